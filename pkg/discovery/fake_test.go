package discovery

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"
)

var errDown = errors.New("connection refused")

// fakeStore is an etcd as it matters to a session, on the clock of a synctest bubble.
// Like the real one it may carry out a request long after the client has given it up: see freeze.
type fakeStore struct {
	mu       sync.Mutex
	revision int64
	granted  int64
	leases   map[int64]*fakeLease
	keys     map[string]held
	watches  map[*fakeWatch]struct{}
	down     bool
	thawed   chan struct{} // closed while not frozen
	late     []func()      // requests that were given up while frozen
	writes   [][]change    // that took effect
	loseNext bool          // the next write takes effect, but its answer is lost
}

type fakeLease struct {
	ttl     time.Duration
	expires time.Time
}

type fakeWatch struct {
	key     string
	removed chan struct{}
	broken  chan struct{}
}

func newFakeStore() *fakeStore {
	f := &fakeStore{granted: 0x1000, leases: make(map[int64]*fakeLease), keys: make(map[string]held), watches: make(map[*fakeWatch]struct{}), thawed: make(chan struct{})}
	close(f.thawed)
	return f
}

// do carries out one request. The caller does not hold mu.
func (f *fakeStore) do(ctx context.Context, request func()) error {
	f.mu.Lock()
	thawed, down := f.thawed, f.down
	f.mu.Unlock()
	if down {
		return errDown
	}
	select {
	case <-thawed:
	case <-ctx.Done():
		f.mu.Lock()
		f.late = append(f.late, request)
		f.mu.Unlock()
		return ctx.Err()
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.expire()
	request()
	return nil
}

func (f *fakeStore) expire() {
	for id, l := range f.leases {
		if !time.Now().Before(l.expires) {
			f.endLease(id)
		}
	}
}

func (f *fakeStore) endLease(id int64) {
	delete(f.leases, id)
	for key, h := range f.keys {
		if h.lease == id {
			f.removeKey(key)
		}
	}
}

func (f *fakeStore) removeKey(key string) {
	f.revision++
	delete(f.keys, key)
	for w := range f.watches {
		if w.key == key {
			select {
			case w.removed <- struct{}{}:
			default:
			}
		}
	}
}

func (f *fakeStore) put(key string, value []byte, lease int64) {
	f.revision++
	f.keys[key] = held{value: value, lease: lease, revision: f.revision}
}

// The requests below leave their results in variables of their own, since one that was given up is still carried out when its caller is long gone.

func (f *fakeStore) Grant(ctx context.Context, ttl time.Duration) (int64, time.Duration, error) {
	var id int64
	if err := f.do(ctx, func() {
		f.granted++
		id = f.granted
		f.leases[id] = &fakeLease{ttl: ttl, expires: time.Now().Add(ttl)}
	}); err != nil {
		return 0, 0, err
	}
	return id, ttl, nil
}

func (f *fakeStore) KeepAlive(ctx context.Context, lease int64) (time.Duration, error) {
	var ttl time.Duration
	if err := f.do(ctx, func() {
		if l := f.leases[lease]; l != nil {
			l.expires = time.Now().Add(l.ttl)
			ttl = l.ttl
		}
	}); err != nil {
		return 0, err
	}
	if ttl == 0 {
		return 0, errLeaseGone
	}
	return ttl, nil
}

func (f *fakeStore) Revoke(ctx context.Context, lease int64) error {
	known := false
	if err := f.do(ctx, func() {
		known = f.leases[lease] != nil
		f.endLease(lease)
	}); err != nil {
		return err
	}
	if !known {
		return errLeaseGone
	}
	return nil
}

func (f *fakeStore) Read(ctx context.Context, keys []string) (map[string]held, error) {
	found := make(map[string]held)
	err := f.do(ctx, func() {
		for _, key := range keys {
			if h, ok := f.keys[key]; ok {
				found[key] = h
			}
		}
	})
	if err != nil {
		return nil, err
	}
	return found, nil
}

func (f *fakeStore) Write(ctx context.Context, lease int64, changes []change) (bool, error) {
	var done, lost bool
	var result error
	err := f.do(ctx, func() {
		for _, c := range changes {
			if !c.remove && f.leases[lease] == nil {
				result = errLeaseGone
				return
			}
			if f.keys[c.key].revision != c.revision {
				return
			}
		}
		done = true
		f.writes = append(f.writes, changes)
		for _, c := range changes {
			if c.remove {
				f.removeKey(c.key)
			} else {
				f.put(c.key, c.value, lease)
			}
		}
		lost, f.loseNext = f.loseNext, false
	})
	switch {
	case err != nil:
		return false, err
	case lost:
		return false, errDown
	default:
		return done, result
	}
}

func (f *fakeStore) Watch(ctx context.Context, key string, changed func()) error {
	w := &fakeWatch{key: key, removed: make(chan struct{}, 1), broken: make(chan struct{})}
	if err := f.do(ctx, func() { f.watches[w] = struct{}{} }); err != nil {
		return err
	}
	defer func() {
		f.mu.Lock()
		delete(f.watches, w)
		f.mu.Unlock()
	}()
	changed()
	for {
		select {
		case <-w.removed:
			changed()
		case <-w.broken:
			return errWatchEnded
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// What follows is what happens to etcd.

// stop makes every request fail at once and breaks the watches.
func (f *fakeStore) stop() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.down = true
	for w := range f.watches {
		close(w.broken)
		delete(f.watches, w)
	}
}

// start ends stop. As in etcd, every lease that has not been ended has its full time again.
func (f *fakeStore) start(empty bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.down = false
	if empty {
		f.leases, f.keys, f.revision = make(map[int64]*fakeLease), make(map[string]held), 0
	}
	for _, l := range f.leases {
		l.expires = time.Now().Add(l.ttl)
	}
}

// freeze makes requests wait. Those that are given up in the meantime are carried out by thaw all the same.
func (f *fakeStore) freeze() {
	f.mu.Lock()
	defer f.mu.Unlock()
	select {
	case <-f.thawed:
		f.thawed = make(chan struct{})
	default:
	}
}

func (f *fakeStore) thaw() {
	f.mu.Lock()
	defer f.mu.Unlock()
	select {
	case <-f.thawed:
		return
	default:
	}
	f.expire()
	for _, request := range f.late {
		request()
	}
	f.late = nil
	close(f.thawed)
}

func (f *fakeStore) revokeNow(lease int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.endLease(lease)
}

func (f *fakeStore) deleteNow(key string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.keys[key]; ok {
		f.removeKey(key)
	}
}

func (f *fakeStore) putNow(key, value string, lease int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.put(key, []byte(value), lease)
}

func (f *fakeStore) loseNextAnswer() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.loseNext = true
}

// contents returns what is stored now.
func (f *fakeStore) contents() map[string]held {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.expire()
	return maps.Clone(f.keys)
}

func (f *fakeStore) leaseIDs() []int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.expire()
	return slices.Sorted(maps.Keys(f.leases))
}

// putsOf counts the writes that put key.
func (f *fakeStore) putsOf(key string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, w := range f.writes {
		if slices.ContainsFunc(w, func(c change) bool { return c.key == key && !c.remove }) {
			n++
		}
	}
	return n
}

func holds(h held, value string, lease int64) bool {
	return bytes.Equal(h.value, []byte(value)) && h.lease == lease
}
