package protocol

// Class is the coarse kind of an error; it decides the HTTP status.
type Class string

// Reason is the precise kind of an error. Each belongs to one class.
type Reason string

// The classes.
const (
	ClassInvalidRequest    Class = "InvalidRequest"
	ClassUnauthenticated   Class = "Unauthenticated"
	ClassPermissionDenied  Class = "PermissionDenied"
	ClassNotFound          Class = "NotFound"
	ClassConflict          Class = "Conflict"
	ClassPayloadTooLarge   Class = "PayloadTooLarge"
	ClassUnsupportedMedia  Class = "UnsupportedMedia"
	ClassRateLimited       Class = "RateLimited"
	ClassCapacityExhausted Class = "CapacityExhausted"
	ClassCancelled         Class = "Cancelled"
	ClassUnavailable       Class = "Unavailable"
	ClassBackendProtocol   Class = "BackendProtocol"
	ClassDeadlineExceeded  Class = "DeadlineExceeded"
	ClassNotImplemented    Class = "NotImplemented"
	ClassInternal          Class = "Internal"
)

// The reasons.
const (
	ReasonRuntimeUnclassified   Reason = "runtime.unclassified"
	ReasonRuntimeInvalidError   Reason = "runtime.invalid_error"
	ReasonRuntimeInternal       Reason = "runtime.internal"
	ReasonRuntimeNotImplemented Reason = "runtime.not_implemented"

	ReasonRequestInvalidArgument  Reason = "request.invalid_argument"
	ReasonRequestInvalid          Reason = "request.invalid"
	ReasonRequestUnauthenticated  Reason = "request.unauthenticated"
	ReasonRequestPermissionDenied Reason = "request.permission_denied"
	ReasonRequestNotFound         Reason = "request.not_found"
	ReasonRequestConflict         Reason = "request.conflict"
	ReasonRequestPayloadTooLarge  Reason = "request.payload_too_large"
	ReasonRequestUnsupportedMedia Reason = "request.unsupported_media"
	ReasonRequestRateLimited      Reason = "request.rate_limited"
	ReasonRequestCancelled        Reason = "request.cancelled"
	ReasonRequestDeadlineExceeded Reason = "request.deadline_exceeded"

	ReasonTransportCannotConnect     Reason = "transport.cannot_connect"
	ReasonTransportDisconnected      Reason = "transport.disconnected"
	ReasonTransportConnectionTimeout Reason = "transport.connection_timeout"

	ReasonBackendUnknown           Reason = "backend.unknown"
	ReasonBackendInvalidArgument   Reason = "backend.invalid_argument"
	ReasonBackendUnavailable       Reason = "backend.unavailable"
	ReasonBackendWorkerUnavailable Reason = "backend.worker_unavailable"
	ReasonBackendCannotConnect     Reason = "backend.cannot_connect"
	ReasonBackendDisconnected      Reason = "backend.disconnected"
	ReasonBackendEngineShutdown    Reason = "backend.engine_shutdown"
	ReasonBackendStreamIncomplete  Reason = "backend.stream_incomplete"
	ReasonBackendResponseTimeout   Reason = "backend.response_timeout"
	ReasonBackendConnectionTimeout Reason = "backend.connection_timeout"
	ReasonBackendCancelled         Reason = "backend.cancelled"
	ReasonBackendProtocol          Reason = "backend.protocol"

	ReasonRouterQueueDeadlineExceeded Reason = "router.queue_deadline_exceeded"

	ReasonCapacityPoolExhausted    Reason = "capacity.pool_exhausted"
	ReasonCapacityWorkerOverloaded Reason = "capacity.worker_overloaded"
	ReasonCapacityExhausted        Reason = "capacity.exhausted"
)

// LegacyType is the error type of frontends older than class and reason. It is
// written as a string, or as {"Backend": Name} when Backend is set.
type LegacyType struct {
	Name    string
	Backend bool
}

// Error is an error as the frontend understands it.
type Error struct {
	Type   LegacyType
	Class  Class
	Reason Reason
	// Message is for logs; HTTP callers never see it. It is cut to
	// MaxMessageLen bytes when written.
	Message string
	// Public is what the HTTP caller reads; without it a phrase of the
	// frontend's own.
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
	// Limit and Actual belong to the other kinds.
	Limit, Actual *int64
}

// Error returns reason and message.
func (e *Error) Error() string { return string(e.Reason) + ": " + e.Message }

// Unwrap returns the cause.
func (e *Error) Unwrap() error {
	if e.Cause == nil {
		return nil
	}
	return e.Cause
}

// InvalidArgument tells the HTTP caller, with status 400, what is wrong with the
// request. format and args are as for fmt.Sprintf.
func InvalidArgument(format string, args ...any) *Error { panic("not yet") }

// ContextLength tells the HTTP caller that prompt and answer do not fit.
func ContextLength(limit, actual int) *Error { panic("not yet") }

// EngineShutdown says that the generation was cut short; the frontend may
// continue it on another worker.
func EngineShutdown(msg string) *Error { panic("not yet") }

// Internal says that the worker or its engine failed in an unforeseen way.
func Internal(msg string) *Error { panic("not yet") }

// Overloaded says that this worker has no room; another one may.
func Overloaded(msg string) *Error { panic("not yet") }

// Unavailable says that this worker does not serve; another one may.
func Unavailable(msg string) *Error { panic("not yet") }

// Cancelled says that the caller gave up.
func Cancelled(msg string) *Error { panic("not yet") }

// AppendJSON appends the error object in JSON, for a prologue.
func (e *Error) AppendJSON(dst []byte) []byte { panic("not yet") }

// Migratable tells whether the frontend may continue the request elsewhere.
func (e *Error) Migratable() bool { panic("not yet") }

// AsError turns any error of this package, and any other error, into one that
// can be sent.
func AsError(err error) *Error { panic("not yet") }
