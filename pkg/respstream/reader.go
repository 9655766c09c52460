package respstream

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"dynworker/pkg/wire"
)

// readBufferSize holds two control frames, which is more than a client ever sends.
const readBufferSize = 64

// controlLimits lets a control word pass and nothing else. Some room is for words that we do not know.
var controlLimits = wire.Limits{MaxHeader: 256}

// read is the stream's own goroutine. It ends when the client has said something that ends the stream, or has closed its sending direction.
func (s *Stream) read() {
	defer close(s.readDone)
	r := wire.NewReaderSize(s.conn, controlLimits, readBufferSize)
	for {
		cause := verdict(r.Next())
		if s.heard(cause) {
			return
		}
	}
}

// errHalfClose is the client's end of sending, which ends nothing else.
var errHalfClose = errors.New("client has closed its sending direction")

// verdict says what a frame, or the lack of one, means.
func verdict(f wire.Frame, err error) error {
	var size *wire.SizeError
	switch {
	case err == nil:
	case errors.Is(err, io.EOF):
		return errHalfClose
	case errors.Is(err, io.ErrUnexpectedEOF), errors.As(err, &size):
		return fmt.Errorf("%w: %w", ErrProtocol, err)
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, net.ErrClosed):
		return err
	default:
		return fmt.Errorf("%w: %w", ErrReset, err)
	}
	word, err := wire.ParseControl(f.Header)
	switch {
	case err != nil:
		return fmt.Errorf("%w: %w", ErrProtocol, err)
	case word == wire.ControlStop:
		return ErrStop
	case word == wire.ControlKill:
		return ErrKill
	default:
		return fmt.Errorf("%w: %s from the client", ErrProtocol, word)
	}
}

// heard acts on a verdict and tells whether the reader is done.
func (s *Stream) heard(cause error) bool {
	s.mu.Lock()
	finishing, lingering, closed := s.finishing, s.lingering, s.closed
	switch {
	case errors.Is(cause, errHalfClose):
		s.halfClosed = true
	case finishing && !lingering && !errors.Is(cause, os.ErrDeadlineExceeded):
		s.late = cause
	}
	s.mu.Unlock()
	switch {
	case closed:
		return true
	case lingering:
		// Stop and kill come too late to matter; the frontend closes after them.
		if errors.Is(cause, ErrStop) || errors.Is(cause, ErrKill) {
			return false
		}
		s.close()
		return true
	case errors.Is(cause, errHalfClose):
		return true
	case errors.Is(cause, os.ErrDeadlineExceeded):
		// A failed write asks what the reader knows, which is nothing.
		return true
	case finishing:
		// It may only be the frontend's close; Finish knows when its write has returned. Closing ends a write that hangs.
		s.close()
		return true
	default:
		s.endWith(cause)
		return true
	}
}
