package ingress

// Plane names a request plane in events and logs.
type Plane string

// The two request planes.
const (
	NATS Plane = "nats"
	TCP  Plane = "tcp"
)

// EventKind is what an Event reports.
type EventKind uint8

const (
	// Malformed is a message without a readable control header. It was refused, and no Admitter saw it.
	Malformed EventKind = iota + 1
	// UnknownEndpoint is a request for a path that nobody serves. It was refused.
	UnknownEndpoint
	// Dropped counts messages that were lost because they came faster than they were taken up. Nobody answered them.
	Dropped
	// ReplyFailed is a reply that could not be handed to the network.
	ReplyFailed
	// ConnectionRefused is a connection closed at once because there were too many.
	ConnectionRefused
	// ConnectionBroken is a connection closed because what came over it made no sense or stopped in the middle.
	ConnectionBroken
)

func (k EventKind) String() string {
	switch k {
	case Malformed:
		return "malformed"
	case UnknownEndpoint:
		return "unknown_endpoint"
	case Dropped:
		return "dropped"
	case ReplyFailed:
		return "reply_failed"
	case ConnectionRefused:
		return "connection_refused"
	case ConnectionBroken:
		return "connection_broken"
	default:
		return "unknown"
	}
}

// Event is something that happened outside of any admitted request, so that no Admitter can count it.
type Event struct {
	Plane Plane
	Kind  EventKind
	// Count is how often, at least 1.
	Count int
	// Err is the cause, if there is one.
	Err error
}

// Observer is told of events, from several goroutines at once. It must not block. A nil Observer is allowed.
type Observer func(Event)

// Note reports one event.
func (o Observer) Note(p Plane, k EventKind, count int, err error) {
	if o != nil {
		o(Event{Plane: p, Kind: k, Count: count, Err: err})
	}
}
