package handlers

import (
	"context"
	"errors"
	"testing"

	"dynworker/pkg/affinity"
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/protocol"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
)

func token(index uint16, tokens ...uint32) ipc.Output {
	return ipc.Output{Index: index, Tokens: tokens}
}

func last(o ipc.Output, m *ipc.Meta) ipc.Output {
	o.Last, o.Meta = true, m
	return o
}

func usage(prompt, completion, cached int) *protocol.Usage {
	return &protocol.Usage{PromptTokens: prompt, CompletionTokens: completion, TotalTokens: prompt + completion, CachedTokens: cached}
}

func hit(prompt, reused int) any {
	return protocol.Object{{Key: "kv_cache_hit", Value: protocol.KVCacheHit{PromptTokens: prompt, ReusedTokens: reused}}}
}

func run(t *testing.T, kind Kind, body string, change func(*Config, *scripted)) (*bench, []protocol.Chunk, error) {
	b := newBench(t, kind, change)
	out := &record{}
	err := b.handler.Generate(context.Background(), call(t, body), out)
	return b, out.chunks, err
}

func same(t *testing.T, want, got []protocol.Chunk) {
	t.Helper()
	require.Empty(t, cmp.Diff(want, got))
}

func TestOneChunkPerStepOrOnePerBatch(t *testing.T) {
	batches := [][]ipc.Output{{token(0, 18)}, {token(0, 25), token(0, 32), last(token(0, 39), &ipc.Meta{FinishReason: "length", CachedTokens: ptr(int64(0))})}}
	end := protocol.Chunk{TokenIDs: []uint32{39}, HasIndex: true, Finish: protocol.FinishLength, Usage: usage(3, 4, 0), EngineData: hit(3, 0)}
	_, chunks, err := run(t, Unified, base, func(_ *Config, e *scripted) { e.batches = batches })
	require.NoError(t, err)
	same(t, []protocol.Chunk{{TokenIDs: []uint32{18}, HasIndex: true}, {TokenIDs: []uint32{25}, HasIndex: true}, {TokenIDs: []uint32{32}, HasIndex: true}, end}, chunks)

	merged := end
	merged.TokenIDs = []uint32{25, 32, 39}
	b, chunks, err := run(t, Unified, base, func(c *Config, e *scripted) { c.MergeTokens, e.batches = true, batches })
	require.NoError(t, err)
	same(t, []protocol.Chunk{{TokenIDs: []uint32{18}, HasIndex: true}, merged}, chunks)
	require.Equal(t, 4, b.observer.generated)
	require.Zero(t, b.engine.streams[0].cancels, "a request that ended is not cancelled")
}

func TestChoicesAreKeptApartAndNothingComesAfterAFinish(t *testing.T) {
	stop := ipc.Output{Index: 0, Meta: &ipc.Meta{FinishReason: "stop", StopReason: int64(32), CompletionTokens: ptr(int64(5))}}
	_, chunks, err := run(t, Legacy, with("sampling_options", `{"n":2,"temperature":0.7}`), func(c *Config, e *scripted) {
		c.MergeTokens = true
		e.batches = [][]ipc.Output{{token(0, 18), token(1, 31), token(0, 25), token(1, 38), stop, token(1, 45)}, {stop, last(token(1, 52), &ipc.Meta{FinishReason: "length", CompletionTokens: ptr(int64(6))})}}
	})
	require.NoError(t, err)
	same(t, []protocol.Chunk{
		{TokenIDs: []uint32{18, 25}, HasIndex: true, Finish: protocol.FinishStop, StopReason: int64(32), Usage: usage(3, 5, 0)},
		{TokenIDs: []uint32{31, 38, 45}, Index: 1, HasIndex: true},
		{TokenIDs: []uint32{52}, Index: 1, HasIndex: true, Finish: protocol.FinishLength, Usage: usage(3, 6, 0)},
	}, chunks)
}

func TestLogprobsStayWithTheirTokens(t *testing.T) {
	position := func(token uint32, p float64) ipc.TokenLogProb {
		return ipc.TokenLogProb{LogProb: p, Top: []ipc.TopLogProb{{TokenID: token, Rank: 1, LogProb: p}, {TokenID: token + 1, Rank: 2, LogProb: p - 1}}}
	}
	_, chunks, err := run(t, Unified, with("output_options", `{"logprobs":2}`), func(c *Config, e *scripted) {
		c.MergeTokens = true
		e.batches = [][]ipc.Output{{
			{Tokens: []uint32{18}, LogProbs: []ipc.TokenLogProb{position(18, -0.25)}},
			{Tokens: []uint32{25}, LogProbs: []ipc.TokenLogProb{position(25, -0.5)}, Last: true, Meta: meta("length")},
		}}
	})
	require.NoError(t, err)
	same(t, []protocol.Chunk{{
		TokenIDs: []uint32{18, 25}, HasIndex: true, LogProbs: []float64{-0.25, -0.5}, Finish: protocol.FinishLength, Usage: usage(3, 2, 0),
		TopLogProbs: [][]protocol.TopLogProb{{{Rank: 1, TokenID: 18, LogProb: -0.25}, {Rank: 2, TokenID: 19, LogProb: -1.25}}, {{Rank: 1, TokenID: 25, LogProb: -0.5}, {Rank: 2, TokenID: 26, LogProb: -1.5}}},
	}}, chunks)
}

func TestCachedTokensAreClampedAndComeEarlyInUnified(t *testing.T) {
	batches := [][]ipc.Output{{{Tokens: []uint32{18}, Meta: &ipc.Meta{CachedTokens: ptr(int64(5000))}}}, {last(token(0, 25), meta("stop"))}}
	end := protocol.Chunk{TokenIDs: []uint32{25}, HasIndex: true, Finish: protocol.FinishStop, Usage: usage(3, 2, 3), EngineData: hit(3, 3)}
	b, chunks, err := run(t, Unified, base, func(_ *Config, e *scripted) { e.batches = batches })
	require.NoError(t, err)
	same(t, []protocol.Chunk{{TokenIDs: []uint32{18}, HasIndex: true, Usage: usage(3, 1, 3)}, end}, chunks)
	require.Equal(t, 3, b.observer.cached)
	_, chunks, err = run(t, Legacy, base, func(_ *Config, e *scripted) { e.batches = batches })
	require.NoError(t, err)
	same(t, []protocol.Chunk{{TokenIDs: []uint32{18}, HasIndex: true}, end}, chunks)
}

func TestEarlyUsageCountsWhatWasMergedIntoItsChunk(t *testing.T) {
	first := ipc.Output{Tokens: []uint32{18}, Meta: &ipc.Meta{CachedTokens: ptr(int64(2))}}
	_, chunks, err := run(t, Unified, base, func(c *Config, e *scripted) {
		c.MergeTokens = true
		e.batches = [][]ipc.Output{{first, token(0, 25)}, {last(token(0, 32), meta("stop"))}}
	})
	require.NoError(t, err)
	same(t, []protocol.Chunk{
		{TokenIDs: []uint32{18, 25}, HasIndex: true, Usage: usage(3, 2, 2)},
		{TokenIDs: []uint32{32}, HasIndex: true, Finish: protocol.FinishStop, Usage: usage(3, 3, 2), EngineData: hit(3, 2)},
	}, chunks)
}

func TestPromptLogprobsRideOnTheLastChunk(t *testing.T) {
	_, chunks, err := run(t, Unified, base, func(_ *Config, e *scripted) {
		e.batches = [][]ipc.Output{{{Tokens: []uint32{18}, Meta: &ipc.Meta{PromptLogProbs: []byte(`[null,{"6":{"logprob":-0.5,"rank":1}}]`)}}}, {last(token(0, 25), meta("stop"))}}
	})
	require.NoError(t, err)
	require.Nil(t, chunks[0].EngineData)
	want := protocol.Object{{Key: "prompt_logprobs", Value: []any{nil, protocol.Map{"6": protocol.Map{"logprob": -0.5, "rank": int64(1)}}}}}
	require.Empty(t, cmp.Diff(any(want), chunks[1].EngineData))
}

func TestFinishReasonsAreMappedOntoWhatTheFrontendReads(t *testing.T) {
	for word, want := range map[string]struct {
		reason protocol.FinishReason
		text   string
	}{
		"stop": {protocol.FinishStop, ""}, "length": {protocol.FinishLength, ""},
		"timeout": {protocol.FinishError, "the engine timed out"}, "not_finished": {protocol.FinishError, `the engine ended the sequence with "not_finished"`},
		"": {protocol.FinishError, "the engine ended the sequence without a reason"},
	} {
		_, chunks, err := run(t, Legacy, base, func(_ *Config, e *scripted) { e.batches = [][]ipc.Output{{last(token(0, 18), meta(word))}} })
		require.NoError(t, err, word)
		same(t, []protocol.Chunk{{TokenIDs: []uint32{18}, HasIndex: true, Finish: want.reason, ErrorText: want.text, Usage: usage(3, 1, 0)}}, chunks)
	}
}

func TestAnErrorOfTheRequestIsAChunkWithoutIndex(t *testing.T) {
	for name, m := range map[string]*ipc.Meta{
		"error":      {Error: &ipc.RequestError{Kind: ipc.ErrorRequest, Type: "RequestError", Message: "no room"}},
		"no outputs": {NoOutputs: true},
	} {
		_, chunks, err := run(t, Unified, base, func(c *Config, e *scripted) {
			c.MergeTokens = true
			// Tokens that nobody had read yet come in one output with the error.
			e.batches = [][]ipc.Output{{token(0, 18)}, {last(token(0, 25), m)}}
		})
		require.NoError(t, err, name)
		text := "no room"
		if m.NoOutputs {
			text = "the engine finished a step without any output"
		}
		same(t, []protocol.Chunk{{TokenIDs: []uint32{18}, HasIndex: true}, {TokenIDs: []uint32{25}, HasIndex: true}, {TokenIDs: []uint32{}, Finish: protocol.FinishError, ErrorText: text}}, chunks)
	}
}

func TestParametersThatTheEngineDoesNotTakeAreTheCallersFault(t *testing.T) {
	_, chunks, err := run(t, Unified, base, func(_ *Config, e *scripted) {
		e.batches = [][]ipc.Output{{last(token(0), &ipc.Meta{Error: &ipc.RequestError{Kind: ipc.ErrorParams, Type: "ValueError", Message: "no such seed"}})}}
	})
	var refused *protocol.Error
	require.ErrorAs(t, err, &refused)
	require.Equal(t, protocol.ClassInvalidRequest, refused.Class)
	require.Equal(t, "ValueError: no such seed", refused.Message)
	require.Empty(t, chunks)
}

func TestAnEndWithoutAFinishNeverLooksComplete(t *testing.T) {
	_, _, err := run(t, Unified, with("sampling_options", `{"n":2,"temperature":0.7}`), func(_ *Config, e *scripted) {
		e.batches = [][]ipc.Output{{last(token(0, 18), meta("stop"))}}
	})
	var cut *protocol.Error
	require.ErrorAs(t, err, &cut)
	require.Equal(t, protocol.ReasonBackendStreamIncomplete, cut.Reason)
	require.True(t, cut.Migratable())
}

func TestADeadEngineIsMigratable(t *testing.T) {
	dead := errors.New("exit status 1")
	for name, change := range map[string]func(*Config, *scripted){
		"before": func(_ *Config, e *scripted) { e.refuse = dead },
		"during": func(_ *Config, e *scripted) { e.batches, e.after = [][]ipc.Output{{token(0, 18)}}, dead },
	} {
		_, _, err := run(t, Unified, base, change)
		var cut *protocol.Error
		require.ErrorAs(t, err, &cut, name)
		require.Equal(t, protocol.ReasonBackendEngineShutdown, cut.Reason, name)
	}
}

func TestAnEngineCancellationThatNobodyAskedForIsNoAnswer(t *testing.T) {
	change := func(_ *Config, e *scripted) {
		e.batches = [][]ipc.Output{{token(0, 18)}, {last(token(0), meta("cancelled"))}}
	}
	_, chunks, err := run(t, Unified, base, change)
	var cut *protocol.Error
	require.ErrorAs(t, err, &cut)
	require.True(t, cut.Migratable())
	same(t, []protocol.Chunk{{TokenIDs: []uint32{18}, HasIndex: true}}, chunks)

	_, chunks, err = run(t, Legacy, base, change)
	require.NoError(t, err)
	require.Equal(t, protocol.FinishCancelled, chunks[1].Finish, "as recorded")
}

func TestTokensBeyondTheBudgetAreDropped(t *testing.T) {
	b, chunks, err := run(t, Unified, base, func(_ *Config, e *scripted) {
		e.batches = [][]ipc.Output{{token(0, 1, 2, 3)}, {token(0, 4, 5, 6)}, {last(token(0, 7), meta("stop"))}}
	})
	require.NoError(t, err)
	same(t, []protocol.Chunk{{TokenIDs: []uint32{1, 2, 3}, HasIndex: true}, {TokenIDs: []uint32{4}, HasIndex: true, Finish: protocol.FinishLength, Usage: usage(3, 4, 0)}}, chunks)
	require.Equal(t, 1, b.observer.overruns)
	require.Equal(t, 1, b.engine.streams[0].cancels)
}

func TestMaxTokensZeroNeedsNoEngine(t *testing.T) {
	for _, kind := range []Kind{Unified, Legacy} {
		b, chunks, err := run(t, kind, `{"token_ids":[5,6,7],"stop_conditions":{"max_tokens":0},"sampling_options":{"n":2,"temperature":0.5}}`, nil)
		require.NoError(t, err)
		require.Empty(t, b.engine.calls)
		same(t, []protocol.Chunk{
			{TokenIDs: []uint32{}, HasIndex: true, Finish: protocol.FinishLength, Usage: usage(3, 0, 0)},
			{TokenIDs: []uint32{}, Index: 1, HasIndex: true, Finish: protocol.FinishLength, Usage: usage(3, 0, 0)},
		}, chunks)
	}
}

func TestAClientThatLeavesEndsTheEnginesWork(t *testing.T) {
	stop := errors.New("stop")
	for name, start := range map[string]func(*record, context.CancelCauseFunc){
		"control":      func(out *record, cancel context.CancelCauseFunc) { out.onChunk = func() { cancel(stop) } },
		"broken write": func(out *record, _ context.CancelCauseFunc) { out.fail = stop },
	} {
		b := newBench(t, Unified, func(_ *Config, e *scripted) { e.batches, e.hang = [][]ipc.Output{{token(0, 18)}}, true })
		ctx, cancel := context.WithCancelCause(context.Background())
		out := &record{}
		start(out, cancel)
		err := b.handler.Generate(ctx, call(t, base), out)
		require.ErrorIs(t, err, ErrClientGone, name)
		require.ErrorIs(t, err, stop, name)
		require.Equal(t, 1, b.engine.streams[0].cancels, name)
		cancel(nil)
	}
}

func TestShutdownCutsAsMigratable(t *testing.T) {
	for _, kind := range []Kind{Unified, Legacy} {
		b := newBench(t, kind, func(_ *Config, e *scripted) {
			e.batches, e.hang, e.last = [][]ipc.Output{{token(0, 18)}}, true, []ipc.Output{last(token(0), meta("cancelled"))}
		})
		ctx, cancel := context.WithCancelCause(context.Background())
		out := &record{onChunk: func() { cancel(ErrShutdown) }}
		err := b.handler.Generate(ctx, call(t, base), out)
		var cut *protocol.Error
		require.ErrorAs(t, err, &cut)
		require.Equal(t, protocol.ReasonBackendEngineShutdown, cut.Reason)
		want := []protocol.Chunk{{TokenIDs: []uint32{18}, HasIndex: true}}
		if kind == Legacy {
			want = append(want, protocol.Chunk{TokenIDs: []uint32{}, HasIndex: true, Finish: protocol.FinishCancelled, Usage: usage(3, 1, 0)})
		}
		same(t, want, out.chunks)
		require.NotZero(t, b.engine.streams[0].cancels)
	}
}

func TestTheGateIsResolvedAtInitOrAtTheFirstRequest(t *testing.T) {
	for kind, before := range map[Kind]int{Unified: 1, Legacy: 0} {
		b := newBench(t, kind, func(_ *Config, e *scripted) { e.batches = [][]ipc.Output{{last(token(0, 1), meta("stop"))}} })
		require.Equal(t, before, b.resolved, kind)
		for range 100 {
			require.NoError(t, b.handler.Generate(context.Background(), call(t, base), &record{}))
		}
		require.Equal(t, 1, b.resolved, kind)
		require.Len(t, b.observer.reasons, 100)
	}
}

func TestAGateThatCannotBeResolved(t *testing.T) {
	fails := func() (*affinity.Gate, error) {
		return affinity.Resolve(affinity.Engine{Ranks: 1, ConfigReadable: true}, affinity.Settings{Override: affinity.OverrideOn})
	}
	_, err := New(Config{Kind: Unified, ResolveGate: fails})
	var disagree *affinity.DisagreementError
	require.ErrorAs(t, err, &disagree)
	h, err := New(Config{Kind: Legacy, ResolveGate: fails})
	require.NoError(t, err)
	for range 2 {
		_, err = h.plan(call(t, base))
		var failed *protocol.Error
		require.ErrorAs(t, err, &failed)
		require.Equal(t, protocol.ReasonBackendUnknown, failed.Reason)
	}
	_, err = New(Config{Kind: "other", ResolveGate: fails})
	require.ErrorContains(t, err, `handler "other"`)
}

func TestTheAcceptedLineJoinsTheIdsAndHidesTheConversation(t *testing.T) {
	change := func(c *Config, e *scripted) {
		e.batches = [][]ipc.Output{{last(token(0, 1), meta("stop"))}}
		c.ResolveGate = func() (*affinity.Gate, error) {
			return affinity.Resolve(affinity.Engine{ConfigReadable: true, ConversationParams: true, Ranks: 4, BindsExplicitRank: affinity.Yes,
				Config: map[string]any{"attention_dp_config": map[string]any{"kv_cache_routing_conversation_affinity": true}}}, affinity.Settings{RankSource: affinity.SourceDynamo})
		}
	}
	body := `{"token_ids":[5,6,7],"stop_conditions":{"max_tokens":4},"agent_context":{"session_id":"alice-1"},"routing":{"dp_rank":2}}`
	b, _, err := run(t, Unified, body, change)
	require.NoError(t, err)
	require.JSONEq(t, `{"level":"info","request_id":"req-1","engine_request_id":7,"prompt_tokens":3,"affinity":"conversation_first_rank","attention_dp_rank":2,"conversation":"`+hashConversation("alice-1")+`","message":"request accepted"}`, b.log.String())
	b, _, err = run(t, Unified, body, func(c *Config, e *scripted) { change(c, e); c.LogConversationIDs = true })
	require.NoError(t, err)
	require.Contains(t, b.log.String(), `"conversation":"alice-1"`)
	require.Equal(t, "alice-1", *b.engine.calls[0].Conversation.ID)
}
