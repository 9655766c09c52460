package protocol

import (
	"strconv"
)

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
	// InstanceID is the worker's identity, the same in all its records. It uses
	// all 64 bits.
	InstanceID uint64
	Transport  Transport
	// DeviceType is "cuda", "cpu" or empty for unknown.
	DeviceType string
	// Codec is how the frontend shall encode requests; empty means JSON.
	Codec string
}

const typeEndpoint = "Endpoint"

// instanceJSON has the members in the order in which the real worker writes
// them. Inside other records the tag is left out.
type instanceJSON struct {
	Type       string            `json:"type,omitempty"`
	Component  string            `json:"component"`
	Endpoint   string            `json:"endpoint"`
	Namespace  string            `json:"namespace"`
	InstanceID uint64            `json:"instance_id"`
	Transport  map[string]string `json:"transport"`
	DeviceType string            `json:"device_type,omitempty"`
	Codec      string            `json:"request_plane_codec,omitempty"`
}

func (i *Instance) json(tag string) instanceJSON {
	return instanceJSON{
		Type:       tag,
		Component:  i.Component,
		Endpoint:   i.Endpoint,
		Namespace:  i.Namespace,
		InstanceID: i.InstanceID,
		Transport:  map[string]string{i.Transport.Kind: i.Transport.Address},
		DeviceType: i.DeviceType,
		Codec:      i.Codec,
	}
}

// InstancePrefix is what all keys of instance records begin with.
const InstancePrefix = "v1/instances/"

// Key is where the record lives in etcd. Names are not escaped.
func (i *Instance) Key() string {
	return InstancePrefix + endpointPath(i.Namespace, i.Component, i.Endpoint, i.InstanceID)
}

func endpointPath(ns, comp, ep string, id uint64) string {
	return ns + "/" + comp + "/" + ep + "/" + strconv.FormatUint(id, 16)
}

// Value is the record's JSON, the same bytes every time.
func (i *Instance) Value() []byte { return recordJSON(i.json(typeEndpoint)) }

// ParseInstance reads a record's value. Unknown members are ignored. The error is
// a *RecordError.
func ParseInstance(value []byte) (Instance, error) {
	const what = "instance record"
	var in instanceJSON
	if err := parseRecord(what, value, typeEndpoint, &in.Type, &in); err != nil {
		return Instance{}, err
	}
	inst, err := in.instance()
	if err != nil {
		return Instance{}, &RecordError{Record: what, Err: err}
	}
	return inst, nil
}

func (in *instanceJSON) instance() (Instance, error) {
	inst := Instance{
		Namespace: in.Namespace, Component: in.Component, Endpoint: in.Endpoint,
		InstanceID: in.InstanceID, DeviceType: in.DeviceType, Codec: in.Codec,
	}
	for _, f := range []struct{ name, value string }{
		{"namespace", in.Namespace}, {"component", in.Component}, {"endpoint", in.Endpoint},
	} {
		if f.value == "" {
			return inst, &FieldError{Field: f.name, Reason: "missing"}
		}
	}
	if len(in.Transport) != 1 {
		return inst, &FieldError{Field: "transport", Reason: "not a map of one member"}
	}
	for kind, address := range in.Transport {
		if kind != TransportNATS && kind != TransportTCP {
			return inst, &FieldError{Field: "transport", Reason: "not of a known kind"}
		}
		inst.Transport = Transport{Kind: kind, Address: address}
	}
	return inst, nil
}
