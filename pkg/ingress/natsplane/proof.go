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
