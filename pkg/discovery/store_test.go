package discovery

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dynworker/internal/testenv"
	"dynworker/internal/testenv/embedded"
)

// The session is tried against a model of etcd; here model and etcd have to agree on what the session relies on.
func TestStoreContract(t *testing.T) {
	t.Parallel()
	e := testenv.StartEtcd(t, embedded.EtcdOptions{})
	c := connect(t, Config{Endpoints: []string{e.Endpoint()}})
	for name, st := range map[string]store{"model": newFakeStore(), "etcd": &etcdStore{etcd: c.etcd, dialer: c.dialer}} {
		t.Run(name, func(t *testing.T) {
			ctx := testenv.Context(t)
			lease, granted, err := st.Grant(ctx, time.Minute)
			require.NoError(t, err)
			require.Positive(t, lease)
			require.Equal(t, time.Minute, granted)
			other, _, err := st.Grant(ctx, time.Minute)
			require.NoError(t, err)
			require.NotEqual(t, lease, other)
			left, err := st.KeepAlive(ctx, lease)
			require.NoError(t, err)
			require.Equal(t, time.Minute, left)

			found, err := st.Read(ctx, []string{"a", "b"})
			require.NoError(t, err)
			require.Empty(t, found)
			write := func(lease int64, changes ...change) bool {
				done, err := st.Write(ctx, lease, changes)
				require.NoError(t, err)
				return done
			}
			require.True(t, write(lease, change{key: "a", value: []byte("1")}, change{key: "b", value: []byte("2")}))
			require.False(t, write(lease, change{key: "a", value: []byte("x")}, change{key: "c", value: []byte("x")}), "a is there")
			found, err = st.Read(ctx, []string{"a", "b", "c"})
			require.NoError(t, err)
			require.Len(t, found, 2, "all or nothing")
			require.True(t, holds(found["a"], "1", lease))
			require.True(t, holds(found["b"], "2", lease))

			require.True(t, write(other, change{key: "a", value: []byte("1"), revision: found["a"].revision}), "moved")
			require.False(t, write(lease, change{key: "a", value: []byte("1"), revision: found["a"].revision}), "moved by somebody else")
			require.False(t, write(lease, change{key: "a", remove: true, revision: found["a"].revision}))
			found, err = st.Read(ctx, []string{"a"})
			require.NoError(t, err)
			require.True(t, holds(found["a"], "1", other))

			// A watch speaks when it begins and when the key goes, whoever removes it.
			watching, stop := context.WithCancel(ctx)
			news := make(chan struct{}, 100)
			var watcher sync.WaitGroup
			var ended error
			watcher.Go(func() { ended = st.Watch(watching, "a", func() { news <- struct{}{} }) })
			<-news
			require.True(t, write(lease, change{key: "a", remove: true, revision: found["a"].revision}))
			<-news
			require.True(t, write(lease, change{key: "a", value: []byte("1")}))
			require.NoError(t, st.Revoke(ctx, lease))
			<-news
			stop()
			watcher.Wait()
			require.ErrorIs(t, ended, context.Canceled)
			require.Empty(t, news, "puts are no news")

			found, err = st.Read(ctx, []string{"a", "b"})
			require.NoError(t, err)
			require.Empty(t, found, "gone with their lease")
			_, err = st.KeepAlive(ctx, lease)
			require.ErrorIs(t, err, errLeaseGone)
			require.ErrorIs(t, st.Revoke(ctx, lease), errLeaseGone)
			_, err = st.Write(ctx, lease, []change{{key: "a", value: []byte("1")}})
			require.ErrorIs(t, err, errLeaseGone)
		})
	}
}

// More keys than one transaction takes.
func TestEtcdReadsInBatches(t *testing.T) {
	t.Parallel()
	ctx := testenv.Context(t)
	e := testenv.StartEtcd(t, embedded.EtcdOptions{})
	c := connect(t, Config{Endpoints: []string{e.Endpoint()}})
	st := &etcdStore{etcd: c.etcd, dialer: c.dialer}
	lease, _, err := st.Grant(ctx, time.Minute)
	require.NoError(t, err)
	var keys []string
	for n := range 3 {
		var changes []change
		for i := range readBatch - n {
			key := fmt.Sprintf("v1/%d/%d", n, i)
			keys = append(keys, key)
			changes = append(changes, change{key: key, value: []byte(key)})
		}
		done, err := st.Write(ctx, lease, changes)
		require.NoError(t, err)
		require.True(t, done)
	}
	found, err := st.Read(ctx, keys)
	require.NoError(t, err)
	require.Len(t, found, len(keys))
	for _, key := range keys {
		require.True(t, holds(found[key], key, lease))
	}
}
