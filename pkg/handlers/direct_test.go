package handlers

import (
	"testing"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/protocol"
)

// directRecord is a sink that can be written to without waiting, or not.
type directRecord struct {
	record
	idle, whole bool
	now         int
}

func (r *directRecord) Idle() bool { return r.idle }

func (r *directRecord) FlushNow() bool {
	r.now++
	return r.whole
}

func TestTheShortWayGivesTheSameAnswer(t *testing.T) {
	batches := [][]ipc.Output{
		{{Tokens: []uint32{18}, Meta: &ipc.Meta{CachedTokens: ptr(int64(2))}}}, {token(0, 25)}, {token(0, 32)}, {token(0, 39)}, {last(token(0, 46), meta("stop"))},
	}
	answer := func(out Sink, offer bool) {
		b := newBench(t, Unified, func(_ *Config, e *scripted) { e.batches, e.offer = batches, offer })
		require.NoError(t, b.handler.Generate(t.Context(), call(t, with("stop_conditions", `{"max_tokens":9}`)), out))
		require.Equal(t, 5, b.observer.generated)
	}
	var plain record
	answer(&plain, false)
	for name, sink := range map[string]*directRecord{
		"all goes at once":     {idle: true, whole: true},
		"the sink is slow":     {idle: true},
		"the sink is not idle": {},
	} {
		answer(sink, true)
		same(t, plain.chunks, sink.chunks)
		if sink.idle {
			require.Equal(t, 3, sink.now, "%s: first and last go through run", name)
		} else {
			require.Zero(t, sink.now, name)
		}
		if sink.whole {
			require.Equal(t, 2, sink.flushes, name)
		} else {
			require.Equal(t, 5, sink.flushes, name)
		}
	}
}

// What would end or fail a request is not for the engine's goroutine.
func TestTheShortWayIsForPlainTokensOnly(t *testing.T) {
	for name, middle := range map[string]ipc.Output{"a choice that was not asked for": token(5, 2), "more tokens than were asked for": {Tokens: make([]uint32, 9)}} {
		sink := &directRecord{idle: true, whole: true}
		b := newBench(t, Unified, func(_ *Config, e *scripted) {
			e.offer, e.batches = true, [][]ipc.Output{{token(0, 1)}, {middle}, {last(token(0, 3), meta("stop"))}}
		})
		require.NoError(t, b.handler.Generate(t.Context(), call(t, base), sink))
		require.Zero(t, sink.now, name)
		require.NotEqual(t, protocol.FinishStop, sink.chunks[len(sink.chunks)-1].Finish, name)
	}
}
