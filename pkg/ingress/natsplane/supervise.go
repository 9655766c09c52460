package natsplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	defaultProofTimeout = 2 * time.Second
	// proofTries is how often a proof of life is tried before the connection is thrown away.
	proofTries = 3
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

// supervise is the goroutine that follows the connection until Close, the only one that changes the state and replaces the connection.
func (p *Plane) supervise() {
	defer p.end()
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-p.kick:
		}
		for p.ctx.Err() == nil && p.step() {
		}
	}
}

func (p *Plane) end() {
	p.mu.Lock()
	conn := p.conn
	p.mu.Unlock()
	conn.Close()
	p.setState(func(s *State) { s.Healthy, s.Reason, s.Server = false, "closed", "" })
}

// step does one thing about the present situation and tells whether to look again at once.
func (p *Plane) step() bool {
	p.mu.Lock()
	l, conn, healthy := p.link, p.conn, p.state.Healthy
	p.link.suspect = false
	p.mu.Unlock()
	switch {
	case l.gone:
		p.lost("connection lost", l.err)
		return p.reopen(conn)
	case !l.up:
		p.lost("connection lost", l.err)
		return false
	case healthy && p.proven == l.epoch:
		if l.suspect {
			p.recheck(conn)
		}
		return false
	default:
		if healthy {
			// Lost and back before anybody looked.
			p.lost("connection lost", l.err)
		}
		return p.regain(conn, l)
	}
}

// lost ends the healthy state.
func (p *Plane) lost(what string, err error) {
	if !p.State().Healthy {
		return
	}
	p.log.Warn().Err(err).Str("server", p.cfg.Conn.redacted()).Msg("nats " + what)
	reason := what
	if err != nil {
		reason += ": " + err.Error()
	}
	p.setState(func(s *State) { s.Healthy, s.Reason, s.Server = false, reason, "" })
}

// reopen replaces a connection that the library has given up. It tries until it succeeds or the plane is closed.
func (p *Plane) reopen(old *Conn) bool {
	old.Close()
	pause := newBackoff(orDefault(p.cfg.Conn.RetryMin, defaultReconnectRetry), orDefault(p.cfg.Conn.RetryMax, defaultRetryMax))
	for p.ctx.Err() == nil {
		conn, err := p.open(p.ctx)
		if err == nil {
			if err = p.adopt(conn); err == nil {
				return true
			}
			conn.Close()
		}
		if p.ctx.Err() == nil {
			p.logOutage.Warn().Err(err).Msg("nats connection cannot be opened again")
			_ = sleep(p.ctx, pause.NextBackOff())
		}
	}
	return false
}

// regain makes the plane healthy if a message comes back, and throws the connection away otherwise.
func (p *Plane) regain(conn *Conn, l link) bool {
	pause := newBackoff(orDefault(p.cfg.Conn.RetryMin, defaultReconnectRetry), orDefault(p.cfg.Conn.RetryMax, defaultRetryMax))
	for range proofTries {
		err := p.prove(conn, l)
		if err == nil {
			p.regained(conn, l.epoch)
			return false
		}
		if p.ctx.Err() != nil || p.epoch() != l.epoch {
			return true
		}
		p.log.Warn().Err(err).Msg("nats is connected, but messages do not come back")
		p.setState(func(s *State) { s.Reason = "no proof of life: " + err.Error() })
		if sleep(p.ctx, pause.NextBackOff()) != nil {
			return false
		}
	}
	if err := conn.ForceReconnect(); err != nil {
		p.log.Warn().Err(err).Msg("nats connection cannot be renewed")
	}
	return false
}

func (p *Plane) regained(conn *Conn, epoch uint64) {
	p.mu.Lock()
	current, since := p.link.epoch == epoch, p.state.Since
	endpoints := slices.Collect(maps.Values(p.endpoints))
	p.mu.Unlock()
	if !current {
		return
	}
	messages, bytes := p.pendingLimits(conn)
	for _, e := range endpoints {
		e.setLimits(messages, bytes)
	}
	server, limit := conn.ConnectedUrlRedacted(), conn.MaxPayload()
	p.proven = epoch
	p.setState(func(s *State) {
		s.Healthy, s.Reason, s.Server, s.MaxPayload = true, "", server, limit
		s.Reconnects++
	})
	p.log.Info().Str("server", server).Int64("max_payload", limit).Dur("outage", time.Since(since)).Msg("nats serves again")
}

// recheck looks after the subscriptions of a healthy connection.
func (p *Plane) recheck(conn *Conn) {
	err := p.denied()
	if err == nil {
		return
	}
	p.lost("subscription lost", err)
	// Only a new connection makes the server think again.
	if err := conn.ForceReconnect(); err != nil {
		p.log.Warn().Err(err).Msg("nats connection cannot be renewed")
	}
}

func (p *Plane) denied() error {
	p.mu.Lock()
	endpoints := slices.Collect(maps.Values(p.endpoints))
	p.mu.Unlock()
	for _, e := range endpoints {
		if !e.confirmed.Load() {
			continue
		}
		if err := e.denied(); err != nil {
			return fmt.Errorf("subject %s: %w", e.subject, err)
		}
	}
	return nil
}

func (p *Plane) epoch() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.link.epoch
}

// prove sends a message to the private subject and waits for it, for as long as the epoch lasts. The subscriptions were sent before it on the same connection,
// so when it is back the server knows them, or has denied them.
func (p *Plane) prove(conn *Conn, l link) error {
	ctx, cancel := context.WithTimeout(p.ctx, orDefault(p.cfg.ProofTimeout, defaultProofTimeout))
	defer cancel()
	p.mu.Lock()
	if p.link.epoch == l.epoch {
		p.link.interrupt = cancel
	} else {
		cancel()
	}
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		p.link.interrupt = nil
		p.mu.Unlock()
	}()
	if err := p.roundTrip(ctx, conn, l.proof); err != nil {
		return err
	}
	return p.denied()
}

func (p *Plane) roundTrip(ctx context.Context, conn *Conn, private *nats.Subscription) error {
	p.nonce++
	nonce := strconv.FormatUint(p.nonce, 10)
	if err := conn.Publish(private.Subject, []byte(nonce)); err != nil {
		return fmt.Errorf("publish to a private subject: %w", err)
	}
	if err := conn.FlushWithContext(ctx); err != nil {
		return fmt.Errorf("wait for the server: %w", err)
	}
	for {
		msg, err := private.NextMsgWithContext(ctx)
		switch {
		case err == nil:
			if string(msg.Data) == nonce {
				return nil
			}
		case errors.Is(err, nats.ErrPermissionViolation), errors.Is(conn.LastError(), nats.ErrPermissionViolation):
			// An account may be allowed the subjects of its endpoints and replies only. Then the server's answer to the flush has to do.
			p.logServer.Warn().Err(err).Msg("nats account may not use private subjects, so the proof of life is weaker")
			return nil
		default:
			return fmt.Errorf("wait for a message of our own: %w", err)
		}
	}
}

// proveFirst is the proof on a new plane, before its supervisor runs.
func (p *Plane) proveFirst(ctx context.Context, conn *Conn) error {
	if err := p.adopt(conn); err != nil {
		return err
	}
	p.mu.Lock()
	l := p.link
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, proofTries*orDefault(p.cfg.ProofTimeout, defaultProofTimeout))
	defer cancel()
	if err := p.roundTrip(ctx, conn, l.proof); err != nil {
		return err
	}
	p.proven = l.epoch
	server, limit := conn.ConnectedUrlRedacted(), conn.MaxPayload()
	p.setState(func(s *State) { s.Healthy, s.Reason, s.Server, s.MaxPayload = true, "", server, limit })
	return nil
}

// setState changes the state and tells. Only the supervisor, and Connect before it, call it.
func (p *Plane) setState(change func(*State)) {
	p.mu.Lock()
	before := p.state
	change(&p.state)
	if p.state == before {
		p.mu.Unlock()
		return
	}
	if p.state.Healthy != before.Healthy {
		p.state.Since = time.Now()
	}
	after := p.state
	p.mu.Unlock()
	if p.cfg.OnState != nil {
		p.cfg.OnState(after)
	}
}
