package chaos

import (
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// callers are enough for enough requests in flight on one of two workers, at any moment.
const callers = 140

// detected says that the detector has counted a failure of the node's engine, and how often it was started again.
func (n *node) detected(detector string) bool {
	return n.metric("dynworker_engine_failures_total", `detector="`+detector+`"`) > 0 && n.metric("dynworker_engine_restarts_total", `detector="`+detector+`"`) > 0
}

// TestAnEngineThatFailsLosesNoRequest breaks the engine of one of two workers in every way that there is.
func TestAnEngineThatFailsLosesNoRequest(t *testing.T) {
	poison := func(salt string) func(*testing.T, *world, *node) {
		return func(t *testing.T, w *world, n *node) { w.poison(n, salt) }
	}
	send := func(signal syscall.Signal) func(*testing.T, *world, *node) {
		return func(t *testing.T, w *world, n *node) { require.NoError(t, syscall.Kill(n.enginePID(), signal)) }
	}
	for _, c := range []struct {
		name     string
		detector string
		break_   func(*testing.T, *world, *node)
		settings []string
	}{
		{"killed", "exit", send(syscall.SIGKILL), nil},
		{"ends with 0", "exit", poison("sim:exit:3"), nil},
		{"ends with 134", "exit", poison("sim:crash:3"), nil},
		{"fatal error", "fatal", poison("sim:fatal:3"), nil},
		{"ill", "health", poison("sim:unhealthy:3"), nil},
		{"stands still", "stall", send(syscall.SIGSTOP), []string{"engine.watch.no_progress=2s", "engine.watch.health_interval=0s"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			victim, _ := w.start(c.settings...), w.start()
			crowd := w.gather(callers, 30)
			r := crowd.strike(func() { c.break_(t, w, victim) }, func() bool { return victim.detected(c.detector) })
			require.Zero(t, r.moving[typed], "what can be moved is: %s", r.samples[typed])
			require.NotZero(t, r.fixed[typed], "the fault must be felt")
			require.Positive(t, victim.log.count(`"detector":"`+c.detector+`"`))
			require.Zero(t, r.silent, "no answer ends without a word")
		})
	}
}

// poison sends one request to a worker that its engine does not survive, or asks until it has reached the engine.
func (w *world) poison(n *node, salt string) {
	c := &crowd{t: w.t, caller: w.caller(), salt: salt}
	for _, i := range w.instances() {
		if i.InstanceID == n.instance {
			a := &answer{crowd: c, want: expected([]int32{7, 7, 7}, 40)}
			require.Error(w.t, a.from(w.t.Context(), i, []int32{7, 7, 7}))
			return
		}
	}
	w.t.Fatalf("worker %x is not in etcd", n.instance)
}

func TestADrainWithinItsBudgetFailsNothing(t *testing.T) {
	w := newWorld(t)
	leaves, _ := w.start(), w.start()
	r := w.gather(callers, 30).strike(leaves.stop, func() bool { return true })
	require.Zero(t, r.count[typed], r.samples[typed])
}

func TestADrainWithoutBudgetMovesTheRest(t *testing.T) {
	w := newWorld(t)
	leaves, _ := w.start("drain.budget=0s"), w.start()
	r := w.gather(callers, 40).strike(leaves.stop, func() bool { return true })
	require.Zero(t, r.moving[typed], r.samples[typed])
	require.NotZero(t, r.fixed[typed], "the fault must be felt")
	require.Zero(t, r.silent, "no answer ends without a word")
}

func TestWorkersAreRestartedOneAfterAnother(t *testing.T) {
	w := newWorld(t)
	nodes := []*node{w.start(), w.start(), w.start()}
	r := w.gather(callers, 30).strike(func() {
		for range 2 {
			for i, n := range nodes {
				n.stop()
				nodes[i] = w.start()
			}
		}
	}, func() bool { return true })
	require.Zero(t, r.count[typed], r.samples[typed])
}

func TestEtcdComesAndGoes(t *testing.T) {
	for name, back := range map[string]func(*world) error{
		"with its data": func(w *world) error { return w.etcd.Start() }, "empty": func(w *world) error { return w.etcd.StartEmpty() },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			nodes := []*node{w.start(), w.start()}
			r := w.gather(callers, 30).strike(func() {
				w.etcd.Stop()
				for _, n := range nodes {
					require.Eventually(t, func() bool { return n.metric("dynworker_etcd_registered", "") == 0 }, patience, 10*time.Millisecond)
				}
				require.NoError(t, back(w))
			}, func() bool {
				return len(w.instances()) == 2 && nodes[0].metric("dynworker_etcd_registered", "")+nodes[1].metric("dynworker_etcd_registered", "") == 2
			})
			require.Zero(t, r.count[typed], "requests do not need etcd: %s", r.samples[typed])
		})
	}
}

func TestNATSComesAndGoes(t *testing.T) {
	w := newWorld(t)
	nodes := []*node{w.start(), w.start()}
	r := w.gather(callers, 30).strike(func() {
		w.nats.Stop()
		for _, n := range nodes {
			require.Eventually(t, func() bool { return n.metric("dynworker_nats_healthy", "") == 0 }, patience, 10*time.Millisecond)
		}
		require.NoError(t, w.nats.Start())
	}, func() bool { return nodes[0].metric("dynworker_ready", "")+nodes[1].metric("dynworker_ready", "") == 2 })
	require.Zero(t, r.silent, "no answer ends without a word")
}

// TestCallersThatLeave asks a thousand times and leaves in every phase of the answer; then the worker is as it was before.
func TestCallersThatLeave(t *testing.T) {
	w := newWorld(t)
	n := w.start()
	leave := w.leavers(n)
	rest := func() (goroutines, files float64) {
		require.Eventually(t, func() bool {
			return n.metric("dynamo_component_inflight_requests", "") == 0 && n.metric("dynworker_streams_open", "") == 0 && n.metric("dynamo_engine_request", "") == 0
		}, patience, 10*time.Millisecond)
		return n.metric("go_goroutines", ""), n.metric("process_open_fds", "")
	}
	leave(100, phases[2]) // what is made once and kept
	for _, p := range phases {
		t.Run(strings.ReplaceAll(p.name, " ", "_"), func(t *testing.T) {
			goroutines, files := rest()
			require.GreaterOrEqual(t, leave(1000, p), int64(enough))
			require.Eventually(t, func() bool {
				g, f := rest()
				return g <= goroutines+5 && f <= files+5
			}, patience, 50*time.Millisecond, "before: %v goroutines, %v files", goroutines, files)
		})
	}
	a := &answer{crowd: &crowd{t: t, caller: w.caller()}, want: expected([]int32{7, 7, 7}, 40)}
	require.NoError(t, a.from(t.Context(), w.instances()[0], []int32{7, 7, 7}))
	require.Equal(t, a.want, a.got)
}
