package natsplane

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"

	"dynworker/internal/testenv"
	"dynworker/internal/testenv/embedded"
	"dynworker/pkg/ingress"
	"dynworker/pkg/wire"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const subject = "dynamo_backend.generate-694da22f57316498"

// quick makes retries quick enough for a test. It asserts nothing.
func quick(url string) ConnConfig {
	return ConnConfig{URL: url, RetryMin: time.Millisecond, RetryMax: 20 * time.Millisecond}
}

// states collects what OnState gets and lets a test wait for one.
type states struct {
	mu      sync.Mutex
	all     []State
	changed chan struct{}
}

func newStates() *states { return &states{changed: make(chan struct{})} }

func (s *states) add(st State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, st)
	close(s.changed)
	s.changed = make(chan struct{})
}

// waitFor waits for a state after the first n and returns it and its place.
func (s *states) waitFor(tb testing.TB, n int, what string, ok func(State) bool) (State, int) {
	tb.Helper()
	timeout := time.After(testenv.Patience)
	for {
		s.mu.Lock()
		all, changed := slices.Clone(s.all), s.changed
		s.mu.Unlock()
		for i := n; i < len(all); i++ {
			if ok(all[i]) {
				return all[i], i + 1
			}
		}
		select {
		case <-changed:
		case <-timeout:
			require.FailNow(tb, "no such state", "%s; seen: %+v", what, all)
		}
	}
}

func healthy(s State) bool   { return s.Healthy }
func unhealthy(s State) bool { return !s.Healthy }

// connectPlane connects and closes at the end of the test.
func connectPlane(tb testing.TB, cfg Config) *Plane {
	tb.Helper()
	p, err := Connect(testenv.Context(tb), cfg)
	require.NoError(tb, err)
	tb.Cleanup(func() { closePlane(tb, p) })
	return p
}

func closePlane(tb testing.TB, p *Plane) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Patience)
	defer cancel()
	require.NoError(tb, p.Close(ctx))
}

// frontend is a second connection, as a frontend has one.
func frontend(tb testing.TB, url string, opts ...nats.Option) *nats.Conn {
	tb.Helper()
	nc, err := nats.Connect(url, append([]nats.Option{nats.UserInfo("user", "user"), nats.MaxReconnects(-1), nats.ReconnectWait(time.Millisecond)}, opts...)...)
	require.NoError(tb, err)
	tb.Cleanup(nc.Close)
	return nc
}

func ask(tb testing.TB, nc *nats.Conn, payload []byte) (wire.ReplyKind, string) {
	tb.Helper()
	msg, err := nc.RequestMsgWithContext(testenv.Context(tb), &nats.Msg{Subject: subject, Data: payload})
	require.NoError(tb, err)
	return wire.ParseReply(msg.Data)
}

// twoPart is a request message with the given id.
func twoPart(id string) []byte {
	return wire.AppendFrame(nil, wire.AppendRequestControl(nil, &wire.RequestControl{
		ID: id, RequestType: wire.RequestSingleIn, ResponseType: wire.ResponseManyOut, PayloadCodec: "msgpack",
		Connection: wire.ConnectionInfo{
			Transport: wire.TransportTCP, Address: "127.0.0.1:4000", Subject: "s", Context: id, StreamType: wire.StreamTypeResponse,
		},
	}), []byte{0x80})
}

// admitter hands every delivery out on a channel and lets its work end at once.
type admitter struct {
	deliveries chan *ingress.Delivery
	started    chan *ingress.Delivery
}

func newAdmitter() *admitter {
	return &admitter{deliveries: make(chan *ingress.Delivery, 10000), started: make(chan *ingress.Delivery, 10000)}
}

func (a *admitter) Admit(d *ingress.Delivery) (func(), *ingress.Refusal) {
	a.deliveries <- d
	return func() { a.started <- d }, nil
}

func take(tb testing.TB, ch <-chan *ingress.Delivery) *ingress.Delivery {
	tb.Helper()
	select {
	case d := <-ch:
		return d
	case <-time.After(testenv.Patience):
		require.FailNow(tb, "nothing was delivered")
		return nil
	}
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

// count sums the counts of one kind.
func (e *events) count(kind ingress.EventKind) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := 0
	for _, ev := range e.all {
		if ev.Kind == kind {
			n += ev.Count
		}
	}
	return n
}

// natsServer runs a server with settings that embedded does not offer.
func natsServer(tb testing.TB, opts server.Options) string {
	tb.Helper()
	return runServer(tb, opts).ClientURL()
}

func runServer(tb testing.TB, opts server.Options) *server.Server {
	tb.Helper()
	opts.Host, opts.Port, opts.NoLog, opts.NoSigs = "127.0.0.1", server.RANDOM_PORT, true, true
	s, err := server.NewServer(&opts)
	require.NoError(tb, err)
	s.Start()
	require.True(tb, s.ReadyForConnections(testenv.Patience))
	tb.Cleanup(func() {
		s.Shutdown()
		s.WaitForShutdown()
	})
	return s
}

func plainNATS(tb testing.TB) *embedded.NATS {
	tb.Helper()
	return testenv.StartNATS(tb, embedded.NATSOptions{Username: "user", Password: "user"})
}

// brokenServer speaks just enough of the NATS protocol to misbehave.
type brokenServer struct {
	ln   net.Listener
	done sync.WaitGroup

	mu       sync.Mutex
	mute     bool   // messages are taken and not delivered
	farewell string // sent to each client in place of the first PONG, and the connection is closed
	conns    map[net.Conn]struct{}
	accepted int
}

func newBrokenServer(tb testing.TB) *brokenServer {
	tb.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(tb, err)
	b := &brokenServer{ln: ln, conns: map[net.Conn]struct{}{}}
	b.done.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			b.mu.Lock()
			b.accepted++
			b.conns[c] = struct{}{}
			b.mu.Unlock()
			b.done.Go(func() { b.serve(c) })
		}
	})
	tb.Cleanup(func() {
		_ = ln.Close()
		b.mu.Lock()
		for c := range b.conns {
			_ = c.Close()
		}
		b.mu.Unlock()
		b.done.Wait()
	})
	return b
}

func (b *brokenServer) url() string { return "nats://" + b.ln.Addr().String() }

func (b *brokenServer) set(change func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	change()
}

func (b *brokenServer) connections() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.accepted
}

// say sends a line to all clients.
func (b *brokenServer) say(line string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := range b.conns {
		_, _ = fmt.Fprintf(c, "%s\r\n", line)
	}
}

func (b *brokenServer) serve(c net.Conn) {
	defer func() {
		b.mu.Lock()
		delete(b.conns, c)
		b.mu.Unlock()
		_ = c.Close()
	}()
	_, _ = fmt.Fprintf(c, "INFO {\"server_id\":\"x\",\"version\":\"2.10.0\",\"headers\":true,\"max_payload\":1048576,\"proto\":1}\r\n")
	subs := map[string]string{}
	in := bufio.NewReader(c)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return
		}
		f := strings.Fields(line)
		if len(f) == 0 {
			continue
		}
		b.mu.Lock()
		mute, farewell := b.mute, b.farewell
		b.mu.Unlock()
		switch f[0] {
		case "PING":
			if farewell != "" {
				_, _ = fmt.Fprintf(c, "%s\r\n", farewell)
				return
			}
			_, _ = fmt.Fprint(c, "PONG\r\n")
		case "SUB":
			subs[f[1]] = f[len(f)-1]
		case "PUB":
			payload, err := in.ReadString('\n')
			if err != nil {
				return
			}
			if sid, ok := subs[f[1]]; ok && !mute {
				_, _ = fmt.Fprintf(c, "MSG %s %s %s\r\n%s", f[1], sid, f[len(f)-1], payload)
			}
		}
	}
}

// lockedLog is a log that can be read while it is written.
type lockedLog struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lockedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedLog) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), text)
}

func (l *lockedLog) logger() zerolog.Logger { return zerolog.New(l) }
