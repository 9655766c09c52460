package caller

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"net"
	"sync"
	"time"

	"dynworker/pkg/wire"
)

// maxReply bounds a reply of the TCP request plane. Refusals are a line of text.
const maxReply = 1 << 20

// planePool keeps one connection for each worker on the TCP request plane and sends requests over it without waiting for the replies to earlier ones.
type planePool struct {
	timeout time.Duration
	tls     *tls.Config

	mu     sync.Mutex
	conns  map[string]*planeEntry
	done   sync.WaitGroup
	closed bool
}

// planeEntry is a connection, perhaps still to come. conn and err are set before ready is closed.
type planeEntry struct {
	ready chan struct{}
	conn  *planeConn
	err   error
}

// planeConn matches replies to requests by their order.
type planeConn struct {
	conn net.Conn

	send sync.Mutex // held while a request is queued and written, so that both have the same order

	mu     sync.Mutex
	queue  []chan planeReply
	broken error
}

type planeReply struct {
	body []byte
	err  error
}

// roundTrip sends one message and waits for its reply.
func (p *planePool) roundTrip(ctx context.Context, addr string, message []byte) ([]byte, error) {
	pc, err := p.get(ctx, addr)
	if err != nil {
		return nil, err
	}
	ch, err := pc.write(message, p.timeout)
	if err != nil {
		return nil, err
	}
	select {
	case r := <-ch:
		return r.body, r.err
	case <-ctx.Done():
		// The reply may still come; it is taken off the queue then.
		return nil, context.Cause(ctx)
	}
}

// get returns the connection to a worker, and opens it if there is none. Calls to other workers do not wait for that.
func (p *planePool) get(ctx context.Context, addr string) (*planeConn, error) {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil, ErrClosed
	}
	e := p.conns[addr]
	if e == nil {
		e = &planeEntry{ready: make(chan struct{})}
		if p.conns == nil {
			p.conns = map[string]*planeEntry{}
		}
		p.conns[addr] = e
		p.done.Go(func() { p.run(ctx, addr, e) })
	}
	p.mu.Unlock()
	select {
	case <-e.ready:
		return e.conn, e.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// run opens a connection and reads it to its end.
func (p *planePool) run(ctx context.Context, addr string, e *planeEntry) {
	// Whoever else waits for this connection has a context of its own.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.timeout)
	defer cancel()
	conn, err := p.dial(ctx, addr)
	p.mu.Lock()
	switch {
	case err != nil:
		e.err = err
	case p.closed:
		_ = conn.Close()
		e.err = ErrClosed
	default:
		e.conn = &planeConn{conn: conn}
	}
	close(e.ready)
	p.mu.Unlock()
	if e.conn != nil {
		e.conn.read()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, addr)
}

func (p *planePool) dial(ctx context.Context, addr string) (net.Conn, error) {
	if p.tls != nil {
		d := tls.Dialer{Config: p.tls}
		return d.DialContext(ctx, "tcp", addr)
	}
	var d net.Dialer
	return d.DialContext(ctx, "tcp", addr)
}

func (pc *planeConn) write(message []byte, timeout time.Duration) (chan planeReply, error) {
	pc.send.Lock()
	defer pc.send.Unlock()
	ch := make(chan planeReply, 1)
	pc.mu.Lock()
	if pc.broken != nil {
		pc.mu.Unlock()
		return nil, pc.broken
	}
	pc.queue = append(pc.queue, ch)
	pc.mu.Unlock()
	if err := pc.conn.SetWriteDeadline(time.Now().Add(timeout)); err != nil {
		return nil, err
	}
	if _, err := pc.conn.Write(message); err != nil {
		// Nobody knows how much of it arrived.
		_ = pc.conn.Close()
		return nil, err
	}
	return ch, nil
}

// read takes replies until the connection ends, which fails all requests that wait.
func (pc *planeConn) read() {
	r := bufio.NewReader(pc.conn)
	for {
		body, err := wire.ReadPlaneReply(r, maxReply)
		pc.mu.Lock()
		if err == nil && len(pc.queue) == 0 {
			err = errors.New("worker sent a reply without a request")
		}
		if err != nil {
			pc.broken = err
			for _, ch := range pc.queue {
				ch <- planeReply{err: err}
			}
			pc.queue = nil
			pc.mu.Unlock()
			_ = pc.conn.Close()
			return
		}
		ch := pc.queue[0]
		pc.queue = pc.queue[1:]
		pc.mu.Unlock()
		ch <- planeReply{body: body}
	}
}

func (p *planePool) close() {
	p.mu.Lock()
	p.closed = true
	for _, e := range p.conns {
		select {
		case <-e.ready:
			if e.conn != nil {
				_ = e.conn.conn.Close()
			}
		default:
			// Still being opened; it sees that the pool is closed.
		}
	}
	p.mu.Unlock()
	p.done.Wait()
}
