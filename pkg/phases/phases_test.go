package phases

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// account is an Observer that remembers.
type account struct {
	mu   sync.Mutex
	in   [numPhases]int
	took [numPhases][]time.Duration
}

func (a *account) Entered(p Phase) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.in[p]++
}

func (a *account) Left(p Phase, d time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.in[p]--
	a.took[p] = append(a.took[p], d)
}

// watched runs f beside a Tracker that watches, in a time of its own, and gives what was reported.
func watched(t *testing.T, after time.Duration, f func(*Tracker, *account)) (reports [][]Slow) {
	synctest.Test(t, func(t *testing.T) {
		a := &account{}
		var mu sync.Mutex
		tracker := New(Config{After: after, Observer: a, Report: func(s []Slow) {
			mu.Lock()
			defer mu.Unlock()
			reports = append(reports, s)
		}})
		ctx, cancel := context.WithCancel(t.Context())
		var watcher sync.WaitGroup
		watcher.Go(func() { tracker.Watch(ctx) })
		f(tracker, a)
		cancel()
		watcher.Wait()
		require.Equal(t, [numPhases]int{}, a.in, "nothing is left in a phase")
		require.Empty(t, tracker.open)
	})
	return reports
}

func TestEachPhaseIsMeasured(t *testing.T) {
	reports := watched(t, time.Hour, func(tracker *Tracker, a *account) {
		r := tracker.Begin("a")
		for i, p := range []Phase{Queue, Prefill, Prefill, Decode} {
			time.Sleep(time.Duration(i+1) * time.Second)
			r.Enter(p)
		}
		time.Sleep(time.Minute)
		r.End()
		r.End()
		r.Enter(Queue)
		require.Equal(t, [numPhases][]time.Duration{Accept: {time.Second}, Queue: {2 * time.Second}, Prefill: {7 * time.Second}, Decode: {time.Minute}}, a.took)
	})
	require.Empty(t, reports)
}

// Each phase in turn is the one in which a request hangs.
func TestTheLineSaysWhereARequestIsStuck(t *testing.T) {
	for stuck := Accept; stuck < numPhases; stuck++ {
		reports := watched(t, 8*time.Second, func(tracker *Tracker, _ *account) {
			r := tracker.Begin("stuck")
			for p := Accept; p <= stuck; p++ {
				switch {
				case p == Prefill && stuck == Transfer: // it is one or the other
					continue
				case p == Transfer:
					r.Fetch(7)
				default:
					r.Enter(p)
				}
				if p < stuck {
					time.Sleep(time.Second)
				}
			}
			time.Sleep(9 * time.Second)
			r.End()
		})
		require.Len(t, reports, 2, "%s", stuck)
		found := reports[0][0]
		require.Equal(t, stuck, found.Phase)
		require.Equal(t, "stuck", found.ID)
		require.GreaterOrEqual(t, found.Silent, 8*time.Second)
		require.LessOrEqual(t, found.Silent, 9*time.Second)
		before := time.Duration(0)
		for p := range stuck {
			if p != Prefill || stuck != Transfer {
				before += time.Second
				require.Equal(t, time.Second, found.Took[p], "%s before %s", p, stuck)
			}
		}
		require.Equal(t, before+found.Silent, found.Age)
		require.Zero(t, found.Took[stuck])
		require.Equal(t, stuck == Transfer, found.Peer == 7)
		require.False(t, found.Over)
		require.True(t, reports[1][0].Over)
		require.Equal(t, found.Silent, reports[1][0].Silent)
	}
}

func TestProgressIsNotSlow(t *testing.T) {
	reports := watched(t, 8*time.Second, func(tracker *Tracker, _ *account) {
		r := tracker.Begin("long")
		r.Enter(Decode)
		for range 100 {
			time.Sleep(6 * time.Second)
			r.Output()
		}
		r.End()
	})
	require.Empty(t, reports)
}

// A request that hangs for long is not reported at each look.
func TestReportsBecomeRare(t *testing.T) {
	var n int
	reports := watched(t, 8*time.Second, func(tracker *Tracker, _ *account) {
		r := tracker.Begin("a")
		r.Enter(Prefill)
		time.Sleep(1000 * time.Second)
		r.Output()
		r.Enter(Decode)
		time.Sleep(20 * time.Second)
		r.End()
	})
	for _, s := range reports {
		if s[0].Phase == Prefill {
			n++
		}
	}
	require.Equal(t, 7, n, "8 to 512 s")
	for i, s := range reports {
		require.Equal(t, i == 0 || i == n, s[0].First)
	}
	require.Len(t, reports, n+2+1, "in the next phase it begins anew, and at the end it is told that it has ended")
	require.GreaterOrEqual(t, reports[n+2][0].Silent, 512*time.Second)
}

func TestTheMostSilentComesFirst(t *testing.T) {
	now := time.Unix(0, 0)
	tracker := New(Config{After: time.Minute, Observer: &account{}, Now: func() time.Time { return now }})
	for i := range 5 {
		tracker.Begin(fmt.Sprint(i))
		now = now.Add(time.Second)
	}
	now = now.Add(time.Minute)
	found := tracker.look()
	require.Len(t, found, 5)
	for i, s := range found {
		require.Equal(t, fmt.Sprint(i), s.ID)
	}
	require.Empty(t, tracker.look())
}

func TestNothingIsSlowWithoutAThreshold(t *testing.T) {
	reports := watched(t, 0, func(tracker *Tracker, _ *account) {
		r := tracker.Begin("a")
		time.Sleep(time.Hour)
		r.End()
	})
	require.Empty(t, reports)
}

// Requests come, go and get output while they are looked at.
func TestConcurrentUse(t *testing.T) {
	var reported sync.Map
	tracker := New(Config{After: time.Nanosecond, Observer: &account{}, Report: func(all []Slow) {
		for _, s := range all {
			reported.Store(s.ID, true)
		}
	}})
	var work sync.WaitGroup
	for i := range 8 {
		work.Go(func() {
			for range 200 {
				r := tracker.Begin(fmt.Sprint(i))
				r.Enter(Queue)
				r.Fetch(1)
				r.Output()
				tracker.look()
				r.Enter(Decode)
				r.End()
			}
		})
	}
	work.Wait()
	require.Empty(t, tracker.open)
}

func TestOutputCostsNothing(t *testing.T) {
	r := New(Config{Observer: &account{}}).Begin("a")
	defer r.End()
	require.Zero(t, testing.AllocsPerRun(100, r.Output))
}
