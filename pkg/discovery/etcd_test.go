package discovery

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"dynworker/internal/testenv"
	"dynworker/internal/testenv/embedded"
)

const (
	// shortTTL is for tests in which a lease has to run out. On a very busy machine it may run out once more than planned, which such a test has to bear.
	shortTTL = 3 * time.Second
	// longTTL is for all others: no beat comes within their time, so that what happens is due to what is tested.
	longTTL = 5 * time.Minute
)

func connect(t *testing.T, cfg Config) *Client {
	t.Helper()
	c, err := Connect(testenv.Context(t), cfg)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

// observer is a plain etcd client, to look at the store and to meddle with it.
func observer(t *testing.T, e *embedded.Etcd) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{e.Endpoint()}, Logger: zap.NewNop()})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func lookUp(t *testing.T, c *clientv3.Client, key string) (value string, lease int64) {
	t.Helper()
	resp, err := c.Get(testenv.Context(t), key)
	require.NoError(t, err)
	if len(resp.Kvs) == 0 {
		return "", 0
	}
	return string(resp.Kvs[0].Value), resp.Kvs[0].Lease
}

// requireInPlace waits until both records are there as they were registered, under a lease for which ok is true.
func requireInPlace(t *testing.T, c *clientv3.Client, ok func(lease int64) bool) {
	t.Helper()
	require.Eventually(t, func() bool {
		i, il := lookUp(t, c, instanceKey)
		m, ml := lookUp(t, c, cardKey)
		return i == string(instance.Value) && m == string(card.Value) && il == ml && ok(il)
	}, testenv.Patience, 10*time.Millisecond)
}

// requireState waits for a state for which ok is true.
func requireState(t *testing.T, s *Session, what string, ok func(State) bool) {
	t.Helper()
	require.Eventually(t, func() bool { return ok(s.State()) }, testenv.Patience, 10*time.Millisecond, what)
}

func registered(st State) bool { return st.Registered && st.Reachable }

// etcdBench is a session with both records on a real etcd.
type etcdBench struct {
	*Session
	etcd   *embedded.Etcd
	proxy  *testenv.Proxy
	client *Client
	plain  *clientv3.Client
	lines  lineCounter
}

func newEtcdBench(t *testing.T, ttl time.Duration) *etcdBench {
	t.Helper()
	b := &etcdBench{etcd: testenv.StartEtcd(t, embedded.EtcdOptions{})}
	b.proxy = testenv.NewProxy(t, b.etcd.Address())
	b.plain = observer(t, b.etcd)
	b.client = connect(t, Config{Endpoints: []string{b.proxy.Address()}, LeaseTTL: ttl, Logger: zerolog.New(&b.lines)})
	s, err := b.client.Session(testenv.Context(t))
	require.NoError(t, err)
	b.Session = s
	t.Cleanup(func() { _ = s.Close(context.Background()) })
	require.NoError(t, s.Register(testenv.Context(t), instance, card))
	requireInPlace(t, b.plain, func(lease int64) bool { return uint64(lease) == s.InstanceID() })
	return b
}

func TestEtcdLifeCycle(t *testing.T) {
	t.Parallel()
	b := newEtcdBench(t, longTTL)
	require.True(t, registered(b.State()))
	require.NoError(t, b.Withdraw(testenv.Context(t), instanceKey))
	value, _ := lookUp(t, b.plain, instanceKey)
	require.Empty(t, value)
	value, lease := lookUp(t, b.plain, cardKey)
	require.Equal(t, string(card.Value), value)
	require.NoError(t, b.Close(testenv.Context(t)))
	value, _ = lookUp(t, b.plain, cardKey)
	require.Empty(t, value)
	left, err := b.plain.TimeToLive(testenv.Context(t), clientv3.LeaseID(lease))
	require.NoError(t, err)
	require.EqualValues(t, -1, left.TTL, "the lease is revoked")
}

func TestEtcdWithdrawAndCloseAfterCancel(t *testing.T) {
	t.Parallel()
	b := newEtcdBench(t, longTTL)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, b.Withdraw(ctx, instanceKey))
	value, _ := lookUp(t, b.plain, instanceKey)
	require.Empty(t, value)
	require.NoError(t, b.Session.Close(ctx))
	value, _ = lookUp(t, b.plain, cardKey)
	require.Empty(t, value)
}

func TestEtcdRevokedOutside(t *testing.T) {
	t.Parallel()
	b := newEtcdBench(t, longTTL)
	id := b.InstanceID()
	// More than once: the second lease has to be guarded just like the first.
	for n := range uint64(3) {
		old := b.State().Lease
		_, err := b.plain.Revoke(testenv.Context(t), clientv3.LeaseID(old))
		require.NoError(t, err)
		requireInPlace(t, b.plain, func(lease int64) bool { return lease != old })
		requireState(t, b.Session, "registered again", func(st State) bool { return registered(st) && st.Losses == n+1 && st.Reregistrations == n+1 })
	}
	require.Equal(t, id, b.InstanceID())
}

func TestEtcdDeletedKey(t *testing.T) {
	t.Parallel()
	b := newEtcdBench(t, longTTL)
	for n := range uint64(3) {
		_, err := b.plain.Delete(testenv.Context(t), cardKey)
		require.NoError(t, err)
		requireInPlace(t, b.plain, func(lease int64) bool { return uint64(lease) == b.InstanceID() })
		requireState(t, b.Session, "registered again", func(st State) bool { return registered(st) && st.Reregistrations == n+1 })
	}
	require.Zero(t, b.State().Losses)
}

func TestEtcdRestored(t *testing.T) {
	t.Parallel()
	b := newEtcdBench(t, shortTTL)
	_, err := b.plain.Put(testenv.Context(t), instanceKey, string(instance.Value)) // under no lease
	require.NoError(t, err)
	requireInPlace(t, b.plain, func(lease int64) bool { return lease == b.State().Lease })
}

func TestEtcdRestartedEmpty(t *testing.T) {
	t.Parallel()
	b := newEtcdBench(t, longTTL)
	id := b.InstanceID()
	for n := range uint64(2) {
		require.NoError(t, b.etcd.StartEmpty())
		requireInPlace(t, b.plain, func(lease int64) bool { return lease != int64(id) })
		requireState(t, b.Session, "registered again", func(st State) bool { return registered(st) && st.Reregistrations == n+1 })
	}
	require.Equal(t, id, b.InstanceID())
	// The watches follow into the new store, whose revisions begin anew.
	_, err := b.plain.Delete(testenv.Context(t), instanceKey)
	require.NoError(t, err)
	requireInPlace(t, b.plain, func(int64) bool { return true })
	require.NoError(t, b.Session.Close(testenv.Context(t)))
	value, _ := lookUp(t, b.plain, instanceKey)
	require.Empty(t, value)
}

func TestEtcdKilledAndRestarted(t *testing.T) {
	t.Parallel()
	b := newEtcdBench(t, shortTTL)
	// A lease that nobody keeps alive shows when all leases of before have run out.
	control, err := b.plain.Grant(testenv.Context(t), int64(shortTTL/time.Second))
	require.NoError(t, err)
	b.etcd.Stop()
	requireState(t, b.Session, "lease presumed lost", func(st State) bool { return !st.Registered && st.Losses > 0 })
	require.Contains(t, b.State().Reason, "etcd does not answer")
	require.NoError(t, b.etcd.Start())
	requireState(t, b.Session, "registered again", registered)
	require.Eventually(t, func() bool {
		left, err := b.plain.TimeToLive(testenv.Context(t), control.ID)
		return err == nil && left.TTL < 0
	}, testenv.Patience, 50*time.Millisecond)
	requireInPlace(t, b.plain, func(lease int64) bool { return lease == b.State().Lease })
}

func TestEtcdFrozen(t *testing.T) {
	t.Parallel()
	b := newEtcdBench(t, shortTTL)
	// For the session etcd is frozen; in truth it goes on and lets the lease run out.
	b.proxy.Pause()
	requireState(t, b.Session, "lease presumed lost", func(st State) bool { return !st.Registered && !st.Reachable && st.Losses > 0 })
	state := b.State()
	b.lines.take()
	require.Eventually(t, func() bool { v, _ := lookUp(t, b.plain, instanceKey); return v == "" }, testenv.Patience, 10*time.Millisecond)
	require.Equal(t, state, b.State())
	require.Empty(t, b.lines.take(), "the tries in between are not worth a line")
	b.proxy.Resume()
	requireInPlace(t, b.plain, func(lease int64) bool { return uint64(lease) != b.InstanceID() })
	requireState(t, b.Session, "registered again", func(st State) bool { return registered(st) && st.Reregistrations > 0 })
}

// A connection that looks alive and is dead must be given up, or a network that is back would not be used.
func TestEtcdStalledConnection(t *testing.T) {
	t.Parallel()
	b := newEtcdBench(t, shortTTL)
	before := b.proxy.Accepted()
	b.proxy.Stall()
	requireState(t, b.Session, "no answer noticed", func(st State) bool { return !st.Reachable })
	requireState(t, b.Session, "back over a new connection", registered)
	require.Greater(t, b.proxy.Accepted(), before)
	requireInPlace(t, b.plain, func(int64) bool { return true })
}

func TestEtcdDroppedConnections(t *testing.T) {
	t.Parallel()
	b := newEtcdBench(t, longTTL)
	for range 5 {
		n := b.proxy.Accepted()
		b.proxy.Drop()
		require.Eventually(t, func() bool { return b.proxy.Accepted() > n }, testenv.Patience, time.Millisecond)
	}
	requireState(t, b.Session, "registered", registered)
	requireInPlace(t, b.plain, func(lease int64) bool { return uint64(lease) == b.InstanceID() })
	_, err := b.plain.Delete(testenv.Context(t), instanceKey)
	require.NoError(t, err)
	requireInPlace(t, b.plain, func(int64) bool { return true })
}

// What a killed process leaves behind vanishes by itself, instance and card alike.
func TestEtcdAbandoned(t *testing.T) {
	t.Parallel()
	b := newEtcdBench(t, shortTTL)
	b.Session.end()
	require.Eventually(t, func() bool {
		resp, err := b.plain.Get(testenv.Context(t), "v1/", clientv3.WithPrefix(), clientv3.WithCountOnly())
		return err == nil && resp.Count == 0
	}, testenv.Patience, 10*time.Millisecond)
}

func TestEtcdKeyTaken(t *testing.T) {
	t.Parallel()
	b := newEtcdBench(t, longTTL)
	second, err := b.client.Session(testenv.Context(t))
	require.NoError(t, err)
	require.NotEqual(t, b.InstanceID(), second.InstanceID())
	// Even with the very same value: who was first keeps it.
	err = second.Register(testenv.Context(t), Record{Key: "v1/free", Value: []byte("x")}, instance)
	require.ErrorIs(t, err, ErrKeyTaken)
	require.ErrorContains(t, err, instanceKey)
	value, _ := lookUp(t, b.plain, "v1/free")
	require.Empty(t, value, "all or nothing")
	require.NoError(t, second.Close(testenv.Context(t)))
	requireInPlace(t, b.plain, func(lease int64) bool { return uint64(lease) == b.InstanceID() })
	require.True(t, registered(b.State()))
}

// While records are put back all the time, a withdrawal must win for good.
func TestEtcdWithdrawWinsAgainstRepair(t *testing.T) {
	t.Parallel()
	b := newEtcdBench(t, longTTL)
	for range 20 {
		before := b.State().Reregistrations
		stop := make(chan struct{})
		var meddler sync.WaitGroup
		meddler.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					_, _ = b.plain.Delete(context.Background(), instanceKey)
				}
			}
		})
		require.Eventually(t, func() bool { return b.State().Reregistrations > before }, testenv.Patience, time.Millisecond)
		require.NoError(t, b.Withdraw(testenv.Context(t), instanceKey))
		close(stop)
		meddler.Wait()
		value, _ := lookUp(t, b.plain, instanceKey)
		require.Empty(t, value)
		require.NoError(t, b.Register(testenv.Context(t), instance))
	}
	require.NoError(t, b.Withdraw(testenv.Context(t), instanceKey))
	w := b.plain.Watch(testenv.Context(t), instanceKey, clientv3.WithCreatedNotify())
	require.True(t, (<-w).Created)
	_, err := b.plain.Revoke(testenv.Context(t), clientv3.LeaseID(b.State().Lease))
	require.NoError(t, err)
	require.Eventually(t, func() bool { v, _ := lookUp(t, b.plain, cardKey); return v != "" }, testenv.Patience, time.Millisecond, "the card is still guarded")
	require.NoError(t, b.Session.Close(testenv.Context(t)))
	select {
	case resp := <-w:
		require.Failf(t, "the withdrawn record came back", "%v", resp.Events)
	default:
	}
}

func TestConnectWaitsForEtcd(t *testing.T) {
	t.Parallel()
	e := testenv.StartEtcd(t, embedded.EtcdOptions{})
	e.Stop()
	waiting := make(chan struct{})
	var once sync.Once
	log := zerolog.New(writerFunc(func(p []byte) (int, error) { once.Do(func() { close(waiting) }); return len(p), nil }))
	done := make(chan error, 1)
	go func() {
		c, err := Connect(testenv.Context(t), Config{Endpoints: []string{e.Endpoint()}, Logger: log, LeaseTTL: longTTL})
		if err == nil {
			c.Close()
		}
		done <- err
	}()
	<-waiting
	require.NoError(t, e.Start())
	require.NoError(t, <-done)
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestConnectGivesUp(t *testing.T) {
	t.Parallel()
	e := testenv.StartEtcd(t, embedded.EtcdOptions{})
	e.Stop()
	for name, cfg := range map[string]Config{
		"plain": {},
		"login": {Username: "root", Password: "x"},
	} {
		t.Run(name, func(t *testing.T) {
			var lines lineCounter
			cfg.Endpoints, cfg.StartupTimeout, cfg.CallTimeout, cfg.Logger = []string{e.Endpoint()}, 2500*time.Millisecond, time.Second, zerolog.New(&lines)
			_, err := Connect(testenv.Context(t), cfg)
			require.ErrorContains(t, err, e.Endpoint())
			require.ErrorContains(t, err, "2.5s")
			require.ErrorContains(t, err, "connection refused")
			require.Len(t, lines.take(), 1, "one line for the whole wait")
		})
	}
}

func TestConnectEndsWithItsContext(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0") // accepts in the kernel and never answers
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	for name, cfg := range map[string]Config{
		"plain": {},
		"login": {Username: "root", Password: "x"},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(testenv.Context(t))
			cfg.Endpoints, cfg.StartupTimeout, cfg.CallTimeout = []string{l.Addr().String()}, time.Hour, time.Hour
			done := make(chan error, 1)
			go func() {
				_, err := Connect(ctx, cfg)
				done <- err
			}()
			in, err := l.Accept()
			require.NoError(t, err)
			defer func() { _ = in.Close() }()
			cancel()
			require.ErrorIs(t, <-done, context.Canceled)
		})
	}
}

func TestAuthentication(t *testing.T) {
	t.Parallel()
	ctx := testenv.Context(t)
	e := testenv.StartEtcd(t, embedded.EtcdOptions{Password: "secret"})
	for name, cfg := range map[string]Config{
		"wrong password": {Username: "root", Password: "guess"},
		"unknown user":   {Username: "nobody", Password: "secret"},
		"no login":       {},
	} {
		t.Run(name, func(t *testing.T) {
			cfg.Endpoints, cfg.StartupTimeout = []string{e.Endpoint()}, time.Hour // so that waiting for it would be seen
			_, err := Connect(ctx, cfg)
			require.ErrorIs(t, err, ErrAuthentication)
			require.ErrorContains(t, err, e.Endpoint())
			require.NotContains(t, err.Error(), "guess")
		})
	}

	c := connect(t, Config{Endpoints: []string{e.Endpoint()}, Username: "root", Password: "secret"})
	s, err := c.Session(ctx)
	require.NoError(t, err)
	require.NoError(t, s.Register(ctx, instance))
	// After a restart etcd has forgotten the tokens of all who were logged in.
	e.Stop()
	require.NoError(t, e.Start())
	require.NoError(t, e.StartEmpty())
	requireState(t, s, "registered again", func(st State) bool { return registered(st) && st.Reregistrations == 1 })
	entries, err := c.List(ctx, "v1/")
	require.NoError(t, err)
	require.Len(t, entries, 1)
	require.NoError(t, s.Close(ctx))
}

func TestPermissions(t *testing.T) {
	t.Parallel()
	ctx := testenv.Context(t)
	e := testenv.StartEtcd(t, embedded.EtcdOptions{Password: "secret"})
	root, err := clientv3.New(clientv3.Config{Endpoints: []string{e.Endpoint()}, Username: "root", Password: "secret", Logger: zap.NewNop()})
	require.NoError(t, err)
	defer func() { _ = root.Close() }()
	_, err = root.RoleAdd(ctx, "worker")
	require.NoError(t, err)
	_, err = root.RoleGrantPermission(ctx, "worker", instanceKey, "", clientv3.PermissionType(clientv3.PermReadWrite))
	require.NoError(t, err)
	_, err = root.UserAdd(ctx, "worker", "pass")
	require.NoError(t, err)
	_, err = root.UserGrantRole(ctx, "worker", "worker")
	require.NoError(t, err)

	c := connect(t, Config{Endpoints: []string{e.Endpoint()}, Username: "worker", Password: "pass"})
	s, err := c.Session(ctx)
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close(ctx)) }()
	require.ErrorIs(t, s.Register(ctx, instance, card), rpctypes.ErrPermissionDenied, "waiting does not help")
	require.NoError(t, s.Register(ctx, instance))
	require.ErrorIs(t, c.Watch(ctx, "v1/", func(Event) {}), rpctypes.ErrPermissionDenied)
}

func TestTLS(t *testing.T) {
	t.Parallel()
	ca := testenv.NewCA(t)
	server, client := ca.Issue("server"), ca.Issue("client")
	e := testenv.StartEtcd(t, embedded.EtcdOptions{CertFile: server.CertFile, KeyFile: server.KeyFile, CAFile: ca.File})
	for name, cfg := range map[string]Config{
		"files": {CA: ca.File, ClientCert: client.CertFile, ClientKey: client.KeyFile},
		"text":  {CA: string(ca.PEM), ClientCert: string(client.CertPEM), ClientKey: string(client.KeyPEM)},
	} {
		t.Run(name, func(t *testing.T) {
			cfg.Endpoints = []string{e.Endpoint()}
			_, err := connect(t, cfg).List(testenv.Context(t), "v1/")
			require.NoError(t, err)
		})
	}
	t.Run("unknown authority", func(t *testing.T) {
		_, err := Connect(testenv.Context(t), Config{Endpoints: []string{e.Endpoint()}, CA: testenv.NewCA(t).File, StartupTimeout: 2 * time.Second})
		require.ErrorContains(t, err, "certificate")
	})
}

func TestConfigIsChecked(t *testing.T) {
	ca := testenv.NewCA(t)
	cert := ca.Issue("client")
	empty := filepath.Join(t.TempDir(), "empty.pem")
	require.NoError(t, os.WriteFile(empty, nil, 0o600))
	https := []string{"https://127.0.0.1:1"}
	for name, tc := range map[string]struct {
		cfg  Config
		want string
	}{
		"no endpoint":        {Config{}, "no etcd endpoint"},
		"empty endpoint":     {Config{Endpoints: []string{""}}, `endpoint ""`},
		"no port":            {Config{Endpoints: []string{"http://etcd"}}, "http://etcd"},
		"other scheme":       {Config{Endpoints: []string{"unix:///run/etcd.sock"}}, "unix:///run/etcd.sock"},
		"mixture":            {Config{Endpoints: []string{"http://a:1", "https://b:1"}}, "mix"},
		"password in URL":    {Config{Endpoints: []string{"http://me:secret@a:1"}}, "endpoint 1 holds user information"},
		"not a URL":          {Config{Endpoints: []string{"http://[::1"}}, "endpoint 1"},
		"short lease":        {Config{Endpoints: https, LeaseTTL: time.Millisecond}, "1ms"},
		"negative":           {Config{Endpoints: https, StartupTimeout: -1}, "start-up timeout"},
		"user only":          {Config{Endpoints: https, Username: "u"}, "together"},
		"password only":      {Config{Endpoints: https, Password: "secret"}, "together"},
		"certificate only":   {Config{Endpoints: https, ClientCert: cert.CertFile}, "together"},
		"no such CA":         {Config{Endpoints: https, CA: "no-such-file.pem"}, "no-such-file.pem"},
		"empty CA":           {Config{Endpoints: https, CA: empty}, "no certificate"},
		"no such cert":       {Config{Endpoints: https, ClientCert: "no-such-file.pem", ClientKey: cert.KeyFile}, "no-such-file.pem"},
		"no such key":        {Config{Endpoints: https, ClientCert: cert.CertFile, ClientKey: "no-such-file.pem"}, "no-such-file.pem"},
		"another's key":      {Config{Endpoints: https, ClientCert: cert.CertFile, ClientKey: ca.Issue("x").KeyFile}, "client certificate and key"},
		"TLS without https":  {Config{Endpoints: []string{"http://a:1"}, CA: ca.File}, "http://a:1"},
		"TLS without scheme": {Config{Endpoints: []string{"a:1"}, CA: ca.File}, "a:1"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Connect(t.Context(), tc.cfg)
			require.ErrorContains(t, err, tc.want)
			require.NotContains(t, err.Error(), "secret")
		})
	}
}

func TestDefaults(t *testing.T) {
	cfg, tlsConfig, err := Config{Endpoints: []string{"localhost:2379"}}.withDefaults()
	require.NoError(t, err)
	require.Nil(t, tlsConfig)
	require.Equal(t, 30*time.Second, cfg.LeaseTTL)
	require.Equal(t, 120*time.Second, cfg.StartupTimeout)
	require.Equal(t, 3*time.Second, cfg.CallTimeout)
	cfg, _, err = Config{Endpoints: []string{"localhost:2379"}, LeaseTTL: 4100 * time.Millisecond}.withDefaults()
	require.NoError(t, err)
	require.Equal(t, 5*time.Second, cfg.LeaseTTL, "etcd counts whole seconds")
}

// watched collects events until they are asked for.
type watched struct {
	events chan Event
	done   chan error
}

func startWatch(t *testing.T, c *Client, prefix string) *watched {
	t.Helper()
	ctx, cancel := context.WithCancel(testenv.Context(t))
	w := &watched{events: make(chan Event, 10_000), done: make(chan error, 1)}
	go func() { w.done <- c.Watch(ctx, prefix, func(e Event) { w.events <- e }) }()
	t.Cleanup(func() {
		cancel()
		require.ErrorIs(t, <-w.done, context.Canceled)
	})
	return w
}

func (w *watched) next(t *testing.T) Event {
	t.Helper()
	select {
	case e := <-w.events:
		return e
	case <-testenv.Context(t).Done():
		require.Fail(t, "no event")
		return Event{}
	}
}

func TestListAndWatch(t *testing.T) {
	t.Parallel()
	ctx := testenv.Context(t)
	e := testenv.StartEtcd(t, embedded.EtcdOptions{})
	plain := observer(t, e)
	c := connect(t, Config{Endpoints: []string{e.Endpoint()}})
	lease, err := plain.Grant(ctx, 600)
	require.NoError(t, err)
	for _, kv := range []string{"v1/b", "v1/a", "v2/c"} {
		_, err := plain.Put(ctx, kv, "value of "+kv, clientv3.WithLease(lease.ID))
		require.NoError(t, err)
	}
	a := Entry{Record: Record{Key: "v1/a", Value: []byte("value of v1/a")}, Lease: int64(lease.ID)}
	b := Entry{Record: Record{Key: "v1/b", Value: []byte("value of v1/b")}, Lease: int64(lease.ID)}
	entries, err := c.List(ctx, "v1/")
	require.NoError(t, err)
	require.Equal(t, []Entry{a, b}, entries)

	w := startWatch(t, c, "v1/")
	require.Equal(t, Event{Entry: a}, w.next(t))
	require.Equal(t, Event{Entry: b}, w.next(t))
	_, err = plain.Put(ctx, "v1/a", "new")
	require.NoError(t, err)
	a = Entry{Record: Record{Key: "v1/a", Value: []byte("new")}}
	require.Equal(t, Event{Entry: a}, w.next(t))
	_, err = plain.Revoke(ctx, lease.ID)
	require.NoError(t, err)
	require.Equal(t, Event{Entry: b, Gone: true}, w.next(t))

	// An etcd that has lost everything counts revisions anew; the watch must not wait for the old ones.
	require.NoError(t, e.StartEmpty())
	require.Equal(t, Event{Entry: a, Gone: true}, w.next(t))
	fresh := observer(t, e)
	_, err = fresh.Put(ctx, "v1/c", "c")
	require.NoError(t, err)
	c1 := Entry{Record: Record{Key: "v1/c", Value: []byte("c")}}
	require.Equal(t, Event{Entry: c1}, w.next(t))
}

// Cut off from etcd while the history that the watch would need is thrown away, it has to read everything again.
func TestWatchSurvivesCompaction(t *testing.T) {
	t.Parallel()
	ctx := testenv.Context(t)
	e := testenv.StartEtcd(t, embedded.EtcdOptions{})
	proxy := testenv.NewProxy(t, e.Address())
	plain := observer(t, e)
	c := connect(t, Config{Endpoints: []string{proxy.Address()}})
	for _, key := range []string{"v1/gone", "v1/kept"} {
		_, err := plain.Put(ctx, key, "old")
		require.NoError(t, err)
	}
	w := startWatch(t, c, "v1/")
	w.next(t)
	w.next(t)

	proxy.Refuse()
	proxy.Drop()
	var last int64
	for range 100 {
		resp, err := plain.Put(ctx, "v1/new", "n")
		require.NoError(t, err)
		last = resp.Header.Revision
	}
	resp, err := plain.Delete(ctx, "v1/gone")
	require.NoError(t, err)
	require.Greater(t, resp.Header.Revision, last)
	_, err = plain.Compact(ctx, resp.Header.Revision)
	require.NoError(t, err)
	require.NoError(t, proxy.Accept())

	require.Equal(t, Event{Entry: Entry{Record: Record{Key: "v1/gone", Value: []byte("old")}}, Gone: true}, w.next(t))
	require.Equal(t, Event{Entry: Entry{Record: Record{Key: "v1/new", Value: []byte("n")}}}, w.next(t))
	_, err = plain.Put(ctx, "v1/kept", "new")
	require.NoError(t, err)
	require.Equal(t, Event{Entry: Entry{Record: Record{Key: "v1/kept", Value: []byte("new")}}}, w.next(t))
}

// The same without a new connection: the watch asks for a revision that is gone.
func TestFollowReportsCompaction(t *testing.T) {
	t.Parallel()
	ctx := testenv.Context(t)
	e := testenv.StartEtcd(t, embedded.EtcdOptions{})
	plain := observer(t, e)
	c := connect(t, Config{Endpoints: []string{e.Endpoint()}})
	var last int64
	for range 3 {
		resp, err := plain.Put(ctx, "v1/k", "v")
		require.NoError(t, err)
		last = resp.Header.Revision
	}
	_, err := plain.Compact(ctx, last)
	require.NoError(t, err)
	var events atomic.Int32
	err = follow(ctx, c.etcd, c.dialer.dialled(), "v1/", func(*clientv3.WatchResponse) { events.Add(1) }, clientv3.WithPrefix(), clientv3.WithRev(1))
	require.ErrorIs(t, err, rpctypes.ErrCompacted)
	require.Zero(t, events.Load())
}

func TestWatchEndsWithItsClient(t *testing.T) {
	t.Parallel()
	e := testenv.StartEtcd(t, embedded.EtcdOptions{})
	c, err := Connect(testenv.Context(t), Config{Endpoints: []string{e.Endpoint()}})
	require.NoError(t, err)
	plain := observer(t, e)
	_, err = plain.Put(testenv.Context(t), "v1/k", "v")
	require.NoError(t, err)
	begun := make(chan struct{})
	done := make(chan error, 1)
	go func() { done <- c.Watch(testenv.Context(t), "v1/", func(Event) { close(begun) }) }()
	<-begun
	c.Close()
	require.Error(t, <-done)
	_, err = c.Session(testenv.Context(t))
	require.ErrorIs(t, err, ErrClosed)
}
