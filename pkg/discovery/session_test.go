package discovery

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"pgregory.net/rapid"

	"dynworker/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const (
	instanceKey = "v1/instances/dynamo/backend/generate/1001"
	cardKey     = "v1/mdc/dynamo/backend/generate/1001"
	ttl         = 9 * time.Second
)

var (
	instance = Record{Key: instanceKey, Value: []byte(`{"type":"Endpoint"}`)}
	card     = Record{Key: cardKey, Value: []byte(`{"type":"Model"}`)}
)

// states collects what a session reports.
type states struct {
	mu  sync.Mutex
	all []State
}

func (s *states) add(st State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, st)
}

func (s *states) take() []State {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := s.all
	s.all = nil
	return all
}

// bench is a session on a fake store.
type bench struct {
	*Session
	store  *fakeStore
	states states
	lines  lineCounter
}

// lineCounter is a log that keeps the messages.
type lineCounter struct {
	mu    sync.Mutex
	lines []string
}

func (l *lineCounter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, string(p))
	return len(p), nil
}

func (l *lineCounter) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	lines := l.lines
	l.lines = nil
	return lines
}

func newBench(t require.TestingT, st *fakeStore) *bench {
	b := &bench{store: st}
	cfg := Config{
		Endpoints: []string{"http://fake:1"}, LeaseTTL: ttl, CallTimeout: 2 * time.Second,
		Logger: zerolog.New(&b.lines), OnState: b.states.add,
	}
	cfg, _, err := cfg.withDefaults()
	require.NoError(t, err)
	b.Session, err = newSession(context.Background(), st, cfg)
	require.NoError(t, err)
	return b
}

// inBubble runs f on fake time with a session that has instance and card registered, and closes it.
func inBubble(t *testing.T, f func(t *testing.T, b *bench)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, newFakeStore())
		require.NoError(t, b.Register(t.Context(), instance, card))
		synctest.Wait()
		b.states.take()
		b.lines.take()
		f(t, b)
		require.NoError(t, b.Close(t.Context()))
		require.Empty(t, b.store.contents())
		require.Empty(t, b.store.leaseIDs())
	})
}

func (b *bench) requireInPlace(t require.TestingT) {
	lease := b.State().Lease
	require.NotZero(t, lease)
	got := b.store.contents()
	require.Len(t, got, 2)
	require.True(t, holds(got[instanceKey], string(instance.Value), lease), "instance under the present lease")
	require.True(t, holds(got[cardKey], string(card.Value), lease), "card under the present lease")
	require.Contains(t, b.store.leaseIDs(), lease)
	st := b.State()
	require.True(t, st.Registered, st.Reason)
	require.True(t, st.Reachable, st.Reason)
	require.Empty(t, st.Reason)
}

func TestRecordsStayForAsLongAsTheSession(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		first := b.State().Lease
		require.EqualValues(t, first, b.InstanceID())
		time.Sleep(time.Hour)
		b.requireInPlace(t)
		require.Equal(t, first, b.State().Lease)
		require.Equal(t, 1, b.store.putsOf(instanceKey))
		require.Empty(t, b.states.take())
		require.Empty(t, b.lines.take())
	})
}

func TestRegisterIsOneTransaction(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		require.Len(t, b.store.writes, 1)
		require.Len(t, b.store.writes[0], 2)
	})
}

func TestRevokedLease(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		id, first := b.InstanceID(), b.State().Lease
		b.store.revokeNow(first)
		synctest.Wait() // the watch tells: no time has to pass
		b.requireInPlace(t)
		st := b.State()
		require.Equal(t, id, b.InstanceID())
		require.NotEqual(t, first, st.Lease)
		require.EqualValues(t, 1, st.Losses)
		require.EqualValues(t, 1, st.Reregistrations)
		lines := b.lines.take()
		require.Len(t, lines, 2)
		require.Contains(t, lines[0], "registration lost")
		require.Contains(t, lines[0], "expired or was revoked")
		require.Contains(t, lines[1], "records put back")
	})
}

func TestRevokedLeaseWithoutWatch(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.store.mu.Lock()
		clear(b.store.watches)
		b.store.mu.Unlock()
		b.store.revokeNow(b.State().Lease)
		time.Sleep(ttl/3 + time.Millisecond)
		synctest.Wait()
		b.requireInPlace(t)
	})
}

func TestDeletedKey(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		lease := b.State().Lease
		b.store.deleteNow(instanceKey)
		synctest.Wait()
		b.requireInPlace(t)
		st := b.State()
		require.Equal(t, lease, st.Lease)
		require.Zero(t, st.Losses)
		require.EqualValues(t, 1, st.Reregistrations)
		require.Equal(t, 1, b.store.putsOf(cardKey), "only what is missing is put")
		lines := b.lines.take()
		require.Len(t, lines, 2)
		require.Contains(t, lines[0], instanceKey)
	})
}

func TestRepairWithLostAnswer(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.store.loseNextAnswer()
		b.store.revokeNow(b.State().Lease)
		time.Sleep(time.Second)
		synctest.Wait()
		b.requireInPlace(t)
		require.EqualValues(t, 1, b.State().Reregistrations, "put back once, whatever the first answer was")
	})
}

// A record that somebody restored from a backup is under no lease and would stay for ever.
func TestRecordUnderAnotherLeaseIsMoved(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.store.putNow(instanceKey, string(instance.Value), 0)
		time.Sleep(ttl)
		synctest.Wait()
		b.requireInPlace(t)
		require.EqualValues(t, 1, b.State().Reregistrations)
	})
}

func TestForeignValueIsNotTouched(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.store.putNow(instanceKey, "somebody else", 0)
		time.Sleep(10 * ttl)
		synctest.Wait()
		require.True(t, holds(b.store.contents()[instanceKey], "somebody else", 0))
		st := b.State()
		require.False(t, st.Registered)
		require.True(t, st.Reachable)
		require.Contains(t, st.Reason, instanceKey)
		require.Len(t, b.lines.take(), 1, "one line, however long it lasts")

		b.store.deleteNow(instanceKey)
		synctest.Wait()
		b.requireInPlace(t)
	})
}

func TestStoppedWithinTheLease(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		lease := b.State().Lease
		b.store.stop()
		time.Sleep(ttl * 2 / 3)
		require.True(t, b.State().Registered)
		require.False(t, b.State().Reachable)
		b.store.start(false)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		b.requireInPlace(t)
		require.Equal(t, lease, b.State().Lease)
		require.Zero(t, b.State().Losses)
		lines := b.lines.take()
		require.Len(t, lines, 2)
		require.Contains(t, lines[0], "trying on")
		require.Contains(t, lines[1], "etcd answers again")
	})
}

// After a restart the old lease is there again with its full time, and so are the records. They must be there long after that time.
func TestKilledAndRestarted(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.store.stop()
		time.Sleep(3 * ttl)
		st := b.State()
		require.False(t, st.Registered)
		require.EqualValues(t, 1, st.Losses)
		require.Contains(t, st.Reason, "connection refused")
		b.store.start(false)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		b.requireInPlace(t)
		time.Sleep(10 * ttl)
		b.requireInPlace(t)
		require.EqualValues(t, 1, b.State().Losses)
		lines := b.lines.take()
		require.Len(t, lines, 3)
		require.Contains(t, lines[2], "registration is intact")
		require.Len(t, b.states.take(), 3, "unreachable, lost, back")
	})
}

func TestRestartedEmpty(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		for range 3 {
			b.store.stop()
			time.Sleep(3 * ttl)
			b.store.start(true)
			time.Sleep(2 * time.Second)
			synctest.Wait()
			b.requireInPlace(t)
		}
		require.EqualValues(t, 3, b.State().Losses, "an outage in which the lease is gone is one loss")
		require.EqualValues(t, 3, b.State().Reregistrations)
	})
}

func TestFrozen(t *testing.T) {
	for name, pause := range map[string]time.Duration{"shorter than the lease": ttl / 2, "longer than the lease": 5 * ttl} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, b *bench) {
				b.store.freeze()
				time.Sleep(pause)
				b.store.thaw()
				time.Sleep(3 * time.Second)
				synctest.Wait()
				b.requireInPlace(t)
				time.Sleep(10 * ttl)
				b.requireInPlace(t)
				if pause > ttl {
					require.EqualValues(t, 1, b.State().Losses)
				} else {
					require.Zero(t, b.State().Losses)
				}
			})
		})
	}
}

func TestWithdrawOneKeyKeepsTheOther(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		require.NoError(t, b.Withdraw(t.Context(), instanceKey))
		require.Equal(t, []string{cardKey}, slices.Collect(maps.Keys(b.store.contents())))
		require.True(t, b.State().Registered)

		b.store.revokeNow(b.State().Lease)
		synctest.Wait()
		time.Sleep(10 * ttl)
		require.Equal(t, []string{cardKey}, slices.Collect(maps.Keys(b.store.contents())), "the card is guarded, the instance stays away")

		require.NoError(t, b.Withdraw(t.Context()))
		require.Empty(t, b.store.contents())
		require.Equal(t, reasonWithdrawn, b.State().Reason)
		require.False(t, b.State().Registered)
		require.NoError(t, b.Withdraw(t.Context(), instanceKey, "no such key"), "withdrawing twice does nothing")
		require.NoError(t, b.Withdraw(t.Context()))
	})
}

func TestWithdrawAndCloseWithCancelledContext(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.NoError(t, b.Withdraw(ctx, instanceKey))
		require.NotContains(t, b.store.contents(), instanceKey)
		require.NoError(t, b.Close(ctx))
		require.Empty(t, b.store.contents())
		require.Empty(t, b.store.leaseIDs())
	})
}

func TestWithdrawIsBoundedAndMadeUpFor(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.store.freeze()
		start := time.Now()
		err := b.Withdraw(t.Context(), instanceKey)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.LessOrEqual(t, time.Since(start), defaultWithdrawTimeout)
		b.store.thaw()
		time.Sleep(3 * time.Second)
		synctest.Wait()
		require.Equal(t, []string{cardKey}, slices.Collect(maps.Keys(b.store.contents())))
		b.mu.Lock()
		require.Contains(t, b.records, instanceKey, "watched over for a while")
		b.mu.Unlock()
		time.Sleep(10 * ttl)
		b.mu.Lock()
		require.NotContains(t, b.records, instanceKey, "and forgotten at last")
		b.mu.Unlock()
	})
}

// The guard is in the middle of putting a key back when the key is withdrawn.
func TestWithdrawDuringRepair(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.store.mu.Lock()
		clear(b.store.watches) // so that the guard learns of it by its beat, at a known time
		b.store.mu.Unlock()
		b.store.deleteNow(instanceKey)
		b.store.freeze() // the beat's request will hang
		time.Sleep(ttl/3 + 500*time.Millisecond)
		synctest.Wait()
		var wg sync.WaitGroup
		var err error
		wg.Go(func() { err = b.Withdraw(t.Context(), instanceKey) })
		synctest.Wait()
		b.store.thaw()
		wg.Wait()
		require.NoError(t, err)
		require.NotContains(t, b.store.contents(), instanceKey)
		time.Sleep(10 * ttl)
		require.NotContains(t, b.store.contents(), instanceKey)
	})
}

func TestCloseWhileEtcdIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, newFakeStore())
		require.NoError(t, b.Register(t.Context(), instance, card))
		b.store.freeze()
		start := time.Now()
		err := b.Close(t.Context())
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.LessOrEqual(t, time.Since(start), defaultWithdrawTimeout)
		require.Equal(t, err, b.Close(t.Context()), "the second call says the same")
		b.store.thaw()
		time.Sleep(ttl)
		require.Empty(t, b.store.contents(), "the lease ran out")
	})
}

func TestClosedSession(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		require.NoError(t, b.Close(t.Context()))
		require.NoError(t, b.Close(t.Context()))
		require.ErrorIs(t, b.Register(t.Context(), instance), ErrClosed)
		require.NoError(t, b.Withdraw(t.Context(), instanceKey))
		require.Equal(t, reasonClosed, b.State().Reason)
	})
}

func TestCloseEndsRegister(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.store.stop()
		var wg sync.WaitGroup
		var err error
		wg.Go(func() { err = b.Register(t.Context(), Record{Key: "another", Value: []byte("x")}) })
		time.Sleep(time.Second)
		b.store.start(false)
		require.NoError(t, b.Close(t.Context()))
		wg.Wait()
		if err != nil { // it may have been registered just before
			require.ErrorIs(t, err, ErrClosed)
		}
	})
}

func TestKeyTaken(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		other := newBench(t, b.store)
		err := other.Register(t.Context(), Record{Key: "free", Value: []byte("x")}, instance)
		require.ErrorIs(t, err, ErrKeyTaken)
		var taken *KeyTakenError
		require.ErrorAs(t, err, &taken)
		require.Equal(t, instanceKey, taken.Key)
		require.Contains(t, err.Error(), instanceKey)
		require.NoError(t, other.Close(t.Context()))
		b.requireInPlace(t) // which also says that "free" was not put
	})
}

func TestRegisterAgain(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		require.NoError(t, b.Register(t.Context(), instance, card))
		require.Equal(t, 1, b.store.putsOf(instanceKey), "nothing new, nothing done")
		require.ErrorIs(t, b.Register(t.Context(), Record{Key: instanceKey, Value: []byte("other")}), ErrKeyTaken)

		require.NoError(t, b.Withdraw(t.Context(), instanceKey))
		require.NoError(t, b.Register(t.Context(), instance))
		b.requireInPlace(t)
		b.store.deleteNow(instanceKey)
		synctest.Wait()
		b.requireInPlace(t)
	})
}

// A withdrawal that failed leaves the record in etcd; registering it again is then no conflict.
func TestRegisterAfterFailedWithdraw(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.store.stop()
		require.Error(t, b.Withdraw(t.Context(), instanceKey))
		var wg sync.WaitGroup
		var err error
		wg.Go(func() { err = b.Register(t.Context(), instance) })
		synctest.Wait()
		b.store.start(false)
		wg.Wait()
		require.NoError(t, err)
		time.Sleep(ttl)
		b.requireInPlace(t)
	})
}

func TestRegisterWithLostAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, newFakeStore())
		b.store.loseNextAnswer()
		require.NoError(t, b.Register(t.Context(), instance, card))
		b.requireInPlace(t)
		require.NoError(t, b.Close(t.Context()))
	})
}

// The lease is lost while the registration is on its way.
func TestRegisterAfterTheLeaseIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, newFakeStore())
		id := b.InstanceID()
		b.store.revokeNow(b.State().Lease)
		require.NoError(t, b.Register(t.Context(), instance, card))
		b.requireInPlace(t)
		require.Equal(t, id, b.InstanceID())
		require.NoError(t, b.Close(t.Context()))
	})
}

func TestFailedRegisterLeavesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, newFakeStore())
		b.store.freeze()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		err := b.Register(ctx, instance, card)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		b.store.thaw() // which carries the request out
		time.Sleep(3 * time.Second)
		synctest.Wait()
		require.Equal(t, 1, b.store.putsOf(instanceKey))
		require.Empty(t, b.store.contents())
		require.Equal(t, reasonNothingYet, b.State().Reason)
		require.NoError(t, b.Close(t.Context()))
	})
}

func TestRegisterRefusesNonsense(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		require.ErrorContains(t, b.Register(t.Context(), Record{Value: []byte("x")}), "no key")
		require.ErrorContains(t, b.Register(t.Context(), instance, instance), instanceKey)
		require.NoError(t, b.Register(t.Context()))
	})
}

func TestSessionWaitsForItsLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := newFakeStore()
		st.stop()
		cfg, _, err := Config{Endpoints: []string{"http://fake:1"}}.withDefaults()
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err = newSession(ctx, st, cfg)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, err, errDown, "the cause is named too")
	})
}

// TestAnythingMayHappen: whatever happens in whatever order, in the end etcd holds what the session wants and nothing else, under a lease that lives.
func TestAnythingMayHappen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rapid.Check(bubbleTB{t}, func(t *rapid.T) {
			st := newFakeStore()
			b := newBench(t, st)
			defer func() { // also when the property does not hold: the bubble must not keep goroutines
				st.thaw()
				st.start(false)
				_ = b.Close(context.Background())
			}()
			wanted := make(map[string]string)
			keys := []string{"a", "b", "c"}
			drawKey := func() string { return rapid.SampledFrom(keys).Draw(t, "key") }
			pause := func() { time.Sleep(time.Duration(rapid.IntRange(0, int(2*ttl)).Draw(t, "pause"))) }
			maybe := make(map[string]bool) // whose registration failed, so that it is not known what there is for now
			t.Repeat(map[string]func(*rapid.T){
				"register": func(*rapid.T) {
					key := drawKey()
					ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
					defer cancel()
					err := b.Register(ctx, Record{Key: key, Value: []byte("v" + key)})
					switch {
					case err == nil:
						wanted[key] = "v" + key
						delete(maybe, key)
					case wanted[key] == "":
						maybe[key] = true
					}
				},
				"withdraw": func(t *rapid.T) {
					key := drawKey()
					delete(wanted, key)
					if err := b.Withdraw(context.Background(), key); err == nil && !maybe[key] {
						require.NotContains(t, st.contents(), key)
					}
				},
				"revoke": func(*rapid.T) {
					if lease := b.State().Lease; lease != 0 {
						st.revokeNow(lease)
					}
				},
				"delete":        func(*rapid.T) { st.deleteNow(drawKey()) },
				"restore":       func(*rapid.T) { key := drawKey(); restore(st, key, wanted[key]) },
				"stop":          func(*rapid.T) { st.stop() },
				"start":         func(*rapid.T) { st.start(false) },
				"start empty":   func(*rapid.T) { st.start(true) },
				"freeze":        func(*rapid.T) { st.freeze() },
				"thaw":          func(*rapid.T) { st.thaw() },
				"lose answer":   func(*rapid.T) { st.loseNextAnswer() },
				"time goes by":  func(*rapid.T) { pause() },
				"instance id":   func(t *rapid.T) { require.EqualValues(t, 0x1001, b.InstanceID()) },
				"let it settle": func(*rapid.T) { synctest.Wait() },
			})
			st.thaw()
			st.start(false)
			time.Sleep(3 * ttl)
			synctest.Wait()
			got, state := st.contents(), b.State()
			require.Len(t, got, len(wanted), "%v %v", got, wanted)
			for key, value := range wanted {
				require.True(t, holds(got[key], value, state.Lease), key)
			}
			require.Contains(t, st.leaseIDs(), state.Lease)
			require.Equal(t, len(wanted) > 0, state.Registered, state.Reason)
			require.True(t, state.Reachable)
			require.NoError(t, b.Close(context.Background()))
			require.Empty(t, st.contents())
			time.Sleep(ttl)
			require.Empty(t, st.leaseIDs())
		})
	})
}

// bubbleTB hides the method Deadline of a *testing.T, which must not be called in a bubble and which rapid would call.
type bubbleTB struct{ testing.TB }

// restore puts a record back as somebody with a backup would, without a lease.
func restore(st *fakeStore, key, value string) {
	if value != "" {
		st.putNow(key, value, 0)
	}
}

func TestErrorKinds(t *testing.T) {
	require.True(t, isFinal(&KeyTakenError{Key: "k"}))
	require.True(t, isFinal(ErrClosed))
	require.False(t, isFinal(errRaced))
	require.False(t, isFinal(context.DeadlineExceeded))
	require.False(t, isFinal(errors.New("anything else")))
	require.True(t, isFinal(fmt.Errorf("write: %w", rpctypes.ErrPermissionDenied)))
	require.True(t, isFinal(rpctypes.ErrRequestTooLarge))
	require.False(t, isFinal(rpctypes.ErrNoSpace))
	require.False(t, isFinal(rpctypes.ErrAuthOldRevision))
	require.True(t, isFinal(status.Error(codes.ResourceExhausted, "message larger than max")))
	require.True(t, refusesCredentials(rpctypes.ErrAuthFailed))
	require.False(t, refusesCredentials(rpctypes.ErrPermissionDenied))
}
