package embedded

import (
	"context"
	"fmt"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"
	"go.uber.org/zap"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait; reaching it means that the thing does not happen at all.
const patience = 60 * time.Second

func newEtcd(t *testing.T, opts EtcdOptions) *Etcd {
	t.Helper()
	e, err := NewEtcd(opts)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.Close()) })
	return e
}

func etcdClient(t *testing.T, cfg clientv3.Config) *clientv3.Client {
	t.Helper()
	cfg.Logger = zap.NewNop()
	c, err := clientv3.New(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

func TestEtcdKeepsAddressAndData(t *testing.T) {
	ctx := testContext(t)
	e := newEtcd(t, EtcdOptions{})
	endpoint := e.Endpoint()
	c := etcdClient(t, clientv3.Config{Endpoints: []string{endpoint}})
	_, err := c.Put(ctx, "k", "v")
	require.NoError(t, err)
	lease, err := c.Grant(ctx, 600)
	require.NoError(t, err)

	require.NoError(t, e.Start(), "Start of a running server does nothing")
	e.Stop()
	e.Stop()
	requireRefused(t, e.Address())

	require.NoError(t, e.Start())
	require.Equal(t, endpoint, e.Endpoint())
	got, err := c.Get(ctx, "k")
	require.NoError(t, err)
	require.Len(t, got.Kvs, 1)
	require.Equal(t, "v", string(got.Kvs[0].Value))
	ttl, err := c.TimeToLive(ctx, lease.ID)
	require.NoError(t, err)
	require.Positive(t, ttl.TTL, "the lease outlives the restart")

	require.NoError(t, e.StartEmpty())
	require.Equal(t, endpoint, e.Endpoint())
	got, err = c.Get(ctx, "k")
	require.NoError(t, err)
	require.Empty(t, got.Kvs)
}

func TestEtcdStopCutsWatches(t *testing.T) {
	ctx := testContext(t)
	e := newEtcd(t, EtcdOptions{})
	c := etcdClient(t, clientv3.Config{Endpoints: []string{e.Endpoint()}})
	w := c.Watch(ctx, "k", clientv3.WithCreatedNotify())
	require.True(t, (<-w).Created)

	e.Stop()
	requireRefused(t, e.Address())
	require.NoError(t, e.Start())
	// A write through the old client could meet its broken connection; a new client waits until it has one.
	writer := etcdClient(t, clientv3.Config{Endpoints: []string{e.Endpoint()}})
	_, err := writer.Put(ctx, "k", "after")
	require.NoError(t, err)
	resp := <-w
	require.NoError(t, resp.Err())
	require.Equal(t, "after", string(resp.Events[0].Kv.Value))
}

func TestEtcdAuthentication(t *testing.T) {
	ctx := testContext(t)
	e := newEtcd(t, EtcdOptions{Password: "secret"})
	for _, restart := range []func() error{func() error { return nil }, func() error { e.Stop(); return e.Start() }, e.StartEmpty} {
		require.NoError(t, restart())
		in := etcdClient(t, clientv3.Config{Endpoints: []string{e.Endpoint()}, Username: "root", Password: "secret"})
		_, err := in.Get(ctx, "k")
		require.NoError(t, err)
		out := etcdClient(t, clientv3.Config{Endpoints: []string{e.Endpoint()}})
		_, err = out.Get(ctx, "k")
		require.Error(t, err)
	}
}

func TestEtcdCloseTwice(t *testing.T) {
	e, err := NewEtcd(EtcdOptions{})
	require.NoError(t, err)
	require.NoError(t, e.Close())
	require.NoError(t, e.Close())
	require.NoDirExists(t, e.dir)
	require.ErrorIs(t, e.Start(), errClosed)
	require.ErrorIs(t, e.StartEmpty(), errClosed)
}

func TestEtcdStartFailureLeavesNothing(t *testing.T) {
	_, err := NewEtcd(EtcdOptions{CertFile: "no-such-cert.pem", KeyFile: "no-such-key.pem"})
	require.Error(t, err)
}

func newNATS(t *testing.T, opts NATSOptions) *NATS {
	t.Helper()
	n, err := NewNATS(opts)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, n.Close()) })
	return n
}

func TestNATSKeepsAddress(t *testing.T) {
	n := newNATS(t, NATSOptions{})
	url := n.URL()
	for range 3 {
		require.NoError(t, n.Start())
		c, err := nats.Connect(url, nats.NoReconnect())
		require.NoError(t, err)
		sub, err := c.SubscribeSync("s")
		require.NoError(t, err)
		require.NoError(t, c.Publish("s", []byte("hello")))
		m, err := sub.NextMsg(patience)
		require.NoError(t, err)
		require.Equal(t, "hello", string(m.Data))
		require.Equal(t, 1, n.NumClients())
		c.Close()
		n.Stop()
		n.Stop()
		require.Zero(t, n.NumClients())
		requireRefused(t, n.Address())
		require.Equal(t, url, n.URL())
	}
}

func TestNATSOptions(t *testing.T) {
	n := newNATS(t, NATSOptions{Username: "user", Password: "secret", MaxPayload: 4096})
	_, err := nats.Connect(n.URL())
	require.ErrorIs(t, err, nats.ErrAuthorization)
	c, err := nats.Connect(n.URL(), nats.UserInfo("user", "secret"))
	require.NoError(t, err)
	defer c.Close()
	require.EqualValues(t, 4096, c.MaxPayload())

	n = newNATS(t, NATSOptions{Token: "t0ken"})
	_, err = nats.Connect(n.URL())
	require.ErrorIs(t, err, nats.ErrAuthorization)
	c2, err := nats.Connect(n.URL(), nats.Token("t0ken"))
	require.NoError(t, err)
	c2.Close()
}

func TestNATSCloseTwice(t *testing.T) {
	n, err := NewNATS(NATSOptions{})
	require.NoError(t, err)
	require.NoError(t, n.Close())
	require.NoError(t, n.Close())
	require.ErrorIs(t, n.Start(), errClosed)
}

func requireRefused(t *testing.T, address string) {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err == nil {
		_ = c.Close()
	}
	require.ErrorIs(t, err, syscall.ECONNREFUSED, fmt.Sprintf("dial %s", address))
}
