package ingress

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/rs/zerolog"

	"dynworker/pkg/wire"
)

// Header names as the frontend writes them, on both planes.
const (
	HeaderRequestID    = "request-id"
	HeaderAltRequestID = "x-dynamo-request-id"
	HeaderSentNanos    = "x-frontend-send-ts-ns"
	HeaderTraceparent  = "traceparent"
	HeaderTracestate   = "tracestate"
)

var (
	// ErrTrailingBytes is a request message with bytes behind its frame.
	ErrTrailingBytes = errors.New("bytes behind the request frame")
	// ErrRequestStream is a request whose body comes as a stream of its own. Text generation never asks for that.
	ErrRequestStream = errors.New("requests with a streamed body are not supported")
)

// Message is what a plane received: one two-part frame and the plane's headers.
type Message struct {
	Data []byte
	// Headers has lower-case names. It is kept in the Delivery.
	Headers map[string]string
	// Oversize is set when the plane did not read the whole message because of its size. Data then holds its beginning.
	Oversize *wire.SizeError
}

// Intake is one endpoint's way from message to reply.
type Intake struct {
	Plane    Plane
	Admitter Admitter
	Observer Observer
	// Logger gets malformed messages; give it one that limits its own rate.
	Logger zerolog.Logger
}

// Take reads the control header and asks the Admitter. The reply is for the frontend, empty means accepted; start is nil when the request was refused.
// The reply has to be sent before start is called.
func (in *Intake) Take(m Message) (reply []byte, start func()) {
	d, err := Decode(m, time.Now())
	if err != nil {
		in.Observer.Note(in.Plane, Malformed, 1, err)
		in.Logger.Warn().Err(err).Str("plane", string(in.Plane)).Int("bytes", len(m.Data)).
			Str("request_id", requestID(m.Headers, "")).Msg("request refused: its control header cannot be read")
		return wire.UnavailableReply("malformed request: " + err.Error()), nil
	}
	start, refusal := in.Admitter.Admit(d)
	if refusal != nil {
		return refusal.reply(), nil
	}
	return nil, start
}

// Decode reads a message up to, and not including, its body. An error means that the control header is of no use; trouble with the body alone is in Delivery.BodyErr.
func Decode(m Message, received time.Time) (*Delivery, error) {
	frame, rest, err := wire.ParseFrame(m.Data, wire.Limits{MaxHeader: wire.MaxControl, MaxData: noLimit})
	if err != nil && len(frame.Header) == 0 {
		return nil, fmt.Errorf("read request frame: %w", err)
	}
	bodyErr := err
	control, err := wire.ParseRequestControl(frame.Header)
	if err != nil {
		return nil, fmt.Errorf("read request control header: %w", err)
	}
	d := &Delivery{
		Control: control, Body: frame.Data, BodyErr: bodyErr,
		RequestID:   requestID(m.Headers, control.ID),
		Traceparent: m.Headers[HeaderTraceparent], Tracestate: m.Headers[HeaderTracestate],
		Headers: m.Headers, SentNanos: control.FrontendSendNanos,
		Received: received, Size: len(m.Data),
	}
	// A number that cannot be read only costs a metric.
	if ns, err := strconv.ParseUint(m.Headers[HeaderSentNanos], 10, 64); err == nil {
		d.SentNanos = ns
	}
	switch {
	case m.Oversize != nil:
		d.BodyErr, d.Size = m.Oversize, int(m.Oversize.Size)
	case d.BodyErr != nil:
	case len(rest) > 0:
		d.BodyErr = fmt.Errorf("%w: %d", ErrTrailingBytes, len(rest))
	case control.HasRequestStream:
		d.BodyErr = ErrRequestStream
	}
	if d.BodyErr != nil {
		d.Body = nil
	}
	return d, nil
}

// noLimit leaves the data part to the limit of the plane, which has read the message already.
const noLimit = ^uint64(0)

func requestID(headers map[string]string, fallback string) string {
	for _, name := range [...]string{HeaderRequestID, HeaderAltRequestID} {
		if id := headers[name]; id != "" {
			return id
		}
	}
	return fallback
}
