package tcpplane

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"dynworker/pkg/ingress"
	"dynworker/pkg/wire"
)

// readBuffer suits the small messages that are usual; a larger payload is read straight into its own memory.
const readBuffer = 16 << 10

// conn is one connection of a frontend. Its goroutine is the only one that reads and writes.
type conn struct {
	plane *Plane
	nc    net.Conn
	in    *bufio.Reader
	out   []byte

	mu       sync.Mutex
	waiting  bool // between two messages
	draining bool
}

func newConn(p *Plane, nc net.Conn) *conn { return &conn{plane: p, nc: nc} }

func (c *conn) serve() {
	defer c.plane.forget(c)
	defer func() { _ = c.nc.Close() }()
	if err := c.handshake(); err != nil {
		c.broken(fmt.Errorf("tls handshake: %w", err))
		return
	}
	c.in = bufio.NewReaderSize(c.nc, readBuffer)
	for {
		if err := c.next(); err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, errQuiet) && !errors.Is(err, net.ErrClosed) {
				c.broken(err)
			}
			return
		}
	}
}

func (c *conn) handshake() error {
	if c.plane.cfg.TLS == nil {
		return nil
	}
	tc := tls.Server(c.nc, c.plane.cfg.TLS)
	ctx, cancel := context.WithTimeout(context.Background(), c.plane.cfg.TLSTimeout)
	defer cancel()
	if err := tc.HandshakeContext(ctx); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nc = tc
	return nil
}

func (c *conn) broken(err error) {
	c.plane.cfg.Observer.Note(ingress.TCP, ingress.ConnectionBroken, 1, err)
	c.plane.logBroken.Warn().Err(err).Str("peer", c.nc.RemoteAddr().String()).Msg("connection of the tcp request plane ended")
}

// errQuiet ends a connection that has nothing more to say while the plane drains.
var errQuiet = errors.New("quiet")

// next serves one message. io.EOF means that the peer has ended the connection between two messages.
func (c *conn) next() error {
	if err := c.await(); err != nil {
		return err
	}
	req, err := wire.ReadPlaneRequest(c.in, c.plane.cfg.MaxMessage)
	var (
		size  *wire.SizeError
		names *wire.ControlError
	)
	switch {
	case err == nil:
		return c.answer(req, nil)
	case errors.As(err, &size):
		return c.oversize(req, size)
	case errors.As(err, &names):
		return c.malformed(names)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("message not complete after %s: %w", c.plane.cfg.MessageTimeout, err)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("connection ended inside a message: %w", err)
	default:
		return err
	}
}

// await waits for the first byte of a message, without limit unless the plane drains, and gives the rest of it the time that a message may take.
func (c *conn) await() error {
	if c.in.Buffered() == 0 {
		c.setWaiting(true)
		_, err := c.in.Peek(1)
		c.setWaiting(false)
		if err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return errQuiet
			}
			if errors.Is(err, syscall.ECONNRESET) {
				return io.EOF
			}
			return err
		}
	}
	return c.nc.SetReadDeadline(time.Now().Add(c.plane.cfg.MessageTimeout))
}

func (c *conn) setWaiting(waiting bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting = waiting
	if waiting {
		c.setIdleDeadline()
	}
}

// setIdleDeadline limits the wait for the next message while draining. The caller holds mu.
func (c *conn) setIdleDeadline() {
	var deadline time.Time
	if c.draining {
		deadline = time.Now().Add(c.plane.cfg.Quiet)
	}
	// It fails only on a closed connection, which the next read finds out.
	_ = c.nc.SetReadDeadline(deadline)
}

// beginDrain ends the connection once it is quiet.
func (c *conn) beginDrain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.draining = true
	if c.waiting {
		c.setIdleDeadline()
	}
}

func (c *conn) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.nc.Close()
}

// oversize reads what is needed to tell the caller, and drops the rest of the message.
func (c *conn) oversize(req wire.PlaneRequest, size *wire.SizeError) error {
	head := make([]byte, min(size.Skip, wire.FrameHeaderLen+wire.MaxControl))
	if _, err := io.ReadFull(c.in, head); err != nil {
		return fmt.Errorf("connection ended inside a message of %d bytes: %w", size.Size, err)
	}
	for left := size.Skip - uint64(len(head)); left > 0; {
		step := min(left, discardStep)
		// As long as bytes come the peer is alive, however large the message is.
		if err := c.nc.SetReadDeadline(time.Now().Add(c.plane.cfg.MessageTimeout)); err != nil {
			return err
		}
		if err := wire.Discard(c.in, step); err != nil {
			return fmt.Errorf("connection ended inside a message of %d bytes: %w", size.Size, err)
		}
		left -= step
	}
	req.Payload = head
	return c.answer(req, size)
}

// discardStep is how much of an oversized message is dropped under one deadline.
const discardStep = 4 << 20

func (c *conn) malformed(err error) error {
	c.plane.cfg.Observer.Note(ingress.TCP, ingress.Malformed, 1, err)
	c.plane.logMalformed.Warn().Err(err).Str("peer", c.nc.RemoteAddr().String()).Msg("request refused: its headers cannot be read")
	return c.reply(wire.UnavailableReply("malformed request: " + err.Error()))
}

// answer replies to a message and starts its work.
func (c *conn) answer(req wire.PlaneRequest, size *wire.SizeError) error {
	in := c.plane.endpoint(req.Path)
	if in == nil {
		c.plane.cfg.Observer.Note(ingress.TCP, ingress.UnknownEndpoint, 1, nil)
		c.plane.logPath.Warn().Str("path", fmt.Sprintf("%.200q", req.Path)).Str("peer", c.nc.RemoteAddr().String()).Msg("request refused: nobody serves its path")
		return c.reply(wire.UnavailableReply(fmt.Sprintf("no endpoint at %.200q", req.Path)))
	}
	reply, start := in.Take(ingress.Message{Data: req.Payload, Headers: lowerKeys(req.Headers), Oversize: size})
	err := c.reply(reply)
	if start != nil {
		go start()
	}
	return err
}

func (c *conn) reply(body []byte) error {
	c.out = wire.AppendPlaneReply(c.out[:0], body)
	if err := c.nc.SetWriteDeadline(time.Now().Add(c.plane.cfg.ReplyTimeout)); err != nil {
		return err
	}
	if _, err := c.nc.Write(c.out); err != nil {
		c.plane.cfg.Observer.Note(ingress.TCP, ingress.ReplyFailed, 1, err)
		return fmt.Errorf("send reply: %w", err)
	}
	return nil
}

// lowerKeys makes header names independent of how they are written.
func lowerKeys(h map[string]string) map[string]string {
	for name, value := range h {
		if l := strings.ToLower(name); l != name {
			delete(h, name)
			h[l] = value
		}
	}
	return h
}
