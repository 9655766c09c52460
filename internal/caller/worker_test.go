package caller

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"dynworker/internal/testenv"
	"dynworker/internal/testenv/embedded"
	"dynworker/pkg/ingress"
	"dynworker/pkg/ingress/natsplane"
	"dynworker/pkg/ingress/tcpplane"
	"dynworker/pkg/protocol"
	"dynworker/pkg/respstream"
	"dynworker/pkg/wire"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const instance = 0x694da22f57316558

// worker is a small worker on the real planes: it answers with the tokens of the prompt, one an item, and obeys the field "do" of the request.
type worker struct {
	dialer  *respstream.Dialer
	running sync.WaitGroup
	refusal *ingress.Refusal

	mu        sync.Mutex
	causes    map[string]error // by request id
	delivered []*ingress.Delivery
	dialErrs  []error
	ended     chan string // request ids
}

func newWorker(tb testing.TB, cfg respstream.Config) *worker {
	tb.Helper()
	w := &worker{dialer: respstream.NewDialer(cfg), causes: map[string]error{}, ended: make(chan string, 10000)}
	tb.Cleanup(func() {
		w.running.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), testenv.Patience)
		defer cancel()
		require.NoError(tb, w.dialer.Close(ctx))
		require.Zero(tb, w.dialer.Open())
	})
	return w
}

func (w *worker) Admit(d *ingress.Delivery) (func(), *ingress.Refusal) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.delivered = append(w.delivered, d)
	if w.refusal != nil {
		return nil, w.refusal
	}
	w.running.Add(1)
	return func() {
		defer w.running.Done()
		w.serve(d)
		w.ended <- d.Control.ID
	}, nil
}

func (w *worker) last() *ingress.Delivery {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.delivered[len(w.delivered)-1]
}

// cause waits for the end of a request and returns why its stream ended.
func (w *worker) cause(tb testing.TB, id string) error {
	tb.Helper()
	ctx := testenv.Context(tb)
	for {
		w.mu.Lock()
		cause, ok := w.causes[id]
		w.mu.Unlock()
		if ok {
			return cause
		}
		select {
		case <-w.ended:
		case <-ctx.Done():
			require.FailNow(tb, "request did not end")
		}
	}
}

func (w *worker) serve(d *ingress.Delivery) {
	s, err := w.dialer.Dial(context.Background(), d.Control.Connection)
	if err != nil {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.dialErrs = append(w.dialErrs, err)
		w.causes[d.Control.ID] = err
		return
	}
	w.answer(d, s)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.causes[d.Control.ID] = context.Cause(s.Context())
}

func (w *worker) answer(d *ingress.Delivery, s *respstream.Stream) {
	codec, err := protocol.ParseCodec(d.Control.PayloadCodec)
	s.SetCodec(codec)
	var req *protocol.Request
	if err == nil {
		err = d.BodyErr
	}
	if err == nil {
		req, err = protocol.ParseRequest(codec, d.Body)
	}
	if err != nil {
		if s.Fail(protocol.InvalidArgument("%s", err)) == nil {
			_ = s.Finish()
		}
		return
	}
	do, _ := req.Fields["do"].(string)
	if do == "refuse" {
		_ = s.Refuse(protocol.Overloaded("no room"))
		return
	}
	if s.Accept() != nil {
		return
	}
	for _, id := range req.TokenIDs {
		if s.Send(&protocol.Chunk{TokenIDs: []uint32{uint32(id)}, HasIndex: true}) != nil || s.Flush() != nil {
			return
		}
	}
	switch do {
	case "wait":
		<-s.Context().Done()
	case "write":
		// Until the client has had enough.
		for s.Send(&protocol.Chunk{TokenIDs: []uint32{7}, HasIndex: true}) == nil && s.Flush() == nil {
		}
	case "abort":
		s.Abort()
	case "fail":
		_ = s.Fail(protocol.EngineShutdown("drain"))
		_ = s.Finish()
	default:
		_ = s.Finish()
	}
}

// plane is one way to the worker.
type plane struct {
	name      string
	transport protocol.Transport
	caller    *Caller
	worker    *worker
	// restart stops and starts what is between the two, if there is something.
	restart func(tb testing.TB)
	tcp     *tcpplane.Plane
}

// natsPlane makes a worker and a caller that meet over NATS.
func natsPlane(tb testing.TB, opts embedded.NATSOptions) plane {
	tb.Helper()
	srv := testenv.StartNATS(tb, opts)
	w := newWorker(tb, respstream.Config{})
	p, err := natsplane.Connect(testenv.Context(tb), natsplane.Config{Conn: natsplane.ConnConfig{URL: srv.URL()}})
	require.NoError(tb, err)
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testenv.Patience)
		defer cancel()
		require.NoError(tb, p.Close(ctx))
	})
	subject := wire.Subject(instance, "dynamo", "backend", "generate")
	require.NoError(tb, p.Serve(testenv.Context(tb), subject, w))
	c := newCaller(tb, Config{NATS: &natsplane.ConnConfig{URL: srv.URL()}})
	return plane{
		name: "nats", transport: protocol.Transport{Kind: protocol.TransportNATS, Address: subject}, caller: c, worker: w,
		restart: func(tb testing.TB) {
			srv.Stop()
			require.NoError(tb, srv.Start())
			require.Eventually(tb, func() bool { return srv.NumClients() == 2 }, testenv.Patience, tick)
			require.Eventually(tb, func() bool { return p.State().Healthy }, testenv.Patience, tick)
		},
	}
}

// tcpPlane makes a worker and a caller that meet over the TCP plane.
func tcpPlane(tb testing.TB, plain tcpplane.Config, answers respstream.Config, cfg Config) plane {
	tb.Helper()
	w := newWorker(tb, answers)
	plain.Host = "127.0.0.1"
	p, err := tcpplane.Listen(plain)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, p.Close()) })
	path := wire.PlanePath(instance, "dynamo", "backend", "generate")
	require.NoError(tb, p.Serve(path, w))
	return plane{
		name: "tcp", transport: protocol.Transport{Kind: protocol.TransportTCP, Address: p.Address(path)},
		caller: newCaller(tb, cfg), worker: w, tcp: p,
	}
}

func planes(tb testing.TB) []plane {
	tb.Helper()
	return []plane{natsPlane(tb, embedded.NATSOptions{}), tcpPlane(tb, tcpplane.Config{}, respstream.Config{}, Config{})}
}

func newCaller(tb testing.TB, cfg Config) *Caller {
	tb.Helper()
	c, err := New(testenv.Context(tb), cfg)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, c.Close()) })
	return c
}

// call is a request for the worker above.
func (p plane) call(codec protocol.Codec, do string, tokens ...int32) Call {
	return Call{
		Transport: p.transport, Codec: codec, Trace: true,
		Request: &protocol.Request{TokenIDs: tokens, TokensState: protocol.TokensList, Fields: protocol.Map{"do": do}},
	}
}

func (p plane) do(tb testing.TB, call Call) *Stream {
	tb.Helper()
	s, err := p.caller.Do(testenv.Context(tb), call)
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = s.Close() })
	return s
}

// collect reads to the end and returns the tokens and what the answer ended in.
func collect(s *Stream) (tokens []uint32, items []protocol.Item, err error) {
	for {
		item, err := s.Next()
		if err != nil {
			return tokens, items, err
		}
		items = append(items, item)
		if item.Chunk != nil {
			tokens = append(tokens, item.Chunk.TokenIDs...)
		}
	}
}

// works requires that an ordinary request is served.
func (p plane) works(tb testing.TB) {
	tb.Helper()
	for _, codec := range codecs {
		tokens, _, err := collect(p.do(tb, p.call(codec, "", 1, 2, 3)))
		require.ErrorContains(tb, err, "EOF")
		require.Equal(tb, []uint32{1, 2, 3}, tokens)
	}
}

var codecs = []protocol.Codec{protocol.CodecMsgpack, protocol.CodecJSON}

// rawWorker answers every request over a TCP plane with given bytes, whatever they are, and closes.
func rawWorker(tb testing.TB, answer func(info wire.ConnectionInfo) []byte) plane {
	tb.Helper()
	var running sync.WaitGroup
	p, err := tcpplane.Listen(tcpplane.Config{Host: "127.0.0.1"})
	require.NoError(tb, err)
	tb.Cleanup(func() {
		require.NoError(tb, p.Close())
		running.Wait()
	})
	require.NoError(tb, p.Serve("x/y/z/w", ingress.AdmitFunc(func(d *ingress.Delivery) (func(), *ingress.Refusal) {
		running.Add(1)
		return func() {
			defer running.Done()
			conn, err := net.Dial("tcp", d.Control.Connection.Address)
			if err != nil {
				return
			}
			_, _ = conn.Write(answer(d.Control.Connection))
			_ = conn.(*net.TCPConn).CloseWrite()
			// Closing before the other side has read everything could destroy it.
			_, _ = conn.Read(make([]byte, 1))
			_ = conn.Close()
		}, nil
	})))
	return plane{name: "raw", transport: protocol.Transport{Kind: protocol.TransportTCP, Address: p.Address("x/y/z/w")}, caller: newCaller(tb, Config{})}
}

func kinds(s *Stream) string {
	text := ""
	for _, f := range s.Frames() {
		text += fmt.Sprintf("%s%s ", f.Kind, f.Did)
	}
	return text
}

var errTest = errors.New("test")
