package respstream

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/rs/zerolog"

	"dynworker/pkg/wire"
)

const (
	defaultDialTimeout  = 4 * time.Second
	defaultRetryPause   = 200 * time.Millisecond
	defaultWriteTimeout = 30 * time.Second
	defaultLinger       = 10 * time.Second
	defaultTLSTimeout   = 3 * time.Second
)

// Config configures a Dialer. Zero values mean the defaults.
type Config struct {
	// DialTimeout bounds a call-home altogether, retries and TLS included, default 4 s. The frontend gives up ten seconds after it accepted a connection that says nothing.
	DialTimeout time.Duration
	// RetryPause is the pause before another attempt when the machine has no free local address, default 200 ms.
	RetryPause time.Duration
	// WriteTimeout bounds one write, default 30 s.
	WriteTimeout time.Duration
	// Linger is how long a finished stream waits for the frontend to close, default 10 s.
	Linger time.Duration
	// TLS turns TLS on; see ClientTLS. TLSTimeout bounds its handshake, default 3 s.
	TLS        *tls.Config
	TLSTimeout time.Duration
	// Dial replaces the network, for tests.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Logger gets the addresses that cannot be reached, each at most once a minute.
	Logger zerolog.Logger
}

// Dialer opens response streams. Its methods may be called from several goroutines.
type Dialer struct {
	cfg     Config
	trouble trouble
	readers sync.WaitGroup
	alive   context.Context // ends when Close cuts
	end     context.CancelFunc

	mu      sync.Mutex
	streams map[*Stream]struct{}
	pending int // dials under way
	closed  bool
	idle    chan struct{} // closed when the dialer is closed and holds nothing any more
}

// NewDialer returns a Dialer.
func NewDialer(cfg Config) *Dialer {
	for _, d := range []struct {
		value *time.Duration
		def   time.Duration
	}{
		{&cfg.DialTimeout, defaultDialTimeout},
		{&cfg.RetryPause, defaultRetryPause},
		{&cfg.WriteTimeout, defaultWriteTimeout},
		{&cfg.Linger, defaultLinger},
		{&cfg.TLSTimeout, defaultTLSTimeout},
	} {
		if *d.value <= 0 {
			*d.value = d.def
		}
	}
	if cfg.Dial == nil {
		cfg.Dial = new(net.Dialer).DialContext
	}
	alive, end := context.WithCancel(context.Background())
	return &Dialer{
		cfg: cfg, trouble: trouble{log: cfg.Logger}, alive: alive, end: end,
		streams: map[*Stream]struct{}{}, idle: make(chan struct{}),
	}
}

// DialError is a frontend that could not be reached.
type DialError struct {
	// Address is where the request said that the frontend waits.
	Address string
	Err     error
}

func (e *DialError) Error() string { return fmt.Sprintf("call home to %s: %v", e.Address, e.Err) }

// Unwrap returns what the network said.
func (e *DialError) Unwrap() error { return e.Err }

// Dial connects to the frontend. The error is ErrDialerClosed or a *DialError, which has been logged.
//
// The handshake is not sent yet but travels together with what comes next; whoever cannot call Accept or Refuse soon calls Flush.
// The stream's Context is a child of ctx. The end of ctx ends neither the attempt nor the connection nor the right to write: a request that was accepted waits for
// a word, also from a worker that is shutting down.
// Every stream must be ended by Finish, Refuse or Abort.
func (d *Dialer) Dial(ctx context.Context, info wire.ConnectionInfo) (*Stream, error) {
	if !d.begin() {
		return nil, ErrDialerClosed
	}
	conn, err := d.connect(info.Address)
	if err != nil {
		d.forget(nil)
		err = &DialError{Address: info.Address, Err: err}
		if d.alive.Err() == nil {
			d.trouble.report(info.Address, err)
		}
		return nil, err
	}
	d.trouble.over(info.Address)
	s := newStream(ctx, d, conn, info.Subject)
	if !d.adopt(s) {
		_ = conn.Close()
		s.cancel(ErrDialerClosed)
		return nil, ErrDialerClosed
	}
	return s, nil
}

// connect tries until it succeeds, the failure is one that stays, or the time is up.
func (d *Dialer) connect(address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(d.alive, d.cfg.DialTimeout)
	defer cancel()
	for {
		conn, err := d.cfg.Dial(ctx, "tcp", address)
		if err == nil {
			return d.secure(ctx, conn, address)
		}
		// All local ports in use: one may be given back any moment.
		if !errors.Is(err, syscall.EADDRNOTAVAIL) {
			return nil, err
		}
		t := time.NewTimer(d.cfg.RetryPause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return nil, errors.Join(context.Cause(ctx), err)
		}
	}
}

// secure sets the connection up and adds TLS when that is configured.
func (d *Dialer) secure(ctx context.Context, conn net.Conn, address string) (net.Conn, error) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		// Tokens are small and must not wait for one another. It is also Go's default; a failure would be found by the first write.
		_ = tcp.SetNoDelay(true)
	}
	if d.cfg.TLS == nil {
		return conn, nil
	}
	cfg := d.cfg.TLS
	if cfg.ServerName == "" {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			return nil, errors.Join(err, conn.Close())
		}
		cfg = cfg.Clone()
		cfg.ServerName = host
	}
	ctx, cancel := context.WithTimeout(ctx, d.cfg.TLSTimeout)
	defer cancel()
	secured := tls.Client(conn, cfg)
	if err := secured.HandshakeContext(ctx); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("tls handshake: %w", err)
	}
	return secured, nil
}

func (d *Dialer) begin() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return false
	}
	d.pending++
	return true
}

// adopt turns a dial into a stream, unless Close came in between.
func (d *Dialer) adopt(s *Stream) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pending--
	if d.closed {
		d.signalIdle()
		return false
	}
	d.streams[s] = struct{}{}
	d.readers.Go(s.read)
	return true
}

// forget takes note of the end of a stream, or without one of a dial.
func (d *Dialer) forget(s *Stream) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if s == nil {
		d.pending--
	} else {
		delete(d.streams, s)
	}
	d.signalIdle()
}

// signalIdle ends the wait in Close when there is nothing left. The caller holds mu.
func (d *Dialer) signalIdle() {
	if !d.closed || d.pending > 0 || len(d.streams) > 0 {
		return
	}
	select {
	case <-d.idle:
	default:
		close(d.idle)
	}
}

// Open is the number of streams whose connection is open, those that only wait for the frontend to close included.
func (d *Dialer) Open() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.streams)
}

// Close refuses new streams and waits until the frontends have closed the finished ones. When ctx ends first, all that is left is cut, and the error says how
// much that was.
func (d *Dialer) Close(ctx context.Context) error {
	d.mu.Lock()
	d.closed = true
	d.signalIdle()
	d.mu.Unlock()
	var err error
	select {
	case <-d.idle:
	case <-ctx.Done():
		if n := d.cut(); n > 0 {
			err = fmt.Errorf("%d response streams cut: %w", n, context.Cause(ctx))
		}
		<-d.idle
	}
	d.end()
	d.readers.Wait()
	return err
}

// cut ends all streams and dials and returns how many streams that were.
func (d *Dialer) cut() int {
	d.end()
	d.mu.Lock()
	left := make([]*Stream, 0, len(d.streams))
	for s := range d.streams {
		left = append(left, s)
	}
	d.mu.Unlock()
	for _, s := range left {
		s.endWith(ErrDialerClosed)
	}
	return len(left)
}
