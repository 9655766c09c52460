package discovery

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/rs/zerolog"
)

// Record is one key with its value.
type Record struct {
	Key   string
	Value []byte
}

// Session is one lease after the other, and the records that are kept under the present one.
type Session struct {
	store      store
	cfg        Config
	log        zerolog.Logger
	instanceID uint64

	// busy is held (by a value in it) by whoever talks to etcd about records and leases, so that such conversations happen one after the other.
	busy chan struct{}
	// The following belong to the holder of busy.
	lease     int64     // 0: there is none
	deadline  time.Time // when the lease must be taken for lost unless etcd has answered
	presumed  bool      // the lease has been counted as lost, though etcd has not said so
	restoring bool      // records are being put back; it may have worked without our knowledge
	started   bool      // something has been registered

	mu      sync.Mutex
	records map[string]*entry
	state   State
	closed  bool
	safe    time.Time // until when the lease is certain to be ours, as far as etcd has answered

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wakeup chan struct{} // makes the guard look at once
	wg     sync.WaitGroup

	closing  sync.Once
	closeErr error
}

// entry is a key that the session looks after.
type entry struct {
	value []byte
	// want is false for a key that has to stay away: it was withdrawn, or its registration failed halfway.
	want bool
	// owned is true when the key has been ours for certain; if not, only the lease can tell our record from somebody else's equal one.
	owned bool
	// away counts the passes that found an unwanted key to be away. A late request could still bring it back, so that once is not enough.
	away int
	// unwatch ends the watch of a wanted key.
	unwatch context.CancelFunc
	// lost is for a key that its owner gives up when somebody else has taken it, nil for one that is waited for; it is signalled then. taken says that this is so.
	lost  chan<- struct{}
	taken bool
}

// passesAway is how often an unwanted key must have been found away before it is forgotten.
const passesAway = 3

// newSession grants the first lease, trying until ctx ends, and starts the guard.
func newSession(ctx context.Context, st store, cfg Config) (*Session, error) {
	s := &Session{
		store: st, cfg: cfg, log: cfg.Logger,
		busy: make(chan struct{}, 1), wakeup: make(chan struct{}, 1),
		records: make(map[string]*entry),
		state:   State{Reason: reasonNothingYet, Reachable: true, Since: time.Now()},
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	if err := s.retry(ctx, s.ensureLease); err != nil {
		s.cancel()
		return nil, fmt.Errorf("grant etcd lease: %w", err)
	}
	s.wg.Go(s.guard)
	return s, nil
}

// InstanceID is the id of the session's first lease. It never changes, whatever becomes of that lease.
func (s *Session) InstanceID() uint64 { return s.instanceID }

// State is the present state.
func (s *Session) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state
}

// Register puts the records, all of them or none, on condition that none of their keys exists, and guards them from then on. It tries until ctx ends or the failure is one that lasts,
// such as a *KeyTakenError or a missing permission. After an error none of the records is guarded, and what may have been put nevertheless is removed as soon as etcd answers.
// Registering what is registered already, with the same value, changes nothing.
func (s *Session) Register(ctx context.Context, records ...Record) error {
	return s.register(ctx, nil, records...)
}

func (s *Session) register(ctx context.Context, lost chan<- struct{}, records ...Record) error {
	r := registration{session: s, records: make([]Record, 0, len(records)), lost: lost}
	for _, rec := range records {
		if rec.Key == "" {
			return errors.New("register in etcd: a record has no key")
		}
		if slices.ContainsFunc(r.records, func(o Record) bool { return o.Key == rec.Key }) {
			return fmt.Errorf("register in etcd: two records for key %s", rec.Key)
		}
		r.records = append(r.records, Record{Key: rec.Key, Value: bytes.Clone(rec.Value)})
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(s.ctx, func() { cancel(ErrClosed) })()
	if err := s.retry(ctx, r.try); err != nil {
		s.mu.Lock()
		r.abandon()
		s.mu.Unlock()
		s.wake()
		return fmt.Errorf("register in etcd: %w", err)
	}
	return nil
}

// Withdraw stops guarding the keys, all keys when none is given, and then removes them. Keys that are not guarded are passed over.
// Its time is bounded by Config.WithdrawTimeout alone: ctx may be cancelled already, as it is in a shutdown, and only its values are used.
// A key that could not be removed in that time is removed as soon as etcd answers, unless it vanishes before with its lease.
func (s *Session) Withdraw(ctx context.Context, keys ...string) error {
	keys = s.unwant(keys)
	if len(keys) == 0 || s.ctx.Err() != nil {
		return nil // nothing is left, or Close is at it
	}
	ctx, cancel := s.cleanup(ctx)
	defer cancel()
	if err := s.retry(ctx, func(ctx context.Context) error { return s.remove(ctx, keys) }); err != nil {
		s.wake()
		return fmt.Errorf("withdraw from etcd: %w", err)
	}
	return nil
}

// Close withdraws every record, revokes the lease and ends the guard. Like Withdraw it is bounded by Config.WithdrawTimeout and not by ctx.
// When etcd does not answer, the records vanish by themselves when the time of the lease is over. Close may be called twice; the second call returns what the first did.
func (s *Session) Close(ctx context.Context) error {
	s.closing.Do(func() { s.closeErr = s.close(ctx) })
	return s.closeErr
}

func (s *Session) close(ctx context.Context) error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	keys := s.unwant(nil)
	s.end()
	ctx, cancel := s.cleanup(ctx)
	defer cancel()
	err := s.retry(ctx, func(ctx context.Context) error {
		if err := s.remove(ctx, keys); err != nil {
			return err
		}
		return s.revoke(ctx)
	})
	if err != nil {
		return fmt.Errorf("leave etcd: %w", err)
	}
	return nil
}

// end stops all goroutines of the session and waits for them.
func (s *Session) end() {
	s.cancel()
	s.wg.Wait()
}

// revoke gives the lease back. A record that a late request still wants to put under it cannot come to life any more.
func (s *Session) revoke(ctx context.Context) error {
	if s.lease != 0 {
		err := s.call(ctx, func(ctx context.Context) error { return s.store.Revoke(ctx, s.lease) })
		if err != nil && !errors.Is(err, errLeaseGone) {
			return fmt.Errorf("revoke lease %s: %w", leaseText(s.lease), err)
		}
		s.lease = 0
	}
	s.settle(time.Time{})
	s.update(func(st *State) { st.Lease, st.Registered, st.Reachable, st.Reason = 0, false, true, reasonClosed })
	return nil
}

// unwant marks keys, all when none is given, as unwanted, and returns those that the session looks after. From now on the guard does not put them.
func (s *Session) unwant(keys []string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(keys) == 0 {
		keys = slices.Sorted(maps.Keys(s.records))
	}
	var known []string
	for _, key := range keys {
		e := s.records[key]
		if e == nil {
			continue
		}
		known = append(known, key)
		e.want, e.away = false, 0
		if e.unwatch != nil {
			e.unwatch()
			e.unwatch = nil
		}
	}
	return known
}

// remove removes unwanted keys. The caller holds busy, so a put that the guard had begun before the keys became unwanted is over.
func (s *Session) remove(ctx context.Context, keys []string) error {
	if len(keys) > 0 {
		found, err := s.read(ctx, keys)
		if err != nil {
			return err
		}
		plan := s.plan(found, keys)
		if err := s.write(ctx, plan); err != nil {
			return err
		}
	}
	s.update(func(st *State) {
		st.Reachable = true
		if !s.wantsAny() {
			st.Registered, st.Reason = false, s.idle()
		}
	})
	return nil
}

// cleanup is the context for what has to be done although everything is being cancelled.
func (s *Session) cleanup(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), s.cfg.WithdrawTimeout)
}

// retry calls try, holding busy, until it succeeds, fails for good or ctx ends.
func (s *Session) retry(ctx context.Context, try func(context.Context) error) error {
	pause := newBackOff()
	var last error
	for {
		err := s.exclusively(ctx, try)
		if err == nil || isFinal(err) {
			return err
		}
		if last == nil || ctx.Err() == nil {
			last = err
			wait(ctx, pause.NextBackOff())
		}
		if ctx.Err() == nil {
			continue
		}
		// The last failure that is not due to ctx is what the reader of the error wants to know.
		if cause := context.Cause(ctx); !errors.Is(last, cause) {
			return fmt.Errorf("%w: %w", cause, last)
		}
		return last
	}
}

// exclusively calls f holding busy, unless ctx ends before it is to be had.
func (s *Session) exclusively(ctx context.Context, f func(context.Context) error) error {
	select {
	case s.busy <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-s.busy }()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return f(ctx)
}

// call bounds one request to etcd.
func (s *Session) call(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.CallTimeout)
	defer cancel()
	return f(ctx)
}

func (s *Session) read(ctx context.Context, keys []string) (found map[string]held, err error) {
	err = s.call(ctx, func(ctx context.Context) error {
		found, err = s.store.Read(ctx, keys)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read records: %w", err)
	}
	return found, nil
}

// write makes the planned changes under the present lease.
func (s *Session) write(ctx context.Context, changes []change) error {
	if len(changes) == 0 {
		return nil
	}
	err := s.call(ctx, func(ctx context.Context) error {
		done, err := s.store.Write(ctx, s.lease, changes)
		if err == nil && !done {
			err = errRaced
		}
		return err
	})
	if errors.Is(err, errLeaseGone) {
		s.loseLease()
	}
	if err != nil {
		return fmt.Errorf("write records: %w", err)
	}
	return nil
}

// wake makes the guard look at the records now.
func (s *Session) wake() {
	select {
	case s.wakeup <- struct{}{}:
	default: // it will look anyway
	}
}

// signal tells the owner of a key that it is lost.
func (e *entry) signal() {
	select {
	case e.lost <- struct{}{}:
	default: // it knows
	}
}

// settle notes until when the lease is certain to be ours.
func (s *Session) settle(deadline time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.safe = deadline
}

func newBackOff() *backoff.ExponentialBackOff {
	b := backoff.NewExponentialBackOff()
	// Short even at its longest: the records have to be back soon after etcd is, and one refused connection a second costs nothing.
	b.InitialInterval, b.MaxInterval, b.Multiplier = 50*time.Millisecond, time.Second, 2
	return b
}

// wait waits for d or the end of ctx.
func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
