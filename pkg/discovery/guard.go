package discovery

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// guard keeps the lease alive and the records in place until the session is closed.
func (s *Session) guard() {
	pause := newBackOff()
	// The first beat is due later: the lease is new.
	timer := time.NewTimer(s.beat())
	defer timer.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-timer.C:
		case <-s.wakeup:
		}
		err := s.exclusively(s.ctx, s.pass)
		if s.ctx.Err() != nil {
			return
		}
		var foreign *foreignError
		switch {
		case err == nil:
			pause.Reset()
			timer.Reset(s.beat())
		case errors.As(err, &foreign):
			// Only its owner can end that, so there is no hurry.
			timer.Reset(s.beat())
		default:
			timer.Reset(pause.NextBackOff())
		}
	}
}

// beat is the time between two passes while all is well: three fit into the time of the lease.
func (s *Session) beat() time.Duration { return s.cfg.LeaseTTL / 3 }

// pass brings etcd into agreement with what the session wants, and the state with what was found. The caller holds busy.
func (s *Session) pass(ctx context.Context) error {
	restored, err := s.reconcile(ctx)
	if s.ctx.Err() != nil {
		return err // the session is being closed
	}
	var foreign *foreignError
	switch {
	case err == nil:
		s.presumed = false
		s.update(func(st *State) {
			st.Reachable = true
			if restored {
				st.Reregistrations++
			}
			if s.wantsAny() {
				st.Registered, st.Reason = true, ""
			} else {
				st.Registered, st.Reason = false, s.idle()
			}
		})
	case errors.As(err, &foreign):
		s.update(func(st *State) {
			if restored {
				st.Reregistrations++
			}
			st.Registered, st.Reachable, st.Reason = false, true, foreign.Error()
		})
	case errors.Is(err, errRaced), errors.Is(err, errLeaseGone):
		// etcd answers; the next pass is soon.
	default:
		expired := s.lease != 0 && !s.presumed && !time.Now().Before(s.deadline)
		s.presumed = s.presumed || expired
		s.update(func(st *State) {
			// The reason is that of the change: the further errors of one outage are no news.
			if st.Reachable || expired {
				st.Reason = fmt.Sprintf("etcd does not answer: %v", err)
			}
			st.Reachable = false
			if expired {
				st.Losses++
				st.Registered = false
			}
		})
	}
	return err
}

// reconcile tells whether records had to be put back.
func (s *Session) reconcile(ctx context.Context) (restored bool, err error) {
	if err := s.ensureLease(ctx); err != nil {
		return false, err
	}
	s.mu.Lock()
	keys := slices.Sorted(maps.Keys(s.records))
	s.mu.Unlock()
	if len(keys) == 0 {
		return false, nil
	}
	found, err := s.read(ctx, keys)
	if err != nil {
		return false, err
	}
	changes := s.plan(found, keys)
	s.restoring = s.restoring || slices.ContainsFunc(changes, func(c change) bool { return !c.remove })
	missing := slices.IndexFunc(changes, func(c change) bool { return !c.remove && c.revision == 0 })
	if missing >= 0 {
		s.update(func(st *State) {
			if st.Registered {
				st.Registered, st.Reason = false, fmt.Sprintf("key %s is gone", changes[missing].key)
			}
		})
	}
	if err := s.write(ctx, changes); err != nil {
		return false, err
	}
	restored, s.restoring = s.restoring, false
	return restored, s.foreign(found)
}

// ensureLease keeps the lease alive, and takes a new one when there is none. The caller holds busy.
func (s *Session) ensureLease(ctx context.Context) error {
	// The time of a lease runs from some moment during the request, so the start of the request is the safe one to count from.
	start := time.Now()
	if s.lease != 0 {
		var ttl time.Duration
		err := s.call(ctx, func(ctx context.Context) (err error) {
			ttl, err = s.store.KeepAlive(ctx, s.lease)
			return err
		})
		if err == nil {
			s.deadline = start.Add(ttl)
			s.settle(s.deadline)
			return nil
		}
		if !errors.Is(err, errLeaseGone) {
			return fmt.Errorf("keep lease %s alive: %w", leaseText(s.lease), err)
		}
		s.loseLease()
		start = time.Now()
	}
	var ttl time.Duration
	var id int64
	err := s.call(ctx, func(ctx context.Context) (err error) {
		id, ttl, err = s.store.Grant(ctx, s.cfg.LeaseTTL)
		return err
	})
	if err != nil {
		return fmt.Errorf("grant lease: %w", err)
	}
	if s.instanceID == 0 {
		s.instanceID = uint64(id)
		s.log.Info().Str("lease", leaseText(id)).Uint64("instance_id", s.instanceID).Dur("ttl", ttl).Msg("etcd lease granted")
	}
	s.lease, s.deadline, s.presumed = id, start.Add(ttl), false
	s.settle(s.deadline)
	s.update(func(st *State) { st.Lease = id })
	return nil
}

// loseLease notes that etcd does not know our lease any more.
func (s *Session) loseLease() {
	lost, counted := s.lease, s.presumed
	s.lease, s.presumed = 0, false
	s.settle(time.Time{})
	s.update(func(st *State) {
		st.Lease = 0
		if !counted {
			st.Losses++
		}
		if s.wantsAny() {
			st.Registered, st.Reason = false, fmt.Sprintf("lease %s expired or was revoked", leaseText(lost))
		}
	})
}

// plan returns the changes that make the given keys of found what the session wants. It forgets unwanted keys that stay away.
func (s *Session) plan(found map[string]held, keys []string) []change {
	s.mu.Lock()
	defer s.mu.Unlock()
	var changes []change
	for _, key := range keys {
		e := s.records[key]
		if e == nil {
			continue
		}
		at, exists := found[key]
		same := exists && bytes.Equal(at.value, e.value)
		switch {
		case e.want && (!exists || same && at.lease != s.lease):
			changes = append(changes, change{key: key, value: e.value, revision: at.revision})
		case e.want:
			// In place, or a foreign record, of which foreign tells.
		case same && (e.owned || at.lease == s.lease):
			e.away = 0
			changes = append(changes, change{key: key, remove: true, revision: at.revision})
		default:
			if e.away++; e.away >= passesAway {
				delete(s.records, key)
			}
		}
	}
	return changes
}

// foreign returns a *foreignError when a wanted key holds somebody else's value.
func (s *Session) foreign(found map[string]held) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var problem error
	for key, at := range found {
		e := s.records[key]
		if e == nil || !e.want {
			continue
		}
		other := !bytes.Equal(at.value, e.value)
		switch {
		case e.lost == nil && other:
			problem = &foreignError{key: key}
		case e.lost != nil && other:
			e.taken = true
			e.signal()
		}
	}
	return problem
}

// wantsAny tells whether there is a record to guard. The caller holds mu.
func (s *Session) wantsAny() bool {
	for _, e := range s.records {
		if e.want {
			return true
		}
	}
	return false
}

// idle is the reason for not being registered while there is nothing to guard. The caller holds busy.
func (s *Session) idle() string {
	if s.started {
		return reasonWithdrawn
	}
	return reasonNothingYet
}

// watch wakes the guard whenever the key may have been removed, until ctx ends. The guard would notice by itself, but only with its next beat.
func (s *Session) watch(ctx context.Context, key string) {
	pause := newBackOff()
	for ctx.Err() == nil {
		begun := false
		_ = s.store.Watch(ctx, key, func() {
			begun = true
			s.wake()
		})
		// Why it ended does not matter: if something is wrong, the guard finds out and says so.
		if begun {
			pause.Reset()
		}
		wait(ctx, pause.NextBackOff())
	}
}
