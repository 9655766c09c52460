package protocol

// Class is the coarse kind of an error; it decides the HTTP status.
type Class string

// Reason is the precise kind of an error. Each belongs to one class.
type Reason string

// The classes.
const (
	ClassInvalidRequest    Class = "InvalidRequest"    // 400
	ClassUnauthenticated   Class = "Unauthenticated"   // 401
	ClassPermissionDenied  Class = "PermissionDenied"  // 403
	ClassNotFound          Class = "NotFound"          // 404
	ClassConflict          Class = "Conflict"          // 409
	ClassPayloadTooLarge   Class = "PayloadTooLarge"   // 413
	ClassUnsupportedMedia  Class = "UnsupportedMedia"  // 415
	ClassRateLimited       Class = "RateLimited"       // 429
	ClassCapacityExhausted Class = "CapacityExhausted" // 529
	ClassCancelled         Class = "Cancelled"         // nothing is delivered
	ClassUnavailable       Class = "Unavailable"       // 503
	ClassBackendProtocol   Class = "BackendProtocol"   // 502
	ClassDeadlineExceeded  Class = "DeadlineExceeded"  // 504
	ClassNotImplemented    Class = "NotImplemented"    // 501
	ClassInternal          Class = "Internal"          // 500
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

// entry is what belongs to a reason.
type entry struct {
	class  Class
	legacy LegacyType
	// migrates: the frontend may continue the request elsewhere. blocks: it
	// must not, whatever else the chain of causes says.
	migrates, blocks bool
}

func plain(name string) LegacyType   { return LegacyType{Name: name} }
func backend(name string) LegacyType { return LegacyType{Name: name, Backend: true} }

// catalogue is closed: the frontend turns every other reason, and every reason
// under another class, into an internal error.
var catalogue = map[Reason]entry{
	ReasonRuntimeUnclassified: {class: ClassInternal, legacy: plain("Unknown")},
	ReasonRuntimeInvalidError: {class: ClassInternal, legacy: plain("Internal")},
	ReasonRuntimeInternal:     {class: ClassInternal, legacy: plain("Internal")},
	ReasonBackendUnknown:      {class: ClassInternal, legacy: backend("Unknown")},

	ReasonRequestInvalidArgument: {class: ClassInvalidRequest, legacy: plain("InvalidArgument")},
	ReasonRequestInvalid:         {class: ClassInvalidRequest, legacy: plain("InvalidRequest")},
	ReasonBackendInvalidArgument: {class: ClassInvalidRequest, legacy: backend("InvalidArgument")},

	ReasonTransportCannotConnect:   {class: ClassUnavailable, legacy: plain("CannotConnect"), migrates: true},
	ReasonTransportDisconnected:    {class: ClassUnavailable, legacy: plain("Disconnected"), migrates: true},
	ReasonBackendUnavailable:       {class: ClassUnavailable, legacy: plain("Unavailable")},
	ReasonBackendWorkerUnavailable: {class: ClassUnavailable, legacy: plain("WorkerUnavailable"), migrates: true},
	ReasonBackendCannotConnect:     {class: ClassUnavailable, legacy: backend("CannotConnect"), migrates: true},
	ReasonBackendDisconnected:      {class: ClassUnavailable, legacy: backend("Disconnected"), migrates: true},
	ReasonBackendEngineShutdown:    {class: ClassUnavailable, legacy: backend("EngineShutdown"), migrates: true},
	ReasonBackendStreamIncomplete:  {class: ClassUnavailable, legacy: backend("StreamIncomplete"), migrates: true},

	ReasonTransportConnectionTimeout:  {class: ClassDeadlineExceeded, legacy: plain("ConnectionTimeout"), migrates: true},
	ReasonBackendResponseTimeout:      {class: ClassDeadlineExceeded, legacy: backend("ResponseTimeout"), migrates: true},
	ReasonBackendConnectionTimeout:    {class: ClassDeadlineExceeded, legacy: backend("ConnectionTimeout"), migrates: true},
	ReasonRequestDeadlineExceeded:     {class: ClassDeadlineExceeded, legacy: plain("DeadlineExceeded"), blocks: true},
	ReasonRouterQueueDeadlineExceeded: {class: ClassDeadlineExceeded, legacy: plain("DeadlineExceeded")},

	ReasonRequestCancelled: {class: ClassCancelled, legacy: plain("Cancelled"), blocks: true},
	ReasonBackendCancelled: {class: ClassCancelled, legacy: backend("Cancelled"), blocks: true},

	ReasonCapacityPoolExhausted:    {class: ClassCapacityExhausted, legacy: plain("ResourceExhausted"), blocks: true},
	ReasonCapacityWorkerOverloaded: {class: ClassCapacityExhausted, legacy: plain("WorkerOverloaded"), migrates: true},
	ReasonCapacityExhausted:        {class: ClassCapacityExhausted, legacy: plain("CapacityExhausted"), blocks: true},

	ReasonBackendProtocol:         {class: ClassBackendProtocol, legacy: plain("BackendProtocol")},
	ReasonRequestUnauthenticated:  {class: ClassUnauthenticated, legacy: plain("Unauthenticated")},
	ReasonRequestPermissionDenied: {class: ClassPermissionDenied, legacy: plain("PermissionDenied")},
	ReasonRequestNotFound:         {class: ClassNotFound, legacy: plain("NotFound")},
	ReasonRequestConflict:         {class: ClassConflict, legacy: plain("Conflict")},
	ReasonRequestPayloadTooLarge:  {class: ClassPayloadTooLarge, legacy: plain("PayloadTooLarge")},
	ReasonRequestUnsupportedMedia: {class: ClassUnsupportedMedia, legacy: plain("UnsupportedMedia")},
	ReasonRequestRateLimited:      {class: ClassRateLimited, legacy: plain("RateLimited")},
	ReasonRuntimeNotImplemented:   {class: ClassNotImplemented, legacy: plain("NotImplemented")},
}

// ClassOf returns the class of a reason, and false for one that is not in the
// catalogue.
func ClassOf(r Reason) (Class, bool) {
	e, ok := catalogue[r]
	return e.class, ok
}

// reasonOfLegacy is how a reader derives the reason that an older writer left
// out. Several reasons share a legacy type, so it is not the catalogue reversed.
var reasonOfLegacy = map[LegacyType]Reason{
	plain("Unknown"):           ReasonRuntimeUnclassified,
	plain("Internal"):          ReasonRuntimeInternal,
	plain("InvalidArgument"):   ReasonRequestInvalidArgument,
	plain("InvalidRequest"):    ReasonRequestInvalid,
	plain("Unauthenticated"):   ReasonRequestUnauthenticated,
	plain("PermissionDenied"):  ReasonRequestPermissionDenied,
	plain("NotFound"):          ReasonRequestNotFound,
	plain("Conflict"):          ReasonRequestConflict,
	plain("PayloadTooLarge"):   ReasonRequestPayloadTooLarge,
	plain("UnsupportedMedia"):  ReasonRequestUnsupportedMedia,
	plain("RateLimited"):       ReasonRequestRateLimited,
	plain("WorkerOverloaded"):  ReasonCapacityWorkerOverloaded,
	plain("ResourceExhausted"): ReasonCapacityPoolExhausted,
	plain("CapacityExhausted"): ReasonCapacityExhausted,
	plain("CannotConnect"):     ReasonTransportCannotConnect,
	plain("Disconnected"):      ReasonTransportDisconnected,
	plain("WorkerUnavailable"): ReasonBackendWorkerUnavailable,
	plain("Unavailable"):       ReasonBackendUnavailable,
	plain("ConnectionTimeout"): ReasonTransportConnectionTimeout,
	plain("ResponseTimeout"):   ReasonBackendResponseTimeout,
	plain("DeadlineExceeded"):  ReasonRequestDeadlineExceeded,
	plain("Cancelled"):         ReasonRequestCancelled,
	plain("BackendProtocol"):   ReasonBackendProtocol,
	plain("NotImplemented"):    ReasonRuntimeNotImplemented,

	backend("Unknown"):           ReasonBackendUnknown,
	backend("InvalidArgument"):   ReasonBackendInvalidArgument,
	backend("CannotConnect"):     ReasonBackendCannotConnect,
	backend("Disconnected"):      ReasonBackendDisconnected,
	backend("EngineShutdown"):    ReasonBackendEngineShutdown,
	backend("StreamIncomplete"):  ReasonBackendStreamIncomplete,
	backend("ConnectionTimeout"): ReasonBackendConnectionTimeout,
	backend("ResponseTimeout"):   ReasonBackendResponseTimeout,
	backend("Cancelled"):         ReasonBackendCancelled,
}

// reasonOfClass is the reason of an error of which only the class is known and
// whose legacy type points to another class.
var reasonOfClass = map[Class]Reason{
	ClassInternal:          ReasonRuntimeInternal,
	ClassInvalidRequest:    ReasonRequestInvalid,
	ClassUnavailable:       ReasonBackendUnavailable,
	ClassDeadlineExceeded:  ReasonRequestDeadlineExceeded,
	ClassCancelled:         ReasonRequestCancelled,
	ClassCapacityExhausted: ReasonCapacityExhausted,
	ClassBackendProtocol:   ReasonBackendProtocol,
	ClassUnauthenticated:   ReasonRequestUnauthenticated,
	ClassPermissionDenied:  ReasonRequestPermissionDenied,
	ClassNotFound:          ReasonRequestNotFound,
	ClassConflict:          ReasonRequestConflict,
	ClassPayloadTooLarge:   ReasonRequestPayloadTooLarge,
	ClassUnsupportedMedia:  ReasonRequestUnsupportedMedia,
	ClassRateLimited:       ReasonRequestRateLimited,
	ClassNotImplemented:    ReasonRuntimeNotImplemented,
}
