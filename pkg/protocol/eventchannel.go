package protocol

// EventChannel is the record that announces an event publisher. An endpoint is
// its scope.
type EventChannel struct {
	Namespace, Component, Endpoint string
	Topic                          string
	// PublisherID is random and below 2^53, not the instance id.
	PublisherID uint64
	Transport   EventTransport
}

// The kinds of EventTransport.
const (
	EventNATS = "Nats"
	EventZMQ  = "Zmq"
)

// EventTransport says where the events are.
type EventTransport struct {
	// Kind is EventNATS or EventZMQ.
	Kind string
	// Address is a NATS subject prefix, or a ZMQ endpoint.
	Address string
}

// Key is where the record lives in etcd.
func (e *EventChannel) Key() string { panic("not yet") }

// Value is the record's JSON, the same bytes every time.
func (e *EventChannel) Value() []byte { panic("not yet") }

// ParseEventChannel reads a record's value.
func ParseEventChannel(value []byte) (EventChannel, error) { panic("not yet") }
