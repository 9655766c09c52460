package discovery

import (
	"strconv"
	"time"

	"github.com/rs/zerolog"
)

// State is how a session stands with etcd.
type State struct {
	// Registered is true while there are records to guard and all of them are known to be in place.
	// It stays true when etcd stops answering, until the lease must be taken for lost.
	Registered bool
	// Reachable is false while etcd does not answer.
	Reachable bool
	// Reason says in words for people why Registered or Reachable is false. It is empty when both are true.
	Reason string
	// Since is when Registered took its present value.
	Since time.Time
	// Lease is the id of the present lease, 0 while there is none.
	Lease int64
	// Losses counts how often the lease was lost, or had to be taken for lost since etcd did not answer for its whole time.
	Losses uint64
	// Reregistrations counts how often records had to be put back.
	Reregistrations uint64
}

const (
	reasonNothingYet = "nothing is registered yet"
	reasonWithdrawn  = "all records are withdrawn"
	reasonClosed     = "the session is closed"
)

// update changes the state and tells log and callback when it is another than before. The caller holds busy, so that changes are told in order.
func (s *Session) update(change func(*State)) {
	s.mu.Lock()
	old := s.state
	change(&s.state)
	if s.state.Registered != old.Registered {
		s.state.Since = time.Now()
	}
	now := s.state
	s.mu.Unlock()
	if now == old {
		return
	}
	s.logChange(old, now)
	if s.cfg.OnState != nil {
		s.cfg.OnState(now)
	}
}

// logChange writes one line for a change that people care about. A mere change of the reason is not one: an outage has many errors.
func (s *Session) logChange(old, now State) {
	line := func(e *zerolog.Event) *zerolog.Event {
		return e.Uint64("instance_id", s.instanceID).Str("lease", leaseText(now.Lease)).Uint64("lease_losses", now.Losses).Uint64("reregistrations", now.Reregistrations)
	}
	switch {
	case old.Registered && !now.Registered && (now.Reason == reasonWithdrawn || now.Reason == reasonClosed):
		line(s.log.Info()).Msg("records withdrawn from discovery")
	case old.Registered && !now.Registered:
		line(s.log.Warn()).Str("reason", now.Reason).Msg("registration lost, serving goes on")
	case now.Losses > old.Losses:
		line(s.log.Warn()).Str("reason", now.Reason).Msg("etcd lease lost")
	case now.Reregistrations > old.Reregistrations:
		line(s.log.Info()).Dur("after", time.Since(old.Since)).Msg("records put back into discovery")
	case !old.Registered && now.Registered && old.Reason == reasonNothingYet, !old.Registered && now.Registered && old.Reason == reasonWithdrawn:
		line(s.log.Info()).Msg("records registered in discovery")
	case !old.Registered && now.Registered:
		line(s.log.Info()).Dur("after", time.Since(old.Since)).Msg("etcd answers again, registration is intact")
	case old.Reachable && !now.Reachable:
		line(s.log.Warn()).Str("reason", now.Reason).Msg("etcd does not answer, trying on")
	case !old.Reachable && now.Reachable:
		line(s.log.Info()).Msg("etcd answers again")
	}
}

// leaseText writes a lease id as etcd's own tools do.
func leaseText(id int64) string { return strconv.FormatInt(id, 16) }
