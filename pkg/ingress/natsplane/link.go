package natsplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/nats-io/nats.go"
)

// link is what the library's callbacks have told about the present connection.
type link struct {
	// epoch changes with every loss and return, so that a proof counts only for the connection that it was made on.
	epoch uint64
	up    bool
	// gone means that the library has closed the connection and will not reconnect.
	gone bool
	err  error
	// suspect asks for a check of the subscriptions.
	suspect bool

	proof *nats.Subscription // private subject
	// interrupt ends a proof that is under way.
	interrupt context.CancelFunc
}

// open dials and makes the private subscription, without touching the plane's state.
func (p *Plane) open(ctx context.Context) (*Conn, error) {
	messages := p.cfg.PendingMessages
	if messages <= 0 {
		messages = defaultPendingMessages
	}
	return Dial(ctx, p.cfg.Conn,
		nats.SyncQueueLen(messages),
		nats.DisconnectErrHandler(func(nc *nats.Conn, err error) {
			p.event(nc, func(l *link) { l.up, l.err = false, err })
		}),
		nats.ReconnectHandler(func(nc *nats.Conn) {
			p.event(nc, func(l *link) { l.up, l.err = true, nil })
		}),
		nats.ClosedHandler(func(nc *nats.Conn) {
			err := nc.LastError()
			p.event(nc, func(l *link) { l.up, l.gone, l.err = false, true, err })
		}),
		nats.ErrorHandler(p.asyncError),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) {
			p.logOutage.Warn().Err(err).Str("server", p.cfg.Conn.redacted()).Msg("nats cannot be reached")
		}),
	)
}

// adopt makes conn the present connection.
func (p *Plane) adopt(conn *Conn) error {
	proof, err := conn.SubscribeSync(nats.NewInbox())
	if err != nil {
		return fmt.Errorf("subscribe to a private subject: %w", err)
	}
	up, gone := conn.IsConnected(), conn.IsClosed()
	p.subscribing.Lock()
	defer p.subscribing.Unlock()
	p.mu.Lock()
	p.conn = conn
	// Events of this connection were ignored until now.
	p.link = link{epoch: p.link.epoch + 1, up: up, gone: gone, proof: proof}
	endpoints := slices.Collect(maps.Values(p.endpoints))
	p.mu.Unlock()
	for _, e := range endpoints {
		if err := p.subscribe(conn, e); err != nil {
			return fmt.Errorf("serve %s again: %w", e.subject, err)
		}
	}
	return nil
}

func (p *Plane) event(nc *nats.Conn, change func(*link)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conn == nil || p.conn.Conn != nc {
		return
	}
	change(&p.link)
	p.link.epoch++
	p.wake()
}

// wake sends the supervisor to look at link. The caller holds mu.
func (p *Plane) wake() {
	if p.link.interrupt != nil {
		p.link.interrupt()
	}
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

// asyncError gets what the server or the library has to say outside of any call.
func (p *Plane) asyncError(nc *nats.Conn, sub *nats.Subscription, err error) {
	ev := p.logServer.Warn().Err(err)
	if sub != nil {
		ev = ev.Str("subject", sub.Subject)
	}
	ev.Msg("nats reports an error")
	switch {
	case errors.Is(err, nats.ErrPermissionViolation):
		// It may be about one of our subjects.
		p.mu.Lock()
		if p.conn != nil && p.conn.Conn == nc {
			p.link.suspect = true
			select {
			case p.kick <- struct{}{}:
			default:
			}
		}
		p.mu.Unlock()
	case errors.Is(err, nats.ErrSlowConsumer) && sub != nil:
		// The reader counts with the next message, but after a burst there may be none for long.
		p.mu.Lock()
		e := p.endpoints[sub.Subject]
		p.mu.Unlock()
		if e != nil {
			e.countDropped()
		}
	}
}
