package vitals

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// Limits are how long an engine may be silent. A duration of 0 turns its check off.
type Limits struct {
	// NoProgress is how long requests may be in flight without output for any of them.
	NoProgress time.Duration
	// Inactivity is how long one request may be without output, whatever others get.
	Inactivity time.Duration
	// PerPromptToken is added to both for each token of a prompt that has got no output yet: a long prefill is silent by nature. For NoProgress the longest such prompt counts.
	PerPromptToken time.Duration
}

// Flights are the requests that an engine works on. Only requests whose reader waits for the engine count: one that is busy writing to a slow client proves nothing about the engine.
type Flights struct {
	limits Limits

	mu   sync.Mutex
	open map[*Flight]struct{}
	// ended counts flights that the engine brought to their end since the last look.
	ended int
	// silent is for how long there has been no progress.
	silent time.Duration
}

// NewFlights makes an empty set.
func NewFlights(l Limits) *Flights {
	return &Flights{limits: l, open: make(map[*Flight]struct{})}
}

// Flight is one request. Wait, Got and Rest belong to the goroutine that reads its output and cost one atomic store each.
type Flight struct {
	flights *Flights
	request Request
	giveUp  func(error)
	// state is the number of outputs, and in the lowest bit whether the reader waits.
	state atomic.Uint64

	// Of the looker, under the lock of flights.
	seen   uint64
	silent time.Duration
}

const waiting = 1

// Request is what the detectors need to know of a request.
type Request struct {
	// Prompt is its length in tokens.
	Prompt int
	// FromPeer says that another engine has to hand over the request's KV cache before this one can begin. Until its first output, its silence proves nothing about this engine.
	FromPeer bool
}

// Begin notes a request. giveUp is called at most once, when the request has been silent for too long or by Drop; it must not block.
func (f *Flights) Begin(r Request, giveUp func(error)) *Flight {
	fl := &Flight{flights: f, request: r, giveUp: giveUp}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.open[fl] = struct{}{}
	return fl
}

// Wait says that the reader waits for output from now on.
func (fl *Flight) Wait() { fl.state.Store(fl.state.Load() | waiting) }

// Got says that the reader has got output.
func (fl *Flight) Got() { fl.state.Store(fl.state.Load()&^waiting + 2) }

// Passed says that output has gone by the reader while it waits, and it still does. It must not be called at the same time as the others.
func (fl *Flight) Passed() { fl.state.Store(fl.state.Load() + 2) }

// Rest says that the reader waits no more, and has got nothing.
func (fl *Flight) Rest() { fl.state.Store(fl.state.Load() &^ waiting) }

// End takes the request out. finished says that the engine ended it, as opposed to its reader having left.
func (fl *Flight) End(finished bool) {
	f := fl.flights
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, open := f.open[fl]; !open {
		return
	}
	delete(f.open, fl)
	if finished {
		f.ended++
	}
}

// Len is the number of requests in flight.
func (f *Flights) Len() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.open)
}

// Drop gives all requests up, as when their engine has failed.
func (f *Flights) Drop(why error) {
	f.mu.Lock()
	open := f.open
	f.open = make(map[*Flight]struct{})
	f.mu.Unlock()
	for fl := range open {
		fl.giveUp(why)
	}
}

// StallError ends a request whose output stopped while its engine went on.
type StallError struct {
	// Silent is for how long.
	Silent time.Duration
}

func (e *StallError) Error() string {
	return fmt.Sprintf("the engine gave nothing for this request for %v", e.Silent)
}

// Look counts elapsed as time without progress where there was none, and gives its finding: a *Failure of Stall when the engine as a whole is silent for too long. Requests that are silent by themselves are given up.
func (f *Flights) Look(elapsed time.Duration) *Failure {
	stalled, silent := f.look(elapsed)
	for _, fl := range silent {
		fl.giveUp(&StallError{Silent: fl.silent})
	}
	return stalled
}

func (f *Flights) look(elapsed time.Duration) (stalled *Failure, silent []*Flight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	progress, anyWaits, longest := f.ended > 0, 0, 0
	f.ended = 0
	for fl := range f.open {
		state := fl.state.Load()
		switch {
		case state>>1 != fl.seen:
			fl.seen, fl.silent, progress = state>>1, 0, true
			continue
		case state&waiting == 0:
			fl.silent = 0
			continue
		}
		fl.silent += elapsed
		allowed := f.limits.Inactivity
		if fl.seen > 0 || !fl.request.FromPeer {
			anyWaits++
		}
		if fl.seen == 0 {
			longest = max(longest, fl.request.Prompt)
			allowed += f.allowance(fl.request.Prompt)
		}
		if f.limits.Inactivity > 0 && fl.silent >= allowed {
			delete(f.open, fl)
			silent = append(silent, fl)
		}
	}
	if progress || anyWaits == 0 {
		f.silent = 0
		return nil, silent
	}
	f.silent += elapsed
	if limit := f.limits.NoProgress + f.allowance(longest); f.limits.NoProgress > 0 && f.silent >= limit {
		return &Failure{Detector: Stall, Reason: fmt.Sprintf("no output for any of %d requests for %v", anyWaits, f.silent.Round(time.Millisecond))}, silent
	}
	return nil, silent
}

func (f *Flights) allowance(prompt int) time.Duration {
	return time.Duration(prompt) * f.limits.PerPromptToken
}
