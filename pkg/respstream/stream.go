package respstream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"dynworker/pkg/protocol"
	"dynworker/pkg/wire"
)

const (
	// flushSize is when collected items are written without waiting for Flush.
	flushSize = 32 << 10
	// bufferSize is what a fresh buffer holds: a dozen tokens.
	bufferSize = 4 << 10
	// keepSize is the largest buffer that goes back to the pool.
	keepSize = 2 * flushSize
	// verdictTime is how long a failed write waits for the reader to find out why.
	verdictTime = time.Second
)

// buffer is what is collected between two flushes.
type buffer struct{ b []byte }

var buffers = sync.Pool{New: func() any { return &buffer{b: make([]byte, 0, bufferSize)} }}

// Stream is the answer to one request. Its methods are for one goroutine.
type Stream struct {
	dialer *Dialer
	conn   net.Conn
	ctx    context.Context
	cancel context.CancelCauseFunc
	codec  protocol.Codec

	now      nowWriter
	out      *buffer // nil when nothing is collected
	body     int64   // bytes of items in out
	sent     int64   // bytes of items that were written
	prologue bool

	readDone chan struct{}

	mu sync.Mutex
	// over is why nothing may be written any more, nil while it may.
	over error
	// finishing means that the end of the stream is being written. The frontend may have it, and close, before the write returns here, so what is heard from now
	// on counts only if the write fails. It is kept in late.
	finishing bool
	late      error
	// lingering means that the stream is complete and only the frontend's close is awaited.
	lingering bool
	// halfClosed means that the client has closed its sending direction.
	halfClosed bool
	closed     bool
}

func newStream(ctx context.Context, d *Dialer, conn net.Conn, subject string) *Stream {
	s := &Stream{dialer: d, conn: conn, readDone: make(chan struct{})}
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	s.now.attach(conn)
	s.out = buffers.Get().(*buffer)
	s.out.b = wire.AppendHandshake(s.out.b, subject)
	return s
}

// Context ends when the stream does, with one of the causes of this package, or with its parent.
func (s *Stream) Context() context.Context { return s.ctx }

// SetCodec sets the codec of the items that follow, which has to be that of the request. Without it they are JSON.
func (s *Stream) SetCodec(c protocol.Codec) { s.codec = c }

// BytesOut is the number of bytes in the bodies of all items that were written, the end mark's body included.
func (s *Stream) BytesOut() int64 { return s.sent }

// Accept tells the frontend that the request was taken, and sends that at once. Until then the frontend moves the request elsewhere when the worker leaves discovery.
// A second call does nothing.
func (s *Stream) Accept() error {
	if err := s.writable(); err != nil {
		return err
	}
	s.appendPrologue()
	return s.Flush()
}

// appendPrologue accepts the request if that has not been done.
func (s *Stream) appendPrologue() {
	if s.prologue {
		return
	}
	s.prologue = true
	w := s.collect()
	w.b = wire.AppendPrologueOK(w.b)
}

// ErrAccepted is returned by Refuse after Accept.
var ErrAccepted = errors.New("request was accepted before")

// Refuse tells the frontend that the request was not taken, and ends the stream. It makes the frontend ask another worker and keep away from this one for some
// seconds, unless the class of the error is InvalidRequest.
func (s *Stream) Refuse(e *protocol.Error) error {
	if err := s.writable(); err != nil {
		return err
	}
	if s.prologue {
		return ErrAccepted
	}
	s.prologue = true
	s.beginFinish()
	w := s.collect()
	w.b = wire.AppendPrologueError(w.b, e.Error(), e.AppendJSON(nil))
	if err := s.Flush(); err != nil {
		return err
	}
	s.linger()
	return nil
}

// Send adds an item. It is written at the next Flush, or at once when much has been collected. Send implies Accept.
func (s *Stream) Send(ch *protocol.Chunk) error {
	if err := s.writable(); err != nil {
		return err
	}
	s.appendPrologue()
	w := s.collect()
	start := len(w.b)
	w.b = wire.AppendFrameHead(w.b, 0, 0)
	w.b = protocol.AppendChunk(w.b, s.codec, ch)
	return s.added(start)
}

// Fail adds an error item. It does not end the stream.
func (s *Stream) Fail(e *protocol.Error) error {
	if err := s.writable(); err != nil {
		return err
	}
	s.appendPrologue()
	w := s.collect()
	start := len(w.b)
	w.b = wire.AppendFrameHead(w.b, 0, 0)
	w.b = protocol.AppendErrorItem(w.b, s.codec, e)
	return s.added(start)
}

// added completes the frame of an item that begins at start.
func (s *Stream) added(start int) error {
	n := len(s.out.b) - start - wire.FrameHeaderLen
	wire.SetFrameHead(s.out.b[start:], 0, n)
	s.body += int64(n)
	if len(s.out.b) < flushSize {
		return nil
	}
	return s.Flush()
}

// Finish writes the end mark and everything before it. It returns without waiting for the frontend, which closes the connection when it has read all.
// When the client has ended the stream before, nothing is written and the cause is returned.
func (s *Stream) Finish() error {
	if err := s.writable(); err != nil {
		return err
	}
	s.beginFinish()
	s.appendPrologue()
	w := s.collect()
	start := len(w.b)
	w.b = wire.AppendFrameHead(w.b, 0, 0)
	w.b = protocol.AppendFinal(w.b, s.codec)
	if err := s.added(start); err != nil {
		return err
	}
	w = s.collect()
	w.b = wire.AppendControl(w.b, wire.ControlSentinel)
	if err := s.Flush(); err != nil {
		return err
	}
	s.linger()
	return nil
}

// Abort ends the stream without an end mark, so that the frontend knows that something is missing. What was collected and not flushed is dropped.
// It does nothing to a stream that has ended.
func (s *Stream) Abort() {
	s.drop()
	s.endWith(ErrFinished)
}

// Flush writes what was collected. When the stream has ended it returns the cause.
func (s *Stream) Flush() error {
	if err := s.writable(); err != nil {
		return err
	}
	if s.out == nil {
		return nil
	}
	err := s.conn.SetWriteDeadline(time.Now().Add(s.dialer.cfg.WriteTimeout))
	if err == nil {
		_, err = s.conn.Write(s.out.b)
	}
	body := s.body
	s.drop()
	if err != nil {
		return s.writeFailed(err)
	}
	s.sent += body
	return nil
}

// Idle tells whether FlushNow has a chance: nothing is collected, and the connection is one that can be written to without waiting.
func (s *Stream) Idle() bool { return s.out == nil && s.now.raw != nil }

// FlushNow writes what was collected as far as that needs no waiting, and reports whether all of it went out. What is left, and whatever is wrong, is for Flush.
func (s *Stream) FlushNow() bool {
	if s.out == nil {
		return true
	}
	if s.writable() != nil {
		return false
	}
	n := s.now.write(s.out.b)
	if n < len(s.out.b) {
		s.out.b = s.out.b[:copy(s.out.b, s.out.b[n:])]
		return false
	}
	s.sent += s.body
	s.drop()
	return true
}

// collect returns the buffer, borrowing one if need be.
func (s *Stream) collect() *buffer {
	if s.out == nil {
		s.out = buffers.Get().(*buffer)
	}
	return s.out
}

// drop gives the buffer back.
func (s *Stream) drop() {
	if s.out == nil {
		return
	}
	if cap(s.out.b) <= keepSize {
		s.out.b = s.out.b[:0]
		buffers.Put(s.out)
	}
	s.out, s.body = nil, 0
}

// writable returns why nothing may be written any more.
func (s *Stream) writable() error {
	s.mu.Lock()
	over := s.over
	s.mu.Unlock()
	if over != nil {
		s.drop()
	}
	return over
}

// writeFailed ends the stream after a write that did not succeed and returns the cause.
func (s *Stream) writeFailed(err error) error {
	if over := s.writable(); over != nil {
		// The reader has closed the connection meanwhile.
		return over
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		// A plain close would leave the kernel with data that nobody reads.
		s.resetOnClose()
		return s.endWith(fmt.Errorf("%w: nothing read for %s", ErrWrite, s.dialer.cfg.WriteTimeout))
	}
	// The kernel reports a reset only once, to reader or writer. If the reader is still there it is about to tell; a closed or broken connection keeps nobody waiting.
	_ = s.conn.SetReadDeadline(time.Now().Add(verdictTime))
	<-s.readDone
	s.mu.Lock()
	late := s.late
	s.mu.Unlock()
	if late != nil {
		return s.endWith(late)
	}
	if errors.Is(err, syscall.ECONNRESET) {
		return s.endWith(fmt.Errorf("%w: %w", ErrReset, err))
	}
	return s.endWith(fmt.Errorf("%w: %w", ErrWrite, err))
}

func (s *Stream) resetOnClose() {
	if tcp, ok := s.conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
}

// endWith ends the stream at once, unless it has ended, and returns why it did.
func (s *Stream) endWith(cause error) error {
	s.mu.Lock()
	if s.over == nil {
		s.over = cause
	}
	cause = s.over
	s.mu.Unlock()
	s.cancel(cause)
	s.close()
	return cause
}

func (s *Stream) close() {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	s.mu.Unlock()
	if first {
		_ = s.conn.Close()
		s.dialer.forget(s)
	}
}

func (s *Stream) beginFinish() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.finishing = true
}

// linger ends the stream for the handler and leaves the connection to the reader, which closes it after the frontend.
func (s *Stream) linger() {
	s.mu.Lock()
	ended := s.over != nil
	if !ended {
		s.over = ErrFinished
		s.lingering = true
	}
	closeNow := s.halfClosed || s.late != nil
	s.mu.Unlock()
	if ended {
		return
	}
	s.cancel(ErrFinished)
	if closeNow {
		s.close()
		return
	}
	_ = s.conn.SetReadDeadline(time.Now().Add(s.dialer.cfg.Linger))
}
