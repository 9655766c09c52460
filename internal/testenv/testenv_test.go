package testenv

import (
	"crypto/tls"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"dynworker/internal/testenv/embedded"
)

func TestMain(m *testing.M) { Main(m) }

// echo is a server that sends back what it gets and, at the end of the input, its total.
func echo(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer func() { _ = c.Close() }()
				if _, err := io.Copy(c, c); err == nil {
					_, _ = io.WriteString(c, "bye")
				}
			})
		}
	})
	t.Cleanup(func() {
		require.NoError(t, l.Close())
		wg.Wait()
	})
	return l.Addr().String()
}

func dial(t *testing.T, p *Proxy) *net.TCPConn {
	c, err := net.Dial("tcp", p.Address())
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(Patience)))
	return c.(*net.TCPConn)
}

func send(t *testing.T, c net.Conn, s string) {
	_, err := io.WriteString(c, s)
	require.NoError(t, err)
}

func expect(t *testing.T, c net.Conn, s string) {
	buf := make([]byte, len(s))
	_, err := io.ReadFull(c, buf)
	require.NoError(t, err)
	require.Equal(t, s, string(buf))
}

func TestProxyPassesDataAndHalfClose(t *testing.T) {
	p := NewProxy(t, echo(t))
	c := dial(t, p)
	send(t, c, "hello")
	expect(t, c, "hello")
	require.Equal(t, 1, p.Accepted())
	require.Equal(t, 1, p.Open())
	require.NoError(t, c.CloseWrite())
	rest, err := io.ReadAll(c)
	require.NoError(t, err)
	require.Equal(t, "bye", string(rest), "the answer to the half-close comes through")
	require.Eventually(t, func() bool { return p.Open() == 0 }, Patience, time.Millisecond)
}

// A pause is only seen by what does not happen, so the order of two events shows it: the late byte of the paused connection comes after the resume.
func TestProxyPauseHoldsDataUntilResume(t *testing.T) {
	target := echo(t)
	p := NewProxy(t, target)
	c := dial(t, p)
	send(t, c, "a")
	expect(t, c, "a")

	p.Pause()
	p.Pause()
	send(t, c, "b")
	late := dial(t, p)
	send(t, late, "c")
	for _, conn := range []net.Conn{c, late} {
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
		_, err := conn.Read(make([]byte, 1))
		require.ErrorIs(t, err, os.ErrDeadlineExceeded, "nothing comes through")
	}
	p.Resume()
	p.Resume()
	for _, conn := range []net.Conn{c, late} {
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(Patience)))
	}
	expect(t, c, "b")
	expect(t, late, "c")
}

func TestProxyDropResets(t *testing.T) {
	p := NewProxy(t, echo(t))
	c := dial(t, p)
	send(t, c, "a")
	expect(t, c, "a")
	p.Drop()
	_, err := c.Read(make([]byte, 1))
	require.ErrorIs(t, err, syscall.ECONNRESET)

	again := dial(t, p)
	send(t, again, "b")
	expect(t, again, "b")
}

func TestProxyStallKeepsNewConnectionsWorking(t *testing.T) {
	p := NewProxy(t, echo(t))
	old := dial(t, p)
	send(t, old, "a")
	expect(t, old, "a")
	p.Stall()
	send(t, old, "b")
	fresh := dial(t, p)
	send(t, fresh, "c")
	expect(t, fresh, "c")
	p.Pause()
	p.Resume()
	p.Drop()
	n, err := old.Read(make([]byte, 1))
	require.Zero(t, n)
	require.ErrorIs(t, err, syscall.ECONNRESET, "what was written to a stalled connection never comes through")
}

func TestProxyRefuse(t *testing.T) {
	p := NewProxy(t, echo(t))
	c := dial(t, p)
	send(t, c, "a")
	expect(t, c, "a")
	p.Refuse()
	p.Refuse()
	_, err := net.Dial("tcp", p.Address())
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	send(t, c, "b")
	expect(t, c, "b")
	require.NoError(t, p.Accept())
	require.NoError(t, p.Accept())
	again := dial(t, p)
	send(t, again, "c")
	expect(t, again, "c")
}

func TestProxyDeadTarget(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := NewProxy(t, l.Addr().String())
	require.NoError(t, l.Close())
	p.Pause() // else the reset could come before the client knows that it is connected
	c := dial(t, p)
	p.Resume()
	_, err = c.Read(make([]byte, 1))
	require.ErrorIs(t, err, syscall.ECONNRESET)
}

func TestServersWithTLS(t *testing.T) {
	ctx := Context(t)
	ca := NewCA(t)
	server, client := ca.Issue("server"), ca.Issue("client")
	clientTLS := &tls.Config{RootCAs: ca.Pool(), Certificates: []tls.Certificate{client.TLS(t)}}

	e := StartEtcd(t, embedded.EtcdOptions{CertFile: server.CertFile, KeyFile: server.KeyFile, CAFile: ca.File})
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{e.Endpoint()}, TLS: clientTLS, Logger: zap.NewNop()})
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	_, err = c.Put(ctx, "k", "v")
	require.NoError(t, err)
	e.Stop()
	require.NoError(t, e.Start())
	got, err := c.Get(ctx, "k")
	require.NoError(t, err)
	require.Len(t, got.Kvs, 1)

	n := StartNATS(t, embedded.NATSOptions{TLS: &tls.Config{
		Certificates: []tls.Certificate{server.TLS(t)}, ClientCAs: ca.Pool(), ClientAuth: tls.RequireAndVerifyClientCert,
	}})
	nc, err := nats.Connect(n.URL(), nats.Secure(clientTLS))
	require.NoError(t, err)
	nc.Close()
	_, err = nats.Connect(n.URL(), nats.RootCAs(ca.File))
	require.Error(t, err, "without a client certificate")
}
