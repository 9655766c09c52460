package status

import (
	"sort"
	"sync"
	"sync/atomic"
	"time"
)

// Reasons that the health model itself gives.
const (
	reasonStarting      = "not reported yet"
	reasonNotRegistered = "not registered"
	reasonNoEndpoint    = "no endpoint registered"
)

// Component names used in transitions and reasons besides those of conditions.
const (
	// ComponentWorker names the worker as a whole in a [Transition].
	ComponentWorker = "worker"
	// ComponentEndpoint is the component of the reason "no endpoint
	// registered", and with "/NAME" behind it that of an endpoint.
	ComponentEndpoint = "endpoint"
)

// Transition is one change of state, of a condition, an endpoint, a hold or
// (component "worker") of readiness as a whole.
type Transition struct {
	Component string
	OK        bool
	Reason    string        // why not ok; empty when OK
	At        time.Time     // when it changed
	Lasted    time.Duration // how long the state before it had lasted
}

// Options are what a [Health] is made of.
type Options struct {
	// Now replaces the clock in tests; nil means time.Now.
	Now func() time.Time
	// StartReady makes the worker count as ready while it starts, that is:
	// conditions that were never reported and endpoints that were never
	// registered do not object (DYN_SYSTEM_STARTING_HEALTH_STATUS=ready).
	// What was reported as failed objects all the same.
	StartReady bool
	// OnTransition is called for every change, in order, one at a time, by
	// whichever goroutine reports. It may call back into the Health. A
	// callback that blocks delays later callbacks but no report and no probe.
	OnTransition func(Transition)
}

// Health collects what the parts of the worker report and derives readiness:
// ready means that every condition is ok, nothing holds, and at least one
// endpoint exists and all of them are ready.
type Health struct {
	now        func() time.Time
	start      time.Time
	startReady bool
	notify     func(Transition)

	ready atomic.Bool // mirror of readyState for callers that must not wait

	mu         sync.Mutex
	conditions map[string]*state
	endpoints  map[string]*state
	holds      map[*hold]struct{}
	progress   *Progress
	readyState state
	pending    []Transition
	delivering bool
}

// state is one named thing that is ok or not.
type state struct {
	ok       bool
	reported bool // false until the first report: "pending"
	reason   string
	since    time.Time
}

type hold struct {
	component, reason string
	since             time.Time
}

// Progress says how far the start has come.
type Progress struct {
	Phase    string    `json:"phase"`
	Detail   string    `json:"detail,omitempty"`
	Fraction *float64  `json:"fraction,omitempty"` // 0 to 1 where the phase knows it
	Since    time.Time `json:"since"`              // when the phase began
}

// Reason is one objection to readiness.
type Reason struct {
	Component string    `json:"component"`
	Since     time.Time `json:"since"`
	Reason    string    `json:"reason"`
}

// Snapshot is the state at one moment.
type Snapshot struct {
	Ready     bool
	Uptime    time.Duration
	Endpoints map[string]bool // name to ready
	Reasons   []Reason        // sorted by component; empty when ready
	Progress  *Progress       // nil when the start is over
}

// NewHealth returns a Health without conditions and endpoints; its uptime
// starts now.
func NewHealth(o Options) *Health {
	now := o.Now
	if now == nil {
		now = time.Now
	}
	start := now()
	h := &Health{
		now:        now,
		start:      start,
		startReady: o.StartReady,
		notify:     o.OnTransition,
		conditions: make(map[string]*state),
		endpoints:  make(map[string]*state),
		holds:      make(map[*hold]struct{}),
	}
	h.readyState = state{ok: o.StartReady, since: start, reason: reasonNoEndpoint}
	h.ready.Store(o.StartReady)
	return h
}

// Uptime is the time since NewHealth. It takes no lock.
func (h *Health) Uptime() time.Duration {
	return max(h.now().Sub(h.start), 0)
}

// Ready reports whether requests can be served. It takes no lock.
func (h *Health) Ready() bool { return h.ready.Load() }

// Condition returns the handle of the named condition and declares it if it is
// new. A declared condition objects to readiness until it is reported ok, so
// declare the conditions of a worker before its first one becomes ok.
func (h *Health) Condition(name string) *Condition {
	h.declare(h.conditions, name, reasonStarting)
	return &Condition{h: h, name: name}
}

// Endpoint returns the handle of the named endpoint and declares it, not
// ready, if it is new.
func (h *Health) Endpoint(name string) *Endpoint {
	h.declare(h.endpoints, name, reasonNotRegistered)
	return &Endpoint{h: h, name: name}
}

func (h *Health) declare(in map[string]*state, name, reason string) {
	h.update(func(now time.Time) {
		if in[name] == nil {
			in[name] = &state{reason: reason, since: now}
		}
	})
}

// Condition is a named part of the worker that is well or not: "etcd", "nats",
// "engine".
type Condition struct {
	h    *Health
	name string
}

// OK reports that the part is well.
func (c *Condition) OK() { c.h.report(c.h.conditions, c.name, c.name, true, "") }

// Fail reports that the part is not well, in words for the operator. Failing
// again keeps the time of the first failure and takes over the new words.
func (c *Condition) Fail(reason string) {
	c.h.report(c.h.conditions, c.name, c.name, false, reason)
}

// Endpoint is an endpoint that the worker serves.
type Endpoint struct {
	h    *Health
	name string
}

// Ready reports that the endpoint is registered and serves.
func (e *Endpoint) Ready() {
	e.h.report(e.h.endpoints, e.name, ComponentEndpoint+"/"+e.name, true, "")
}

// NotReady reports that the endpoint cannot serve, or is no longer registered.
func (e *Endpoint) NotReady(reason string) {
	e.h.report(e.h.endpoints, e.name, ComponentEndpoint+"/"+e.name, false, reason)
}

// Hold keeps the worker from being ready until the returned function is
// called, whatever everything else says; that function may be called twice.
// Draining is a hold that is never released.
func (h *Health) Hold(component, reason string) (release func()) {
	held := &hold{component: component, reason: reason}
	h.update(func(now time.Time) {
		held.since = now
		h.holds[held] = struct{}{}
		h.queue(Transition{Component: component, Reason: reason, At: now})
	})
	return func() {
		h.update(func(now time.Time) {
			if _, ok := h.holds[held]; !ok {
				return
			}
			delete(h.holds, held)
			h.queue(Transition{Component: component, OK: true, At: now, Lasted: now.Sub(held.since)})
		})
	}
}

// SetProgress says in /health how far the start has come; fraction may be nil.
// The time of a phase is that of its first report.
func (h *Health) SetProgress(phase, detail string, fraction *float64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	since := h.now()
	if h.progress != nil && h.progress.Phase == phase {
		since = h.progress.Since
	}
	h.progress = &Progress{Phase: phase, Detail: detail, Since: since}
	if fraction != nil {
		f := min(max(*fraction, 0), 1)
		h.progress.Fraction = &f
	}
}

// ClearProgress ends the start-up part of /health.
func (h *Health) ClearProgress() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.progress = nil
}

// Snapshot returns the state at this moment.
func (h *Health) Snapshot() Snapshot {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := Snapshot{
		Ready:     h.readyState.ok,
		Uptime:    h.Uptime(),
		Endpoints: make(map[string]bool, len(h.endpoints)),
	}
	for name, e := range h.endpoints {
		s.Endpoints[name] = e.ok || h.startReady && !e.reported
	}
	if !s.Ready {
		s.Reasons = h.reasons()
	}
	if h.progress != nil {
		p := *h.progress
		s.Progress = &p
	}
	return s
}

func (h *Health) report(in map[string]*state, name, component string, ok bool, reason string) {
	h.update(func(now time.Time) {
		s := in[name]
		first := !s.reported
		s.reported = true
		if s.ok == ok {
			// A first report of "not ok" is news all the same: until then the
			// part had only not been heard of.
			if s.reason = reason; !first || ok {
				return
			}
		}
		h.queue(Transition{Component: component, OK: ok, Reason: reason, At: now, Lasted: now.Sub(s.since)})
		s.ok, s.reason, s.since = ok, reason, now
	})
}

// update runs f under the lock, derives readiness anew and delivers what
// changed.
func (h *Health) update(f func(now time.Time)) {
	h.mu.Lock()
	now := h.now()
	f(now)
	reasons := h.reasons()
	if ok := len(reasons) == 0; ok != h.readyState.ok {
		t := Transition{Component: ComponentWorker, OK: ok, At: now, Lasted: now.Sub(h.readyState.since)}
		if !ok {
			t.Reason = reasons[0].Component + ": " + reasons[0].Reason
		}
		h.readyState = state{ok: ok, reason: t.Reason, since: now}
		h.ready.Store(ok)
		h.queue(t)
	}
	h.deliver()
}

// queue appends a transition; the lock is held.
func (h *Health) queue(t Transition) {
	if h.notify != nil {
		h.pending = append(h.pending, t)
	}
}

// deliver calls back outside the lock, which it releases. One goroutine
// delivers at a time, so the order of callbacks is that of the changes; others
// leave their transitions to it, so that no reporter waits for a callback.
func (h *Health) deliver() {
	if h.delivering {
		h.mu.Unlock()
		return
	}
	h.delivering = true
	for len(h.pending) > 0 {
		t := h.pending[0]
		h.pending = h.pending[1:]
		h.mu.Unlock()
		h.notify(t)
		h.mu.Lock()
	}
	h.pending = nil
	h.delivering = false
	h.mu.Unlock()
}

// reasons lists all objections; the lock is held.
func (h *Health) reasons() []Reason {
	var rs []Reason
	for name, c := range h.conditions {
		if !c.ok && (c.reported || !h.startReady) {
			rs = append(rs, Reason{Component: name, Since: c.since, Reason: c.reason})
		}
	}
	for name, e := range h.endpoints {
		if !e.ok && (e.reported || !h.startReady) {
			rs = append(rs, Reason{Component: ComponentEndpoint + "/" + name, Since: e.since, Reason: e.reason})
		}
	}
	if len(h.endpoints) == 0 && !h.startReady {
		rs = append(rs, Reason{Component: ComponentEndpoint, Since: h.start, Reason: reasonNoEndpoint})
	}
	for held := range h.holds {
		rs = append(rs, Reason{Component: held.component, Since: held.since, Reason: held.reason})
	}
	sort.Slice(rs, func(i, j int) bool {
		if rs[i].Component != rs[j].Component {
			return rs[i].Component < rs[j].Component
		}
		return rs[i].Since.Before(rs[j].Since)
	})
	return rs
}
