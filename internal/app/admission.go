package app

import (
	"context"
	"sync"
)

// admission counts the requests that a worker holds, refuses those for which there is no room, and tells when the last one is gone. A request that is admitted beyond the limit of running ones waits for a slot; it has its call-home
// and its prologue by then, so that a frontend does not take it away when the worker withdraws.
type admission struct {
	// running is a semaphore of the slots, nil without a limit.
	running chan struct{}

	mu       sync.Mutex
	held     int
	capacity int // 0 without a limit
	// tokens are the prompt tokens of all held requests, maxTokens their limit, 0 without one.
	tokens, maxTokens int
	stopped           bool
	// idle is closed and replaced whenever held falls to zero.
	idle chan struct{}
	// arrivals counts admitted requests, so that a drain can see that it has become quiet.
	arrivals uint64
}

// newAdmission makes room for limit running requests and queue waiting ones, and for maxTokens prompt tokens in all of them; a limit of 0 means none.
func newAdmission(limit, queue, maxTokens int) *admission {
	a := &admission{idle: make(chan struct{}), maxTokens: maxTokens}
	if limit > 0 {
		a.running = make(chan struct{}, limit)
		a.capacity = limit + queue
	}
	return a
}

// verdict is the outcome of an attempt to admit.
type verdict uint8

const (
	admitted verdict = iota
	full
	tooLong
	closed
)

// limitsTokens says whether enter wants to know the length of prompts.
func (a *admission) limitsTokens() bool { return a.maxTokens > 0 }

// enter admits one more request with that many prompt tokens if it can. It never blocks. A prompt that is longer than the limit by itself is taken when nothing else is held: refused everywhere, it could never be answered.
func (a *admission) enter(tokens int) verdict {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.stopped:
		return closed
	case a.capacity > 0 && a.held >= a.capacity:
		return full
	case a.maxTokens > 0 && a.held > 0 && tokens > a.maxTokens-a.tokens:
		return tooLong
	}
	a.held++
	a.tokens += tokens
	a.arrivals++
	return admitted
}

// leave gives back what enter took for a request with that many prompt tokens.
func (a *admission) leave(tokens int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.held--
	a.tokens -= tokens
	if a.held == 0 {
		close(a.idle)
		a.idle = make(chan struct{})
	}
}

// slot waits for one of the running slots and returns the function that gives it back.
func (a *admission) slot(ctx context.Context) (release func(), err error) {
	if a.running == nil {
		return func() {}, nil
	}
	select {
	case a.running <- struct{}{}:
		return func() { <-a.running }, nil
	default:
	}
	select {
	case a.running <- struct{}{}:
		return func() { <-a.running }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// stop refuses everything from now on.
func (a *admission) stop() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stopped = true
}

// counts tells how many requests are held and how many were ever admitted.
func (a *admission) counts() (held int, arrivals uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.held, a.arrivals
}

// wait returns when no request is held, or the context's error.
func (a *admission) wait(ctx context.Context) error {
	for {
		a.mu.Lock()
		held, idle := a.held, a.idle
		a.mu.Unlock()
		if held == 0 {
			return nil
		}
		select {
		case <-idle:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
