package app

import (
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"dynworker/internal/caller"
	"dynworker/pkg/config"
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
	require.Eventually(r.t, func() bool { return strings.Count(r.log.String(), `"message":"serving again"`) >= lives-1 }, patience, 10*time.Millisecond)
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
	t.Parallel()
	w := newWorld(t)
	r := w.start(append(quickly, "engine.watch.no_progress=5s", "engine.watch.health_interval=0s")...)
	c := w.caller()
	streams := r.many(50, c, r.instance())
	require.NoError(t, syscall.Kill(r.enginePID(), syscall.SIGSTOP))
	r.movedOn(streams)
	r.backAgain(c, 2)
	_, metrics := get(t, r, "/metrics")
	require.Contains(t, metrics, `dynworker_engine_failures_total{detector="stall"} 1`)
	require.NoError(t, r.stop())
}

// restarts makes the engine of a worker die so many times and waits each time until it serves again.
func (r *running) restarts(n int) {
	c := r.world.caller()
	i := r.instance()
	for life := range n {
		s, err := c.Do(timeout(r.t), caller.Call{Transport: i.Transport, Codec: protocol.CodecMsgpack, Request: ask(10, salt("sim:crash:1"))})
		require.NoError(r.t, err)
		require.Error(r.t, read(s).err)
		r.backAgain(c, life+2)
	}
}

func TestAnEngineThatKeepsDyingEndsTheWorker(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.start(append(quickly, "engine.restart.max=2", "engine.restart.window=1h")...)
	r.restarts(2)
	s, err := w.caller().Do(timeout(t), caller.Call{Transport: r.instance().Transport, Codec: protocol.CodecMsgpack, Request: ask(10, salt("sim:crash:1"))})
	require.NoError(t, err)
	require.Error(t, read(s).err)
	require.ErrorIs(t, r.wait(), ErrEngineDied)
	require.ErrorContains(t, r.wait(), "was started again 2 times (engine.restart.max): exit: engine process exited with status")
	require.Empty(t, w.records())
}

// onceOnly is an engine that starts the first time, and the next time is what then says.
func (w *world) onceOnly(then string) string {
	exe, err := os.Executable()
	require.NoError(w.t, err)
	first := filepath.Join(w.t.TempDir(), "first")
	return "engine.command=[sh, -c, 'if mkdir " + first + "; then exec " + exe + " " + EngineCommand + "; fi; " + then + "']"
}

func TestAnEngineThatDoesNotStartAgainEndsTheWorker(t *testing.T) {
	w := newWorld(t)
	r := w.start(append(quickly, "engine.restart.max=3", w.onceOnly("echo no such device; exit 7"))...)
	require.NoError(t, syscall.Kill(r.enginePID(), syscall.SIGKILL))
	require.ErrorIs(t, r.wait(), ErrEngineDied)
	require.ErrorContains(t, r.wait(), "status 7")
	require.ErrorContains(t, r.wait(), "no such device")
	require.Equal(t, 3, strings.Count(r.log.String(), `"message":"the engine could not be started again"`))
	require.Empty(t, w.records())
}

// A worker without an engine ends at once when it is told to, in whatever step the restart is, and without an error.
func TestAWorkerThatIsBroughtBackCanBeStopped(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for name, c := range map[string]struct {
		settings []string
		step     string
	}{
		"back-off": {[]string{"engine.restart.backoff=1h", "engine.restart.backoff_max=1h"}, "started again in"},
		"start":    {append(quickly, w.onceOnly("exec sleep 1000")), "starting, after exit: "},
	} {
		r := w.start(c.settings...)
		pid := r.enginePID()
		require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
		require.Eventually(t, func() bool {
			status, body := get(t, r, "/health")
			return status == http.StatusServiceUnavailable && strings.Contains(body, c.step)
		}, patience, 10*time.Millisecond, name)
		status, _ := get(t, r, "/live")
		require.Equal(t, http.StatusOK, status, name)
		records := w.records()
		require.Len(t, records, 1, "%s: the instance is gone, the card stays", name)
		require.NoError(t, r.stop(), name)
		require.NotContains(t, r.log.String(), "serving again", name)
		require.Empty(t, w.records(), name)
	}
}

func TestAnEngineOnWhichEverythingFailsIsFound(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.start(append(quickly, "engine.watch.failure_count=20")...)
	i, c := r.instance(), w.caller()
	for range 30 { // the callers' own mistakes say nothing about the engine
		s, err := c.Do(timeout(t), caller.Call{Transport: i.Transport, Codec: protocol.CodecMsgpack, Request: ask(10, salt("sim:value-error"))})
		require.NoError(t, err)
		require.Equal(t, protocol.FinishError, read(s).finish)
	}
	for range 130 {
		s, err := c.Do(timeout(t), caller.Call{Transport: i.Transport, Codec: protocol.CodecMsgpack, Request: ask(10, salt("sim:request-error"))})
		if err != nil {
			break // refused: it has been found
		}
		read(s)
	}
	r.backAgain(c, 2)
	_, metrics := get(t, r, "/metrics")
	require.Contains(t, metrics, `dynworker_engine_failures_total{detector="failures"} 1`)
	require.NoError(t, r.stop())
}

func TestACanaryWithoutAnswerEndsTheEngine(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.start(append(quickly, "health_check.enabled=true", "health_check.wait=10ms", "health_check.timeout=5s", "engine.watch.canary_failures=2", "engine.watch.health_interval=0s")...)
	require.NoError(t, syscall.Kill(r.enginePID(), syscall.SIGSTOP))
	r.backAgain(w.caller(), 2)
	require.Eventually(t, func() bool { status, _ := get(t, r, "/health"); return status == http.StatusOK }, patience, 10*time.Millisecond)
	_, metrics := get(t, r, "/metrics")
	require.NotContains(t, metrics, `dynworker_engine_failures_total{detector="canary"} 0`)
	require.Contains(t, metrics, "dynamo_component_requests_total{", "of the callers'")
	require.Contains(t, metrics, "dynworker_tokens_total 20\n", "the canaries count as no business")
	require.NoError(t, r.stop())
}

// One request of which the engine has forgotten is moved, and the engine is told; the others go on.
func TestARequestThatGetsNothingIsMoved(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.start(append(quickly, "engine.watch.stream_inactivity=5s")...)
	i, c := r.instance(), w.caller()
	lively := r.many(1, c, i)[0]
	s, err := c.Do(timeout(t), caller.Call{Transport: i.Transport, Codec: protocol.CodecMsgpack, Request: ask(10, salt("sim:stall:3")), ID: "silent"})
	require.NoError(t, err)
	a := read(s)
	var cut *protocol.Error
	require.ErrorAs(t, a.err, &cut)
	require.True(t, cut.Migratable())
	require.Equal(t, protocol.ReasonBackendResponseTimeout, cut.Reason)
	require.Equal(t, expected(3), a.tokens)
	require.Eventually(t, func() bool { return count(t, r, "cancel", "silent") == 1 }, patience, 10*time.Millisecond)
	_, err = lively.Next()
	require.NoError(t, err)
	require.NoError(t, lively.Kill())
	_, metrics := get(t, r, "/metrics")
	require.Contains(t, metrics, "dynworker_engine_stream_stalls_total 1\n")
	require.NoError(t, r.stop())
}

func TestARequestThatKillsEnginesIsNotTriedForEver(t *testing.T) {
	w := newWorld(t)
	r := w.start(quickly...)
	i, c := r.instance(), w.caller()
	poison := func() *protocol.Error {
		s, err := c.Do(timeout(t), caller.Call{Transport: i.Transport, Codec: protocol.CodecMsgpack, Request: ask(10, salt("sim:crash:1")), ID: "poison"})
		require.NoError(t, err)
		var failed *protocol.Error
		require.ErrorAs(t, read(s).err, &failed)
		return failed
	}
	bystander := r.many(1, c, i)
	require.True(t, poison().Migratable(), "once is no proof")
	r.movedOn(bystander)
	r.backAgain(c, 2)
	bystander = r.many(1, c, i)
	require.False(t, poison().Migratable(), "twice is one too many")
	r.movedOn(bystander)
	r.backAgain(c, 3)
	require.False(t, poison().Migratable())
	require.Contains(t, poison().Message, "2 times")
	_, metrics := get(t, r, "/metrics")
	require.Contains(t, metrics, "dynworker_engine_starts_total 3\n", "it does not reach the engine any more")
	require.Contains(t, metrics, "dynworker_suspect_requests_total 3\n")
	require.NoError(t, r.stop())
}

func TestRestartsLeaveNothingBehind(t *testing.T) {
	w := newWorld(t)
	r := w.start(append(quickly, "engine.restart.max=100")...)
	r.restarts(2)
	files := func() int {
		open, err := os.ReadDir("/proc/self/fd")
		require.NoError(t, err)
		return len(open)
	}
	routines, descriptors := runtime.NumGoroutine(), files()
	c, i := w.caller(), r.instance()
	for life := range 20 {
		s, err := c.Do(timeout(t), caller.Call{Transport: i.Transport, Codec: protocol.CodecMsgpack, Request: ask(10, salt("sim:crash:1"))})
		require.NoError(t, err)
		require.Error(t, read(s).err)
		r.backAgain(c, life+4)
	}
	const slack = 10 // of connections that come and go; a leak in each restart is twice that
	require.Eventually(t, func() bool { return runtime.NumGoroutine() <= routines+slack && files() <= descriptors+slack }, patience, 50*time.Millisecond,
		"%d goroutines and %d descriptors before, %d and %d after", routines, descriptors, runtime.NumGoroutine(), files())
	require.NoError(t, r.stop())
}

func TestADrainOverHTTP(t *testing.T) {
	w := newWorld(t)
	r := w.start("engine.sim.token_delay=20ms")
	i, c := r.instance(), w.caller()
	streams := []*caller.Stream{}
	for range 10 {
		s, err := c.Do(timeout(t), caller.Call{Transport: i.Transport, Codec: protocol.CodecMsgpack, Request: ask(100, nil)})
		require.NoError(t, err)
		_, err = s.Next()
		require.NoError(t, err)
		streams = append(streams, s)
	}
	const path = "/engine/control/drain"
	status, _ := get(t, r, path)
	require.Equal(t, http.StatusMethodNotAllowed, status, "a probe drains nothing")
	require.Len(t, w.records(), 2)
	code, body := post(t, r, path)
	require.Equal(t, http.StatusOK, code)
	require.JSONEq(t, `{"status":"draining","in_flight":10}`, body)
	for _, s := range streams {
		a := read(s)
		require.NoError(t, a.err)
		require.Len(t, a.tokens, 99)
	}
	require.Eventually(t, func() bool {
		_, body = post(t, r, path)
		return strings.Contains(body, `"drained"`)
	}, patience, 10*time.Millisecond)
	require.JSONEq(t, `{"status":"drained","in_flight":0}`, body)
	require.Empty(t, w.records())
	status, _ = get(t, r, "/live")
	require.Equal(t, http.StatusOK, status, "it waits for the signal")
	status, body = get(t, r, "/health")
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.Contains(t, body, "draining")
	require.NoError(t, r.stop())

	off := w.start("drain.route=off")
	code, _ = post(t, off, path)
	require.Equal(t, http.StatusNotFound, code)
	require.NoError(t, off.stop())
}

func post(t *testing.T, r *running, path string) (int, string) {
	return do(t, r, http.MethodPost, path)
}

// An engine that fails while the worker drains ends the drain, and is not started again.
func TestAnEngineThatDiesInADrain(t *testing.T) {
	w := newWorld(t)
	r := w.start(quickly...)
	c := w.caller()
	streams := r.many(10, c, r.instance())
	r.cancel()
	require.Eventually(t, func() bool { return len(w.records()) == 1 }, patience, 5*time.Millisecond)
	require.NoError(t, syscall.Kill(r.enginePID(), syscall.SIGKILL))
	r.movedOn(streams)
	require.NoError(t, r.wait())
	require.NotContains(t, r.log.String(), "the engine is started again")
	require.Empty(t, w.records())
}

func TestCanaryBody(t *testing.T) {
	bos := uint32(7)
	for role, disaggregated := range map[string]any{config.RoleAggregated: nil, config.RolePrefill: protocol.Map{"request_type": "context_and_generation"}, config.RoleDecode: protocol.Map{"request_type": "context_and_generation"}} {
		for _, payload := range []string{"", "{}", `{"token_ids":[7],"disaggregated_params":null}`} {
			body, err := canaryBody(payload, role, &bos)
			require.NoError(t, err)
			request, err := protocol.ParseRequest(protocol.CodecJSON, body)
			require.NoError(t, err)
			require.Equal(t, []int32{7}, request.TokenIDs)
			require.Equal(t, true, request.Fields["_HEALTH_CHECK"])
			require.Equal(t, disaggregated, request.Fields["disaggregated_params"], "%s %s", role, payload)
		}
	}
	_, err := canaryBody("[]", config.RoleAggregated, nil)
	require.Error(t, err)
}

// An engine that fails while etcd is away comes back all the same: requests of frontends that know the worker from before are served, and the record is there as soon as etcd is.
func TestAnEngineComesBackWithoutEtcd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.start(quickly...)
	before, i, c := w.records(), r.instance(), w.caller()
	w.etcd.Stop()
	require.NoError(t, syscall.Kill(r.enginePID(), syscall.SIGKILL))
	require.Eventually(t, func() bool { return strings.Count(r.log.String(), `"message":"engine ready"`) == 2 }, patience, 10*time.Millisecond)
	s, err := c.Do(timeout(t), caller.Call{Transport: i.Transport, Codec: protocol.CodecMsgpack, Request: ask(20, nil)})
	require.NoError(t, err)
	require.Equal(t, expected(20), read(s).tokens)
	require.NotContains(t, r.log.String(), "serving again")
	require.NoError(t, w.etcd.Start())
	require.Equal(t, i, r.backAgain(c, 2))
	require.Equal(t, before, w.records())
	require.NoError(t, r.stop())
	require.Empty(t, w.records())
}

// A drain that was asked for over HTTP goes on under the signal that follows it, as in a preStop hook that gives up.
func TestASignalDuringADrainOverHTTP(t *testing.T) {
	w := newWorld(t)
	r := w.start("engine.sim.token_delay=20ms")
	s, err := w.caller().Do(timeout(t), caller.Call{Transport: r.instance().Transport, Codec: protocol.CodecMsgpack, Request: ask(50, nil)})
	require.NoError(t, err)
	_, err = s.Next()
	require.NoError(t, err)
	code, _ := post(t, r, "/engine/control/drain")
	require.Equal(t, http.StatusOK, code)
	r.cancel()
	require.Len(t, read(s).tokens, 49)
	require.NoError(t, r.wait())
	require.Empty(t, w.records())
}
