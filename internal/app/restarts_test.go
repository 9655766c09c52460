package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"dynworker/pkg/engine"
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/engine/vitals"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
)

func TestRestartBudget(t *testing.T) {
	b := restartBudget{max: 4, window: 40 * time.Minute, backoff: time.Second, cap: 5 * time.Second, jitter: func() float64 { return 0 }}
	pauses := func() (all []time.Duration) {
		for {
			pause, ok := b.next()
			if !ok {
				return all
			}
			all = append(all, pause)
		}
	}
	require.Equal(t, []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 5 * time.Second}, pauses())
	b.served(9 * time.Minute)
	require.Empty(t, pauses(), "not yet earned")
	b.served(time.Minute)
	require.Equal(t, []time.Duration{5 * time.Second}, pauses())
	b.served(20 * time.Minute)
	require.Equal(t, []time.Duration{4 * time.Second, 5 * time.Second}, pauses())
	b.served(1000 * time.Hour)
	b.jitter = func() float64 { return 0.999999 }
	pause, ok := b.next()
	require.True(t, ok, "no more than max is earned")
	require.Zero(t, b.spent-1)
	require.InDelta(t, float64(time.Second)/2, float64(pause), float64(time.Millisecond))
}

// actor plays an engine, and the rest of the worker, for the owner of the engine's lives. Its methods run on the goroutine of the owner or of the test, never at the same time: the test waits for the owner to come to rest.
type actor struct {
	t *testing.T
	// starts are what comes of each start: nil for an engine, or an error.
	starts    []error
	approvals []error
	enters    func(ctx context.Context) error
	story     []string
	began     time.Time
	lives     []*role
}

// role is one life of an engine that only dies when it is told to.
type role struct {
	engineProcess
	dead  chan struct{}
	cause error
	stops int
}

func (r *role) die(cause error) {
	r.cause = cause
	close(r.dead)
}
func (r *role) Open(context.Context, *ipc.Generate, []int32) (engineStream, error) {
	return nil, engine.ErrEngineDead
}
func (r *role) Query(context.Context, string) (json.RawMessage, error) {
	return json.RawMessage(`{"healthy":true}`), nil
}
func (r *role) Dead() <-chan struct{} { return r.dead }
func (r *role) Cause() error          { return r.cause }
func (r *role) Exit() *engine.Exit    { return nil }
func (r *role) Stop(context.Context) error {
	r.stops++
	return nil
}

func (a *actor) note(format string, args ...any) {
	a.story = append(a.story, fmt.Sprintf("%v ", time.Since(a.began))+fmt.Sprintf(format, args...))
}

func pop(list *[]error) error {
	if len(*list) == 0 {
		return nil
	}
	err := (*list)[0]
	*list = (*list)[1:]
	return err
}

func (a *actor) start(context.Context) (engineProcess, error) {
	a.note("start")
	if err := pop(&a.starts); err != nil {
		return nil, err
	}
	r := &role{dead: make(chan struct{})}
	a.lives = append(a.lives, r)
	return r, nil
}
func (a *actor) leave(f *vitals.Failure) { a.note("leave: %v", f) }
func (a *actor) down(reason string)      { a.note("down: %s", reason) }
func (a *actor) approve(context.Context, engineProcess) error {
	a.note("approve")
	return pop(&a.approvals)
}
func (a *actor) enter(ctx context.Context) error {
	a.note("enter")
	if a.enters == nil {
		return nil
	}
	return a.enters(ctx)
}
func (a *actor) EngineFailed(detector string)    { a.note("failed: %s", detector) }
func (a *actor) EngineGone()                     {}
func (a *actor) EngineServing()                  {}
func (a *actor) EngineRestarted(detector string) { a.note("restarted after %s", detector) }
func (a *actor) StreamStalled()                  {}
func (a *actor) RequestSuspected()               {}

// play begins a first life and looks after it.
func play(t *testing.T, a *actor, restart bool) (l *lives, over chan error) {
	a.t, a.began = t, time.Now()
	l = &lives{
		start: a.start, service: a, counter: a, log: zerolog.Nop(), restart: restart, suspects: newSuspects(2), questions: vitals.Questions{Interval: 2 * time.Second},
		budget: restartBudget{max: 3, window: time.Hour, backoff: time.Second, cap: time.Minute, jitter: func() float64 { return 0 }},
	}
	_, err := l.begin(t.Context())
	require.NoError(t, err)
	over = make(chan error, 1)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	go func() { over <- l.supervise(ctx) }()
	synctest.Wait()
	a.story = nil
	return l, over
}

// pass lets time go by and everybody come to rest.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

var errCrash = &engine.ExitError{Code: 139}

func TestTheOrderOfARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &actor{starts: []error{nil, &engine.StartError{Err: &engine.TimeoutError{Waiting: "ready", Bound: time.Minute}}}, approvals: []error{vitals.Failed(vitals.Canary, errors.New("no answer"))}}
		l, over := play(t, a, true)
		pass(time.Hour)
		a.lives[0].die(errCrash)
		pass(time.Minute)
		const h = "1h0m"
		crash := "exit: engine process exited with status 139"
		require.Equal(t, []string{
			h + "0s failed: exit", h + "0s leave: " + crash, h + "0s down: " + crash + "; started again in 1s",
			h + "1s start", h + "1s failed: load", h + "1s down: load: start engine: engine: no ready within 1m0s; started again in 2s",
			h + "3s start", h + "3s approve", h + "3s failed: canary", h + "3s down: canary: no answer; started again in 4s",
			h + "7s start", h + "7s approve", h + "7s enter", h + "7s restarted after exit",
		}, a.story)
		require.Equal(t, []int{1, 1, 0}, []int{a.lives[0].stops, a.lives[1].stops, a.lives[2].stops}, "every life but the present one is ended")
		require.True(t, l.settle())
		a.lives[2].die(errCrash)
		require.ErrorIs(t, <-over, ErrEngineDied, "nothing is started while the worker ends")
		require.False(t, l.settle())
	})
}

func TestWhenThereIsNoRestart(t *testing.T) {
	for name, c := range map[string]struct {
		actor   actor
		restart bool
		want    string
		starts  int
	}{
		"never":           {actor{}, false, "the engine died: exit: ", 1},
		"another engine":  {actor{approvals: []error{fmt.Errorf("%w: its vocabulary was 5 and is 6", errMismatch)}}, true, "its vocabulary was 5 and is 6", 2},
		"budget used up":  {actor{starts: []error{nil, errCrash, errCrash, errCrash, errCrash}}, true, "started again 3 times", 4},
		"no registration": {actor{enters: func(context.Context) error { return errors.New("permission denied") }}, true, "permission denied", 2},
	} {
		synctest.Test(t, func(t *testing.T) {
			a := c.actor
			starts := 1
			l, over := play(t, &a, c.restart)
			a.lives[0].die(errCrash)
			err := <-over
			require.ErrorContains(t, err, c.want, name)
			for _, line := range a.story {
				if line[len(line)-len(" start"):] == " start" {
					starts++
				}
			}
			require.Equal(t, c.starts, starts, name)
			l.settle()
		})
	}
}

// An engine that fails while its worker cannot register yet is brought back like any other.
func TestAFailureBeforeTheWorkerIsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		entered := 0
		a := &actor{enters: func(ctx context.Context) error {
			if entered++; entered == 1 {
				<-ctx.Done() // etcd is away
				return ctx.Err()
			}
			return nil
		}}
		l, _ := play(t, a, true)
		a.lives[0].die(errCrash)
		pass(time.Minute)
		a.lives[1].die(&engine.ProtocolError{Reason: "nonsense"})
		pass(time.Minute)
		require.Equal(t, "1m2s restarted after protocol", a.story[len(a.story)-1])
		require.True(t, l.settle())
	})
}

func TestSettleEndsABackOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &actor{}
		l, over := play(t, a, true)
		l.budget.backoff, l.budget.cap = time.Hour, time.Hour
		a.lives[0].die(ipc.Fatal{Message: "CUDA"})
		pass(time.Minute)
		require.False(t, l.settle())
		require.ErrorIs(t, <-over, ErrEngineDied)
		synctest.Wait()
		require.Equal(t, time.Minute, time.Since(a.began))
		require.Equal(t, "0s failed: fatal", a.story[0])
	})
}

func TestDetectorOf(t *testing.T) {
	for want, err := range map[vitals.Detector]error{
		vitals.Exit:     fmt.Errorf("%w: %w", engine.ErrEngineDead, engine.ErrChannelClosed),
		vitals.Fatal:    ipc.Fatal{Message: "x"},
		vitals.Protocol: &engine.StartError{Err: &engine.VersionError{}},
		vitals.Load:     &engine.StartError{Err: &engine.TimeoutError{}},
		vitals.Stall:    &vitals.Failure{Detector: vitals.Stall},
	} {
		require.Equal(t, want, detectorOf(err))
	}
}

func TestSameEngine(t *testing.T) {
	before := &ipc.Ready{Engine: "sim", AttentionDPSize: 1, Bounds: ipc.Bounds{VocabSize: 10}, KV: ipc.KV{TotalBlocks: 100, BlockSize: 32}}
	now := *before
	now.KV.TotalBlocks = 99
	require.NoError(t, sameEngine(before, &now))
	now.Bounds.VocabSize = 11
	require.EqualError(t, sameEngine(before, &now), "its vocabulary was 10 and is 11")
	now = *before
	now.AttentionDPSize = 2
	require.EqualError(t, sameEngine(before, &now), "its attention_dp_size was 1 and is 2")
	now = *before
	now.Capabilities.CacheSalt = true
	require.ErrorContains(t, sameEngine(before, &now), "capabilities")
}

func TestSuspectsAreBounded(t *testing.T) {
	s := newSuspects(2)
	require.NoError(t, s.saw("a"))
	for i := range maxSuspects {
		require.NoError(t, s.saw(fmt.Sprint(i)))
	}
	require.NoError(t, s.saw("a"), "forgotten")
	require.Len(t, s.seen, maxSuspects)
	require.Error(t, s.saw("a"))
	require.Error(t, s.refusal("a"))
	s.clear("a")
	require.NoError(t, s.refusal("a"), "an engine has survived it")
	require.NoError(t, newSuspects(0).saw("a"))
	for range 5 {
		require.NoError(t, s.saw(canaryID))
	}
}

func TestFromPeer(t *testing.T) {
	require.True(t, fromPeer(&ipc.Generate{Disaggregated: json.RawMessage(`{"request_type":"generation_only"}`)}))
	for _, none := range []string{`{"request_type":"context_and_generation"}`, `{"request_type":"context_only"}`, `null`, `[]`} {
		require.False(t, fromPeer(&ipc.Generate{Disaggregated: json.RawMessage(none)}), none)
	}
	require.False(t, fromPeer(&ipc.Generate{}))
}
