package natsplane

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/nats-io/nats.go"
)

var (
	// ErrAuthorization is a server that does not accept the credentials. Dial does not try again.
	ErrAuthorization = errors.New("nats server refused the credentials")
	// ErrStartupTimeout is a server that was not reached in ConnConfig.StartupTimeout.
	ErrStartupTimeout = errors.New("not reached in time")
)

const (
	defaultPingInterval = 10 * time.Second
	maxPings            = 2
	// writeTimeout bounds a write to a server that has stopped reading.
	writeTimeout = 10 * time.Second
	// outageBuffer is how many bytes may wait for the next connection. It holds replies that may still be in time, and keeps an outage from taking memory.
	outageBuffer = 256 << 10
)

// Conn is a NATS connection together with its dialer.
type Conn struct {
	*nats.Conn
	dialer *dialer
}

// Close closes the connection at once, also while an attempt to reconnect hangs.
func (c *Conn) Close() {
	c.dialer.close()
	c.Conn.Close()
}

// Dial connects to NATS. While the server cannot be reached it tries again until StartupTimeout has passed; a server that answers and refuses is final.
// Errors name the address. When ctx ends, Dial returns at once. Options of the caller come after those of cfg.
func Dial(ctx context.Context, cfg ConnConfig, opts ...nats.Option) (*Conn, error) {
	servers, err := cfg.servers()
	if err != nil {
		return nil, err
	}
	base, err := cfg.options()
	if err != nil {
		return nil, err
	}
	timeout := orDefault(cfg.StartupTimeout, defaultStartupTimeout)
	dialCtx, cancel := context.WithTimeoutCause(ctx, timeout, ErrStartupTimeout)
	defer cancel()
	pause := newBackoff(orDefault(cfg.RetryMin, defaultStartupRetry), orDefault(cfg.RetryMax, defaultRetryMax))
	var last error
	for {
		c, err := connectOnce(dialCtx, cfg, servers, append(base[:len(base):len(base)], opts...))
		if err == nil {
			return c, nil
		}
		if final(err) {
			return nil, fmt.Errorf("connect to nats at %s: %w", cfg.redacted(), err)
		}
		// An attempt that was cut off by the end of the wait says less than the one before it.
		var network net.Error
		if last == nil || !errors.As(err, &network) || !network.Timeout() {
			last = err
		}
		if err := sleep(dialCtx, pause.NextBackOff()); err != nil {
			if errors.Is(err, ErrStartupTimeout) {
				return nil, fmt.Errorf("connect to nats at %s: %w (%s): %w", cfg.redacted(), err, timeout, last)
			}
			return nil, fmt.Errorf("connect to nats at %s: %w", cfg.redacted(), err)
		}
	}
}

func connectOnce(ctx context.Context, cfg ConnConfig, servers string, opts []nats.Option) (*Conn, error) {
	d := newDialer(ctx, orDefault(cfg.AttemptTimeout, defaultAttemptTimeout))
	nc, err := nats.Connect(servers, append(opts, nats.SetCustomDialer(d))...)
	if err != nil {
		// The library drops the reason when a connection was refused.
		if dialErr := d.lastError(); errors.Is(err, nats.ErrNoServers) && dialErr != nil {
			err = dialErr
		}
		d.close()
		if refused(err) {
			err = fmt.Errorf("%w: %w", ErrAuthorization, err)
		}
		return nil, err
	}
	d.established()
	return &Conn{Conn: nc, dialer: d}, nil
}

func (c *ConnConfig) options() ([]nats.Option, error) {
	login, err := c.credentials()
	if err != nil {
		return nil, err
	}
	secure, err := c.secure()
	if err != nil {
		return nil, err
	}
	reconnect := newBackoff(orDefault(c.RetryMin, defaultReconnectRetry), orDefault(c.RetryMax, defaultRetryMax))
	opts := []nats.Option{
		nats.Name(c.Name),
		login,
		nats.Timeout(orDefault(c.AttemptTimeout, defaultAttemptTimeout)),
		nats.MaxReconnects(-1),
		nats.CustomReconnectDelay(func(attempts int) time.Duration {
			if attempts <= 1 {
				reconnect.Reset()
			}
			return reconnect.NextBackOff()
		}),
		// Credentials may be repaired while we wait; giving up would need a restart.
		nats.IgnoreAuthErrorAbort(),
		nats.PermissionErrOnSubscribe(true),
		nats.ReconnectBufSize(outageBuffer),
		nats.PingInterval(orDefault(c.PingInterval, defaultPingInterval)),
		nats.MaxPingsOutstanding(maxPings),
		nats.FlusherTimeout(writeTimeout),
		// The dialer resolves names itself, bounded in time.
		nats.SkipHostLookup(),
	}
	return append(opts, secure...), nil
}

// refused tells whether the server said no to who we are.
func refused(err error) bool {
	for _, e := range []error{nats.ErrAuthorization, nats.ErrAuthExpired, nats.ErrAuthRevoked, nats.ErrAccountAuthExpired} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// final tells whether another attempt is pointless. Only what can pass by itself is tried again: names that do not resolve, connections that fail or break, silence.
func final(err error) bool {
	if refused(err) {
		return true
	}
	var (
		certificate *tls.CertificateVerificationError
		notTLS      tls.RecordHeaderError
		op          *net.OpError
	)
	if errors.As(err, &certificate) || errors.As(err, &notTLS) {
		return true
	}
	// A TLS alert of the other side, such as one about our certificate, comes as an operation of this name.
	if errors.As(err, &op) && op.Op == "remote error" {
		return true
	}
	var network net.Error
	switch {
	case errors.As(err, &network), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed),
		errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), errors.Is(err, ErrStartupTimeout),
		errors.Is(err, nats.ErrNoServers), errors.Is(err, nats.ErrTimeout), errors.Is(err, nats.ErrConnectionClosed),
		errors.Is(err, nats.ErrMaxConnectionsExceeded), errors.Is(err, nats.ErrMaxAccountConnectionsExceeded):
		return false
	}
	return true
}

func newBackoff(shortest, longest time.Duration) *backoff.ExponentialBackOff {
	b := backoff.NewExponentialBackOff()
	b.InitialInterval = shortest
	b.MaxInterval = max(shortest, longest)
	b.Multiplier = 2
	b.Reset()
	return b
}

// sleep waits, and returns the cause when ctx ends first.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// dialer opens the connections of one Conn. The library dials without a context and while it holds its lock, so the end of an attempt has to come from here.
type dialer struct {
	timeout time.Duration
	alive   context.Context // ends with close
	end     context.CancelFunc

	mu      sync.Mutex
	start   context.Context // bounds the first connection, nil once it stands
	conn    net.Conn        // the latest
	release func() bool     // undoes the watch on conn
	err     error           // of the latest failed attempt
}

func newDialer(start context.Context, timeout time.Duration) *dialer {
	alive, end := context.WithCancel(context.WithoutCancel(start))
	return &dialer{timeout: timeout, alive: alive, end: end, start: start}
}

// Dial implements nats.CustomDialer.
func (d *dialer) Dial(network, address string) (net.Conn, error) {
	watched := d.context()
	ctx, cancel := context.WithTimeout(watched, d.timeout)
	defer cancel()
	var nd net.Dialer
	c, err := nd.DialContext(ctx, network, address)
	d.mu.Lock()
	defer d.mu.Unlock()
	if err != nil {
		d.err = err
		return nil, err
	}
	d.conn = c
	d.watch(watched)
	return c, nil
}

// watch closes the latest connection when ctx ends: the only way out of a server that accepts and then says nothing, and out of a write that hangs.
func (d *dialer) watch(ctx context.Context) {
	if d.release != nil {
		d.release()
	}
	c := d.conn
	d.release = context.AfterFunc(ctx, func() { _ = c.Close() })
}

func (d *dialer) context() context.Context {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.start != nil {
		return d.start
	}
	return d.alive
}

// established moves the connection from the caller's context, which may end now, to the life of the Conn.
func (d *dialer) established() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.start = nil
	d.watch(d.alive)
}

func (d *dialer) lastError() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.err
}

func (d *dialer) close() { d.end() }
