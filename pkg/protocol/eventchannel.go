package protocol

import (
	"encoding/json"
	"strconv"
	"strings"
)

// EventChannel is the record that announces an event publisher. Its scope is an
// endpoint, the only scope that workers use.
type EventChannel struct {
	Namespace, Component, Endpoint string
	Topic                          string
	// PublisherID is random and below 2^53; it is not the instance id.
	PublisherID uint64
	Transport   EventTransport
}

// Topics that a worker publishes.
const (
	TopicActiveSequences = "active_sequences_events"
	TopicKVEvents        = "kv-events"
	TopicKVMetrics       = "kv_metrics"
	TopicForwardPass     = "forward-pass-metrics"
)

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

// EventSource is the record that tells the KV router whose cache a publisher of
// KV events describes.
type EventSource struct {
	Namespace, Component, Endpoint string
	Topic                          string
	PublisherID                    uint64
	// KVStateEndpoint is the endpoint whose requests fill the cache.
	KVStateEndpoint EndpointRef
	// WorkerID is the instance id, Rank the attention-DP rank.
	WorkerID uint64
	Rank     uint32
	// Recovery is the endpoint that answers for lost events, or nil.
	Recovery *Instance
}

const (
	typeEventChannel = "EventChannel"
	typeEventSource  = "EventSource"
	scopeEndpoint    = "endpoint"
)

type scopeJSON struct {
	Kind     string      `json:"kind"`
	Endpoint EndpointRef `json:"endpoint"`
}

type channelJSON struct {
	Type        string           `json:"type"`
	Scope       scopeJSON        `json:"scope"`
	Topic       string           `json:"topic"`
	PublisherID uint64           `json:"instance_id"`
	Transport   channelTransport `json:"transport"`
}

type channelTransport struct {
	Kind   string        `json:"kind"`
	Config channelConfig `json:"config"`
}

type channelConfig struct {
	SubjectPrefix string `json:"subject_prefix,omitempty"`
	Endpoint      string `json:"endpoint,omitempty"`
}

type sourceJSON struct {
	Type        string       `json:"type"`
	Scope       scopeJSON    `json:"scope"`
	Topic       string       `json:"topic"`
	PublisherID uint64       `json:"publisher_id"`
	Metadata    sourceDetail `json:"metadata"`
}

type sourceDetail struct {
	KVStateEndpoint EndpointRef   `json:"kv_state_endpoint"`
	Worker          sourceWorker  `json:"worker"`
	PublisherID     uint64        `json:"publisher_id"`
	Recovery        *instanceJSON `json:"recovery_target,omitempty"`
}

type sourceWorker struct {
	ID   uint64 `json:"worker_id"`
	Rank uint32 `json:"dp_rank"`
}

// Prefixes of the keys of event records.
const (
	EventChannelPrefix = "v1/event_channels/"
	EventSourcePrefix  = "v1/event_sources/"
)

// Key is where the record lives in etcd.
func (e *EventChannel) Key() string {
	return EventChannelPrefix + eventPath(e.Namespace, e.Component, e.Endpoint, e.Topic, e.PublisherID)
}

// Key is where the record lives in etcd.
func (e *EventSource) Key() string {
	return EventSourcePrefix + eventPath(e.Namespace, e.Component, e.Endpoint, e.Topic, e.PublisherID)
}

// eventPath is the part that both kinds of event record share. Other than in
// instance and model keys the names are escaped.
func eventPath(ns, comp, ep, topic string, publisher uint64) string {
	return "namespace/" + escapeSegment(ns) + "/component/" + escapeSegment(comp) +
		"/endpoint/" + escapeSegment(ep) + "/topic/" + escapeSegment(topic) +
		"/" + strconv.FormatUint(publisher, 16)
}

// escapeSegment keeps ASCII letters, digits, - and _; any other byte becomes %XX.
func escapeSegment(s string) string {
	const upperHex = "0123456789ABCDEF"
	var b strings.Builder
	for i := range len(s) {
		c := s[i]
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_' {
			b.WriteByte(c)
		} else {
			b.Write([]byte{'%', upperHex[c>>4], upperHex[c&15]})
		}
	}
	return b.String()
}

// Value is the record's JSON, the same bytes every time.
func (e *EventChannel) Value() []byte {
	t := channelTransport{Kind: e.Transport.Kind}
	if e.Transport.Kind == EventNATS {
		t.Config.SubjectPrefix = e.Transport.Address
	} else {
		t.Config.Endpoint = e.Transport.Address
	}
	return recordJSON(channelJSON{
		Type: typeEventChannel, Scope: scopeOf(e.Namespace, e.Component, e.Endpoint), Topic: e.Topic,
		PublisherID: e.PublisherID, Transport: t,
	})
}

// Value is the record's JSON, the same bytes every time.
func (e *EventSource) Value() []byte {
	detail := sourceDetail{
		KVStateEndpoint: e.KVStateEndpoint,
		Worker:          sourceWorker{ID: e.WorkerID, Rank: e.Rank},
		PublisherID:     e.PublisherID,
	}
	if e.Recovery != nil {
		in := e.Recovery.json("")
		detail.Recovery = &in
	}
	return recordJSON(sourceJSON{
		Type: typeEventSource, Scope: scopeOf(e.Namespace, e.Component, e.Endpoint), Topic: e.Topic,
		PublisherID: e.PublisherID, Metadata: detail,
	})
}

func scopeOf(ns, comp, ep string) scopeJSON {
	return scopeJSON{Kind: scopeEndpoint, Endpoint: EndpointRef{Namespace: ns, Component: comp, Name: ep}}
}

// ParseEventChannel reads a record's value. Only channels with an endpoint as
// scope and a NATS or ZMQ transport are known. The error is a *RecordError.
func ParseEventChannel(value []byte) (EventChannel, error) {
	const what = "event channel record"
	// A scope of another kind has its members elsewhere, a transport another
	// config: the raw forms are looked at before the typed ones.
	var in struct {
		Type        string    `json:"type"`
		Scope       scopeJSON `json:"scope"`
		Topic       string    `json:"topic"`
		PublisherID uint64    `json:"instance_id"`
		Transport   struct {
			Kind   string          `json:"kind"`
			Config json.RawMessage `json:"config"`
		} `json:"transport"`
	}
	if err := parseRecord(what, value, typeEventChannel, &in.Type, &in); err != nil {
		return EventChannel{}, err
	}
	fail := func(field, reason string) (EventChannel, error) {
		return EventChannel{}, &RecordError{Record: what, Err: &FieldError{Field: field, Reason: reason}}
	}
	if in.Scope.Kind != scopeEndpoint {
		return fail("scope.kind", "not "+scopeEndpoint)
	}
	var config channelConfig
	switch in.Transport.Kind {
	case EventNATS, EventZMQ:
		if err := json.Unmarshal(in.Transport.Config, &config); err != nil {
			return fail("transport.config", "not a map of strings")
		}
	default:
		return fail("transport.kind", "not known")
	}
	ch := EventChannel{
		Namespace: in.Scope.Endpoint.Namespace, Component: in.Scope.Endpoint.Component, Endpoint: in.Scope.Endpoint.Name,
		Topic: in.Topic, PublisherID: in.PublisherID,
		Transport: EventTransport{Kind: in.Transport.Kind, Address: config.SubjectPrefix},
	}
	if in.Transport.Kind == EventZMQ {
		ch.Transport.Address = config.Endpoint
	}
	if ch.Transport.Address == "" {
		return fail("transport.config", "no address")
	}
	return ch, nil
}

// ParseEventSource reads a record's value. The error is a *RecordError.
func ParseEventSource(value []byte) (EventSource, error) {
	const what = "event source record"
	var in sourceJSON
	if err := parseRecord(what, value, typeEventSource, &in.Type, &in); err != nil {
		return EventSource{}, err
	}
	if in.Scope.Kind != scopeEndpoint {
		return EventSource{}, &RecordError{Record: what, Err: &FieldError{Field: "scope.kind", Reason: "not " + scopeEndpoint}}
	}
	src := EventSource{
		Namespace: in.Scope.Endpoint.Namespace, Component: in.Scope.Endpoint.Component, Endpoint: in.Scope.Endpoint.Name,
		Topic: in.Topic, PublisherID: in.PublisherID,
		KVStateEndpoint: in.Metadata.KVStateEndpoint,
		WorkerID:        in.Metadata.Worker.ID, Rank: in.Metadata.Worker.Rank,
	}
	if in.Metadata.Recovery != nil {
		inst, err := in.Metadata.Recovery.instance()
		if err != nil {
			return EventSource{}, &RecordError{Record: what, Err: err}
		}
		src.Recovery = &inst
	}
	return src, nil
}
