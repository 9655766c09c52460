package app

import (
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"dynworker/internal/caller"
	"dynworker/pkg/protocol"

	"github.com/stretchr/testify/require"
)

// quickly are settings for engines that fail on purpose.
var quickly = []string{"engine.restart.backoff=1ms", "engine.restart.backoff_max=1ms", "engine.stop_timeout=1s", "engine.sim.token_delay=5ms"}

// many are requests in flight that have had their first output.
func (r *running) many(n int, c *caller.Caller, i protocol.Instance) []*caller.Stream {
	var streams []*caller.Stream
	for range n {
		s, err := c.Do(timeout(r.t), caller.Call{Transport: i.Transport, Codec: protocol.CodecMsgpack, Request: ask(8000, nil)})
		require.NoError(r.t, err)
		_, err = s.Next()
		require.NoError(r.t, err)
		streams = append(streams, s)
	}
	return streams
}

// movedOn asserts that each request ended with an error that makes the frontend continue it elsewhere, and with no token that is wrong.
func (r *running) movedOn(streams []*caller.Stream) {
	for _, s := range streams {
		a := read(s)
		var cut *protocol.Error
		require.ErrorAs(r.t, a.err, &cut)
		require.True(r.t, cut.Migratable(), "%v", cut)
		require.Equal(r.t, protocol.FinishNone, a.finish, "nothing that looks complete")
	}
}

// backAgain waits until the worker is registered again under its identity and serves.
func (r *running) backAgain(c *caller.Caller, lives int) protocol.Instance {
	require.Eventually(r.t, func() bool { return strings.Count(r.log.String(), `"message":"serving again"`) == lives-1 }, patience, 10*time.Millisecond)
	i := r.instance() // of the same id, or it fails
	s, err := c.Do(timeout(r.t), caller.Call{Transport: i.Transport, Codec: protocol.CodecMsgpack, Request: ask(20, nil)})
	require.NoError(r.t, err)
	a := read(s)
	require.NoError(r.t, a.err)
	require.Equal(r.t, expected(20), a.tokens)
	return i
}

func TestAnEngineThatDiesIsStartedAgain(t *testing.T) {
	w := newWorld(t)
	r := w.start(quickly...)
	before, c := w.records(), w.caller()
	i := r.instance()
	for life, how := range []string{"sim:crash:3", "sim:fatal:3", "sim:unhealthy:3"} {
		streams := r.many(60, c, i)
		s, err := c.Do(timeout(t), caller.Call{Transport: i.Transport, Codec: protocol.CodecMsgpack, Request: ask(10, salt(how))})
		require.NoError(t, err)
		read(s)
		r.movedOn(streams)
		r.backAgain(c, life+2)
		require.Equal(t, before, w.records(), "the same bytes under the same keys")
	}
	_, metrics := get(t, r, "/metrics")
	for _, detector := range []string{"exit", "fatal", "health"} {
		require.Contains(t, metrics, `dynworker_engine_failures_total{detector="`+detector+`"} 1`)
		require.Contains(t, metrics, `dynworker_engine_restarts_total{detector="`+detector+`"} 1`)
		require.Contains(t, r.log.String(), `"detector":"`+detector+`"`)
	}
	require.Contains(t, metrics, `dynworker_engine_starts_total 4`)
	status, _ := get(t, r, "/health")
	require.Equal(t, http.StatusOK, status)
	require.NoError(t, r.stop())
	require.Empty(t, w.records())
}

// An engine that is stopped is alive as a process and holds all of its streams open.
func TestAnEngineThatStandsStillIsFound(t *testing.T) {
	w := newWorld(t)
	r := w.start(append(quickly, "engine.watch.no_progress=3s", "engine.watch.health_interval=0s")...)
	c := w.caller()
	streams := r.many(50, c, r.instance())
	require.NoError(t, syscall.Kill(r.enginePID(), syscall.SIGSTOP))
	r.movedOn(streams)
	r.backAgain(c, 2)
	_, metrics := get(t, r, "/metrics")
	require.Contains(t, metrics, `dynworker_engine_failures_total{detector="stall"} 1`)
	require.NoError(t, r.stop())
}
