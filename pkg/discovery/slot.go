package discovery

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"
)

// NoSlotError means that every slot is held by a live worker.
type NoSlotError struct {
	Prefix string
	Bound  int
}

func (e *NoSlotError) Error() string {
	return fmt.Sprintf("all %d slots below %s in etcd are taken by live workers", e.Bound, e.Prefix)
}

// Slot is a number that no other live worker has. It is safe for concurrent use.
type Slot struct {
	session *Session
	prefix  string
	bound   int
	holder  []byte
	// lost is signalled when the number belongs to somebody else.
	lost chan struct{}

	mu     sync.Mutex
	number int // -1 for none
}

// ClaimSlot takes a number from 0 to bound-1 that no other live worker holds, as the record prefix + number. Its value is the instance id and, for people, holder. The record is kept under the session's lease like every other, so the
// number is free again soon after its holder has gone. Where the search begins depends on the session, so that workers that start together do not all try the same ones. The error is a *NoSlotError when none is free.
//
// When the lease is lost and somebody else has taken the number before the session is back, it takes another one by itself.
func (s *Session) ClaimSlot(ctx context.Context, prefix string, bound int, holder string) (*Slot, error) {
	sl := &Slot{session: s, prefix: prefix, bound: bound, holder: fmt.Appendf(nil, "%x %s", s.instanceID, holder), lost: make(chan struct{}, 1), number: -1}
	if err := sl.claim(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	s.wg.Go(sl.keep)
	return sl, nil
}

func (sl *Slot) key(number int) string { return sl.prefix + strconv.Itoa(number) }

// claim looks for a free number.
func (sl *Slot) claim(ctx context.Context) error {
	first := uint64(0)
	if sl.bound > 0 {
		first = sl.session.instanceID % uint64(sl.bound)
	}
	for i := range sl.bound {
		number := (int(first) + i) % sl.bound
		err := sl.session.register(ctx, sl.lost, Record{Key: sl.key(number), Value: sl.holder})
		switch {
		case err == nil:
			sl.mu.Lock()
			sl.number = number
			sl.mu.Unlock()
			return nil
		case !errors.Is(err, ErrKeyTaken):
			return fmt.Errorf("claim a slot below %s: %w", sl.prefix, err)
		}
	}
	return &NoSlotError{Prefix: sl.prefix, Bound: sl.bound}
}

// keep moves to another number when the present one is lost, until the session is closed.
func (sl *Slot) keep() {
	s := sl.session
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-sl.lost:
		}
		number := sl.present()
		if !s.isTaken(sl.key(number)) {
			continue // that was about an earlier one
		}
		sl.mu.Lock()
		sl.number = -1
		sl.mu.Unlock()
		s.unwant([]string{sl.key(number)})
		s.log.Warn().Int("slot", number).Str("prefix", sl.prefix).Msg("somebody else took the slot while the lease was lost; another one is taken")
		for err := sl.claim(s.ctx); err != nil && s.ctx.Err() == nil; err = sl.claim(s.ctx) {
			s.log.Error().Err(err).Msg("no slot, trying on")
			wait(s.ctx, s.beat())
		}
	}
}

func (s *Session) isTaken(key string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.records[key]
	return e != nil && e.taken
}

func (sl *Slot) present() int {
	sl.mu.Lock()
	defer sl.mu.Unlock()
	return sl.number
}

// Number is the slot; ok is false while it is not certain that nobody else has it, as when etcd has not answered for the time of the lease.
func (sl *Slot) Number() (number int, ok bool) {
	number = sl.present()
	if number < 0 || !sl.session.holds(sl.key(number)) {
		return 0, false
	}
	return number, true
}

// holds tells whether a record is ours for certain at this moment.
func (s *Session) holds(key string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.records[key]
	return e != nil && e.want && !e.taken && s.state.Registered && time.Now().Before(s.safe)
}
