// Package phases follows requests through what is done with them. It measures how long each part takes and finds the requests that are stuck, and where.
//
// In a disaggregated deployment a request that hangs looks the same to its caller whichever worker or link is to blame. What tells them apart is the phase: a slot, the engine's prompt, another engine's KV blocks, or the next token.
package phases

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Phase is what is being done with a request.
type Phase uint8

// The phases, in the order in which a request goes through them. Prefill and Transfer exclude each other.
const (
	// Accept is calling the frontend back and telling it that the request is taken up.
	Accept Phase = iota
	// Queue is waiting for a slot in this worker.
	Queue
	// Prefill is from handing the request to the engine to its first output: the engine's own queue and the prompt.
	Prefill
	// Transfer is the same on a decode worker that has to fetch the KV blocks of a prefill worker first.
	Transfer
	// Decode is from the first output to the end of the answer.
	Decode
	numPhases
)

var names = [numPhases]string{"accept", "queue", "prefill", "transfer", "decode"}

func (p Phase) String() string { return names[p] }

// Names are the names of all phases; the index is the Phase.
func Names() []string { return slices.Clone(names[:]) }

// Observer counts. Its methods are called from the goroutines of requests and must not block.
type Observer interface {
	// Entered is called when a request enters a phase.
	Entered(Phase)
	// Left is called when it leaves the phase, with the time that it spent there.
	Left(Phase, time.Duration)
}

// Slow is a request that made no progress for long: it entered no phase and got no output.
type Slow struct {
	// ID is the frontend's id of the request.
	ID string
	// Phase is where it is, and Silent for how long nothing has happened there.
	Phase  Phase
	Silent time.Duration
	// Age is the time since the request was taken up, Took the part of it that each earlier phase had.
	Age  time.Duration
	Took [numPhases]time.Duration
	// Outputs is how often the request got output.
	Outputs uint64
	// Peer is the worker whose KV blocks the request needs, 0 when it needs none or nobody said whose.
	Peer uint64
	// First means that it was not reported before in this phase.
	First bool
	// Over means that the request, which was reported before, has ended after all; Silent is the longest silence that was reported.
	Over bool
}

// Config makes a Tracker.
type Config struct {
	// After is for how long a request may make no progress before it is reported. It is reported again each time that the silence has doubled, and when it ends. 0 means never.
	After    time.Duration
	Observer Observer
	// Report gets the requests that are due, the most silent first, never none. It is called from one goroutine at a time, except for requests that are over, which the goroutine of the request reports.
	Report func([]Slow)
	// Now is time.Now unless a test has its own.
	Now func() time.Time
}

// Tracker knows all requests of a worker. It is safe for concurrent use.
type Tracker struct {
	cfg  Config
	mu   sync.Mutex
	open map[*Request]struct{}
}

// New makes a Tracker. Watch has to run for requests to be reported.
func New(c Config) *Tracker {
	if c.Now == nil {
		c.Now = time.Now
	}
	return &Tracker{cfg: c, open: make(map[*Request]struct{})}
}

// Request is one request. Its methods are for one goroutine at a time, except Output, which may be called at the same time as any of them.
type Request struct {
	tracker *Tracker
	id      string
	began   time.Time
	// outputs is bumped on the token path, where nothing else is done.
	outputs atomic.Uint64

	mu     sync.Mutex
	phase  Phase
	in     time.Time // since when it is in the phase
	took   [numPhases]time.Duration
	peer   uint64
	ended  bool
	silent time.Time     // since when nothing has happened, as far as look has seen
	seen   uint64        // outputs at the last look
	told   time.Duration // longest silence that was told since then
	stuck  bool          // it was told in this phase
	worst  time.Duration // longest silence that was told, over all phases
}

// Begin takes a request up; it is in Accept then. The caller calls End, whatever happens.
func (t *Tracker) Begin(id string) *Request {
	now := t.cfg.Now()
	r := &Request{tracker: t, id: id, began: now, in: now, silent: now}
	t.cfg.Observer.Entered(Accept)
	t.mu.Lock()
	t.open[r] = struct{}{}
	t.mu.Unlock()
	return r
}

// Enter takes the request to its next phase. Entering the phase that it is in changes nothing.
func (r *Request) Enter(p Phase) { r.enter(p, 0) }

// Fetch takes the request to Transfer; peer is the worker that has its KV blocks, or 0.
func (r *Request) Fetch(peer uint64) { r.enter(Transfer, peer) }

func (r *Request) enter(p Phase, peer uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended || r.phase == p {
		return
	}
	now := r.tracker.cfg.Now()
	r.leave(now)
	r.phase, r.in, r.peer = p, now, peer
	r.silent, r.told, r.stuck = now, 0, false
	r.tracker.cfg.Observer.Entered(p)
}

func (r *Request) leave(now time.Time) {
	spent := max(now.Sub(r.in), 0)
	r.took[r.phase] += spent
	r.tracker.cfg.Observer.Left(r.phase, spent)
}

// Output notes that the request got output.
func (r *Request) Output() { r.outputs.Add(1) }

// End takes the request out. Calling it again does nothing.
func (r *Request) End() {
	t := r.tracker
	t.mu.Lock()
	delete(t.open, r)
	t.mu.Unlock()
	r.mu.Lock()
	if r.ended {
		r.mu.Unlock()
		return
	}
	now := t.cfg.Now()
	r.leave(now)
	r.ended = true
	s := r.slow(now, r.worst)
	s.Over = true
	r.mu.Unlock()
	if s.Silent > 0 {
		t.cfg.Report([]Slow{s})
	}
}

func (r *Request) slow(now time.Time, silent time.Duration) Slow {
	return Slow{ID: r.id, Phase: r.phase, Silent: silent, Age: now.Sub(r.began), Took: r.took, Outputs: r.outputs.Load(), Peer: r.peer}
}

// due looks at a request and says whether it has to be reported now.
func (r *Request) due(now time.Time, after time.Duration) (s Slow, due bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := r.outputs.Load(); n != r.seen {
		r.seen, r.silent, r.told = n, now, 0
	}
	silent := now.Sub(r.silent)
	if r.ended || silent < after || silent < 2*r.told {
		return s, false
	}
	s = r.slow(now, silent)
	s.First = !r.stuck
	r.told, r.worst, r.stuck = silent, max(r.worst, silent), true
	return s, true
}

// look finds the requests that are due.
func (t *Tracker) look() (found []Slow) {
	now := t.cfg.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	for r := range t.open {
		if s, due := r.due(now, t.cfg.After); due {
			found = append(found, s)
		}
	}
	slices.SortFunc(found, func(a, b Slow) int { return cmp.Or(cmp.Compare(b.Silent, a.Silent), cmp.Compare(a.ID, b.ID)) })
	return found
}

// Look reports the requests that are due now. Watch does it again and again.
func (t *Tracker) Look() {
	if found := t.look(); len(found) > 0 {
		t.cfg.Report(found)
	}
}

// Longest and shortest time between two looks.
const (
	longestLook  = 5 * time.Second
	shortestLook = 10 * time.Millisecond
)

// Watch looks for requests that are stuck until ctx ends. A silence is found out an eighth of Config.After too late at most, or five seconds.
func (t *Tracker) Watch(ctx context.Context) {
	if t.cfg.After <= 0 {
		return
	}
	tick := time.NewTicker(min(max(t.cfg.After/8, shortestLook), longestLook))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		t.Look()
	}
}
