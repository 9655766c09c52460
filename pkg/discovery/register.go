package discovery

import (
	"bytes"
	"context"
	"errors"
	"slices"
)

// registration is one call of Session.Register over its tries.
type registration struct {
	session *Session
	records []Record
	// unsure is true when a try ended without saying whether it took effect.
	unsure bool
	// lost is for the entries.
	lost chan<- struct{}
}

// try makes one attempt. The caller holds busy.
func (r *registration) try(ctx context.Context) error {
	s := r.session
	pending, err := r.pending()
	if err != nil {
		return err
	}
	if len(pending) == 0 {
		return nil
	}
	if s.lease == 0 {
		if err := s.ensureLease(ctx); err != nil {
			return err
		}
	}
	changes := make([]change, 0, len(pending))
	for _, rec := range pending {
		changes = append(changes, change{key: rec.Key, value: rec.Value})
	}
	err = s.write(ctx, changes)
	if errors.Is(err, errRaced) {
		// Something is there already. It may be ours: from a try whose answer was lost, or from before a withdrawal that did not get through.
		if changes, err = r.overOwn(ctx, pending); err == nil {
			err = s.write(ctx, changes)
		}
	}
	if err != nil {
		if !isFinal(err) && !errors.Is(err, errRaced) && !errors.Is(err, errLeaseGone) {
			r.unsure = true
		}
		return err
	}
	return r.adopt(pending)
}

// pending returns the records that are not guarded yet. A guarded key with another value is as taken as a foreign one.
func (r *registration) pending() ([]Record, error) {
	s := r.session
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	var pending []Record
	for _, rec := range r.records {
		e := s.records[rec.Key]
		if e == nil || !e.want {
			pending = append(pending, rec)
		} else if !bytes.Equal(e.value, rec.Value) {
			return nil, &KeyTakenError{Key: rec.Key, Lease: s.lease}
		}
	}
	return pending, nil
}

// overOwn plans to write the records over earlier ones of ours and nothing else.
func (r *registration) overOwn(ctx context.Context, pending []Record) ([]change, error) {
	s := r.session
	keys := make([]string, 0, len(pending))
	for _, rec := range pending {
		keys = append(keys, rec.Key)
	}
	found, err := s.read(ctx, keys)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	changes := make([]change, 0, len(pending))
	for _, rec := range pending {
		at, exists := found[rec.Key]
		e := s.records[rec.Key]
		ours := at.lease == s.lease && (r.unsure && bytes.Equal(at.value, rec.Value) || e != nil && bytes.Equal(at.value, e.value))
		if exists && !ours {
			return nil, &KeyTakenError{Key: rec.Key, Lease: at.lease}
		}
		changes = append(changes, change{key: rec.Key, value: rec.Value, revision: at.revision})
	}
	return changes, nil
}

// adopt makes the session guard records that have just been put.
func (r *registration) adopt(records []Record) error {
	s := r.session
	s.mu.Lock()
	if s.closed {
		// Close is waiting for its turn. It revokes the lease and the records with it.
		s.mu.Unlock()
		return ErrClosed
	}
	first := !s.wantsAny()
	for _, rec := range records {
		ctx, unwatch := context.WithCancel(s.ctx)
		s.records[rec.Key] = &entry{value: rec.Value, want: true, owned: true, unwatch: unwatch, lost: r.lost}
		s.wg.Go(func() { s.watch(ctx, rec.Key) })
	}
	s.mu.Unlock()
	s.started = true
	s.update(func(st *State) {
		// With other records the state is that of the last look at all of them.
		if first {
			st.Registered, st.Reachable, st.Reason = true, true, ""
		}
	})
	return nil
}

// abandon leaves the removal of what a failed registration may have put to the guard. The caller holds mu.
func (r *registration) abandon() {
	if !r.unsure {
		return
	}
	for _, rec := range r.records {
		if e := r.session.records[rec.Key]; e == nil {
			r.session.records[rec.Key] = &entry{value: slices.Clone(rec.Value)}
		}
	}
}
