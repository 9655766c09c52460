package tcpplane

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/rs/zerolog"

	"dynworker/pkg/ingress"
	"dynworker/pkg/wire"
)

const (
	defaultMaxConnections = 4096
	defaultMessageTimeout = 30 * time.Second
	defaultReplyTimeout   = 10 * time.Second
	defaultTLSTimeout     = 3 * time.Second
	defaultQuiet          = 100 * time.Millisecond
)

var (
	// ErrClosed is returned after Drain or Close.
	ErrClosed = errors.New("tcp plane is closed")
	// ErrPathServed is returned when a path is served twice.
	ErrPathServed = errors.New("path is served already")
)

// Config configures a Plane. The zero value listens on all addresses and a free port.
type Config struct {
	// Host is the IP address to listen on, empty for all. It is also what is advertised, unless it is unspecified (0.0.0.0 or ::).
	Host string
	// Port is the port to listen on, 0 for a free one.
	Port uint16
	// Advertise is the IP address for instance records when Host does not say it; empty picks an address of this machine.
	Advertise string
	// MaxMessage is the largest message in bytes, default 32 MiB.
	MaxMessage int
	// MaxConnections bounds the open connections, default 4096. More are closed at once.
	MaxConnections int
	// MessageTimeout is how long a message may take from its first byte to its last, default 30 s. Between messages a connection may be silent for ever.
	MessageTimeout time.Duration
	// ReplyTimeout is how long a peer may take to accept a reply, default 10 s.
	ReplyTimeout time.Duration
	// Quiet is how long a connection must be silent to be closed while draining, default 100 ms.
	Quiet time.Duration
	// TLS turns TLS on; see ServerTLS. TLSTimeout bounds its handshake, default 3 s.
	TLS        *tls.Config
	TLSTimeout time.Duration

	Observer ingress.Observer
	Logger   zerolog.Logger
}

// Plane is the TCP request plane of a worker.
type Plane struct {
	cfg Config
	// For lines that can come with every message or connection.
	logAccept, logFull, logBroken, logPath, logMalformed zerolog.Logger
	listener                                             net.Listener
	advertise                                            netip.AddrPort
	done                                                 sync.WaitGroup
	drain                                                chan struct{} // closed when draining begins

	mu        sync.RWMutex
	endpoints map[string]*ingress.Intake
	conns     map[*conn]struct{}
	draining  bool
}

// Listen opens the listener and begins to serve it. Requests for paths that nobody serves yet are refused.
func Listen(cfg Config) (*Plane, error) {
	cfg.setDefaults()
	ln, err := net.Listen("tcp", net.JoinHostPort(cfg.Host, fmt.Sprint(cfg.Port)))
	if err != nil {
		return nil, fmt.Errorf("listen for the tcp request plane: %w", err)
	}
	addr, err := advertised(cfg, ln.Addr())
	if err != nil {
		return nil, errors.Join(err, ln.Close())
	}
	p := &Plane{
		cfg:       cfg,
		logAccept: ingress.Limited(cfg.Logger), logFull: ingress.Limited(cfg.Logger), logBroken: ingress.Limited(cfg.Logger),
		logPath: ingress.Limited(cfg.Logger), logMalformed: ingress.Limited(cfg.Logger),
		listener: ln, advertise: addr, drain: make(chan struct{}),
		endpoints: map[string]*ingress.Intake{}, conns: map[*conn]struct{}{},
	}
	p.done.Go(p.accept)
	return p, nil
}

func (c *Config) setDefaults() {
	if c.MaxMessage <= 0 {
		c.MaxMessage = wire.MaxMessage
	}
	if c.MaxConnections <= 0 {
		c.MaxConnections = defaultMaxConnections
	}
	for _, d := range []struct {
		value *time.Duration
		def   time.Duration
	}{
		{&c.MessageTimeout, defaultMessageTimeout},
		{&c.ReplyTimeout, defaultReplyTimeout},
		{&c.TLSTimeout, defaultTLSTimeout},
		{&c.Quiet, defaultQuiet},
	} {
		if *d.value <= 0 {
			*d.value = d.def
		}
	}
}

// AddrPort is the address for instance records, without a path.
func (p *Plane) AddrPort() netip.AddrPort { return p.advertise }

// Address is what an instance record says about a path: "ip:port/path".
func (p *Plane) Address(path string) string { return wire.PlaneAddress(p.advertise, path) }

// MaxMessage is the largest message in bytes that is read.
func (p *Plane) MaxMessage() int { return p.cfg.MaxMessage }

// Serve begins to take requests for a path; see wire.PlanePath.
func (p *Plane) Serve(path string, admitter ingress.Admitter) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.draining {
		return fmt.Errorf("serve %s: %w", path, ErrClosed)
	}
	if p.endpoints[path] != nil {
		return fmt.Errorf("serve %s: %w", path, ErrPathServed)
	}
	p.endpoints[path] = &ingress.Intake{Plane: ingress.TCP, Admitter: admitter, Observer: p.cfg.Observer, Logger: p.logMalformed}
	return nil
}

func (p *Plane) endpoint(path string) *ingress.Intake {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.endpoints[path]
}

// accept is the listener's goroutine.
func (p *Plane) accept() {
	pause := backoff.NewExponentialBackOff()
	pause.InitialInterval, pause.MaxInterval = 5*time.Millisecond, time.Second
	for {
		c, err := p.listener.Accept()
		if err == nil {
			pause.Reset()
			p.admit(c)
			continue
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
		// Mostly a lack of file descriptors, which passes.
		p.logAccept.Warn().Err(err).Msg("tcp request plane cannot accept a connection")
		t := time.NewTimer(pause.NextBackOff())
		select {
		case <-t.C:
		case <-p.drain:
			t.Stop()
			return
		}
	}
}

// admit serves a connection, or closes it when there are too many.
func (p *Plane) admit(nc net.Conn) {
	c := newConn(p, nc)
	p.mu.Lock()
	full := len(p.conns) >= p.cfg.MaxConnections
	draining := p.draining
	if !full && !draining {
		p.conns[c] = struct{}{}
		p.done.Go(c.serve)
	}
	p.mu.Unlock()
	if full {
		p.cfg.Observer.Note(ingress.TCP, ingress.ConnectionRefused, 1, nil)
		p.logFull.Warn().Int("limit", p.cfg.MaxConnections).Str("peer", nc.RemoteAddr().String()).Msg("tcp request plane has too many connections")
	}
	if full || draining {
		_ = nc.Close()
	}
}

func (p *Plane) forget(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}

// Connections is the number of open connections.
func (p *Plane) Connections() int {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return len(p.conns)
}

// Drain closes the listener, goes on serving each connection until it has been silent for Config.Quiet, and closes it then. When ctx ends first, the rest is cut
// and the cause is returned.
func (p *Plane) Drain(ctx context.Context) error {
	p.beginDrain()
	ended := make(chan struct{})
	var waiter sync.WaitGroup
	waiter.Go(func() {
		p.done.Wait()
		close(ended)
	})
	defer waiter.Wait()
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		p.cut()
		return fmt.Errorf("drain the tcp request plane: %w", context.Cause(ctx))
	}
}

// Close ends the listener and all connections at once. It is safe to call twice, and after Drain.
func (p *Plane) Close() error {
	p.beginDrain()
	p.cut()
	p.done.Wait()
	return nil
}

func (p *Plane) beginDrain() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.draining {
		return
	}
	p.draining = true
	close(p.drain)
	// It can only fail because it is closed.
	_ = p.listener.Close()
	for c := range p.conns {
		c.beginDrain()
	}
}

func (p *Plane) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.cut()
	}
}
