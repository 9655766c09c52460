package caller

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"dynworker/pkg/protocol"
	"dynworker/pkg/wire"
)

// controlTimeout bounds the writing of a control word.
const controlTimeout = 10 * time.Second

// Stream is the answer to one request.
type Stream struct {
	// ID is the request id.
	ID string

	caller *Caller
	conn   net.Conn
	reader *wire.Reader
	codec  protocol.Codec
	ctx    context.Context
	unhook func() bool
	traced bool
	keep   bool

	// These belong to the goroutine that calls Next.
	prologue bool
	end      error

	write sync.Mutex

	mu        sync.Mutex
	frames    []Frame
	cancelled bool
	closed    bool
}

func (c *Caller) newStream(ctx context.Context, call *Call, h *home) (*Stream, error) {
	s := &Stream{ID: call.ID, caller: c, conn: h.conn, reader: h.reader, codec: call.Codec, ctx: ctx, traced: call.Trace, keep: call.KeepOpen}
	s.record(FrameHandshake, h.handshake)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		_ = h.conn.Close()
		return nil, ErrClosed
	}
	c.streams[s] = struct{}{}
	// Wakes Next up.
	s.unhook = context.AfterFunc(ctx, func() { _ = h.conn.SetReadDeadline(time.Unix(1, 0)) })
	return s, nil
}

// Prologue waits for the worker's word whether it takes the request. The error is a *PrologueError when it does not. Next does the same when it has not been done.
func (s *Stream) Prologue() error {
	if s.end != nil {
		return s.end
	}
	if s.prologue {
		return nil
	}
	f, err := s.frame()
	if err != nil {
		return s.ended(err)
	}
	s.record(FramePrologue, f.Header)
	if len(f.Data) > 0 {
		return s.ended(fmt.Errorf("%w: data in place of the prologue", ErrProtocol))
	}
	p, err := wire.ParsePrologue(f.Header)
	if err != nil {
		return s.ended(fmt.Errorf("%w: prologue: %w", ErrProtocol, err))
	}
	s.prologue = true
	if p.Error == nil {
		return nil
	}
	refused := &PrologueError{Text: *p.Error}
	if p.TypedError != nil {
		if refused.Typed, err = protocol.ParseErrorJSON(p.TypedError); err != nil {
			return s.ended(fmt.Errorf("%w: typed error of the prologue: %w", ErrProtocol, err))
		}
	}
	return s.ended(refused)
}

// Next returns the next item. After the end mark of the answer it returns io.EOF; every other error means that the answer is not complete, and is returned again
// by later calls. Error items of the worker are items.
func (s *Stream) Next() (protocol.Item, error) {
	if err := s.Prologue(); err != nil {
		return protocol.Item{}, err
	}
	f, err := s.frame()
	if err != nil {
		return protocol.Item{}, s.ended(err)
	}
	if len(f.Header) > 0 {
		return protocol.Item{}, s.ended(s.control(f))
	}
	s.record(FrameData, f.Data)
	item, err := protocol.ParseItem(s.codec, f.Data)
	if err != nil {
		return protocol.Item{}, s.ended(fmt.Errorf("%w: item: %w", ErrProtocol, err))
	}
	if item.Final {
		return protocol.Item{}, s.ended(s.afterFinal())
	}
	return item, nil
}

// control judges a control frame that comes before the end mark.
func (s *Stream) control(f wire.Frame) error {
	s.record(FrameControl, f.Header)
	word, err := wire.ParseControl(f.Header)
	switch {
	case err != nil:
		return fmt.Errorf("%w: %w", ErrProtocol, err)
	case word == wire.ControlSentinel && len(f.Data) == 0:
		return ErrIncomplete
	default:
		return fmt.Errorf("%w: control word %s", ErrProtocol, word)
	}
}

// afterFinal reads the sentinel. Its lack is no fault, anything else in its place is.
func (s *Stream) afterFinal() error {
	f, err := s.frame()
	if errors.Is(err, ErrIncomplete) || errors.Is(err, ErrCancelled) {
		return io.EOF
	}
	if err != nil {
		return err
	}
	if len(f.Data) > 0 {
		s.record(FrameData, f.Data)
		return fmt.Errorf("%w: data after the end mark", ErrProtocol)
	}
	s.record(FrameControl, f.Header)
	if word, err := wire.ParseControl(f.Header); err != nil || word != wire.ControlSentinel {
		return fmt.Errorf("%w: no sentinel after the end mark", ErrProtocol)
	}
	return io.EOF
}

// frame reads a frame and turns the end of the connection into an error of this package.
func (s *Stream) frame() (wire.Frame, error) {
	f, err := s.reader.Next()
	if err == nil {
		return f, nil
	}
	if s.ctx.Err() != nil {
		return f, context.Cause(s.ctx)
	}
	reason := ErrIncomplete
	s.mu.Lock()
	if s.cancelled {
		reason = ErrCancelled
	}
	s.mu.Unlock()
	switch {
	case errors.Is(err, io.EOF):
		s.record(FrameEOF, nil)
		return f, reason
	case errors.Is(err, io.ErrUnexpectedEOF):
		s.record(FrameEOF, nil)
		return f, fmt.Errorf("%w: inside a frame", reason)
	case errors.Is(err, syscall.ECONNRESET):
		s.record(FrameReset, nil)
		return f, fmt.Errorf("%w: %w", reason, err)
	case errors.Is(err, net.ErrClosed):
		return f, ErrClosed
	default:
		return f, fmt.Errorf("read answer: %w", err)
	}
}

// ended remembers how the answer ended. Once complete the connection is closed at once and hard, as the frontend does it.
func (s *Stream) ended(err error) error {
	s.end = err
	if errors.Is(err, io.EOF) && !s.keep {
		s.hardClose()
	}
	return err
}

// AwaitClose ends the sending direction of a complete answer that was kept open, and waits until the worker has ended the other one. It belongs to the goroutine that calls Next.
func (s *Stream) AwaitClose() error {
	if err := s.HalfClose(); err != nil {
		return fmt.Errorf("end the sending direction: %w", err)
	}
	switch _, err := s.frame(); {
	case errors.Is(err, ErrIncomplete), errors.Is(err, ErrCancelled):
		return nil
	case err != nil:
		return err
	default:
		return fmt.Errorf("%w: a frame after the end", ErrProtocol)
	}
}

// Stop asks the worker to end the generation, as the frontend does when its client goes away or a stop string was found.
func (s *Stream) Stop() error {
	s.cancel()
	s.did("stop")
	return s.SendRaw(wire.AppendControl(nil, wire.ControlStop))
}

// Kill asks the worker to end at once, and closes the sending direction.
func (s *Stream) Kill() error {
	s.cancel()
	s.did("kill")
	return errors.Join(s.SendRaw(wire.AppendControl(nil, wire.ControlKill)), s.HalfClose())
}

func (s *Stream) cancel() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cancelled = true
}

// HalfClose closes the sending direction.
func (s *Stream) HalfClose() error {
	s.write.Lock()
	defer s.write.Unlock()
	half, ok := s.conn.(interface{ CloseWrite() error })
	if !ok {
		return errors.ErrUnsupported
	}
	return half.CloseWrite()
}

// SendRaw sends bytes that a frontend may never send.
func (s *Stream) SendRaw(b []byte) error {
	s.write.Lock()
	defer s.write.Unlock()
	if err := s.conn.SetWriteDeadline(time.Now().Add(controlTimeout)); err != nil {
		return fmt.Errorf("send to the worker: %w", err)
	}
	if _, err := s.conn.Write(b); err != nil {
		return fmt.Errorf("send to the worker: %w", err)
	}
	return nil
}

// Reset breaks the connection, as the death of a frontend does.
func (s *Stream) Reset() {
	s.did("reset")
	s.hardClose()
}

// Close ends the stream. If the answer is not complete the worker is told to kill it, as when the frontend has lost interest. It is safe to call twice.
func (s *Stream) Close() error {
	if s.open() {
		// A worker that has closed already needs no kill.
		_ = s.SendRaw(wire.AppendControl(nil, wire.ControlKill))
	}
	return s.closeWith(false)
}

// Drop closes the connection without a word.
func (s *Stream) Drop() error {
	s.did("close")
	return s.closeWith(false)
}

func (s *Stream) hardClose() { _ = s.closeWith(true) }

func (s *Stream) open() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.closed
}

func (s *Stream) closeWith(reset bool) error {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	s.mu.Unlock()
	if !first {
		return nil
	}
	s.unhook()
	if reset {
		raw := s.conn
		if secured, ok := raw.(*tls.Conn); ok {
			raw = secured.NetConn()
		}
		if tcp, ok := raw.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0)
			_ = tcp.Close()
		}
	}
	err := s.conn.Close()
	if reset {
		err = nil
	}
	s.caller.mu.Lock()
	delete(s.caller.streams, s)
	s.caller.mu.Unlock()
	return err
}
