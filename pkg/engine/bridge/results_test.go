package bridge_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"dynworker/pkg/engine/bridge"
	"dynworker/pkg/engine/bridge/bridgetest"
	"dynworker/pkg/engine/ipc"
)

// TestAnswers is one request a row on an engine that survives all of them: the
// tokens that came and what the last record tells.
func TestAnswers(t *testing.T) {
	c := start(t, bridgetest.Setup{}, nil, bridge.Options{})
	sampling := func(f func(*ipc.Sampling)) func(*ipc.Generate) {
		return func(g *ipc.Generate) { f(&g.Sampling) }
	}
	refused := func(kind ipc.ErrorKind, class, message string) ipc.Meta {
		return ipc.Meta{Error: &ipc.RequestError{Kind: kind, Type: class, Message: message}}
	}
	zero := ptr(int64(0))
	const noPrompt = 10 // a first token that triggers nothing
	tests := []struct {
		name   string
		prompt []int32
		order  *ipc.Generate
		tokens []uint32
		last   ipc.Meta
	}{
		{"length", []int32{5, 6, 7}, order(3), []uint32{18, 25, 32}, ipc.Meta{FinishReason: "length", CachedTokens: zero}},
		{"end of sequence", []int32{300, 43}, order(9), []uint32{343, 350, 2}, ipc.Meta{FinishReason: "stop", CachedTokens: zero}},
		{
			"stop token, trimmed", []int32{5, 6, 7}, order(9, sampling(func(s *ipc.Sampling) { s.StopTokenIDs = []int64{32} })),
			[]uint32{18, 25}, ipc.Meta{FinishReason: "stop", StopReason: int64(32), CachedTokens: zero},
		},
		{
			"cached tokens", make([]int32, 130), order(1, sampling(func(s *ipc.Sampling) { s.IgnoreEOS = ptr(true) })),
			[]uint32{0}, ipc.Meta{FinishReason: "length", CachedTokens: ptr(int64(64)), EngineRequestID: ptr(uint64(4))},
		},
		{"request error at once", []int32{90001}, order(9), nil, refused("request", "RequestError", "stand-in request error after 0 tokens")},
		{"request error later", []int32{90002}, order(9), []uint32{187, 194, 201}, refused("request", "RequestError", "stand-in request error after 3 tokens")},
		{"value error", []int32{90003}, order(9), nil, refused("value", "ValueError", "stand-in ValueError from generate_async")},
		{"type error", []int32{90004}, order(9), nil, refused("type", "TypeError", "stand-in TypeError from generate_async")},
		{"not implemented", []int32{90005}, order(9), nil, refused("not_implemented", "NotImplementedError", "stand-in NotImplementedError from generate_async")},
		{"step without outputs", []int32{90008}, order(9), []uint32{193, 200}, ipc.Meta{NoOutputs: true}},
		{"no finish reason", []int32{90009}, order(9), []uint32{194, 201, 208}, ipc.Meta{CachedTokens: zero}},
		{"engine's own word", []int32{90011}, order(9), []uint32{196, 203, 210}, ipc.Meta{FinishReason: "timeout", CachedTokens: zero}},
		{
			"prompt too long for the engine", make([]int32, 9000), order(1), nil,
			refused("request", "RequestError", "prompt of 9000 tokens exceeds max_num_tokens 8192"),
		},
		{
			"sampling value refused", []int32{noPrompt}, order(1, sampling(func(s *ipc.Sampling) { s.Temperature = ptr(-1.0) })), nil,
			refused("params", "ValueError", "temperature must not be negative: -1"),
		},
		{
			"several greedy choices", []int32{noPrompt}, order(1, sampling(func(s *ipc.Sampling) { s.N = ptr(int64(2)) })), nil,
			refused("params", "ValueError", "greedy decoding gives one sequence, not best_of=2"),
		},
		{
			"empty conversation", []int32{noPrompt}, order(1, func(g *ipc.Generate) { g.Conversation = &ipc.Conversation{ID: ptr(" ")} }), nil,
			refused("params", "ValueError", "conversation_id is empty"),
		},
		{
			"adapter that is not there", []int32{noPrompt}, order(1, func(g *ipc.Generate) { g.LoRA = &ipc.LoRA{Name: "a", Path: "/nonexistent", ID: 1} }), nil,
			refused("params", "ValueError", "lora_path '/nonexistent' does not exist"),
		},
		{
			"bad handoff", []int32{noPrompt}, order(1, func(g *ipc.Generate) { g.Disaggregated = []byte(`{"request_type": "sideways"}`) }), nil,
			refused("params", "ValueError", "request_type 'sideways' is none of ('context_only', 'generation_only', 'context_and_generation')"),
		},
	}
	for i, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			id := uint64(1000 + i)
			c.generate(id, tt.prompt, tt.order)
			a := c.answer(id)
			require.Equal(t, tt.tokens, a.tokens[0])
			require.Empty(t, cmp.Diff(tt.last, a.lastMeta()))
		})
	}
	require.True(t, c.query(1, ipc.QueryHealth).OK, "the engine survived all of them")
}

func TestFirstRecordTellsTheEngineID(t *testing.T) {
	c := start(t, bridgetest.Setup{}, nil, bridge.Options{})
	c.generate(77, []int32{5, 6, 7}, order(3))
	a := c.answer(77)
	require.Empty(t, cmp.Diff([]ipc.Meta{
		{CachedTokens: ptr(int64(0)), EngineRequestID: ptr(uint64(1))},
		{CachedTokens: ptr(int64(0)), FinishReason: "length"},
	}, a.metas[0]))
}

func TestSeveralChoices(t *testing.T) {
	c := start(t, bridgetest.Setup{}, nil, bridge.Options{})
	c.generate(1, []int32{5, 6, 7}, order(6, func(g *ipc.Generate) {
		g.Sampling.N, g.Sampling.Temperature = ptr(int64(2)), ptr(0.7)
		g.Sampling.StopTokenIDs = []int64{32} // the third token of choice 0
	}))
	a := c.answer(1)
	require.Equal(t, []uint32{18, 25}, a.tokens[0])
	require.Equal(t, []uint32{31, 38, 45, 52, 59, 66}, a.tokens[1])
	require.Empty(t, cmp.Diff([]ipc.Meta{
		{CachedTokens: ptr(int64(0)), EngineRequestID: ptr(uint64(1))},
		{FinishReason: "stop", StopReason: int64(32), CompletionTokens: ptr(int64(5))},
	}, a.metas[0]), "a choice that is done says nothing more")
	require.Empty(t, cmp.Diff([]ipc.Meta{
		{FinishReason: "length", CachedTokens: ptr(int64(0)), CompletionTokens: ptr(int64(8))},
	}, a.metas[1]))
	require.Equal(t, uint16(1), a.last.Index)
}

func TestLogProbs(t *testing.T) {
	c := start(t, bridgetest.Setup{}, nil, bridge.Options{})
	c.generate(1, []int32{5, 6, 7}, order(2, func(g *ipc.Generate) {
		g.Sampling.LogProbs, g.Sampling.PromptLogProbs = ptr(int64(2)), ptr(int64(1))
	}))
	a := c.answer(1)
	require.Equal(t, uint16(2), a.last.TopK)
	require.Empty(t, cmp.Diff([]ipc.TokenLogProb{
		{LogProb: -0.25, Top: []ipc.TopLogProb{{TokenID: 18, Rank: 1, LogProb: -0.25}, {TokenID: 19, Rank: 2, LogProb: -1.25}}},
		{LogProb: -0.5, Top: []ipc.TopLogProb{{TokenID: 25, Rank: 1, LogProb: -0.5}, {TokenID: 26, Rank: 2, LogProb: -1.5}}},
	}, a.probs[0]))
	require.JSONEq(t, `[null, {"6": {"logprob": -0.5, "rank": 1}}, {"7": {"logprob": -0.75, "rank": 1}}]`,
		string(a.metas[0][0].PromptLogProbs))
}

// A stop token that is trimmed takes its log probability along.
func TestLogProbsOfATrimmedToken(t *testing.T) {
	c := start(t, bridgetest.Setup{}, nil, bridge.Options{})
	c.generate(1, []int32{5, 6, 7}, order(9, func(g *ipc.Generate) {
		g.Sampling.LogProbs, g.Sampling.StopTokenIDs = ptr(int64(1)), []int64{25}
	}))
	a := c.answer(1)
	require.Equal(t, []uint32{18}, a.tokens[0])
	require.Len(t, a.probs[0], 1)
}

func TestContextOnly(t *testing.T) {
	c := start(t, bridgetest.Setup{}, nil, bridge.Options{})
	c.generate(1, []int32{5, 6, 7}, order(9, func(g *ipc.Generate) {
		g.Streaming = false
		g.Sampling.LogProbs = ptr(int64(2))
		g.Disaggregated = []byte(`{"request_type": "context_only", "machine_id": 0}`)
	}))
	a := c.answer(1)
	require.Equal(t, []uint32{18}, a.tokens[0])
	require.JSONEq(t, `{
		"request_type": "context_only", "first_gen_tokens": [18],
		"first_gen_log_probs": [[{"token_id": 18, "logprob": -0.25, "rank": 1}, {"token_id": 19, "logprob": -1.25, "rank": 2}]],
		"first_gen_logits": null, "ctx_request_id": 1, "opaque_state": "c3RhbmRpbi0x", "draft_tokens": null,
		"disagg_request_id": 4398046511105, "ctx_dp_rank": 0, "ctx_info_endpoint": "tcp://standin:0", "schedule_style": null,
		"multimodal_embedding_handles": null, "multimodal_hashes": null,
		"mrope_position_ids_handle": null, "mrope_position_deltas_handle": null}`, string(a.lastMeta().Disaggregated))
}

func TestManyRequestsAtOnce(t *testing.T) {
	const streams, length = 64, 200
	c := start(t, bridgetest.Setup{Env: []string{"STANDIN_STEPPED=1", "STANDIN_DELAY_MS=1"}}, nil, bridge.Options{})
	ids := make([]uint64, streams)
	for i := range ids {
		ids[i] = uint64(i)
		c.generate(ids[i], []int32{int32(i), 1}, order(length, func(g *ipc.Generate) { g.Sampling.IgnoreEOS = ptr(true) }))
	}
	got := map[uint64]*answer{}
	largest, done := 0, 0
	for done < streams {
		payload := c.expect(ipc.KindOutputs)
		outs, err := ipc.ParseOutputs(payload)
		require.NoError(t, err)
		largest = max(largest, len(outs))
		c.add(got, payload)
		done = 0
		for _, a := range got {
			if a.last != nil {
				done++
			}
		}
	}
	for i := range ids {
		require.Len(t, got[ids[i]].tokens[0], length)
		for k, token := range got[ids[i]].tokens[0] {
			require.Equal(t, uint32((i+1+7*k)%355), token)
		}
	}
	require.Greater(t, largest, 8, "what one step of the engine gives goes into one frame")
	require.Empty(t, c.log.Calls(t, "abort"))
}

func TestNoiseOnStdoutDoesNotMatter(t *testing.T) {
	c := start(t, bridgetest.Setup{Env: []string{"STANDIN_NOISE=1", "STANDIN_STEPPED=1"}}, nil, bridge.Options{})
	c.generate(1, []int32{5, 6, 7}, order(4))
	require.Equal(t, []uint32{18, 25, 32, 39}, c.answer(1).tokens[0])
	c.send(ipc.Shutdown{DeadlineMillis: 20_000})
	c.expect(ipc.KindGoodbye)
	require.Equal(t, bridge.ExitStopped, c.wait())
	require.Empty(t, c.stdout.String())
	for _, where := range []string{"import", "load", "step"} {
		require.Contains(t, c.stderr.String(), "[stand-in noise] "+where)
	}
}
