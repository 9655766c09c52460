package handlers

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/affinity"
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/protocol"
)

// left is what an engine leaves after a prompt, in the recorded layout.
const left = `{"request_type":"context_only","first_gen_tokens":[18],"first_gen_log_probs":null,"ctx_request_id":12,"opaque_state":"c3RhbmRpbi0xMg==","disagg_request_id":4398046511105,"ctx_dp_rank":0}`

func prefilled(reason string) ipc.Output {
	return last(token(0, 18), &ipc.Meta{FinishReason: reason, CachedTokens: ptr(int64(2)), Disaggregated: []byte(left)})
}

func onPrefill(batches ...[]ipc.Output) func(*Config, *scripted) {
	return func(c *Config, e *scripted) {
		c.Role, c.Machine = Prefill, func() int { return 7 }
		e.batches = batches
	}
}

func onDecode(batches ...[]ipc.Output) func(*Config, *scripted) {
	return func(c *Config, e *scripted) {
		c.Role, c.DeferLimit, c.DeferTime = Decode, 2, time.Minute
		e.batches = batches
	}
}

func TestPrefillHandsOver(t *testing.T) {
	for _, kind := range []Kind{Unified, Legacy} {
		for _, reason := range []string{"length", "not_finished"} {
			b, chunks, err := run(t, kind, with("stop_conditions", `{"max_tokens":9,"min_tokens":5}`), onPrefill([]ipc.Output{prefilled(reason)}))
			require.NoError(t, err)
			g := b.engine.calls[0]
			require.JSONEq(t, `{"request_type":"context_only","machine_id":7}`, string(g.Disaggregated))
			require.False(t, g.Streaming)
			require.EqualValues(t, 1, *g.Sampling.MaxTokens)
			require.EqualValues(t, 1, *g.Sampling.MinTokens, "the caller's minimum is for the whole answer")
			fields, err := protocol.DecodeValue(protocol.CodecJSON, []byte(left))
			require.NoError(t, err)
			same(t, []protocol.Chunk{{TokenIDs: []uint32{18}, HasIndex: true, Finish: protocol.FinishLength, Disaggregated: fields, Usage: usage(3, 1, 2), EngineData: hit(3, 2)}}, chunks)
			require.Equal(t, 1, b.observer.handed)
		}
	}
}

func TestAPrefillThatIsOverNeedsNoDecode(t *testing.T) {
	b, chunks, err := run(t, Unified, base, onPrefill([]ipc.Output{prefilled("stop")}))
	require.NoError(t, err)
	require.Equal(t, protocol.FinishStop, chunks[0].Finish)
	require.Zero(t, b.observer.handed)
}

func TestAPrefillThatLeavesNothingFails(t *testing.T) {
	for name, m := range map[string]*ipc.Meta{
		"no parameters": {FinishReason: "length"},
		"no context id": {FinishReason: "length", Disaggregated: []byte(`{"request_type":"context_only"}`)},
		"no object":     {FinishReason: "length", Disaggregated: []byte(`[]`)},
	} {
		_, chunks, err := run(t, Unified, base, onPrefill([]ipc.Output{last(token(0, 18), m)}))
		var failure *protocol.Error
		require.ErrorAs(t, err, &failure, name)
		require.Empty(t, chunks, name)
	}
	_, _, err := run(t, Unified, with("sampling_options", `{"n":2,"temperature":1.0}`), onPrefill())
	require.ErrorContains(t, err, "sampling_options.n")
}

const handed = `{"token_ids":[5,6,7],"stop_conditions":{"max_tokens":4},"sampling_options":{},"output_options":{},"prefill_result":{"disaggregated_params":` + left + `,"prompt_tokens_details":{"cached_tokens":2,"audio_tokens":null}}}`

func TestDecodeGoesOnFromAPrefill(t *testing.T) {
	for _, kind := range []Kind{Unified, Legacy} {
		first := ipc.Output{Tokens: []uint32{18}, Meta: &ipc.Meta{CachedTokens: ptr(int64(3))}}
		b, chunks, err := run(t, kind, handed, onDecode([]ipc.Output{first}, []ipc.Output{last(token(0, 25), meta("length"))}))
		require.NoError(t, err)
		require.JSONEq(t, `{"request_type":"generation_only","first_gen_tokens":[18],"ctx_request_id":12,"opaque_state":"c3RhbmRpbi0xMg==","disagg_request_id":4398046511105,"ctx_dp_rank":0}`, string(b.engine.calls[0].Disaggregated))
		require.True(t, b.engine.calls[0].Streaming)
		details := usage(3, 2, 3)
		details.Details = protocol.Map{"cached_tokens": int64(2), "audio_tokens": nil}
		same(t, []protocol.Chunk{{TokenIDs: []uint32{18}, HasIndex: true}, {TokenIDs: []uint32{25}, HasIndex: true, Finish: protocol.FinishLength, Usage: details}}, chunks)
	}
}

func TestDecodeTellsItsOwnBlocksFromThoseThatCame(t *testing.T) {
	body := `{"token_ids":[5,6,7],"stop_conditions":{"max_tokens":4},"sampling_options":{},"output_options":{},"prefill_result":{"disaggregated_params":` + left + `}}`
	for perf, want := range map[string]int{`{"num_reused_blocks":1,"num_missed_blocks":1}`: 1, `{"num_reused_blocks":9,"num_missed_blocks":0}`: 2, `{"num_reused_blocks":0,"num_missed_blocks":0}`: 0} {
		_, chunks, err := run(t, Unified, body, onDecode([]ipc.Output{last(token(0, 18), &ipc.Meta{FinishReason: "stop", CachedTokens: ptr(int64(3)), Perf: []byte(perf)})}))
		require.NoError(t, err)
		require.Equal(t, want, chunks[0].Usage.CachedTokens, perf)
		require.Equal(t, protocol.Object{{Key: "cached_tokens_engine_reported", Value: int64(3)}}, chunks[0].EngineData)
	}
}

func TestDecodeRefusesWhatCannotBeContinued(t *testing.T) {
	for body, says := range map[string]string{
		base: "prefill_result.disaggregated_params is missing",
		`{"token_ids":[5],"stop_conditions":{},"sampling_options":{},"prefill_result":{"disaggregated_params":{}}}`:                                                 "prefill_result.disaggregated_params.ctx_request_id",
		`{"token_ids":[5],"stop_conditions":{},"sampling_options":{},"prefill_result":{"disaggregated_params":{"ctx_request_id":1,"opaque_state":"!!!"}}}`:          "prefill_result.disaggregated_params.opaque_state",
		`{"token_ids":[5],"stop_conditions":{},"sampling_options":{},"prefill_result":[]}`:                                                                          "prefill_result must be a map",
		`{"token_ids":[5],"stop_conditions":{},"sampling_options":{},"prefill_result":{"disaggregated_params":{"ctx_request_id":1},"prompt_tokens_details":"two"}}`: "prefill_result.prompt_tokens_details",
	} {
		b, _, err := run(t, Unified, body, onDecode())
		var failure *protocol.Error
		require.ErrorAs(t, err, &failure, body)
		require.Equal(t, protocol.ClassInvalidRequest, failure.Class, body)
		require.ErrorContains(t, err, says)
		require.Empty(t, b.engine.calls)
	}
}

func TestBypassDoesBothHalvesHere(t *testing.T) {
	b, chunks, err := run(t, Unified, with("annotations", `["x-bypass-remote-prefill"]`), onDecode([]ipc.Output{last(token(0, 18), &ipc.Meta{FinishReason: "stop", CachedTokens: ptr(int64(0))})}))
	require.NoError(t, err)
	require.JSONEq(t, `{"request_type":"context_and_generation"}`, string(b.engine.calls[0].Disaggregated))
	require.Equal(t, hit(3, 0), chunks[0].EngineData)
}

func TestHealthChecksNeedNoPeer(t *testing.T) {
	body := `{"_HEALTH_CHECK":true,"token_ids":[1],"stop_conditions":{"max_tokens":1},"sampling_options":{},"disaggregated_params":{"request_type":"context_and_generation"}}`
	for _, role := range []func(...[]ipc.Output) func(*Config, *scripted){onPrefill, onDecode} {
		b, chunks, err := run(t, Unified, body, role([]ipc.Output{last(token(0, 1), &ipc.Meta{FinishReason: "length", Disaggregated: []byte(`{"request_type":"context_and_generation","ctx_request_id":null}`)})}))
		require.NoError(t, err)
		require.JSONEq(t, `{"request_type":"context_and_generation"}`, string(b.engine.calls[0].Disaggregated))
		require.Equal(t, protocol.FinishLength, chunks[0].Finish)
		require.Zero(t, b.observer.handed)
	}
}

// The gate and the rank rules are the same in every role, and a conversation is never a part of the hand-off.
func TestPlacementIsTheSameInEveryRole(t *testing.T) {
	for _, on := range []bool{false, true} {
		for name, setup := range map[string]func(...[]ipc.Output) func(*Config, *scripted){"prefill": onPrefill, "decode": onDecode} {
			body := `{"token_ids":[5,6,7],"stop_conditions":{"max_tokens":4},"sampling_options":{},"output_options":{},"routing":{"dp_rank":1},"agent_context":{"session_id":" s1 "}`
			if name == "decode" {
				body += `,"prefill_result":{"disaggregated_params":` + left + `}`
			}
			out := []ipc.Output{prefilled("length")}
			b, _, err := run(t, Unified, body+"}", func(c *Config, e *scripted) {
				setup(out)(c, e)
				c.ResolveGate = func() (*affinity.Gate, error) {
					return affinity.Resolve(affinity.Engine{ConfigReadable: true, ConversationParams: true, Ranks: 4, Config: map[string]any{"attention_dp_config": map[string]any{"kv_cache_routing_conversation_affinity": on}}}, affinity.Settings{})
				}
			})
			require.NoError(t, err, name)
			g := b.engine.calls[0]
			if on {
				require.Nil(t, g.Scheduling, name)
				require.Equal(t, "s1", *g.Conversation.ID, name)
			} else {
				require.Equal(t, 1, g.Scheduling.AttentionDPRank, name)
				require.Nil(t, g.Conversation, name)
			}
			require.NotContains(t, string(g.Disaggregated), "s1", name)
		}
	}
}

func abandoned(t *testing.T, b *bench, ctx context.Context) error {
	return b.handler.Generate(ctx, call(t, handed), &record{})
}

func TestAnAbortWaitsForTheBlocksThatAreOnTheirWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, Unified, onDecode())
		b.engine.hang = true
		why := errors.New("client left")
		ctx, cancel := context.WithCancelCause(t.Context())
		done := make(chan error, 1)
		go func() { done <- abandoned(t, b, ctx) }()
		synctest.Wait()
		cancel(why)
		require.ErrorIs(t, <-done, ErrClientGone, "the caller's part is over at once")
		synctest.Wait()
		require.Zero(t, b.engine.streams[0].cancels)
		require.Error(t, b.handler.Settle(bounded(t, time.Second)))

		b.engine.streams[0].arrive <- []ipc.Output{token(0, 18)}
		synctest.Wait()
		require.Equal(t, 1, b.engine.streams[0].cancels, "the first token says that they have arrived")
		require.NoError(t, b.handler.Settle(t.Context()))
		require.Equal(t, []Outcome{AbortInTime}, b.observer.outcomes())
	})
}

func TestDeferredAbortsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, Unified, onDecode())
		b.engine.hang = true
		gone, cancel := context.WithCancel(t.Context())
		for range 3 {
			done := make(chan error, 1)
			ctx, leave := context.WithCancel(gone)
			go func() { done <- abandoned(t, b, ctx) }()
			synctest.Wait()
			leave()
			require.ErrorIs(t, <-done, ErrClientGone)
		}
		cancel()
		synctest.Wait()
		require.Equal(t, []Outcome{AbortCrowded}, b.observer.outcomes())
		require.Equal(t, 1, b.engine.streams[2].cancels)
		begin := time.Now()
		require.NoError(t, b.handler.Settle(t.Context()))
		require.Equal(t, time.Minute, time.Since(begin))
		require.Equal(t, []Outcome{AbortCrowded, AbortForced, AbortForced}, b.observer.outcomes())
		require.Contains(t, b.log.String(), "did not end in time")
	})
}

func TestAfterTheFirstTokenAnAbortIsAtOnce(t *testing.T) {
	b := newBench(t, Unified, onDecode([]ipc.Output{token(0, 18)}))
	b.engine.hang = true
	ctx, cancel := context.WithCancel(t.Context())
	err := b.handler.Generate(ctx, call(t, handed), &record{onChunk: cancel})
	require.ErrorIs(t, err, ErrClientGone)
	require.Equal(t, 1, b.engine.streams[0].cancels)
	require.Empty(t, b.observer.outcomes())
}

func TestBlocksAreFetchedForCallersThatCannotBeReached(t *testing.T) {
	b := newBench(t, Unified, onDecode([]ipc.Output{token(0, 18)}))
	require.NoError(t, b.handler.Abandon(t.Context(), call(t, handed)))
	require.NoError(t, b.handler.Settle(t.Context()))
	require.EqualValues(t, 1, *b.engine.calls[0].Sampling.MaxTokens)
	require.Equal(t, 1, b.engine.streams[0].cancels)

	require.NoError(t, b.handler.Abandon(t.Context(), call(t, with("annotations", `["x-bypass-remote-prefill"]`))), "nothing is held for it")
	require.Error(t, b.handler.Abandon(t.Context(), call(t, base)))
	require.Len(t, b.engine.calls, 1)
	other := newBench(t, Unified, onPrefill())
	require.NoError(t, other.handler.Abandon(t.Context(), call(t, base)))
	require.Empty(t, other.engine.calls)
}

// A request for no tokens must still not leave blocks behind.
func TestARequestForNothingFetchesItsBlocks(t *testing.T) {
	body := `{"token_ids":[5,6,7],"stop_conditions":{"max_tokens":0},"sampling_options":{},"prefill_result":{"disaggregated_params":` + left + `}}`
	b, chunks, err := run(t, Unified, body, onDecode([]ipc.Output{token(0, 18)}))
	require.NoError(t, err)
	require.Equal(t, protocol.FinishLength, chunks[0].Finish)
	require.Empty(t, chunks[0].TokenIDs)
	require.NoError(t, b.handler.Settle(t.Context()))
	require.Len(t, b.engine.calls, 1)
}

func bounded(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func failedWith(kind ipc.ErrorKind) *ipc.Meta {
	return &ipc.Meta{Error: &ipc.RequestError{Kind: kind, Type: "RequestError", Message: "KV transfer: the connection broke"}}
}

// The prompt has run once, so what fails before the first token is the way of its blocks, and another prefill can help.
func TestAFailedTransferIsTriedAgain(t *testing.T) {
	for _, kind := range []Kind{Unified, Legacy} {
		body := handed[:len(handed)-1] + `,"routing":{"prefill_worker_id":2748}}`
		_, chunks, err := run(t, kind, body, onDecode([]ipc.Output{{Last: true, Meta: failedWith(ipc.ErrorRequest)}}))
		var failure *protocol.Error
		require.ErrorAs(t, err, &failure)
		require.True(t, failure.Migratable())
		require.ErrorContains(t, err, "prefill worker abc")
		require.ErrorContains(t, err, "the connection broke")
		require.Empty(t, chunks)

		// Not so when it has a token already, when the request is wrong, or when nothing was fetched.
		for name, c := range map[string]struct {
			body    string
			batches [][]ipc.Output
		}{
			"later":  {handed, [][]ipc.Output{{token(0, 18)}, {{Last: true, Meta: failedWith(ipc.ErrorRequest)}}}},
			"wrong":  {handed, [][]ipc.Output{{{Last: true, Meta: failedWith(ipc.ErrorValue)}}}},
			"bypass": {with("annotations", `["x-bypass-remote-prefill"]`), [][]ipc.Output{{{Last: true, Meta: failedWith(ipc.ErrorRequest)}}}},
		} {
			_, chunks, err := run(t, kind, c.body, onDecode(c.batches...))
			require.NoError(t, err, name)
			require.Equal(t, protocol.FinishError, chunks[len(chunks)-1].Finish, name)
		}
	}
}

func TestPrefillWorker(t *testing.T) {
	for id, want := range map[any]uint64{int64(7): 7, uint64(1 << 63): 1 << 63, int64(-1): 0, "7": 0, nil: 0} {
		require.Equal(t, want, PrefillWorker(&protocol.Request{Fields: protocol.Map{"routing": protocol.Map{"prefill_worker_id": id}}}))
	}
	require.Zero(t, PrefillWorker(&protocol.Request{}))
}

// A legacy handler cancels at shutdown and waits for the engine's last word; not in the middle of a transfer.
func TestAShutdownWaitsForTheBlocksThatAreOnTheirWay(t *testing.T) {
	for _, kind := range []Kind{Unified, Legacy} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t, kind, onDecode())
			b.engine.hang = true
			ctx, cancel := context.WithCancelCause(t.Context())
			done := make(chan error, 1)
			go func() { done <- abandoned(t, b, ctx) }()
			synctest.Wait()
			cancel(ErrShutdown)
			var failure *protocol.Error
			require.ErrorAs(t, <-done, &failure)
			require.True(t, failure.Migratable())
			synctest.Wait()
			require.Zero(t, b.engine.streams[0].cancels)
			b.engine.streams[0].arrive <- []ipc.Output{token(0, 18)}
			require.NoError(t, b.handler.Settle(t.Context()))
			require.Equal(t, 1, b.engine.streams[0].cancels)
		})
	}
}

// The truth table of the affinity policy, in the roles that share a request. docs/disaggregation.md has it.
func TestTheTruthTableHoldsInBothRoles(t *testing.T) {
	const none, empty = "-", "" // no conversation argument at all, and one without an id
	for _, row := range []struct {
		on            bool
		source        affinity.RankSource
		session, rank string
		conversation  string
		forced        bool
	}{
		{false, affinity.SourceEngine, `" s1 "`, "null", none, false},
		{false, affinity.SourceEngine, `" s1 "`, "1", none, true},
		{false, affinity.SourceDynamo, `""`, "1", none, true},
		{true, affinity.SourceEngine, `" s1 "`, "1", "s1", false},
		{true, affinity.SourceEngine, `" s1 "`, "null", "s1", false},
		{true, affinity.SourceEngine, `"  "`, "1", empty, false},
		{true, affinity.SourceDynamo, `" s1 "`, "1", "s1", true},
		{true, affinity.SourceDynamo, `" s1 "`, "null", "s1", false},
		{true, affinity.SourceDynamo, `7`, "1", empty, false},
	} {
		for name, setup := range map[string]func(...[]ipc.Output) func(*Config, *scripted){"prefill": onPrefill, "decode": onDecode} {
			for _, kind := range []Kind{Unified, Legacy} {
				body := `{"token_ids":[5,6,7],"stop_conditions":{"max_tokens":4},"sampling_options":{},"output_options":{},"routing":{"dp_rank":` + row.rank + `},"agent_context":{"session_id":` + row.session + `}`
				if name == "decode" {
					body += `,"prefill_result":{"disaggregated_params":` + left + `}`
				}
				b, _, err := run(t, kind, body+"}", func(c *Config, e *scripted) {
					setup([]ipc.Output{prefilled("length")})(c, e)
					c.ResolveGate = func() (*affinity.Gate, error) {
						return affinity.Resolve(affinity.Engine{ConfigReadable: true, ConversationParams: true, BindsExplicitRank: affinity.Yes, Ranks: 4, Config: map[string]any{"attention_dp_config": map[string]any{"kv_cache_routing_conversation_affinity": row.on}}}, affinity.Settings{RankSource: row.source})
					}
				})
				require.NoError(t, err, "%s %+v", name, row)
				g := b.engine.calls[0]
				require.Equal(t, row.forced, g.Scheduling != nil, "%s %+v", name, row)
				got := none
				if g.Conversation != nil {
					got = empty
					if g.Conversation.ID != nil {
						got = *g.Conversation.ID
					}
				}
				require.Equal(t, row.conversation, got, "%s %+v", name, row)
				require.NotContains(t, string(g.Disaggregated), "s1")
			}
		}
	}
}

// When the engine ends, nothing is left to wait for.
func TestADeferredAbortEndsWithTheEngine(t *testing.T) {
	b := newBench(t, Unified, onDecode())
	b.engine.after = errors.New("the engine died")
	require.NoError(t, b.handler.Abandon(t.Context(), call(t, handed)))
	require.NoError(t, b.handler.Settle(t.Context()))
	require.Equal(t, []Outcome{AbortMoot}, b.observer.outcomes())
}
