package respstream

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dynworker/pkg/protocol"
	"dynworker/pkg/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds waits for something that is going to happen.
const patience = 60 * time.Second

const subject = "c98da554-586e-4cc4-a6a3-2e2352de4c3e"

func info(address string) wire.ConnectionInfo {
	return wire.ConnectionInfo{Transport: wire.TransportTCP, Address: address, Subject: subject, Context: "id", StreamType: wire.StreamTypeResponse}
}

func tokens(ids ...uint32) *protocol.Chunk {
	return &protocol.Chunk{TokenIDs: ids, HasIndex: true}
}

// frontend is the far end of one stream over loopback.
type frontend struct {
	net.Conn
	frames *wire.Reader
}

// start opens a stream to a fresh frontend.
func start(tb testing.TB, d *Dialer) (*Stream, *frontend) {
	tb.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(tb, err)
	defer func() { require.NoError(tb, ln.Close()) }()
	s, err := d.Dial(tb.Context(), info(ln.Addr().String()))
	require.NoError(tb, err)
	c, err := ln.Accept()
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = c.Close() })
	require.NoError(tb, c.SetDeadline(time.Now().Add(patience)))
	return s, newFrontend(c)
}

func newFrontend(c net.Conn) *frontend {
	return &frontend{Conn: c, frames: wire.NewReader(c, wire.Limits{MaxHeader: 1 << 20, MaxData: 1 << 30})}
}

// shakeHands reads handshake and ok prologue.
func (f *frontend) shakeHands(tb testing.TB) {
	tb.Helper()
	hs, err := wire.ParseHandshake(f.header(tb))
	require.NoError(tb, err)
	require.Equal(tb, wire.Handshake{Subject: subject, StreamType: wire.StreamTypeResponse}, hs)
	p, err := wire.ParsePrologue(f.header(tb))
	require.NoError(tb, err)
	require.Nil(tb, p.Error)
}

func (f *frontend) header(tb testing.TB) []byte {
	tb.Helper()
	fr, err := f.frames.Next()
	require.NoError(tb, err)
	require.Empty(tb, fr.Data)
	return fr.Header
}

func (f *frontend) item(tb testing.TB, codec protocol.Codec) protocol.Item {
	tb.Helper()
	fr, err := f.frames.Next()
	require.NoError(tb, err)
	require.Empty(tb, fr.Header)
	item, err := protocol.ParseItem(codec, fr.Data)
	require.NoError(tb, err)
	return item
}

// ends requires that the worker has closed and sent nothing more.
func (f *frontend) ends(tb testing.TB) {
	tb.Helper()
	_, err := f.frames.Next()
	require.ErrorIs(tb, err, io.EOF)
}

func (f *frontend) send(tb testing.TB, b []byte) {
	tb.Helper()
	_, err := f.Write(b)
	require.NoError(tb, err)
}

func (f *frontend) reset(tb testing.TB) {
	tb.Helper()
	require.NoError(tb, f.Conn.(*net.TCPConn).SetLinger(0))
	require.NoError(tb, f.Close())
}

// closeDialer closes the dialer and requires that nothing had to be cut.
func closeDialer(tb testing.TB, d *Dialer) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(tb, d.Close(ctx))
	require.Zero(tb, d.Open())
}

// waitDone waits for the end of the stream and returns the cause.
func waitDone(tb testing.TB, s *Stream) error {
	tb.Helper()
	select {
	case <-s.Context().Done():
		return context.Cause(s.Context())
	case <-time.After(patience):
		require.FailNow(tb, "stream did not end")
		return nil
	}
}

// pipes is a network of in-memory connections, for tests with a clock of their own.
type pipes struct {
	mu    sync.Mutex
	peers []net.Conn
}

func (p *pipes) dial(context.Context, string, string) (net.Conn, error) {
	near, far := net.Pipe()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.peers = append(p.peers, far)
	return near, nil
}

// peer returns the far end of the n-th connection, counted from 0.
func (p *pipes) peer(n int) *frontend {
	p.mu.Lock()
	defer p.mu.Unlock()
	return newFrontend(p.peers[n])
}

// countingConn counts the writes.
type countingConn struct {
	net.Conn
	writes *int
}

func (c countingConn) Write(b []byte) (int, error) {
	*c.writes++
	return c.Conn.Write(b)
}

// slowConn lets a write return only when release is closed.
type slowConn struct {
	net.Conn
	release <-chan struct{}
}

func (c slowConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	<-c.release
	return n, err
}

var errTest = errors.New("test")
