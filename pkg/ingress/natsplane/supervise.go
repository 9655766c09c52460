package natsplane

import (
	"maps"
	"slices"
	"time"
)

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

func (p *Plane) epoch() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.link.epoch
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
