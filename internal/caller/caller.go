package caller

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"dynworker/pkg/ingress/natsplane"
	"dynworker/pkg/wire"
)

const (
	defaultHost            = "127.0.0.1"
	defaultReplyTimeout    = 10 * time.Second
	defaultCallHomeTimeout = 10 * time.Second
	// handshakeTimeout is how long a worker may take to say which stream it answers; the frontend's own value.
	handshakeTimeout = 10 * time.Second
	// maxItem bounds one item of an answer.
	maxItem = 64 << 20
	// readBuffer suits streams of small items.
	readBuffer = 4 << 10
)

// Config configures a Caller. The zero value has no NATS and listens on loopback.
type Config struct {
	// Host is the IP address to listen on for call-homes and to tell workers, default 127.0.0.1.
	Host string
	// NATS, when set, is where requests over NATS go.
	NATS *natsplane.ConnConfig
	// ResponseTLS, when set, makes the listener speak TLS. PlaneTLS, when set, is how to speak TLS to the TCP request plane.
	ResponseTLS, PlaneTLS *tls.Config
	// ReplyTimeout is how long the reply to a request may take, default 10 s.
	ReplyTimeout time.Duration
	// MaxMessage is the largest request for the TCP plane in bytes, default 32 MiB as in the frontend; negative means no limit.
	MaxMessage int
	Logger     zerolog.Logger
}

// Caller sends requests. Its methods may be called from several goroutines.
type Caller struct {
	cfg      Config
	listener net.Listener
	nats     *natsplane.Conn
	planes   planePool
	done     sync.WaitGroup

	mu      sync.Mutex
	waiting map[string]chan *home // by subject
	fresh   map[net.Conn]struct{} // connected, handshake not read
	streams map[*Stream]struct{}
	closed  bool
}

// home is a connection whose handshake has been read.
type home struct {
	conn      net.Conn
	reader    *wire.Reader
	handshake []byte
}

// New opens the listener and connects to NATS if that is configured.
func New(ctx context.Context, cfg Config) (*Caller, error) {
	if cfg.Host == "" {
		cfg.Host = defaultHost
	}
	if cfg.ReplyTimeout <= 0 {
		cfg.ReplyTimeout = defaultReplyTimeout
	}
	if cfg.MaxMessage == 0 {
		cfg.MaxMessage = wire.MaxMessage
	}
	c := &Caller{
		cfg: cfg, planes: planePool{timeout: cfg.ReplyTimeout, tls: cfg.PlaneTLS},
		waiting: map[string]chan *home{}, fresh: map[net.Conn]struct{}{}, streams: map[*Stream]struct{}{},
	}
	if cfg.NATS != nil {
		conn, err := natsplane.Dial(ctx, *cfg.NATS)
		if err != nil {
			return nil, err
		}
		c.nats = conn
	}
	ln, err := net.Listen("tcp", net.JoinHostPort(cfg.Host, "0"))
	if err != nil {
		if c.nats != nil {
			c.nats.Close()
		}
		return nil, fmt.Errorf("listen for call-homes: %w", err)
	}
	c.listener = ln
	c.done.Go(c.accept)
	return c, nil
}

// MaxPayload is the payload limit of the NATS server in bytes, 0 without NATS.
func (c *Caller) MaxPayload() int64 {
	if c.nats == nil {
		return 0
	}
	return c.nats.MaxPayload()
}

// Address is where workers call home.
func (c *Caller) Address() string { return c.listener.Addr().String() }

// Close ends all streams and connections. It is safe to call twice.
func (c *Caller) Close() error {
	c.mu.Lock()
	first := !c.closed
	c.closed = true
	streams := make([]*Stream, 0, len(c.streams))
	for s := range c.streams {
		streams = append(streams, s)
	}
	for conn := range c.fresh {
		_ = conn.Close()
	}
	c.mu.Unlock()
	if !first {
		return nil
	}
	err := c.listener.Close()
	for _, s := range streams {
		_ = s.Close()
	}
	c.planes.close()
	if c.nats != nil {
		c.nats.Close()
	}
	c.done.Wait()
	return err
}

// accept is the listener's goroutine.
func (c *Caller) accept() {
	for {
		conn, err := c.listener.Accept()
		if err != nil {
			if !errors.Is(err, net.ErrClosed) {
				c.cfg.Logger.Error().Err(err).Msg("no more call-homes are accepted")
			}
			return
		}
		c.mu.Lock()
		if c.closed {
			c.mu.Unlock()
			_ = conn.Close()
			continue
		}
		c.fresh[conn] = struct{}{}
		c.done.Go(func() { c.receive(conn) })
		c.mu.Unlock()
	}
}

// receive reads a handshake and hands the connection to the call that waits for it. Like the frontend it closes what nobody waits for.
func (c *Caller) receive(conn net.Conn) {
	h, subject, err := c.shakeHands(conn)
	if c.deliver(conn, h, subject) {
		return
	}
	c.cfg.Logger.Debug().Err(err).Str("peer", conn.RemoteAddr().String()).Msg("call-home that nobody waits for")
	_ = conn.Close()
}

func (c *Caller) deliver(conn net.Conn, h *home, subject string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.fresh, conn)
	waiter := c.waiting[subject]
	if h == nil || waiter == nil {
		return false
	}
	delete(c.waiting, subject)
	waiter <- h
	return true
}

func (c *Caller) shakeHands(raw net.Conn) (h *home, subject string, err error) {
	if err := raw.SetReadDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return nil, "", err
	}
	conn := raw
	if c.cfg.ResponseTLS != nil {
		conn = tls.Server(raw, c.cfg.ResponseTLS)
	}
	r := wire.NewReaderSize(conn, wire.Limits{MaxHeader: wire.MaxControl, MaxData: maxItem}, readBuffer)
	f, err := r.Next()
	if err != nil {
		return nil, "", fmt.Errorf("read handshake: %w", err)
	}
	hs, err := wire.ParseHandshake(f.Header)
	if err != nil {
		return nil, "", err
	}
	if hs.StreamType != wire.StreamTypeResponse {
		return nil, "", fmt.Errorf("handshake of a %q stream", hs.StreamType)
	}
	if err := raw.SetReadDeadline(time.Time{}); err != nil {
		return nil, "", err
	}
	return &home{conn: conn, reader: r, handshake: append([]byte(nil), f.Header...)}, hs.Subject, nil
}

// expect announces a subject. The channel holds one connection and is never closed.
func (c *Caller) expect(subject string) (chan *home, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, ErrClosed
	}
	ch := make(chan *home, 1)
	c.waiting[subject] = ch
	return ch, nil
}

// forget ends the wait for a subject, and closes a connection that came meanwhile.
func (c *Caller) forget(subject string, ch chan *home) {
	c.mu.Lock()
	delete(c.waiting, subject)
	c.mu.Unlock()
	select {
	case h := <-ch:
		_ = h.conn.Close()
	default:
	}
}
