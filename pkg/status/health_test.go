package status

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
)

// clock is a hand-driven clock.
type clock struct {
	mu sync.Mutex
	t  time.Time
}

func newClock() *clock { return &clock{t: time.Date(2026, 12, 1, 4, 0, 0, 0, time.UTC)} }

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.t
}

func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.t = c.t.Add(d)
}

// recorder collects transitions as short text.
type recorder struct {
	mu  sync.Mutex
	all []string
}

func (r *recorder) add(t Transition) {
	r.mu.Lock()
	defer r.mu.Unlock()
	word := "ok"
	if !t.OK {
		word = "not ok: " + t.Reason
	}
	r.all = append(r.all, fmt.Sprintf("%s %s after %s", t.Component, word, t.Lasted))
}

func (r *recorder) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := r.all
	r.all = nil
	return all
}

func TestReadyOnlyWhenEverythingIs(t *testing.T) {
	c, rec := newClock(), &recorder{}
	h := NewHealth(Options{Now: c.now, OnTransition: rec.add})
	start := c.now()

	require.False(t, h.Ready(), "nothing is registered yet")
	require.Equal(t, []Reason{{"endpoint", start, "no endpoint registered"}}, h.Snapshot().Reasons)

	etcd, engine := h.Condition("etcd"), h.Condition("engine")
	generate := h.Endpoint("generate")
	require.Equal(t, []Reason{
		{"endpoint/generate", start, "not registered"},
		{"engine", start, "not reported yet"},
		{"etcd", start, "not reported yet"},
	}, h.Snapshot().Reasons)

	c.advance(time.Second)
	etcd.OK()
	engine.OK()
	require.False(t, h.Ready(), "the endpoint is not registered")
	generate.Ready()
	require.True(t, h.Ready())
	require.Empty(t, h.Snapshot().Reasons)
	require.Equal(t, map[string]bool{"generate": true}, h.Snapshot().Endpoints)

	c.advance(2 * time.Second)
	failed := c.now()
	etcd.Fail("lease lost")
	require.False(t, h.Ready())
	c.advance(time.Second)
	etcd.Fail("no answer from 10.0.0.1:2379")
	require.Equal(t, []Reason{{"etcd", failed, "no answer from 10.0.0.1:2379"}}, h.Snapshot().Reasons,
		"the words are the newest, the time is that of the first failure")
	etcd.OK()
	etcd.OK()
	require.True(t, h.Ready())

	require.Empty(t, cmp.Diff([]string{
		"etcd ok after 1s",
		"engine ok after 1s",
		"endpoint/generate ok after 1s",
		"worker ok after 1s",
		"etcd not ok: lease lost after 2s",
		"worker not ok: etcd: lease lost after 2s",
		"etcd ok after 1s",
		"worker ok after 1s",
	}, rec.take()), "one callback a change, none for what did not change")
	require.Equal(t, 4*time.Second, h.Uptime())
}

func TestConditionDeclaredTwiceIsOne(t *testing.T) {
	h := NewHealth(Options{})
	h.Endpoint("generate").Ready()
	h.Condition("nats").OK()
	h.Condition("nats")
	h.Endpoint("generate")
	require.True(t, h.Ready(), "declaring again must not reset what was reported")
}

func TestFirstReportOfFailureIsNews(t *testing.T) {
	c, rec := newClock(), &recorder{}
	h := NewHealth(Options{Now: c.now, OnTransition: rec.add})
	nats := h.Condition("nats")
	c.advance(3 * time.Second)
	nats.Fail("connection refused")
	nats.Fail("connection refused")
	require.Equal(t, []string{"nats not ok: connection refused after 3s"}, rec.take())
}

func TestHoldsKeepUnready(t *testing.T) {
	c, rec := newClock(), &recorder{}
	h := NewHealth(Options{Now: c.now, OnTransition: rec.add})
	h.Endpoint("generate").Ready()
	rec.take()

	release := h.Hold("draining", "stopping on SIGTERM")
	second := h.Hold("draining", "again")
	require.False(t, h.Ready())
	require.Equal(t, []Reason{
		{"draining", c.now(), "stopping on SIGTERM"},
		{"draining", c.now(), "again"},
	}, sortedByReason(h.Snapshot().Reasons))
	require.True(t, h.Snapshot().Endpoints["generate"], "a hold says nothing about the endpoint itself")

	c.advance(time.Second)
	release()
	release()
	require.False(t, h.Ready(), "the other hold is still there")
	second()
	require.True(t, h.Ready())
	require.Equal(t, []string{
		"draining not ok: stopping on SIGTERM after 0s",
		"worker not ok: draining: stopping on SIGTERM after 0s",
		"draining not ok: again after 0s",
		"draining ok after 1s",
		"draining ok after 1s",
		"worker ok after 1s",
	}, rec.take())
}

// sortedByReason orders two holds of one component and time.
func sortedByReason(rs []Reason) []Reason {
	if len(rs) == 2 && rs[0].Reason < rs[1].Reason {
		rs[0], rs[1] = rs[1], rs[0]
	}
	return rs
}

func TestStartReady(t *testing.T) {
	h := NewHealth(Options{StartReady: true})
	require.True(t, h.Ready(), "ready before anything is known")
	engine := h.Condition("engine")
	generate := h.Endpoint("generate")
	require.True(t, h.Ready(), "what was never reported does not object")
	require.True(t, h.Snapshot().Endpoints["generate"])
	engine.Fail("crashed")
	require.False(t, h.Ready(), "what failed objects")
	engine.OK()
	generate.NotReady("withdrawn")
	require.False(t, h.Ready())
	require.False(t, h.Snapshot().Endpoints["generate"])
}

func TestProgress(t *testing.T) {
	c := newClock()
	h := NewHealth(Options{Now: c.now})
	require.Nil(t, h.Snapshot().Progress)
	f := 0.25
	began := c.now()
	h.SetProgress("engine", "loading weights", &f)
	c.advance(time.Minute)
	f = 7 // out of range, and the caller's variable is not kept
	h.SetProgress("engine", "warming up", &f)
	p := h.Snapshot().Progress
	require.Equal(t, "warming up", p.Detail)
	require.Equal(t, 1.0, *p.Fraction)
	require.Equal(t, began, p.Since, "same phase, same beginning")
	h.SetProgress("register", "", nil)
	require.Equal(t, c.now(), h.Snapshot().Progress.Since)
	require.Nil(t, h.Snapshot().Progress.Fraction)
	h.ClearProgress()
	require.Nil(t, h.Snapshot().Progress)
}

// A callback may report itself, and its reports are delivered after it.
func TestCallbackMayReport(t *testing.T) {
	var h *Health
	var engine *Condition
	rec := &recorder{}
	h = NewHealth(Options{OnTransition: func(tr Transition) {
		rec.add(Transition{Component: tr.Component, OK: tr.OK})
		if tr.Component == "etcd" && tr.OK {
			engine.OK()
		}
	}})
	engine = h.Condition("engine")
	etcd := h.Condition("etcd")
	h.Endpoint("generate").Ready()
	etcd.OK()
	require.True(t, h.Ready())
	require.Equal(t, []string{"endpoint/generate ok after 0s", "etcd ok after 0s", "engine ok after 0s", "worker ok after 0s"}, rec.take())
}

// Many reporters at once: no report is lost, callbacks never overlap, and the
// last callback about the worker agrees with the final state.
func TestConcurrentReports(t *testing.T) {
	var overlap sync.Mutex
	last := make(map[string]bool)
	h := NewHealth(Options{OnTransition: func(tr Transition) {
		require.True(t, overlap.TryLock(), "two callbacks at once")
		defer overlap.Unlock()
		last[tr.Component] = tr.OK
	}})
	h.Endpoint("generate").Ready()
	var wg sync.WaitGroup
	for i := range 8 {
		c := h.Condition(fmt.Sprint("part", i))
		wg.Go(func() {
			for range 200 {
				c.Fail("down")
				_ = h.Snapshot()
				release := h.Hold("hold", "held")
				c.OK()
				release()
			}
		})
	}
	wg.Wait()
	require.True(t, h.Ready())
	require.True(t, last[ComponentWorker])
	require.True(t, last["part3"])
}
