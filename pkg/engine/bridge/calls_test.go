package bridge_test

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"dynworker/pkg/engine/bridge"
	"dynworker/pkg/engine/bridge/bridgetest"
	"dynworker/pkg/engine/ipc"
)

// What a few typical requests make the engine see, order and call side by side.
func TestCallsWrittenByHand(t *testing.T) {
	c := start(t, bridgetest.Setup{}, args{"tensor_parallel_size": 4, "enable_attention_dp": true}, bridge.Options{})
	stops := func(g *ipc.Generate) { g.Sampling.StopTokenIDs = []int64{2} }
	tests := []struct {
		name  string
		order *ipc.Generate
		want  string // differences from the plain call; null takes a key away
	}{
		{"plain", order(4, stops), `{}`},
		{"priority none", order(4, stops, func(g *ipc.Generate) { g.Priority = nil }), `{"priority": null}`},
		{
			"conversation", order(4, stops, func(g *ipc.Generate) { g.Conversation = &ipc.Conversation{ID: ptr("s1")} }),
			`{"conversation_params": {"_type": "ConversationParams", "conversation_id": "s1"}}`,
		},
		{
			"conversation none", order(4, stops, func(g *ipc.Generate) { g.Conversation = &ipc.Conversation{} }),
			`{"conversation_params": null}`,
		},
		{
			"rank", order(4, stops, func(g *ipc.Generate) { g.Scheduling = &ipc.Scheduling{AttentionDPRank: 1} }),
			`{"scheduling_params": {"_type": "SchedulingParams", "attention_dp_rank": 1, "attention_dp_relax": false}}`,
		},
		{
			"salt and trace", order(4, stops, func(g *ipc.Generate) {
				g.CacheSalt, g.TraceHeaders = ptr("tenant-b"), map[string]string{"request-id": "r"}
			}),
			`{"cache_salt": "tenant-b", "trace_headers": {"request-id": "r"}}`,
		},
		{
			"two choices", order(4, stops, func(g *ipc.Generate) {
				g.Sampling.N, g.Sampling.BestOf, g.Sampling.Temperature = ptr(int64(2)), ptr(int64(2)), ptr(0.7)
			}),
			`{"sampling_params": {"_type": "SamplingParams", "max_tokens": 4, "stop_token_ids": [2], "n": 2, "best_of": 2, "temperature": 0.7, "detokenize": false}}`,
		},
		{
			"guided", order(4, stops, func(g *ipc.Generate) { g.Guided = &ipc.Guided{JSON: json.RawMessage(`{"b": 1, "a": 2}`)} }),
			`{"sampling_params": {"_type": "SamplingParams", "max_tokens": 4, "stop_token_ids": [2], "best_of": 1, "guided_decoding": {"_type": "GuidedDecodingParams", "json": {"b": 1, "a": 2}}, "detokenize": false}}`,
		},
		{
			"lora", order(4, stops, func(g *ipc.Generate) { g.LoRA = &ipc.LoRA{Name: "fin", Path: bridgetest.Dir("model"), ID: 3} }),
			`{"lora_request": {"_type": "LoRARequest", "lora_name": "fin", "lora_int_id": 3, "lora_path": ` + strconv.Quote(bridgetest.Dir("model")) + `}}`,
		},
	}
	const plain = `{"event": "generate_async", "inputs": [5, 6, 7], "_inputs_type": "list",
		"sampling_params": {"_type": "SamplingParams", "max_tokens": 4, "stop_token_ids": [2], "best_of": 1, "detokenize": false},
		"streaming": true, "disaggregated_params": null, "trace_headers": null, "scheduling_params": null, "cache_salt": null, "priority": 0.5}`
	for i, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c.generate(uint64(i), []int32{5, 6, 7}, tt.order)
			c.answer(uint64(i))
			want := bridgetest.Call{}
			require.NoError(t, json.Unmarshal([]byte(plain), &want))
			require.NoError(t, json.Unmarshal([]byte(tt.want), &want))
			calls := c.log.Calls(t, "generate_async")
			require.Empty(t, cmp.Diff(want, comparable(calls[len(calls)-1])))
		})
	}
}

// Every recorded call of today's worker, taken apart into what the worker orders
// and put together again by the bridge.
func TestRecordedCalls(t *testing.T) {
	// A request without a prompt made today's worker pass None; ours answers it.
	without := []string{"core/token_ids_missing", "core/token_ids_null"}
	text, err := os.ReadFile("testdata/recorded/calls.json")
	require.NoError(t, err)
	var cases []struct {
		Case   string
		Events []bridgetest.Call
	}
	require.NoError(t, json.Unmarshal(text, &cases))
	require.Len(t, cases, 95)
	fast := start(t, bridgetest.Setup{}, args{"max_seq_len": 8192}, bridge.Options{})
	// With this delay no recorded request is done before it is cancelled.
	slow := start(t, bridgetest.Setup{Env: []string{"STANDIN_DELAY_MS=200"}}, nil, bridge.Options{AbortGrace: time.Millisecond})
	for i, tt := range cases {
		if slices.Contains(without, tt.Case) {
			continue
		}
		t.Run(tt.Case, func(t *testing.T) {
			id, call, c := uint64(i), tt.Events[0], fast
			cancelled := len(tt.Events) > 1
			if cancelled {
				c = slow
			}
			before := len(c.log.Calls(t))
			c.generate(id, prompt(call), orderOf(t, call))
			if cancelled {
				c.cancel(id)
			}
			c.answer(id)
			got := c.log.Calls(t)[before:]
			require.Empty(t, cmp.Diff(comparable(call), comparable(got[0])))
			aborts := 0
			for _, call := range got {
				if call.Event() == "abort" {
					aborts++
				}
			}
			require.Equal(t, cancelled || tt.Case == "core/engine_no_outputs", aborts == 1)
		})
	}
}

// prompt rebuilds the prompt of a recorded call, one with the same length, sum
// and head where it was shortened.
func prompt(call bridgetest.Call) (ids []int32) {
	short, isShort := call["inputs"].(map[string]any)
	if !isShort {
		for _, id := range call["inputs"].([]any) {
			ids = append(ids, int32(id.(float64)))
		}
		return ids
	}
	ids = make([]int32, int(short["_len"].(float64)))
	rest := int32(short["_sum"].(float64))
	for i, id := range short["head"].([]any) {
		ids[i] = int32(id.(float64))
		rest -= ids[i]
	}
	ids[len(ids)-1] = rest
	return ids
}

// orderOf takes a recorded call apart.
func orderOf(t *testing.T, call bridgetest.Call) *ipc.Generate {
	g := &ipc.Generate{Streaming: call["streaming"].(bool)}
	sampling := cloneMap(call["sampling_params"])
	if sampling["best_of"] == sampling["n"] || sampling["n"] == nil && sampling["best_of"] == 1.0 {
		delete(sampling, "best_of") // follows from n
	}
	if guided := sampling["guided_decoding"]; guided != nil {
		g.Guided = &ipc.Guided{}
		into(t, guided, g.Guided)
	}
	delete(sampling, "guided_decoding")
	into(t, sampling, &g.Sampling)
	if s := call["scheduling_params"]; s != nil {
		g.Scheduling = &ipc.Scheduling{}
		into(t, s, g.Scheduling)
	}
	into(t, call["trace_headers"], &g.TraceHeaders)
	into(t, call["cache_salt"], &g.CacheSalt)
	into(t, call["priority"], &g.Priority)
	if d := call["disaggregated_params"]; d != nil {
		g.Disaggregated = mustJSON(handoff(t, cloneMap(d)))
	}
	return g
}

// handoff is a recorded DisaggregatedParams as it comes over the wire.
func handoff(t *testing.T, d map[string]any) map[string]any {
	delete(d, "_type")
	if state, ok := d["opaque_state"].(map[string]any); ok {
		raw, err := hex.DecodeString(state["_bytes"].(string))
		require.NoError(t, err)
		d["opaque_state"] = base64.StdEncoding.EncodeToString(raw)
	}
	if positions, ok := d["first_gen_log_probs"].([]any); ok {
		var all []any
		for _, position := range positions {
			var entries []any
			for token, p := range position.(map[string]any) {
				id, err := strconv.Atoi(token)
				require.NoError(t, err)
				p := p.(map[string]any)
				entries = append(entries, map[string]any{"token_id": id, "logprob": p["logprob"], "rank": p["rank"]})
			}
			all = append(all, entries)
		}
		d["first_gen_log_probs"] = all
	}
	if masked, _ := d["disagg_request_id"].(string); strings.HasPrefix(masked, "<") {
		d["disagg_request_id"] = 4398046511105
	}
	return d
}

// comparable is a call without what two equal calls may differ in.
func comparable(call bridgetest.Call) bridgetest.Call {
	call = cloneMap(map[string]any(call))
	delete(call, "t")
	if s, ok := call["sampling_params"].(map[string]any); ok {
		if ids, ok := s["stop_token_ids"].([]any); ok {
			slices.SortFunc(ids, func(a, b any) int { return int(a.(float64) - b.(float64)) })
		}
	}
	if d, ok := call["disaggregated_params"].(map[string]any); ok && d["disagg_request_id"] != nil {
		d["disagg_request_id"] = "<disagg id>"
	}
	return call
}

func cloneMap(v any) (m map[string]any) {
	if err := json.Unmarshal(mustJSON(v), &m); err != nil {
		panic(err)
	}
	return m
}

func into(t *testing.T, from, to any) {
	t.Helper()
	require.NoError(t, json.Unmarshal(mustJSON(from), to))
}
