package protocol

import (
	"context"
	"errors"
	"fmt"
	"unicode/utf8"
)

// MaxMessageLen is how many bytes of an error's texts are written; the frontend
// keeps no more.
const MaxMessageLen = 4096

// maxCauses bounds a chain of causes, written or searched.
const maxCauses = 16

// LegacyType is the error type of frontends older than class and reason. It is
// written as a string, or as {"Backend": Name} when Backend is set.
type LegacyType struct {
	Name    string
	Backend bool
}

// Error is an error as the frontend understands it. Make one with NewError or
// one of the functions named after what happened.
type Error struct {
	Type   LegacyType
	Class  Class
	Reason Reason
	// Message is for logs; HTTP callers never see it. It is cut to
	// MaxMessageLen bytes when written.
	Message string
	// Public is what the HTTP caller reads; without it the frontend has a
	// phrase of its own.
	Public *Public
	Cause  *Error
}

// The kinds of Public.
const (
	PublicMessage       = "message"
	PublicContextLength = "context_length"
	PublicSizeLimit     = "size_limit"
	PublicRateLimit     = "rate_limit"
)

// Public is the part of an error that reaches the HTTP caller.
type Public struct {
	// Type is one of the Public constants.
	Type string
	// Message belongs to PublicMessage.
	Message string
	// Limit and Actual belong to PublicContextLength (tokens) and
	// PublicSizeLimit (bytes), Limit alone to PublicRateLimit.
	Limit, Actual *int64
}

// Error returns reason and message.
func (e *Error) Error() string {
	if e.Message == "" {
		return string(e.Reason)
	}
	return string(e.Reason) + ": " + e.Message
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error {
	if e.Cause == nil {
		return nil
	}
	return e.Cause
}

// NewError returns an error with class and legacy type that belong to the
// reason. A reason outside the catalogue becomes ReasonBackendUnknown.
func NewError(r Reason, message string) *Error {
	entry, ok := catalogue[r]
	if !ok {
		r, entry = ReasonBackendUnknown, catalogue[ReasonBackendUnknown]
	}
	return &Error{Type: entry.legacy, Class: entry.class, Reason: r, Message: message}
}

// InvalidArgument tells the HTTP caller, with status 400, what is wrong with the
// request. format and args are as for fmt.Sprintf; the text must not repeat the
// prompt.
func InvalidArgument(format string, args ...any) *Error {
	text := fmt.Sprintf(format, args...)
	e := NewError(ReasonBackendInvalidArgument, text)
	e.Public = &Public{Type: PublicMessage, Message: text}
	return e
}

// ContextLength tells the HTTP caller, with status 400, that the request takes
// actual tokens where there is room for limit.
func ContextLength(limit, actual int) *Error {
	e := NewError(ReasonBackendInvalidArgument,
		fmt.Sprintf("request takes %d tokens, the limit is %d", actual, limit))
	l, a := int64(limit), int64(actual)
	e.Public = &Public{Type: PublicContextLength, Limit: &l, Actual: &a}
	return e
}

// EngineShutdown says that the generation was cut short. The frontend may
// continue it on another worker; what was sent before counts as delivered.
func EngineShutdown(message string) *Error { return NewError(ReasonBackendEngineShutdown, message) }

// StreamIncomplete says that the engine's output ended without its end mark. The
// frontend may continue on another worker.
func StreamIncomplete(message string) *Error {
	return NewError(ReasonBackendStreamIncomplete, message)
}

// Internal says that the worker or its engine failed in an unforeseen way: 500,
// and no other worker is tried.
func Internal(message string) *Error { return NewError(ReasonBackendUnknown, message) }

// Overloaded says that this worker has no room; the frontend tries another one.
func Overloaded(message string) *Error { return NewError(ReasonCapacityWorkerOverloaded, message) }

// Unavailable says that this worker does not serve; the frontend tries another
// one.
func Unavailable(message string) *Error { return NewError(ReasonBackendWorkerUnavailable, message) }

// Cancelled says that the caller gave up; nobody is told.
func Cancelled(message string) *Error { return NewError(ReasonBackendCancelled, message) }

// DeadlineExceeded says that the request's own time was up: 504.
func DeadlineExceeded(message string) *Error {
	return NewError(ReasonRequestDeadlineExceeded, message)
}

// NotImplemented says that the request asks for what this worker cannot do: 501.
// The text also reaches the HTTP caller.
func NotImplemented(message string) *Error {
	e := NewError(ReasonRuntimeNotImplemented, message)
	e.Public = &Public{Type: PublicMessage, Message: message}
	return e
}

// AsError turns any error into one that can be sent: an *Error in its chain is
// kept, what ParseRequest and ParseCodec find wrong is the caller's fault and
// named to him, the rest is internal. The result is nil only for nil.
func AsError(err error) *Error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	var (
		decode *DecodeError
		notMap *NotMapError
		field  *FieldError
		codec  *UnknownCodecError
	)
	switch {
	case errors.As(err, &decode):
		return InvalidArgument("%s", decode)
	case errors.As(err, &notMap):
		return InvalidArgument("%s", notMap)
	case errors.As(err, &field):
		return InvalidArgument("%s", field)
	case errors.As(err, &codec):
		return InvalidArgument("%s", codec)
	case errors.Is(err, context.Canceled):
		return Cancelled(err.Error())
	case errors.Is(err, context.DeadlineExceeded):
		return DeadlineExceeded(err.Error())
	default:
		return Internal(err.Error())
	}
}

// Migratable tells whether the frontend may continue the request on another
// worker: some error of the chain is of a kind that allows it and none of a kind
// that forbids it.
func (e *Error) Migratable() bool {
	allowed := false
	for i := 0; e != nil && i < maxCauses; i, e = i+1, e.Cause {
		entry := catalogue[e.Reason]
		if entry.blocks {
			return false
		}
		allowed = allowed || entry.migrates
	}
	return allowed
}

// AppendJSON appends the error object in JSON, for a prologue.
func (e *Error) AppendJSON(dst []byte) []byte { return e.append(dst, CodecJSON) }

// append writes the error object. The frontend turns an error whose class does
// not fit its reason into an internal one, so the catalogue decides and not the
// fields.
func (e *Error) append(dst []byte, c Codec) []byte { return e.appendChain(dst, c, maxCauses) }

func (e *Error) appendChain(dst []byte, c Codec, depth int) []byte {
	reason := e.Reason
	entry, ok := catalogue[reason]
	if !ok {
		reason, entry = ReasonBackendUnknown, catalogue[ReasonBackendUnknown]
	}
	legacy := e.Type
	if legacy.Name == "" {
		legacy = entry.legacy
	}
	message := cut(e.Message)
	withCause := e.Cause != nil && depth > 1

	n := 5
	if e.Public != nil {
		n++
	}
	if withCause {
		n++
	}
	dst = c.mapHead(dst, n)
	dst = c.field(dst, 0, "error_type")
	if legacy.Backend {
		dst = c.mapHead(dst, 1)
		dst = c.field(dst, 0, "Backend")
		dst = c.text(dst, legacy.Name)
		dst = c.mapEnd(dst)
	} else {
		dst = c.text(dst, legacy.Name)
	}
	dst = c.field(dst, 1, "class")
	dst = c.text(dst, string(entry.class))
	dst = c.field(dst, 2, "reason")
	dst = c.text(dst, string(reason))
	dst = c.field(dst, 3, "message")
	dst = c.text(dst, message)
	dst = c.field(dst, 4, "diagnostic")
	dst = c.text(dst, message)
	if e.Public != nil {
		dst = c.field(dst, 5, "public")
		dst = e.Public.append(dst, c)
	}
	if withCause {
		dst = c.field(dst, 6, "caused_by")
		dst = e.Cause.appendChain(dst, c, depth-1)
	}
	return c.mapEnd(dst)
}

func (p *Public) append(dst []byte, c Codec) []byte {
	n := 1
	isMessage := p.Type == PublicMessage
	if isMessage {
		n++
	}
	if p.Limit != nil {
		n++
	}
	if p.Actual != nil {
		n++
	}
	dst = c.mapHead(dst, n)
	dst = c.field(dst, 0, "type")
	dst = c.text(dst, p.Type)
	if isMessage {
		dst = c.field(dst, 1, "message")
		dst = c.text(dst, cut(p.Message))
	}
	if p.Limit != nil {
		dst = c.field(dst, 1, "limit")
		dst = c.signed(dst, *p.Limit)
	}
	if p.Actual != nil {
		dst = c.field(dst, 1, "actual")
		dst = c.signed(dst, *p.Actual)
	}
	return c.mapEnd(dst)
}

// cut shortens a text to MaxMessageLen bytes without breaking a character.
func cut(s string) string {
	if len(s) <= MaxMessageLen {
		return s
	}
	end := MaxMessageLen
	for end > MaxMessageLen-utf8.UTFMax && !utf8.RuneStart(s[end]) {
		end--
	}
	return s[:end]
}
