package caller

import (
	"errors"
	"fmt"

	"dynworker/pkg/protocol"
	"dynworker/pkg/wire"
)

var (
	// ErrOverloaded and ErrUnavailable are the two refusals; the error that matches them is a *RefusedError.
	ErrOverloaded  = errors.New("worker is overloaded")
	ErrUnavailable = errors.New("worker is unavailable")
	// ErrNoResponders means that nobody listens on the subject, so the worker is gone.
	ErrNoResponders = errors.New("nobody serves the subject")
	// ErrNoReply means that the request was sent and no reply came in Config.ReplyTimeout.
	ErrNoReply = errors.New("no reply to the request")
	// ErrNoCallHome means that the worker accepted the request and did not connect in Call.CallHomeTimeout.
	ErrNoCallHome = errors.New("worker accepted the request but did not call home")
	// ErrIncomplete is an answer that ended without its end mark.
	ErrIncomplete = errors.New("answer ended without an end mark")
	// ErrCancelled is an answer that ended without its end mark after Stop or Kill, as it should.
	ErrCancelled = errors.New("answer ended after it was cancelled")
	// ErrProtocol is something that a worker must not send.
	ErrProtocol = errors.New("worker broke the response protocol")
	// ErrClosed is a call on a closed Caller or Stream.
	ErrClosed = errors.New("caller is closed")
	// ErrNoNATS is a call over NATS with a Caller that has no NATS connection.
	ErrNoNATS = errors.New("caller has no nats connection")
)

// RefusedError is a reply that refuses the request.
type RefusedError struct {
	Kind   wire.ReplyKind
	Reason string
}

func (e *RefusedError) Error() string { return e.Unwrap().Error() + ": " + e.Reason }

// Unwrap returns ErrOverloaded or ErrUnavailable.
func (e *RefusedError) Unwrap() error {
	if e.Kind == wire.ReplyOverloaded {
		return ErrOverloaded
	}
	return ErrUnavailable
}

// PayloadLimitError is a request larger than the request plane carries. It was not sent.
type PayloadLimitError struct {
	// Plane is "nats" or "tcp".
	Plane string
	// Size and Limit are in bytes, headers included.
	Size, Limit int64
}

func (e *PayloadLimitError) Error() string {
	return fmt.Sprintf("request of %d bytes is over the payload limit of the %s request plane, %d bytes", e.Size, e.Plane, e.Limit)
}

// PrologueError is a worker that called home to refuse.
type PrologueError struct {
	Text string
	// Typed is the error object, nil when there was none.
	Typed *protocol.Error
}

func (e *PrologueError) Error() string { return "worker refused the request: " + e.Text }
