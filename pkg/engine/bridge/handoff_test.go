package bridge_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/engine/bridge"
	"dynworker/pkg/engine/bridge/bridgetest"
	"dynworker/pkg/engine/ipc"
)

var transfers = bridgetest.Setup{Env: []string{"STANDIN_TRANSFER=1"}}

// prefilled is what a prefill worker's engine leaves for a decode worker's.
func prefilled(t *testing.T, c *child, id uint64, prompt []int32, change ...func(*ipc.Generate)) map[string]json.RawMessage {
	t.Helper()
	g := order(1, change...)
	g.Streaming, g.Disaggregated = false, []byte(`{"request_type": "context_only"}`)
	c.generate(id, prompt, g)
	meta := c.answer(id).lastMeta()
	require.Equal(t, "length", meta.FinishReason)
	var left map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(meta.Disaggregated, &left))
	return left
}

func takesOver(left map[string]json.RawMessage) func(*ipc.Generate) {
	d := map[string]json.RawMessage{}
	for k, v := range left {
		d[k] = v
	}
	d["request_type"] = json.RawMessage(`"generation_only"`)
	return func(g *ipc.Generate) { g.Disaggregated = mustJSON(d) }
}

// releasedSoon waits until so many contexts have been given up: the receiver's
// answer does not wait for it.
func releasedSoon(t *testing.T, c *child, count int) {
	t.Helper()
	require.Eventually(t, func() bool { return len(c.log.Calls(t, "released")) == count }, patience, time.Millisecond)
}

// The hand-off goes through two bridges, byte for byte, and the KV from one
// stand-in to the other: what both say together is what one says alone.
func TestHandoffBetweenTwoBridges(t *testing.T) {
	one, two, whole := start(t, transfers, nil, bridge.Options{}), start(t, transfers, nil, bridge.Options{}), start(t, bridgetest.Setup{}, nil, bridge.Options{})
	logged := func(g *ipc.Generate) { g.Sampling.LogProbs = ptr(int64(2)) }
	for id, prompt := range [][]int32{{5, 6, 7}, make([]int32, 100), {300}} {
		id := uint64(id + 1)
		whole.generate(id, prompt, order(20, logged))
		want := whole.answer(id)
		left := prefilled(t, one, id, prompt, logged)
		two.generate(id, prompt, order(20, logged, takesOver(left)))
		got := two.answer(id)
		require.Equal(t, want.tokens, got.tokens)
		require.Equal(t, want.probs, got.probs)
		require.Equal(t, want.lastMeta().FinishReason, got.lastMeta().FinishReason)
		releasedSoon(t, one, int(id))
		two.generate(id+100, prompt, order(20, takesOver(left)))
		require.Contains(t, two.answer(id+100).lastMeta().Error.Message, "is not here", "KV can be taken once")
	}
	require.Len(t, one.log.Calls(t, "held"), 3)
}

// KV that cannot be had, or is not that of the request, fails the request and
// nothing else; its blocks stay where they are.
func TestHandoffsThatFail(t *testing.T) {
	one, two := start(t, transfers, nil, bridge.Options{}), start(t, transfers, args{"cache_transceiver_config": args{"kv_transfer_timeout_ms": 50}}, bridge.Options{})
	salt := func(id string) func(*ipc.Generate) {
		return func(g *ipc.Generate) { g.CacheSalt = ptr("trigger:" + id) }
	}
	var id uint64
	fails := func(reason string, left map[string]json.RawMessage, change ...func(*ipc.Generate)) {
		t.Helper()
		id++
		two.generate(id, []int32{5, 6, 7}, order(20, append(change, takesOver(left))...))
		a := two.answer(id)
		require.Empty(t, a.tokens[0])
		require.NotNil(t, a.lastMeta().Error)
		require.Equal(t, ipc.ErrorRequest, a.lastMeta().Error.Kind)
		require.True(t, strings.HasPrefix(a.lastMeta().Error.Message, "KV transfer: "), a.lastMeta().Error.Message)
		require.Contains(t, a.lastMeta().Error.Message, reason)
	}
	fails("IncompleteReadError", prefilled(t, one, 1, []int32{5, 6, 7}, salt("90017")), salt("90017"))
	fails("not those that were announced", prefilled(t, one, 2, []int32{5, 6, 7}, salt("90018")), salt("90018"))
	fails("not complete within", prefilled(t, one, 3, []int32{5, 6, 7}, salt("90019")), salt("90019"))
	fails("another prompt", prefilled(t, one, 4, []int32{5, 6, 8}))
	left := prefilled(t, one, 5, []int32{5, 6, 7})
	left["ctx_request_id"] = json.RawMessage("1")
	fails("about context 1", left)
	left["opaque_state"] = json.RawMessage(`"c3RhbmRpbi0x"`)
	fails("", left)
	require.Len(t, one.log.Calls(t, "held"), 5)
	require.Empty(t, one.log.Calls(t, "released"))
}

// The bridge holds a cancel back until the KV is here, so that none is left
// behind; what it waits for no longer is left until its time is over.
func TestCancelBetweenPhases(t *testing.T) {
	one := start(t, transfers, nil, bridge.Options{})
	two := start(t, bridgetest.Setup{Env: []string{"STANDIN_TRANSFER=1", "STANDIN_TRANSFER_DELAY_MS=100"}}, nil, bridge.Options{FirstTokenWait: patience, AbortGrace: patience})
	two.generate(1, []int32{5, 6, 7}, order(1000, takesOver(prefilled(t, one, 1, []int32{5, 6, 7}))))
	two.cancel(1)
	require.Equal(t, "cancelled", two.answer(1).lastMeta().FinishReason)
	releasedSoon(t, one, 1)
	require.Empty(t, two.log.Calls(t, "dangling"))

	hasty := start(t, bridgetest.Setup{Env: []string{"STANDIN_TRANSFER=1", "STANDIN_TRANSFER_DELAY_MS=3600000"}}, nil, bridge.Options{FirstTokenWait: 1, AbortGrace: patience})
	hasty.generate(1, []int32{5, 6, 7}, order(1000, takesOver(prefilled(t, one, 2, []int32{5, 6, 7}))))
	hasty.cancel(1)
	require.Equal(t, "cancelled", hasty.answer(1).lastMeta().FinishReason)
	require.Len(t, hasty.log.Calls(t, "dangling"), 1)
	require.Len(t, one.log.Calls(t, "released"), 1)
}
