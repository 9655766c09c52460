package tcpplane

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dynworker/internal/testenv"
	"dynworker/pkg/ingress"
	"dynworker/pkg/wire"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const path = "694da22f57316558/dynamo/backend/generate"

// frontend is one connection to the plane.
type frontend struct {
	net.Conn
	in *bufio.Reader
}

func connect(tb testing.TB, p *Plane) *frontend {
	tb.Helper()
	c, err := net.Dial("tcp", p.AddrPort().String())
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = c.Close() })
	require.NoError(tb, c.SetDeadline(time.Now().Add(testenv.Patience)))
	return &frontend{Conn: c, in: bufio.NewReader(c)}
}

func (f *frontend) send(tb testing.TB, b []byte) {
	tb.Helper()
	_, err := f.Write(b)
	require.NoError(tb, err)
}

func (f *frontend) reply(tb testing.TB) (wire.ReplyKind, string) {
	tb.Helper()
	b, err := wire.ReadPlaneReply(f.in, 1<<20)
	require.NoError(tb, err)
	return wire.ParseReply(b)
}

func (f *frontend) accepted(tb testing.TB) {
	tb.Helper()
	kind, text := f.reply(tb)
	require.Equal(tb, wire.ReplyAccepted, kind)
	require.Empty(tb, text)
}

func (f *frontend) unavailable(tb testing.TB, reason string) {
	tb.Helper()
	kind, text := f.reply(tb)
	require.Equal(tb, wire.ReplyUnavailable, kind)
	require.Contains(tb, text, reason)
}

// ends requires that the worker closes, in order or not.
func (f *frontend) ends(tb testing.TB) {
	tb.Helper()
	_, err := io.Copy(io.Discard, f.in)
	require.False(tb, errors.Is(err, os.ErrDeadlineExceeded), "connection is still open")
}

// twoPart is a request message with the given id and body.
func twoPart(id string, body []byte) []byte {
	control := wire.AppendRequestControl(nil, &wire.RequestControl{
		ID: id, RequestType: wire.RequestSingleIn, ResponseType: wire.ResponseManyOut, PayloadCodec: "msgpack",
		Connection: wire.ConnectionInfo{
			Transport: wire.TransportTCP, Address: "127.0.0.1:4000", Subject: "s", Context: id, StreamType: wire.StreamTypeResponse,
		},
	})
	return wire.AppendFrame(nil, control, body)
}

func request(tb testing.TB, path, id string, body []byte) []byte {
	tb.Helper()
	b, err := wire.AppendPlaneRequest(nil, &wire.PlaneRequest{
		Path: path, Headers: map[string]string{"Request-ID": "h-" + id, "x-endpoint-path": path}, Payload: twoPart(id, body),
	})
	require.NoError(tb, err)
	return b
}

// admitter takes everything, unless refuse says otherwise, and notes it.
type admitter struct {
	refuse func(*ingress.Delivery) *ingress.Refusal

	mu         sync.Mutex
	deliveries []*ingress.Delivery
	started    sync.WaitGroup
}

func (a *admitter) Admit(d *ingress.Delivery) (func(), *ingress.Refusal) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.deliveries = append(a.deliveries, d)
	if a.refuse != nil {
		if r := a.refuse(d); r != nil {
			return nil, r
		}
	}
	a.started.Add(1)
	return a.started.Done, nil
}

// taken waits for the work and returns the deliveries.
func (a *admitter) taken() []*ingress.Delivery {
	a.started.Wait()
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]*ingress.Delivery(nil), a.deliveries...)
}

// events collects what an Observer gets.
type events struct {
	mu  sync.Mutex
	all []ingress.Event
}

func (e *events) observe(ev ingress.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = append(e.all, ev)
}

func (e *events) kinds() []ingress.EventKind {
	e.mu.Lock()
	defer e.mu.Unlock()
	var kinds []ingress.EventKind
	for _, ev := range e.all {
		kinds = append(kinds, ev.Kind)
	}
	return kinds
}

func listen(tb testing.TB, cfg Config) *Plane {
	tb.Helper()
	if cfg.Host == "" {
		cfg.Host = "127.0.0.1"
	}
	p, err := Listen(cfg)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, p.Close()) })
	return p
}

func serve(tb testing.TB, cfg Config) (*Plane, *admitter) {
	tb.Helper()
	p := listen(tb, cfg)
	a := &admitter{}
	require.NoError(tb, p.Serve(path, a))
	return p, a
}

func TestRecordedConnection(t *testing.T) {
	from, err := os.ReadFile(filepath.Join("testdata", "tcp-plane-from-frontend.bin"))
	require.NoError(t, err)
	want, err := os.ReadFile(filepath.Join("testdata", "tcp-plane-from-worker.bin"))
	require.NoError(t, err)
	p, a := serve(t, Config{})
	f := connect(t, p)
	f.send(t, from)
	got := make([]byte, len(want))
	_, err = io.ReadFull(f.in, got)
	require.NoError(t, err)
	require.Equal(t, want, got)
	taken := a.taken()
	require.Len(t, taken, 3)
	for _, d := range taken {
		require.NoError(t, d.BodyErr)
		require.Equal(t, d.Control.ID, d.RequestID)
		require.NotZero(t, d.SentNanos)
		require.Equal(t, path, d.Headers["x-endpoint-path"])
	}
}

func TestPathsSelectEndpoints(t *testing.T) {
	p, a := serve(t, Config{})
	b := &admitter{}
	require.NoError(t, p.Serve("1/other/x/y", b))
	require.ErrorIs(t, p.Serve(path, b), ErrPathServed)
	f := connect(t, p)
	f.send(t, request(t, "1/other/x/y", "b", nil))
	f.send(t, request(t, path, "a", nil))
	f.accepted(t)
	f.accepted(t)
	require.Equal(t, "a", a.taken()[0].Control.ID)
	require.Equal(t, "h-b", b.taken()[0].RequestID, "header names do not depend on case")
	require.Equal(t, p.AddrPort().String()+"/"+path, p.Address(path))
}

func TestRepliesKeepTheOrderOfRequests(t *testing.T) {
	p := listen(t, Config{})
	a := &admitter{refuse: func(d *ingress.Delivery) *ingress.Refusal {
		if d.Body[0]%2 == 0 {
			return &ingress.Refusal{Kind: ingress.Overloaded, Reason: "even " + d.Control.ID}
		}
		return nil
	}}
	require.NoError(t, p.Serve(path, a))
	f := connect(t, p)
	const n = 1024 // what a frontend has outstanding at most
	var all []byte
	for i := range n {
		all = append(all, request(t, path, string(rune('a'+i%26)), []byte{byte(i)})...)
	}
	sent := make(chan error, 1)
	go func() {
		_, err := f.Write(all)
		sent <- err
	}()
	for i := range n {
		kind, reason := f.reply(t)
		if i%2 == 0 {
			require.Equal(t, wire.ReplyOverloaded, kind)
			require.Equal(t, "even "+string(rune('a'+i%26)), reason)
		} else {
			require.Equal(t, wire.ReplyAccepted, kind)
		}
	}
	require.NoError(t, <-sent)
	for i, d := range a.taken() {
		require.Equal(t, byte(i), d.Body[0])
	}
}

func TestWhatIsMerelyWrongIsAnsweredAndTheConnectionGoesOn(t *testing.T) {
	var seen events
	p, a := serve(t, Config{Observer: seen.observe})
	f := connect(t, p)

	f.send(t, request(t, "ffff/dynamo/backend/generate", "gone", nil))
	f.unavailable(t, "no endpoint at")

	badHeaders := binary.BigEndian.AppendUint16(nil, uint16(len(path)))
	badHeaders = append(badHeaders, path...)
	badHeaders = append(binary.BigEndian.AppendUint16(badHeaders, 4), "oops"...)
	badHeaders = append(binary.BigEndian.AppendUint32(badHeaders, 3), "abc"...)
	f.send(t, badHeaders)
	f.unavailable(t, "malformed request")

	for _, payload := range [][]byte{nil, []byte("short"), wire.AppendFrame(nil, []byte("no json"), nil)} {
		b, err := wire.AppendPlaneRequest(nil, &wire.PlaneRequest{Path: path, Payload: payload})
		require.NoError(t, err)
		f.send(t, b)
		f.unavailable(t, "malformed request")
	}
	require.Empty(t, a.taken())
	require.Equal(t, []ingress.EventKind{
		ingress.UnknownEndpoint, ingress.Malformed, ingress.Malformed, ingress.Malformed, ingress.Malformed,
	}, seen.kinds())

	// Where only the body is damaged the caller can be told, so the request is taken.
	whole := twoPart("cut", []byte("0123456789"))
	cut, err := wire.AppendPlaneRequest(nil, &wire.PlaneRequest{Path: path, Payload: whole[:len(whole)-3]})
	require.NoError(t, err)
	f.send(t, cut)
	f.accepted(t)
	require.ErrorIs(t, a.taken()[0].BodyErr, wire.ErrTruncated)

	f.send(t, request(t, path, "good", []byte{0x80}))
	f.accepted(t)
	require.Equal(t, "good", a.taken()[1].Control.ID)
}

func TestOversizedMessageIsTakenWithoutItsBody(t *testing.T) {
	p, a := serve(t, Config{})
	f := connect(t, p)
	const size = 40 << 20
	body := bytes.Repeat([]byte{0xc0}, size)
	sent := make(chan error, 1)
	go func() {
		b := request(t, path, "big", body)
		_, err := f.Write(append(b, request(t, path, "next", []byte{0x80})...))
		sent <- err
	}()
	f.accepted(t)
	f.accepted(t)
	require.NoError(t, <-sent)
	taken := a.taken()
	var over *wire.SizeError
	require.ErrorAs(t, taken[0].BodyErr, &over)
	require.Equal(t, uint64(wire.MaxMessage), over.Limit)
	require.Greater(t, taken[0].Size, size)
	require.Nil(t, taken[0].Body)
	require.Equal(t, "big", taken[0].Control.ID)
	require.Equal(t, "next", taken[1].Control.ID)
	require.NoError(t, taken[1].BodyErr)
	require.Equal(t, wire.MaxMessage, p.MaxMessage())
}

func TestOversizedMessageWithoutAControlHeader(t *testing.T) {
	p, a := serve(t, Config{MaxMessage: 1000})
	f := connect(t, p)
	for _, size := range []int{1001, 200 << 10, 5 << 20} {
		b, err := wire.AppendPlaneRequest(nil, &wire.PlaneRequest{Path: path, Payload: make([]byte, size)})
		require.NoError(t, err)
		sent := make(chan error, 1)
		go func() {
			_, err := f.Write(b)
			sent <- err
		}()
		f.unavailable(t, "malformed request")
		require.NoError(t, <-sent)
	}
	f.send(t, request(t, path, "last", nil))
	f.accepted(t)
	require.Len(t, a.taken(), 1)
}

func TestConnectionThatStopsInsideAMessage(t *testing.T) {
	whole := request(t, path, "x", []byte("body"))
	for _, cut := range []int{1, 2, 10, len(whole) - 1} {
		var seen events
		p, a := serve(t, Config{Observer: seen.observe})
		f := connect(t, p)
		f.send(t, whole[:cut])
		require.NoError(t, f.Conn.(*net.TCPConn).CloseWrite())
		f.ends(t)
		require.Empty(t, a.taken())
		require.NoError(t, p.Close())
		require.Equal(t, []ingress.EventKind{ingress.ConnectionBroken}, seen.kinds())
	}
}

func TestMessageThatDoesNotComeToItsEnd(t *testing.T) {
	var seen events
	p, a := serve(t, Config{Observer: seen.observe, MessageTimeout: 20 * time.Millisecond})
	f := connect(t, p)
	// Silence between messages has no limit: a good message after it is served.
	f.send(t, request(t, path, "x", nil))
	f.accepted(t)
	f.send(t, request(t, path, "y", nil)[:30])
	f.ends(t)
	require.Len(t, a.taken(), 1)
	require.NoError(t, p.Close())
	require.Equal(t, []ingress.EventKind{ingress.ConnectionBroken}, seen.kinds())
	seen.mu.Lock()
	defer seen.mu.Unlock()
	require.ErrorIs(t, seen.all[0].Err, os.ErrDeadlineExceeded)
}

func TestPeerThatIgnoresReplies(t *testing.T) {
	var seen events
	p := listen(t, Config{Observer: seen.observe, ReplyTimeout: 20 * time.Millisecond})
	require.NoError(t, p.Serve(path, &admitter{refuse: func(*ingress.Delivery) *ingress.Refusal {
		return &ingress.Refusal{Kind: ingress.Overloaded, Reason: string(make([]byte, 64<<10))}
	}}))
	f := connect(t, p)
	one := request(t, path, "x", nil)
	var err error
	for err == nil {
		_, err = f.Write(one)
	}
	require.False(t, errors.Is(err, os.ErrDeadlineExceeded), "the worker has closed")
	require.NoError(t, p.Close())
	require.Equal(t, []ingress.EventKind{ingress.ReplyFailed, ingress.ConnectionBroken}, seen.kinds())
}

func TestResetAndCloseByTheFrontendAreNoNews(t *testing.T) {
	var seen events
	p, _ := serve(t, Config{Observer: seen.observe})
	f, g := connect(t, p), connect(t, p)
	for _, c := range []*frontend{f, g} {
		c.send(t, request(t, path, "x", nil))
		c.accepted(t)
	}
	require.NoError(t, f.Conn.(*net.TCPConn).SetLinger(0))
	require.NoError(t, f.Close())
	require.NoError(t, g.Close())
	ctx := testenv.Context(t)
	require.NoError(t, p.Drain(ctx))
	require.Empty(t, seen.kinds())
}

func TestTooManyConnections(t *testing.T) {
	var seen events
	p, _ := serve(t, Config{Observer: seen.observe, MaxConnections: 2})
	open := []*frontend{connect(t, p), connect(t, p)}
	for _, f := range open {
		f.send(t, request(t, path, "x", nil))
		f.accepted(t)
	}
	require.Equal(t, 2, p.Connections())
	connect(t, p).ends(t)
	require.Equal(t, []ingress.EventKind{ingress.ConnectionRefused}, seen.kinds())

	// A place that was given back is used again.
	require.NoError(t, open[0].Close())
	require.Eventually(t, func() bool { return p.Connections() == 1 }, testenv.Patience, time.Millisecond)
	f := connect(t, p)
	f.send(t, request(t, path, "x", nil))
	f.accepted(t)
}

func TestDrainServesWhatComesAndThenCloses(t *testing.T) {
	p := listen(t, Config{Quiet: 50 * time.Millisecond})
	var draining bool
	a := &admitter{refuse: func(*ingress.Delivery) *ingress.Refusal {
		if draining {
			return &ingress.Refusal{Kind: ingress.Unavailable, Reason: "shutting down"}
		}
		return nil
	}}
	require.NoError(t, p.Serve(path, a))
	idle, busy := connect(t, p), connect(t, p)
	for _, f := range []*frontend{idle, busy} {
		f.send(t, request(t, path, "x", nil))
		f.accepted(t)
	}
	// A message that is half there when the drain begins is still answered.
	half := request(t, path, "half", nil)
	busy.send(t, half[:20])
	require.Eventually(t, func() bool { return waiting(p) == 1 }, testenv.Patience, time.Millisecond)
	a.mu.Lock()
	draining = true
	a.mu.Unlock()
	result := make(chan error, 1)
	go func() { result <- p.Drain(testenv.Context(t)) }()
	idle.ends(t)
	busy.send(t, half[20:])
	busy.unavailable(t, "shutting down")
	busy.ends(t)
	require.NoError(t, <-result)
	require.Zero(t, p.Connections())
	_, err := net.Dial("tcp", p.AddrPort().String())
	require.Error(t, err)
	require.ErrorIs(t, p.Serve("another/path/a/b", a), ErrClosed)
	require.NoError(t, p.Drain(testenv.Context(t)), "again")
}

// waiting is the number of connections between two messages.
func waiting(p *Plane) int {
	p.mu.RLock()
	defer p.mu.RUnlock()
	n := 0
	for c := range p.conns {
		c.mu.Lock()
		if c.waiting {
			n++
		}
		c.mu.Unlock()
	}
	return n
}

func TestDrainIsBounded(t *testing.T) {
	p, _ := serve(t, Config{})
	f := connect(t, p)
	f.send(t, request(t, path, "x", nil))
	f.accepted(t)
	f.send(t, request(t, path, "never complete", nil)[:20])
	require.Eventually(t, func() bool { return waiting(p) == 0 }, testenv.Patience, time.Millisecond)
	cause := errors.New("no time")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	require.ErrorIs(t, p.Drain(ctx), cause)
	f.ends(t)
	require.Zero(t, p.Connections())
}

func TestTLS(t *testing.T) {
	ca := testenv.NewCA(t)
	server, client := ca.Issue("worker"), ca.Issue("frontend")
	cfg, err := ServerTLS(server.CertFile, server.KeyFile, ca.File)
	require.NoError(t, err)
	p, a := serve(t, Config{TLS: cfg})

	with, err := tls.Dial("tcp", p.AddrPort().String(), &tls.Config{RootCAs: ca.Pool(), Certificates: []tls.Certificate{client.TLS(t)}})
	require.NoError(t, err)
	f := &frontend{Conn: with, in: bufio.NewReader(with)}
	f.send(t, request(t, path, "x", nil))
	f.accepted(t)
	require.NoError(t, with.Close())
	require.Len(t, a.taken(), 1)

	without, err := tls.Dial("tcp", p.AddrPort().String(), &tls.Config{RootCAs: ca.Pool()})
	if err == nil {
		// In TLS 1.3 the server's verdict about the client comes after the client's handshake.
		_, err = without.Read(make([]byte, 1))
		require.NoError(t, without.Close())
	}
	require.Error(t, err)

	plain := connect(t, p)
	plain.send(t, request(t, path, "x", nil))
	plain.ends(t)
	require.Len(t, a.taken(), 1)
}

func TestTLSHandshakeIsBounded(t *testing.T) {
	ca := testenv.NewCA(t)
	cert := ca.Issue("worker")
	cfg, err := ServerTLS(cert.CertFile, cert.KeyFile, "")
	require.NoError(t, err)
	p, _ := serve(t, Config{TLS: cfg, TLSTimeout: 20 * time.Millisecond})
	connect(t, p).ends(t)
}

func TestServerTLSSettings(t *testing.T) {
	cfg, err := ServerTLS("", "", "")
	require.NoError(t, err)
	require.Nil(t, cfg)
	cert := testenv.NewCA(t).Issue("worker")
	for _, files := range [][3]string{
		{cert.CertFile, "", ""}, {"", cert.KeyFile, ""}, {cert.KeyFile, cert.CertFile, ""},
		{cert.CertFile, cert.KeyFile, "/nowhere"}, {cert.CertFile, cert.KeyFile, cert.KeyFile},
	} {
		_, err := ServerTLS(files[0], files[1], files[2])
		require.Error(t, err)
	}
}

func TestListenErrors(t *testing.T) {
	p := listen(t, Config{})
	_, err := Listen(Config{Host: "127.0.0.1", Port: p.AddrPort().Port()})
	require.ErrorContains(t, err, "tcp request plane")
	require.ErrorContains(t, err, p.AddrPort().String())
	_, err = Listen(Config{Advertise: "worker.example"})
	require.ErrorContains(t, err, "advertised host")
}

func TestAdvertisedAddress(t *testing.T) {
	cidr := func(texts ...string) (addrs []net.Addr) {
		for _, s := range texts {
			ip, network, err := net.ParseCIDR(s)
			require.NoError(t, err)
			addrs = append(addrs, &net.IPNet{IP: ip, Mask: network.Mask})
		}
		return addrs
	}
	require.Equal(t, "127.0.0.1", pickAddress(nil).String())
	require.Equal(t, "127.0.0.1", pickAddress(cidr("127.0.0.1/8", "::1/128", "fe80::1/64")).String())
	require.Equal(t, "fd00::5", pickAddress(cidr("::1/128", "fe80::1/64", "fd00::5/64")).String())
	require.Equal(t, "10.1.2.3", pickAddress(cidr("127.0.0.1/8", "fd00::5/64", "169.254.7.7/16", "10.1.2.3/24", "10.1.2.4/24")).String())

	for host, want := range map[string]string{"127.0.0.1": "127.0.0.1", "": machineAddress().String(), "0.0.0.0": machineAddress().String()} {
		p, err := Listen(Config{Host: host})
		require.NoError(t, err)
		require.Equal(t, want, p.AddrPort().Addr().String())
		require.NotZero(t, p.AddrPort().Port())
		require.NoError(t, p.Close())
	}
	p, err := Listen(Config{Host: "127.0.0.1", Advertise: "fd00::7"})
	require.NoError(t, err)
	require.Equal(t, netip.AddrPortFrom(netip.MustParseAddr("fd00::7"), p.AddrPort().Port()), p.AddrPort())
	require.Contains(t, p.Address("a/b"), "[fd00::7]:")
	require.NoError(t, p.Close())
	require.NoError(t, p.Close(), "again")
}
