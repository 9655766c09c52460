package discovery

import (
	"context"
	"errors"
	"net"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
)

// dialer makes the connections of one client, so that it can be told when there is a new one and can close those that are dead.
type dialer struct {
	mu    sync.Mutex
	conns map[*trackedConn]struct{}
	next  chan struct{} // closed with the next connection
	err   error         // of the latest attempt
}

func newDialer() *dialer {
	return &dialer{conns: make(map[*trackedConn]struct{}), next: make(chan struct{})}
}

func (d *dialer) dial(ctx context.Context, address string) (net.Conn, error) {
	var nd net.Dialer
	c, err := nd.DialContext(ctx, "tcp", address)
	d.mu.Lock()
	defer d.mu.Unlock()
	if !errors.Is(ctx.Err(), context.Canceled) { // a try that was called off says nothing about the network
		d.err = err
	}
	if err != nil {
		return nil, err
	}
	t := &trackedConn{Conn: c, dialer: d}
	d.conns[t] = struct{}{}
	close(d.next)
	d.next = make(chan struct{})
	return t, nil
}

// dialled returns a channel that is closed when a connection is made after this call.
func (d *dialer) dialled() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.next
}

// failure returns why the latest attempt to make a connection failed, nil when it did not.
func (d *dialer) failure() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.err
}

// closeAll closes all connections. gRPC makes new ones by itself.
func (d *dialer) closeAll() {
	d.mu.Lock()
	conns := d.conns
	d.conns = make(map[*trackedConn]struct{})
	d.mu.Unlock()
	for c := range conns {
		_ = c.Conn.Close()
	}
}

// trackedConn leaves its dialer's list when it is closed.
type trackedConn struct {
	net.Conn
	dialer *dialer
}

func (c *trackedConn) Close() error {
	c.dialer.mu.Lock()
	delete(c.dialer.conns, c)
	c.dialer.mu.Unlock()
	return c.Conn.Close()
}

// cause collects why a call waited in vain. The etcd client says only "context deadline exceeded" then, and so hides, for instance, that the connection is refused.
type cause struct {
	dialer *dialer
	mu     sync.Mutex
	last   error // what gRPC said
}

type causeKey struct{}

func (d *dialer) withCause(ctx context.Context) (context.Context, *cause) {
	c := &cause{dialer: d}
	return context.WithValue(ctx, causeKey{}, c), c
}

func noteCause(ctx context.Context, err error) {
	c, ok := ctx.Value(causeKey{}).(*cause)
	if !ok || err == nil {
		return
	}
	c.mu.Lock()
	c.last = err
	c.mu.Unlock()
}

// explain puts the cause in place of an error that says only that the time is over.
func (c *cause) explain(err error) error {
	if err == nil || (!errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled)) {
		return err
	}
	if failure := c.dialer.failure(); failure != nil {
		return &explainedError{err: err, text: failure.Error()}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.last == nil {
		return err
	}
	return &explainedError{err: err, text: status.Convert(c.last).Message()}
}

// explainedError is err with a better text.
type explainedError struct {
	err  error
	text string
}

func (e *explainedError) Error() string { return e.text }

func (e *explainedError) Unwrap() error { return e.err }

// causeOptions make every call note its cause.
func causeOptions() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			err := invoke(ctx, method, req, reply, cc, opts...)
			noteCause(ctx, err)
			return err
		}),
		grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			stream, err := open(ctx, desc, cc, method, opts...)
			noteCause(ctx, err)
			return stream, err
		}),
	}
}
