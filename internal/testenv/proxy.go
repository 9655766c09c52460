package testenv

import (
	"errors"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"dynworker/internal/testenv/heldport"
)

// Proxy is a TCP proxy on loopback whose connections a test can break in the ways in which networks do. It starts passing everything through.
// Its methods may be called from several goroutines.
type Proxy struct {
	port   *heldport.Port
	target string

	mu       sync.Mutex
	gate     chan struct{} // closed while data flows
	listener net.Listener  // nil while connections are refused
	links    map[*link]struct{}
	accepted int
	closed   bool

	wg sync.WaitGroup
}

// link is one proxied connection.
type link struct {
	client, server net.Conn      // server is nil until it is dialled
	dead           chan struct{} // closed when the link is given up
	once           sync.Once
	stalled        chan struct{} // closed when the link may never carry data again
}

// NewProxy starts a proxy in front of target, a host and port. It is closed at the end of the test.
func NewProxy(tb testing.TB, target string) *Proxy {
	tb.Helper()
	port, err := heldport.Hold()
	require.NoError(tb, err)
	p := &Proxy{port: port, target: target, gate: make(chan struct{}), links: make(map[*link]struct{})}
	close(p.gate)
	if err := p.Accept(); err != nil {
		port.Release()
		require.NoError(tb, err)
	}
	tb.Cleanup(p.close)
	return p
}

// Address is the host and port for clients. It never changes.
func (p *Proxy) Address() string { return p.port.Address() }

// Accepted is the number of connections that clients have made so far.
func (p *Proxy) Accepted() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepted
}

// Open is the number of connections that exist now.
func (p *Proxy) Open() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.links)
}

// Pause makes the network a black hole: connections can be made and written to, but nothing comes through and nobody is told. It is what a frozen server looks like.
func (p *Proxy) Pause() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.gate:
		p.gate = make(chan struct{})
	default:
	}
}

// Resume ends Pause. What was written in the meantime arrives now.
func (p *Proxy) Resume() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.gate:
	default:
		close(p.gate)
	}
}

// Stall makes a black hole of the present connections for good, while new ones work. It is what a dead host whose address has been taken over looks like.
func (p *Proxy) Stall() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		select {
		case <-l.stalled:
		default:
			close(l.stalled)
		}
	}
}

// Drop resets the present connections on both sides.
func (p *Proxy) Drop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.reset()
	}
}

// Refuse makes new connections fail at once. The present ones stay.
func (p *Proxy) Refuse() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refuse()
}

func (p *Proxy) refuse() {
	if p.listener != nil {
		_ = p.listener.Close()
		p.listener = nil
	}
}

// Accept ends Refuse.
func (p *Proxy) Accept() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != nil || p.closed {
		return nil
	}
	l, err := net.Listen("tcp", p.port.Address())
	if err != nil {
		return err
	}
	p.listener = l
	p.wg.Go(func() { p.serve(l) })
	return nil
}

func (p *Proxy) close() {
	p.mu.Lock()
	p.closed = true
	p.refuse()
	for l := range p.links {
		l.reset()
	}
	p.mu.Unlock()
	p.wg.Wait()
	p.port.Release()
}

func (p *Proxy) serve(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return // the listener has been closed
		}
		k := &link{client: c, dead: make(chan struct{}), stalled: make(chan struct{})}
		p.mu.Lock()
		p.accepted++
		p.links[k] = struct{}{}
		if p.closed {
			k.reset()
		}
		p.mu.Unlock()
		p.wg.Go(func() { p.carry(k) })
	}
}

func (p *Proxy) carry(k *link) {
	end := k.reset
	defer func() {
		p.mu.Lock()
		end()
		delete(p.links, k)
		p.mu.Unlock()
	}()
	if !p.pass(k) {
		return
	}
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	p.mu.Lock()
	k.server = server
	select {
	case <-k.dead: // reset while dialling
		_ = server.Close()
	default:
	}
	p.mu.Unlock()
	var both sync.WaitGroup
	both.Go(func() { p.copy(k, k.server, k.client) })
	both.Go(func() { p.copy(k, k.client, k.server) })
	both.Wait()
	end = k.finish
}

// pass waits until data may flow over the link and tells whether the link is still wanted then.
func (p *Proxy) pass(k *link) bool {
	p.mu.Lock()
	gate := p.gate
	p.mu.Unlock()
	select {
	case <-k.dead:
		return false
	case <-k.stalled:
		<-k.dead
		return false
	default:
	}
	select {
	case <-k.dead:
		return false
	case <-k.stalled:
		<-k.dead
		return false
	case <-gate:
		return true
	}
}

// copy moves data in one direction and ends as the source does: an orderly end is passed on as a half-close, anything else resets both sides.
func (p *Proxy) copy(k *link, dst, src net.Conn) {
	buf := make([]byte, 32<<10)
	for {
		n, err := src.Read(buf)
		if !p.pass(k) {
			return
		}
		if n > 0 {
			if _, werr := dst.Write(buf[:n]); werr != nil {
				k.reset()
				return
			}
		}
		switch {
		case err == nil:
		case errors.Is(err, io.EOF):
			_ = dst.(*net.TCPConn).CloseWrite()
			return
		default:
			k.reset()
			return
		}
	}
}

// reset closes both sides with a TCP reset, which also throws away what has not been delivered. Only the first of reset and finish does anything.
func (k *link) reset() {
	k.once.Do(func() {
		close(k.dead)
		for _, c := range k.sides() {
			_ = c.(*net.TCPConn).SetLinger(0)
			_ = c.Close()
		}
	})
}

// finish closes both sides after both directions have ended in order. The kernel still delivers what it holds.
func (k *link) finish() {
	k.once.Do(func() {
		close(k.dead)
		for _, c := range k.sides() {
			_ = c.Close()
		}
	})
}

func (k *link) sides() []net.Conn {
	if k.server == nil {
		return []net.Conn{k.client}
	}
	return []net.Conn{k.client, k.server}
}
