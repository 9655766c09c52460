package respstream

import (
	"bytes"
	"context"
	"crypto/tls"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"

	"dynworker/internal/testenv"
	"dynworker/pkg/protocol"
)

func TestDialNobodyThere(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := ln.Addr().String()
	require.NoError(t, ln.Close())
	var log bytes.Buffer
	d := NewDialer(Config{Logger: zerolog.New(&log)})
	for range 100 {
		_, err = d.Dial(t.Context(), info(address))
		var failed *DialError
		require.ErrorAs(t, err, &failed)
		require.Equal(t, address, failed.Address)
		require.ErrorIs(t, err, syscall.ECONNREFUSED)
		require.ErrorContains(t, err, address)
	}
	require.Equal(t, 1, strings.Count(log.String(), "\n"), "one line for a peer, not one for a request")
	require.Contains(t, log.String(), address)
	require.Zero(t, d.Open())
	closeDialer(t, d)
}

func TestDialToABlackHoleIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := NewDialer(Config{Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}})
		begin := time.Now()
		_, err := d.Dial(t.Context(), info("10.255.255.1:9"))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 4*time.Second, time.Since(begin))

		// The end of the work does not spare the caller the news, the end of the dialer does.
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		result := make(chan error, 1)
		go func() {
			_, err := d.Dial(ctx, info("10.255.255.1:9"))
			result <- err
		}()
		synctest.Wait()
		limited, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		begin = time.Now()
		require.NoError(t, d.Close(limited), "no stream was cut")
		require.Equal(t, time.Second, time.Since(begin))
		require.ErrorIs(t, <-result, context.Canceled)
	})
}

func TestDialTriesAgainWhenLocalAddressesAreUsedUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var network pipes
		failures := 3
		used := &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.EADDRNOTAVAIL)}
		d := NewDialer(Config{Dial: func(ctx context.Context, n, a string) (net.Conn, error) {
			if failures > 0 {
				failures--
				return nil, used
			}
			return network.dial(ctx, n, a)
		}})
		begin := time.Now()
		s, err := d.Dial(t.Context(), info("127.0.0.1:1"))
		require.NoError(t, err)
		require.Equal(t, 3*defaultRetryPause, time.Since(begin))
		s.Abort()

		failures = 1 << 30
		begin = time.Now()
		_, err = d.Dial(t.Context(), info("127.0.0.1:1"))
		require.ErrorIs(t, err, syscall.EADDRNOTAVAIL)
		require.Equal(t, defaultDialTimeout, time.Since(begin))
		closeDialer(t, d)
	})
}

func TestCloseWhileDialling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var network pipes
		release := make(chan struct{})
		d := NewDialer(Config{Dial: func(ctx context.Context, n, a string) (net.Conn, error) {
			<-release
			return network.dial(ctx, n, a)
		}})
		result := make(chan error, 1)
		go func() {
			_, err := d.Dial(t.Context(), info("127.0.0.1:1"))
			result <- err
		}()
		synctest.Wait()
		time.AfterFunc(time.Second, func() { close(release) })
		closeDialer(t, d)
		require.ErrorIs(t, <-result, ErrDialerClosed)
		network.peer(0).ends(t)
	})
}

func TestTroubleIsLoggedAgainAfterAWhileAndBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		tr := trouble{log: zerolog.New(&log)}
		lines := func() int { return strings.Count(log.String(), "\n") }
		for range 5 {
			tr.report("a", errTest)
		}
		require.Equal(t, 1, lines())
		time.Sleep(troublePeriod)
		tr.report("a", errTest)
		require.Equal(t, 2, lines())
		require.Contains(t, log.String(), `"since_last":4`)
		tr.over("a")
		tr.report("a", errTest)
		require.Equal(t, 3, lines(), "an address that has worked is news again")
		for i := range 10 * troubleMax {
			tr.report(string(rune('b'+i)), errTest)
		}
		require.LessOrEqual(t, len(tr.peers), troubleMax)
	})
}

// serveTLS accepts one TLS connection and returns the frontend end.
func serveTLS(t *testing.T, cfg *tls.Config) (address string, accepted <-chan net.Conn) {
	t.Helper()
	ln, err := tls.Listen("tcp", "127.0.0.1:0", cfg)
	require.NoError(t, err)
	ch := make(chan net.Conn, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := ln.Accept()
		if err == nil {
			err = c.(*tls.Conn).Handshake()
		}
		if err != nil {
			if c != nil {
				_ = c.Close()
			}
			c = nil
		}
		ch <- c
	}()
	t.Cleanup(func() {
		_ = ln.Close()
		<-done
	})
	return ln.Addr().String(), ch
}

func TestTLS(t *testing.T) {
	ca, other := testenv.NewCA(t), testenv.NewCA(t)
	server := ca.Issue("frontend")
	client := ca.Issue("worker")
	serverTLS := &tls.Config{Certificates: []tls.Certificate{server.TLS(t)}}
	mutualTLS := &tls.Config{Certificates: []tls.Certificate{server.TLS(t)}, ClientCAs: ca.Pool(), ClientAuth: tls.RequireAndVerifyClientCert}
	for _, c := range []struct {
		name   string
		server *tls.Config
		files  TLSFiles
		ok     bool
	}{
		{"address in certificate", serverTLS, TLSFiles{CA: ca.File}, true},
		{"other name in certificate", serverTLS, TLSFiles{CA: ca.File, ServerName: "localhost"}, true},
		{"wrong name", serverTLS, TLSFiles{CA: ca.File, ServerName: "elsewhere"}, false},
		{"wrong ca", serverTLS, TLSFiles{CA: other.File}, false},
		{"insecure", serverTLS, TLSFiles{Insecure: true}, true},
		{"mutual", mutualTLS, TLSFiles{CA: ca.File, Cert: client.CertFile, Key: client.KeyFile}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg, err := ClientTLS(c.files)
			require.NoError(t, err)
			d := NewDialer(Config{TLS: cfg})
			address, accepted := serveTLS(t, c.server)
			s, err := d.Dial(t.Context(), info(address))
			if !c.ok {
				var wrong *tls.CertificateVerificationError
				require.ErrorAs(t, err, &wrong)
				require.Nil(t, <-accepted)
				closeDialer(t, d)
				return
			}
			require.NoError(t, err)
			require.NoError(t, s.Send(tokens(9)))
			require.NoError(t, s.Finish())
			f := newFrontend(<-accepted)
			f.shakeHands(t)
			require.Equal(t, []uint32{9}, f.item(t, protocol.CodecJSON).Chunk.TokenIDs)
			require.NoError(t, f.Close())
			closeDialer(t, d)
		})
	}
}

func TestTLSHandshakeIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var network pipes
		d := NewDialer(Config{Dial: network.dial, TLS: &tls.Config{InsecureSkipVerify: true}})
		begin := time.Now()
		_, err := d.Dial(t.Context(), info("127.0.0.1:1"))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, defaultTLSTimeout, time.Since(begin))
		closeDialer(t, d)
	})
}

func TestClientTLSSettings(t *testing.T) {
	cfg, err := ClientTLS(TLSFiles{ServerName: "name alone is no wish for tls"})
	require.NoError(t, err)
	require.Nil(t, cfg)
	empty := filepath.Join(t.TempDir(), "empty.pem")
	require.NoError(t, os.WriteFile(empty, nil, 0o600))
	for _, f := range []TLSFiles{{Cert: "c"}, {Key: "k"}, {CA: "/nowhere"}, {CA: empty}, {Cert: empty, Key: empty}} {
		_, err := ClientTLS(f)
		require.Error(t, err)
	}
}
