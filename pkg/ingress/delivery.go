package ingress

import (
	"time"

	"dynworker/pkg/wire"
)

// Delivery is one request as it came over a plane, its body not yet decoded.
type Delivery struct {
	// Control is the header that every request begins with. It has been checked.
	Control wire.RequestControl
	// Body is encoded as Control.PayloadCodec says. It is a view into the message, which nobody else uses.
	Body []byte
	// BodyErr tells why there is no usable body although Control is sound: a *wire.TruncatedError, a *wire.SizeError, ErrTrailingBytes or ErrRequestStream.
	// The caller must be told so over the response stream.
	BodyErr error

	// RequestID identifies the request in logs: the header request-id, else x-dynamo-request-id, else the id in Control. It is not unique when a request is retried.
	RequestID string
	// Traceparent and Tracestate are the W3C trace context; empty when the frontend does not trace.
	Traceparent, Tracestate string
	// Headers holds all headers of the plane under lower-case names, nil when there were none.
	Headers map[string]string

	// SentNanos is when the frontend sent the request, in nanoseconds since 1970 by its own clock; 0 when it did not say.
	SentNanos uint64
	// Received is when the plane took the message up.
	Received time.Time
	// Size is the length of the whole message in bytes, both parts and the frame head; for an oversized one the length that was announced.
	Size int
}

// RefusalKind tells the two refusals apart that a frontend understands. Both make it try another worker.
type RefusalKind uint8

const (
	// Overloaded means that there is no room now. The frontend avoids the worker for about a second.
	Overloaded RefusalKind = iota + 1
	// Unavailable means that this worker does not serve the request at all. The frontend avoids it for some seconds.
	Unavailable
)

func (k RefusalKind) String() string {
	switch k {
	case Overloaded:
		return "overloaded"
	case Unavailable:
		return "unavailable"
	default:
		return "unknown"
	}
}

// Refusal is a request turned away in the reply, before any stream exists.
type Refusal struct {
	Kind RefusalKind
	// Reason is for people who read the frontend's log.
	Reason string
}

func (r *Refusal) reply() []byte {
	if r.Kind == Overloaded {
		return wire.OverloadedReply(r.Reason)
	}
	return wire.UnavailableReply(r.Reason)
}

// Admitter decides about a request. Admit must not block: the requests behind it wait, and the frontend counts the time as time without an answer.
//
// It returns either a refusal, or the function that does the work and gives the permit back. The plane calls start in a goroutine of its own after it has
// replied, exactly once, even when the reply could not be sent: the frontend may still take the call-home, and the permit must come back in any case.
// Planes do not wait for start to return and do not recover from its panics; whoever admits work also keeps count of it.
type Admitter interface {
	Admit(d *Delivery) (start func(), refusal *Refusal)
}

// AdmitFunc makes an Admitter of a function.
type AdmitFunc func(d *Delivery) (start func(), refusal *Refusal)

// Admit calls f.
func (f AdmitFunc) Admit(d *Delivery) (start func(), refusal *Refusal) { return f(d) }
