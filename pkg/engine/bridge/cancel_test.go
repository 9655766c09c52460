package bridge_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/engine/bridge"
	"dynworker/pkg/engine/bridge/bridgetest"
	"dynworker/pkg/engine/ipc"
)

// First tokens of a prompt that make the stand-in behave as a cancel test needs it.
const (
	stallsAfterThree  = 90014 // until aborted
	ignoresAborts     = 90012 // and goes on
	deafBeforeFirst   = 90015 // stalls before its first token, ignores aborts
	stallsBeforeFirst = 90016 // until aborted
)

// within waits for so many tokens of choice 0 of a request.
func (c *child) tokens(got map[uint64]*answer, id uint64, n int) {
	c.t.Helper()
	for got[id] == nil || len(got[id].tokens[0]) < n {
		c.add(got, c.expect(ipc.KindOutputs))
	}
}

func (c *child) aborts() (tokens []int) {
	for _, call := range c.log.Calls(c.t, "abort") {
		tokens = append(tokens, call.Int("tokens"))
	}
	return tokens
}

func TestCancelBeforeTheFirstToken(t *testing.T) {
	c := start(t, bridgetest.Setup{}, nil, bridge.Options{AbortGrace: patience})
	c.generate(1, []int32{stallsBeforeFirst}, order(9))
	c.cancel(1)
	a := c.answer(1)
	require.Empty(t, a.tokens[0])
	require.Equal(t, "cancelled", a.lastMeta().FinishReason)
	require.Equal(t, []int{0}, c.aborts())
}

func TestCancelMidStream(t *testing.T) {
	c := start(t, bridgetest.Setup{}, nil, bridge.Options{AbortGrace: patience})
	c.generate(1, []int32{stallsAfterThree}, order(9, func(g *ipc.Generate) {
		g.Sampling.N, g.Sampling.Temperature = ptr(int64(2)), ptr(0.7)
	}))
	got := map[uint64]*answer{}
	c.tokens(got, 1, 3)
	c.cancel(1)
	c.cancel(1)
	c.cancel(12345) // never heard of it
	for got[1].last == nil {
		c.add(got, c.expect(ipc.KindOutputs))
	}
	require.Len(t, got[1].tokens[0], 3)
	require.Len(t, got[1].tokens[1], 3)
	for _, choice := range []uint16{0, 1} {
		metas := got[1].metas[choice]
		require.Equal(t, "cancelled", metas[len(metas)-1].FinishReason)
	}
	require.Equal(t, []int{3}, c.aborts(), "one abort, however many cancels")
}

func TestCancelAfterTheEnd(t *testing.T) {
	c := start(t, bridgetest.Setup{}, nil, bridge.Options{})
	c.generate(1, []int32{5}, order(2))
	got := c.answers(1)
	c.cancel(1)
	c.generate(2, []int32{5}, order(2))
	for got[2] == nil || got[2].last == nil {
		c.add(got, c.expect(ipc.KindOutputs))
	}
	require.Empty(t, c.aborts())
}

// A request that waits in the engine's queue is dropped there without a word.
func TestCancelOfAQueuedRequest(t *testing.T) {
	c := start(t, bridgetest.Setup{}, args{"max_batch_size": 1}, bridge.Options{AbortGrace: 20 * time.Millisecond})
	c.generate(1, []int32{stallsAfterThree}, order(9))
	got := map[uint64]*answer{}
	c.tokens(got, 1, 3)
	c.generate(2, []int32{5, 6, 7}, order(9))
	c.cancel(2)
	for got[2] == nil || got[2].last == nil {
		c.add(got, c.expect(ipc.KindOutputs))
	}
	require.Equal(t, "cancelled", got[2].lastMeta().FinishReason)
	require.Empty(t, got[2].tokens[0])

	// The place in the queue is free, and the first request has its own end.
	c.generate(3, []int32{5, 6, 7}, order(2))
	c.cancel(1)
	for got[3] == nil || got[3].last == nil {
		c.add(got, c.expect(ipc.KindOutputs))
	}
	require.Equal(t, "cancelled", got[1].lastMeta().FinishReason)
	require.Equal(t, []uint32{18, 25}, got[3].tokens[0])
	require.Len(t, c.log.Calls(t, "placed"), 2)
}

// Whatever the engine still says after the made-up end is not passed on: add
// fails on a record after the last one.
func TestCancelThatTheEngineIgnores(t *testing.T) {
	c := start(t, bridgetest.Setup{}, nil, bridge.Options{AbortGrace: 20 * time.Millisecond})
	c.generate(1, []int32{ignoresAborts}, order(1<<40, func(g *ipc.Generate) { g.Sampling.IgnoreEOS = ptr(true) }))
	c.generate(2, []int32{deafBeforeFirst}, order(9))
	got := map[uint64]*answer{}
	c.tokens(got, 1, 3)
	c.cancel(1)
	c.cancel(2)
	for got[1].last == nil || got[2] == nil || got[2].last == nil {
		c.add(got, c.expect(ipc.KindOutputs))
	}
	c.generate(3, []int32{5}, order(500))
	for got[3] == nil || got[3].last == nil {
		c.add(got, c.expect(ipc.KindOutputs))
	}
	for _, id := range []uint64{1, 2} {
		require.Equal(t, "cancelled", got[id].lastMeta().FinishReason)
	}
}

// A request whose KV blocks are on their way is aborted once they are there.
func TestCancelDuringTransfer(t *testing.T) {
	receives := func(g *ipc.Generate) {
		g.Disaggregated = []byte(`{"request_type": "generation_only", "first_gen_tokens": [18]}`)
	}
	c := start(t, bridgetest.Setup{Env: []string{"STANDIN_DELAY_MS=100"}}, nil,
		bridge.Options{AbortGrace: patience, FirstTokenWait: patience})
	c.generate(1, []int32{5, 6, 7}, order(1000, receives))
	c.cancel(1)
	a := c.answer(1)
	require.NotEmpty(t, a.tokens[0])
	require.Equal(t, "cancelled", a.lastMeta().FinishReason)
	require.Len(t, c.aborts(), 1)
	require.NotZero(t, c.aborts()[0], "the abort waited for the first token")

	// Without the transfer nothing is waited for.
	c.generate(2, []int32{stallsBeforeFirst}, order(9))
	c.cancel(2)
	c.answer(2)
	require.Zero(t, c.aborts()[1])
}

func TestCancelDuringTransferIsNotPutOffForEver(t *testing.T) {
	c := start(t, bridgetest.Setup{}, nil, bridge.Options{FirstTokenWait: 20 * time.Millisecond, AbortGrace: patience})
	c.generate(1, []int32{stallsBeforeFirst}, order(9, func(g *ipc.Generate) {
		g.Disaggregated = []byte(`{"request_type": "generation_only"}`)
	}))
	c.cancel(1)
	require.Equal(t, "cancelled", c.answer(1).lastMeta().FinishReason)
	require.Equal(t, []int{0}, c.aborts())
}

func TestAbortPolicies(t *testing.T) {
	t.Run("first_token", func(t *testing.T) {
		c := start(t, bridgetest.Setup{Env: []string{"STANDIN_DELAY_MS=100"}}, nil,
			bridge.Options{Abort: bridge.AbortAfterFirstToken, AbortGrace: patience})
		c.generate(1, []int32{5, 6, 7}, order(1000))
		c.cancel(1)
		require.NotEmpty(t, c.answer(1).tokens[0])
		require.NotZero(t, c.aborts()[0])
	})
	t.Run("detach", func(t *testing.T) {
		c := start(t, bridgetest.Setup{}, nil, bridge.Options{Abort: bridge.Detach})
		c.generate(1, []int32{5, 6, 7}, order(2000, func(g *ipc.Generate) { g.Sampling.IgnoreEOS = ptr(true) }))
		c.cancel(1)
		a := c.answer(1)
		require.Equal(t, "length", a.lastMeta().FinishReason, "it ran to its own end")
		require.Empty(t, c.aborts())
	})
}

// Requests cancelled at all moments get exactly one last record each.
func TestCancelStorm(t *testing.T) {
	const requests = 300
	c := start(t, bridgetest.Setup{}, args{"max_batch_size": 50}, bridge.Options{AbortGrace: 50 * time.Millisecond})
	ids := make([]uint64, requests)
	for i := range ids {
		ids[i] = uint64(i)
		c.generate(ids[i], []int32{int32(i)}, order(int64(i)*2+1))
		if i%3 == 0 {
			c.cancel(ids[i/2])
		}
	}
	for _, id := range ids {
		c.cancel(id)
	}
	got := c.answers(ids...)
	require.Len(t, got, requests)
	for id, a := range got {
		require.Contains(t, []string{"cancelled", "length", "stop"}, a.lastMeta().FinishReason, "request %d", id)
	}
	c.generate(requests, []int32{5, 6, 7}, order(2))
	require.Equal(t, []uint32{18, 25}, c.answer(requests).tokens[0])
}
