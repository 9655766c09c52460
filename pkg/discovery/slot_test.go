package discovery

import (
	"context"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dynworker/internal/testenv"
	"dynworker/internal/testenv/embedded"
)

const slots = "dynworker/machine_slots/"

func (b *bench) claim(t *testing.T, bound int) *Slot {
	t.Helper()
	sl, err := b.ClaimSlot(t.Context(), slots, bound, "test")
	require.NoError(t, err)
	return sl
}

func requireNumber(t *testing.T, sl *Slot) int {
	t.Helper()
	n, ok := sl.Number()
	require.True(t, ok)
	return n
}

func requireUncertain(t *testing.T, sl *Slot) {
	t.Helper()
	_, ok := sl.Number()
	require.False(t, ok)
}

func TestASlotStaysForAsLongAsTheLease(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		sl := b.claim(t, 4)
		n := requireNumber(t, sl)
		require.EqualValues(t, b.InstanceID()%4, n)
		time.Sleep(time.Hour)
		require.Equal(t, n, requireNumber(t, sl))
		require.Equal(t, 1, b.store.putsOf(slots+strconv.Itoa(n)))

		require.NoError(t, b.Withdraw(t.Context(), instanceKey, cardKey))
		require.Equal(t, n, requireNumber(t, sl), "a worker that drains still makes ids")
		require.NoError(t, b.Close(t.Context()))
		requireUncertain(t, sl)
	})
}

// While etcd does not answer, the lease runs out at a moment that only the clock tells.
func TestASlotIsUncertainWhenTheLeaseMayBeOver(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		sl := b.claim(t, 4)
		n := requireNumber(t, sl)
		b.store.freeze()
		time.Sleep(ttl - time.Millisecond) // since the lease was granted
		require.Equal(t, n, requireNumber(t, sl))
		time.Sleep(time.Millisecond)
		requireUncertain(t, sl)
		b.store.thaw()
		time.Sleep(ttl)
		require.Equal(t, n, requireNumber(t, sl), "nobody has taken it, so it is put back")
	})
}

func TestASlotThatWasTakenIsGivenUp(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		sl := b.claim(t, 4)
		n := requireNumber(t, sl)
		key := slots + strconv.Itoa(n)
		b.store.revokeNow(b.State().Lease)
		b.store.putNow(key, "somebody else", 0)
		time.Sleep(2 * ttl)
		require.Equal(t, (n+1)%4, requireNumber(t, sl))
		st := b.State()
		require.True(t, st.Registered, "the other records are not concerned: %s", st.Reason)
		require.Equal(t, "somebody else", string(b.store.contents()[key].value))
		time.Sleep(time.Hour)
		require.Equal(t, (n+1)%4, requireNumber(t, sl))
		require.Equal(t, "somebody else", string(b.store.contents()[key].value))
		b.store.deleteNow(key)
	})
}

// With all other numbers taken there is none until one is free.
func TestASlotIsTriedForUntilThereIsOne(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		sl := b.claim(t, 2)
		b.store.revokeNow(b.State().Lease)
		b.store.putNow(slots+"0", "a", 0)
		b.store.putNow(slots+"1", "b", 0)
		time.Sleep(time.Minute)
		requireUncertain(t, sl)
		b.store.deleteNow(slots + "1")
		time.Sleep(ttl)
		require.Equal(t, 1, requireNumber(t, sl))
		b.store.deleteNow(slots + "0")
	})
}

func TestNoSlotIsLeft(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.store.putNow(slots+"0", "a", 0)
		_, err := b.ClaimSlot(t.Context(), slots, 1, "test")
		var none *NoSlotError
		require.ErrorAs(t, err, &none)
		require.Equal(t, &NoSlotError{Prefix: slots, Bound: 1}, none)
		_, err = b.ClaimSlot(t.Context(), slots, 0, "test")
		require.ErrorAs(t, err, &none)
		b.store.deleteNow(slots + "0")
	})
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, newFakeStore())
		require.NoError(t, b.Close(t.Context()))
		_, err := b.ClaimSlot(t.Context(), slots, 4, "test")
		require.ErrorIs(t, err, ErrClosed)
	})
}

// More sessions than slots claim at the same time: each number goes to one of them, and one gets none until another has gone.
func TestEtcdSlotsAreUnique(t *testing.T) {
	t.Parallel()
	const bound = 5
	etcd := testenv.StartEtcd(t, embedded.EtcdOptions{})
	type result struct {
		session *Session
		slot    *Slot
		err     error
	}
	results := make([]result, bound+1)
	var claims sync.WaitGroup
	for i := range results {
		session, err := connect(t, Config{Endpoints: []string{etcd.Endpoint()}, LeaseTTL: longTTL}).Session(testenv.Context(t))
		require.NoError(t, err)
		t.Cleanup(func() { _ = session.Close(context.Background()) })
		claims.Go(func() {
			sl, err := session.ClaimSlot(testenv.Context(t), slots, bound, "test")
			results[i] = result{session, sl, err}
		})
	}
	claims.Wait()
	var numbers []int
	var without, with *Session
	for _, r := range results {
		if r.err == nil {
			numbers = append(numbers, requireNumber(t, r.slot))
			with = r.session
			continue
		}
		var none *NoSlotError
		require.ErrorAs(t, r.err, &none)
		without = r.session
	}
	slices.Sort(numbers)
	require.Equal(t, []int{0, 1, 2, 3, 4}, numbers)
	require.NotNil(t, without)
	require.NoError(t, with.Close(testenv.Context(t)))
	_, err := without.ClaimSlot(testenv.Context(t), slots, bound, "test")
	require.NoError(t, err)
}
