package natsplane

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"dynworker/pkg/ingress"
)

// endpoint is one served subject. Its subscription, and with it the reader, is replaced when a new connection has to be opened.
type endpoint struct {
	plane   *Plane
	subject string
	intake  ingress.Intake
	// confirmed means that the server has allowed the subscription once. Until then Serve looks after it.
	confirmed atomic.Bool

	mu  sync.Mutex
	cur *reader // there is one from before the endpoint is in the plane's map
}

// reader is the goroutine that takes the messages of one subscription.
type reader struct {
	sub *nats.Subscription
	// ctx ends the reader once the messages at hand are used up.
	ctx  context.Context
	stop context.CancelFunc
	done chan struct{}

	mu sync.Mutex
	// dropped is how many lost messages have been reported.
	dropped int
}

// attach starts a reader, unless the plane is closed. An earlier one has lost its connection and ends by itself.
func (e *endpoint) attach(sub *nats.Subscription) bool {
	ctx, stop := context.WithCancel(e.plane.ctx)
	r := &reader{sub: sub, ctx: ctx, stop: stop, done: make(chan struct{})}
	e.mu.Lock()
	e.cur = r
	e.mu.Unlock()
	return e.plane.spawn(func() {
		defer close(r.done)
		defer stop()
		e.read(r)
	})
}

func (e *endpoint) current() *reader {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.cur
}

func (e *endpoint) read(r *reader) {
	for {
		msg, err := r.sub.NextMsgWithContext(r.ctx)
		switch {
		case err == nil:
			e.take(msg)
			e.countDropped()
		case errors.Is(err, nats.ErrSlowConsumer):
			e.countDropped()
		case errors.Is(err, nats.ErrNoResponders):
			// The library takes an empty message with a certain header for a word of the server, and keeps it.
			e.intake.Observer.Note(ingress.NATS, ingress.Malformed, 1, err)
		case errors.Is(err, nats.ErrPermissionViolation):
			// Reported by Serve, or by the supervisor when it comes later; the server may allow the subject again after a reconnect.
			if sleep(r.ctx, time.Second) != nil {
				return
			}
		case r.ctx.Err() != nil:
			e.sweep(r)
			return
		default:
			// Drained, or the connection is gone for good.
			return
		}
	}
}

// sweep takes what has been received already.
func (e *endpoint) sweep(r *reader) {
	for {
		msg, err := r.sub.NextMsg(time.Nanosecond)
		if errors.Is(err, nats.ErrSlowConsumer) || errors.Is(err, nats.ErrNoResponders) {
			continue
		}
		if err != nil {
			e.countDropped()
			return
		}
		e.take(msg)
	}
}

func (e *endpoint) take(msg *nats.Msg) {
	reply, start := e.intake.Take(ingress.Message{Data: msg.Data, Headers: header(msg.Header)})
	if msg.Reply != "" {
		if err := msg.Respond(reply); err != nil {
			e.intake.Observer.Note(ingress.NATS, ingress.ReplyFailed, 1, err)
			e.plane.logReply.Warn().Err(err).Str("subject", e.subject).Msg("reply to a request could not be sent")
		}
	}
	if start != nil {
		go start()
	}
}

// countDropped reports messages that the library threw away since the last look.
func (e *endpoint) countDropped() {
	r := e.current()
	n, total := r.newlyDropped()
	if n == 0 {
		return
	}
	e.intake.Observer.Note(ingress.NATS, ingress.Dropped, n, nats.ErrSlowConsumer)
	e.plane.logLoss.Error().Str("subject", e.subject).Int("messages", n).Int("total", total).
		Msg("requests lost: they came faster than they could be taken up")
}

func (r *reader) newlyDropped() (n, total int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	total, err := r.sub.Dropped()
	if err != nil || total <= r.dropped {
		return 0, total
	}
	n = total - r.dropped
	r.dropped = total
	return n, total
}

// denied returns the server's refusal of the subscription, if there was one. It may be called besides the reader.
func (e *endpoint) denied() error {
	r := e.current()
	// The library tells of a refusal only to those who ask for a message.
	msg, err := r.sub.NextMsg(time.Nanosecond)
	if err == nil {
		e.take(msg)
		return nil
	}
	if errors.Is(err, nats.ErrPermissionViolation) {
		return err
	}
	return nil
}

// setLimits follows a server with another payload limit.
func (e *endpoint) setLimits(messages, bytes int) {
	// A subscription that has ended needs no limits.
	_ = e.current().sub.SetPendingLimits(messages, bytes)
}

// beginDrain asks the server to send nothing more.
func (e *endpoint) beginDrain() {
	r := e.current()
	// Without a connection nothing more can come, and the library would only wait for it.
	if !e.plane.connected() || !e.plane.spawn(func() {
		if r.sub.Drain() != nil {
			r.stop()
		}
	}) {
		r.stop()
	}
}

// drained waits until what had come was taken. When ctx ends first it gives up the rest.
func (e *endpoint) drained(ctx context.Context) error {
	r := e.current()
	select {
	case <-r.done:
		return nil
	case <-ctx.Done():
		e.detach()
		return context.Cause(ctx)
	}
}

// detach ends the subscription and the reader, without waiting for either.
func (e *endpoint) detach() {
	r := e.current()
	r.stop()
	e.plane.spawn(func() {
		// An error means that the subscription is gone already.
		_ = r.sub.Unsubscribe()
	})
}
