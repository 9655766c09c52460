package protocol

// The kinds of Transport.
const (
	TransportNATS = "nats_tcp"
	TransportTCP  = "tcp"
)

// Transport says how the frontend sends requests to an instance.
type Transport struct {
	// Kind is TransportNATS or TransportTCP.
	Kind string
	// Address is a NATS subject, or "ip:port/path".
	Address string
}

// Instance is the record of a served endpoint.
type Instance struct {
	Namespace, Component, Endpoint string
	InstanceID                     uint64
	Transport                      Transport
	// DeviceType is "cuda", "cpu" or empty for unknown.
	DeviceType string
	// Codec is how the frontend shall encode requests; empty means JSON.
	Codec string
}

// Key is where the record lives in etcd.
func (i *Instance) Key() string { panic("not yet") }

// Value is the record's JSON, the same bytes every time.
func (i *Instance) Value() []byte { panic("not yet") }

// ParseInstance reads a record's value.
func ParseInstance(value []byte) (Instance, error) { panic("not yet") }
