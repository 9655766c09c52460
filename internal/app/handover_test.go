package app

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"dynworker/internal/caller"
	"dynworker/pkg/discovery"
	"dynworker/pkg/protocol"
	"dynworker/pkg/wire"

	"github.com/stretchr/testify/require"
)

// pair is a prefill and a decode worker of one model.
type pair struct {
	t               *testing.T
	caller          *caller.Caller
	prefill, decode *running
}

func (w *world) pair(settings ...string) *pair {
	p := &pair{t: w.t, caller: w.caller()}
	p.prefill = w.start(append([]string{"role=prefill", "drain.budget=15s"}, settings...)...)
	p.decode = w.start(append([]string{"role=decode"}, settings...)...)
	return p
}

// do opens a stream as the frontend does.
func (p *pair) do(r *running, id string, request *protocol.Request) *caller.Stream {
	p.t.Helper()
	s, err := p.caller.Do(timeout(p.t), caller.Call{Transport: r.instance().Transport, Codec: protocol.CodecMsgpack, Request: request, ID: id})
	require.NoError(p.t, err)
	return s
}

// firstHalf runs the prompt with one token, as the frontend asks for it, and gives the one item of the answer.
func (p *pair) firstHalf(id string, change func(protocol.Map)) *protocol.Chunk {
	p.t.Helper()
	s := p.do(p.prefill, id, ask(1, change))
	item, err := s.Next()
	require.NoError(p.t, err)
	require.Nil(p.t, item.Err)
	require.Equal(p.t, protocol.FinishLength, item.Chunk.Finish)
	require.Empty(p.t, read(s).tokens, "one item and no more")
	return item.Chunk
}

// goOn is the request for the second half.
func (p *pair) goOn(tokens int, first *protocol.Chunk) *protocol.Request {
	return ask(tokens, func(m protocol.Map) {
		m["prefill_result"] = protocol.Map{"disaggregated_params": first.Disaggregated}
		m["routing"] = protocol.Map{"prefill_worker_id": int64(p.prefill.serving.InstanceID)}
	})
}

// holds waits until the prefill engine holds the blocks of n requests.
func (p *pair) holds(n int) {
	p.t.Helper()
	require.Eventually(p.t, func() bool {
		_, text := get(p.t, p.prefill, "/metrics")
		return strings.Contains(text, fmt.Sprintf("dynworker_engine_held_requests %d\n", n))
	}, patience, 10*time.Millisecond)
}

func TestPrefillAndDecodeAnswerAsOne(t *testing.T) {
	w := newWorld(t)
	p := w.pair()
	for _, tokens := range []int{1, 2, 20} {
		first := p.firstHalf(fmt.Sprint(tokens), nil)
		require.Equal(t, expected(1), first.TokenIDs)
		a := read(p.do(p.decode, fmt.Sprint(tokens), p.goOn(tokens, first)))
		require.NoError(t, a.err)
		require.Equal(t, expected(tokens), a.tokens, "with the first token again")
		require.Equal(t, protocol.FinishLength, a.finish)
	}
	p.holds(0)
	_, text := get(t, p.prefill, "/metrics")
	require.Contains(t, text, "dynworker_handovers_total 3\n")
	require.Contains(t, text, "dynworker_request_phase_seconds_count{phase=\"prefill\"} 3\n")
	require.Contains(t, text, "dynworker_request_phase_seconds_count{phase=\"decode\"} 0\n")
	_, text = get(t, p.decode, "/metrics")
	require.Contains(t, text, "dynworker_request_phase_seconds_count{phase=\"transfer\"} 3\n")
	require.Contains(t, text, "dynworker_request_phase_seconds_count{phase=\"prefill\"} 0\n")
	require.NoError(t, p.decode.stop())
	require.NoError(t, p.prefill.stop())
	require.Empty(t, w.records())
}

func TestTheRecordsOfRoles(t *testing.T) {
	w := newWorld(t)
	p := w.pair()
	cards := map[string]protocol.Card{}
	for key, value := range w.records() {
		if strings.HasPrefix(key, protocol.ModelPrefix) {
			r, err := protocol.ParseModelRecord([]byte(value))
			require.NoError(t, err)
			cards[r.Component] = r.Card
		}
	}
	require.Len(t, cards, 2)
	require.Equal(t, "prefill", cards["prefill"].WorkerType)
	require.Equal(t, "decode", cards["backend"].WorkerType)
	require.Contains(t, string(w.machineSlots(t)), fmt.Sprintf("%x ", p.prefill.serving.InstanceID))
	require.NotContains(t, string(w.machineSlots(t)), fmt.Sprintf("%x ", p.decode.serving.InstanceID), "only prefills are named")
	require.NoError(t, p.prefill.stop())
	require.Empty(t, w.machineSlots(t))
}

// machineSlots are the values of all slots.
func (w *world) machineSlots(t *testing.T) (values []byte) {
	c, err := discovery.Connect(t.Context(), discovery.Config{Endpoints: []string{w.etcd.Endpoint()}, Logger: nopLogger})
	require.NoError(t, err)
	defer c.Close()
	all, err := c.List(t.Context(), machineSlots)
	require.NoError(t, err)
	for _, r := range all {
		values = append(append(values, r.Value...), '\n')
	}
	return values
}

// Two prefill workers never name two prompts alike.
func TestPrefillWorkersNameTheirPrompts(t *testing.T) {
	w := newWorld(t)
	p := w.pair("engine.sim.kv_transfer_timeout=1s")
	other := *p
	other.prefill = w.start("role=prefill", "engine.sim.kv_transfer_timeout=1s")
	seen := map[any]bool{}
	for n := range 10 {
		for _, q := range []*pair{p, &other} {
			left := q.firstHalf(fmt.Sprint(n), nil).Disaggregated.(protocol.Map)
			require.NotNil(t, left["disagg_request_id"])
			require.NotContains(t, left, "machine_id")
			require.False(t, seen[left["disagg_request_id"]])
			seen[left["disagg_request_id"]] = true
		}
	}
}

// A caller that leaves while its blocks are on their way is dropped only when they have arrived, so that none are left behind.
func TestNoBlocksAreLeftBehind(t *testing.T) {
	w := newWorld(t)
	p := w.pair("engine.sim.kv_transfer_delay=300ms")
	first := p.firstHalf("left", nil)
	p.holds(1)
	s := p.do(p.decode, "left", p.goOn(8000, first))
	require.NoError(t, s.Prologue())
	require.Eventually(t, func() bool { return count(t, p.decode, "generate", "left") == 1 }, patience, 5*time.Millisecond)
	require.NoError(t, s.Kill())
	p.holds(0)
	require.Eventually(t, func() bool { return count(t, p.decode, "cancel", "left") == 1 }, patience, 5*time.Millisecond)
	_, text := get(t, p.decode, "/metrics")
	require.Contains(t, text, `dynworker_deferred_aborts_total{outcome="in_time"} 1`)

	// The same when nobody can be called back.
	first = p.firstHalf("gone", nil)
	p.holds(1)
	_, err := p.caller.Do(timeout(t), caller.Call{Transport: p.decode.instance().Transport, Codec: protocol.CodecMsgpack, Request: p.goOn(5, first), ID: "gone", CallHomeTimeout: time.Nanosecond, Edit: func(h *wire.RequestControl) { h.Connection.Address = "127.0.0.1:1" }})
	require.Error(t, err)
	p.holds(0)
	require.Equal(t, 1, count(t, p.decode, "generate", "gone"))
}

// A request whose caller leaves while it waits for a slot still takes its blocks.
func TestWaitingRequestsTakeTheirBlocks(t *testing.T) {
	w := newWorld(t)
	p := w.pair("admission.max_requests=1", "admission.queue=1")
	first := p.firstHalf("waits", nil)
	busy := p.do(p.decode, "busy", ask(5, func(m protocol.Map) {
		m["annotations"] = []any{"x-bypass-remote-prefill"}
		m["routing"] = protocol.Map{"cache_salt": "sim:stall:1"}
	}))
	require.Eventually(t, func() bool { return count(t, p.decode, "generate", "busy") == 1 }, patience, 5*time.Millisecond)
	s := p.do(p.decode, "waits", p.goOn(5, first))
	require.NoError(t, s.Prologue())
	require.NoError(t, s.Kill())
	p.holds(0)
	require.NoError(t, busy.Close())
}

func TestAFailedTransferMovesTheRequest(t *testing.T) {
	w := newWorld(t)
	p := w.pair("engine.watch.failure_count=1", "engine.sim.kv_transfer_timeout=5s")
	for _, fault := range []string{"transfer-lost", "transfer-corrupt", "transfer-mismatch"} {
		first := p.firstHalf(fault, salt("sim:"+fault))
		a := read(p.do(p.decode, fault, p.goOn(5, first)))
		var failure *protocol.Error
		require.ErrorAs(t, a.err, &failure, fault)
		require.True(t, failure.Migratable(), fault)
		require.Contains(t, failure.Message, fmt.Sprintf("%x", p.prefill.serving.InstanceID))
		require.Empty(t, a.tokens)
	}
	a := read(p.do(p.decode, "after", p.goOn(5, p.firstHalf("after", nil))))
	require.NoError(t, a.err)
	require.Equal(t, expected(5), a.tokens)
	_, text := get(t, p.decode, "/metrics")
	require.Contains(t, text, "dynworker_engine_starts_total 1\n", "the engine is not to blame")
}

// A prefill worker that ends waits until its blocks were fetched.
func TestAPrefillWorkerStaysForItsBlocks(t *testing.T) {
	w := newWorld(t)
	p := w.pair()
	first := p.firstHalf("late", nil)
	p.holds(1)
	p.prefill.cancel()
	require.Eventually(t, func() bool {
		return strings.Contains(p.prefill.log.String(), "records withdrawn") || len(w.records()) < 4
	}, patience, 5*time.Millisecond)
	a := read(p.do(p.decode, "late", p.goOn(5, first)))
	require.NoError(t, a.err)
	require.Equal(t, expected(5), a.tokens)
	require.NoError(t, p.prefill.wait())
	require.NotContains(t, p.prefill.log.String(), "while KV blocks were on their way")
}

func TestADecodeWorkerDoesBothHalvesWhenItIsTold(t *testing.T) {
	w := newWorld(t)
	r := w.start("role=decode")
	p := &pair{t: t, caller: w.caller(), decode: r}
	a := read(p.do(r, "local", ask(5, func(m protocol.Map) { m["annotations"] = []any{"x-bypass-remote-prefill"} })))
	require.NoError(t, a.err)
	require.Equal(t, expected(5), a.tokens)
	a = read(p.do(r, "nothing", ask(5, nil)))
	require.ErrorContains(t, a.err, "prefill_result")
}

func TestBrokenHandoffsAreRefusedByName(t *testing.T) {
	w := newWorld(t)
	p := w.pair("engine.sim.kv_transfer_timeout=1s")
	for field, value := range map[string]any{"opaque_state": "!!!", "ctx_request_id": nil, "first_gen_tokens": "x"} {
		first := p.firstHalf(field, nil)
		left := first.Disaggregated.(protocol.Map)
		left[field] = value
		a := read(p.do(p.decode, field, p.goOn(5, first)))
		var failure *protocol.Error
		require.ErrorAs(t, a.err, &failure, field)
		require.Equal(t, protocol.ClassInvalidRequest, failure.Class)
		require.Contains(t, failure.Message, "prefill_result.disaggregated_params."+field)
		require.Zero(t, count(t, p.decode, "generate", field))
	}
}
