package handlers

import (
	"context"
	"sync"
	"time"
)

// Outcome is how a deferred abort ended.
type Outcome string

// The outcomes.
const (
	// AbortInTime: the blocks had arrived, the abort followed.
	AbortInTime Outcome = "in_time"
	// AbortForced: they had not arrived within the time, and the request was aborted all the same.
	AbortForced Outcome = "forced"
	// AbortMoot: the engine had ended, and the transfer with it.
	AbortMoot Outcome = "moot"
	// AbortCrowded: so many aborts waited already that this one was not deferred.
	AbortCrowded Outcome = "crowded"
)

// deferred holds requests whose caller has gone while KV blocks were on their way to them. Aborting an engine's request in the middle of such a transfer leaks the blocks on both sides or wedges the engine, so the abort waits for the first
// output, which says that the transfer is over. How many wait, and for how long, is bounded.
type deferred struct {
	limit   int
	wait    time.Duration
	observe func(Outcome)
	warn    func(id uint64, text string)

	mu   sync.Mutex
	held int
	idle chan struct{} // closed while nothing is held
}

func newDeferred(limit int, wait time.Duration, observe func(Outcome), warn func(uint64, string)) *deferred {
	idle := make(chan struct{})
	close(idle)
	return &deferred{limit: limit, wait: wait, observe: observe, warn: warn, idle: idle}
}

// take becomes the owner of a stream. It does not wait.
func (d *deferred) take(s Stream) {
	if !d.enter() {
		s.Close()
		d.observe(AbortCrowded)
		d.warn(s.ID(), "too many aborts wait for KV transfers; this one was not deferred, and blocks may be lost")
		return
	}
	go func() {
		defer d.leave()
		defer s.Close()
		ctx, cancel := context.WithTimeout(context.Background(), d.wait)
		defer cancel()
		switch _, err := s.Next(ctx); {
		case err == nil:
			d.observe(AbortInTime)
		case ctx.Err() != nil:
			d.observe(AbortForced)
			d.warn(s.ID(), "a KV transfer did not end in time; its request was aborted, and blocks may be lost")
		default:
			d.observe(AbortMoot)
		}
	}()
}

func (d *deferred) enter() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.held >= d.limit {
		return false
	}
	if d.held == 0 {
		d.idle = make(chan struct{})
	}
	d.held++
	return true
}

func (d *deferred) leave() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.held--
	if d.held == 0 {
		close(d.idle)
	}
}

// Settle waits until no abort is deferred any more, or ctx ends.
func (h *Handler) Settle(ctx context.Context) error {
	h.deferred.mu.Lock()
	idle := h.deferred.idle
	h.deferred.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Abandon is for a request whose caller cannot be reached. On a decode worker a prefill worker holds KV blocks for it until they are fetched, so they are, and the request is aborted then; in other roles there is nothing to do. The error says
// that the request could not be given to the engine.
func (h *Handler) Abandon(ctx context.Context, call *Call) error {
	if h.cfg.Role != Decode {
		return nil
	}
	p, err := h.plan(call)
	if err != nil || p.half != generationHalf {
		return err
	}
	return h.release(ctx, p, call)
}

// release fetches the KV blocks of a request that nobody waits for.
func (h *Handler) release(ctx context.Context, p *plan, call *Call) error {
	one := int64(1)
	p.generate.Sampling.MaxTokens = &one
	stream, err := h.cfg.Engine.Generate(ctx, &p.generate, call.Request.TokenIDs)
	if err != nil {
		return err
	}
	h.deferred.take(stream)
	return nil
}

// awaitsBlocks tells whether KV blocks may be on their way to the request, so that it must not be aborted.
func (r *relay) awaitsBlocks() bool { return r.plan.half == generationHalf && !r.heard }

// leave gives the stream up as its half allows.
func (r *relay) leave() {
	if r.awaitsBlocks() {
		r.handler.deferred.take(r.stream)
		return
	}
	r.stream.Close()
}

// answerNothing ends a request for no tokens. What a prefill worker may hold for it is fetched.
func (h *Handler) answerNothing(ctx context.Context, p *plan, call *Call, out Sink) error {
	if p.half == generationHalf {
		if err := h.release(ctx, p, call); err != nil {
			return engineGone(err)
		}
	}
	return answerEmpty(p, out)
}
