package wire

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
)

// MaxControl is the largest request control header in bytes; the frontend
// refuses to send a larger one.
const MaxControl = 128 << 10

// MaxMessage is the default bound of one request in bytes, the value that
// Dynamo uses for its TCP request plane.
const MaxMessage = 32 << 20

// What the frontend writes for a text generation request.
const (
	RequestSingleIn    = "single_in"
	ResponseManyOut    = "many_out"
	TransportTCP       = "tcp_server"
	StreamTypeResponse = "response"
	// CodecDefault is what a missing payload_codec means.
	CodecDefault = "json"
)

// RequestControl is the header part of a request: who asks, how the body is
// encoded and where the answer goes.
type RequestControl struct {
	// ID is the frontend's request id, a UUID as text.
	ID string
	// RequestType is "single_in" or "many_in", ResponseType "many_out" or
	// "single_out".
	RequestType, ResponseType string
	// PayloadCodec names the codec of the body and of the answer. It is not
	// checked here; an unknown codec can be reported to the caller.
	PayloadCodec string
	Connection   ConnectionInfo
	Metadata     map[string]string
	// FrontendSendNanos is the sending time in nanoseconds since 1970, or 0.
	FrontendSendNanos uint64
	// HasRequestStream tells that the frontend wants to stream the request
	// over a connection of its own (many_in). AppendRequestControl ignores it.
	HasRequestStream bool
}

// ConnectionInfo says where the frontend waits for the answer.
type ConnectionInfo struct {
	// Transport is "tcp_server".
	Transport string
	// Address is IP and port, IPv6 in brackets.
	Address string
	// Subject identifies the waiting stream, Context repeats the request id.
	Subject, Context string
	// StreamType is "response".
	StreamType string
}

// ControlError tells which field of a JSON header cannot be used. A field of a
// nested object is named with dots, the empty name means the whole header.
type ControlError struct {
	Field, Reason string
}

func (e *ControlError) Error() string {
	if e.Field == "" {
		return "control header: " + e.Reason
	}
	return fmt.Sprintf("control header: %s: %s", e.Field, e.Reason)
}

// ParseRequestControl reads and checks the header part of a request. Errors are
// *SizeError and *ControlError. Unknown fields are ignored, as the frontend may
// add some. Together with an error the fields read so far are returned; they
// are good for a log line only.
func ParseRequestControl(b []byte) (RequestControl, error) {
	if len(b) > MaxControl {
		return RequestControl{}, &SizeError{Part: PartHeader, Size: uint64(len(b)), Limit: MaxControl}
	}
	var obj object
	err := obj.read("", b)
	if err != nil {
		return RequestControl{}, err
	}
	var c RequestControl
	if c.ID, err = obj.text("id"); err != nil {
		return c, err
	}
	if c.RequestType, err = obj.text("request_type"); err != nil {
		return c, err
	}
	if c.ResponseType, err = obj.text("response_type"); err != nil {
		return c, err
	}
	c.PayloadCodec = CodecDefault
	if obj.has("payload_codec") {
		if c.PayloadCodec, err = obj.text("payload_codec"); err != nil {
			return c, err
		}
	}
	c.HasRequestStream = obj.has("request_stream_connection_info")
	if obj.has("metadata") {
		if err := json.Unmarshal(obj.value("metadata"), &c.Metadata); err != nil {
			return c, &ControlError{"metadata", "not an object of strings"}
		}
	}
	if obj.has("frontend_send_ts_ns") {
		c.FrontendSendNanos, err = strconv.ParseUint(string(obj.value("frontend_send_ts_ns")), 10, 64)
		if err != nil {
			return c, &ControlError{"frontend_send_ts_ns", "not an unsigned integer"}
		}
	}
	if c.Connection, err = parseConnection(&obj); err != nil {
		return c, err
	}
	if c.Connection.Context != c.ID {
		return c, &ControlError{"connection_info.info.context", "differs from the request id"}
	}
	return c, nil
}

// parseConnection reads connection_info, whose member info is JSON once more,
// inside a string.
func parseConnection(parent *object) (ConnectionInfo, error) {
	const field, inner = "connection_info", "connection_info.info"
	if !parent.has(field) {
		return ConnectionInfo{}, &ControlError{field, "missing"}
	}
	var outer, obj object
	err := outer.read(field, parent.value(field))
	if err != nil {
		return ConnectionInfo{}, err
	}
	var info ConnectionInfo
	if info.Transport, err = outer.text("transport"); err != nil {
		return info, err
	}
	if info.Transport != TransportTCP {
		return info, &ControlError{field + ".transport", "not " + TransportTCP}
	}
	text, err := outer.text("info")
	if err != nil {
		return info, err
	}
	if err := obj.read(inner, []byte(text)); err != nil {
		return info, err
	}
	for _, f := range []struct {
		name string
		to   *string
	}{
		{"address", &info.Address},
		{"subject", &info.Subject},
		{"context", &info.Context},
		{"stream_type", &info.StreamType},
	} {
		if *f.to, err = obj.text(f.name); err != nil {
			return info, err
		}
	}
	if info.StreamType != StreamTypeResponse {
		return info, &ControlError{inner + ".stream_type", "not " + StreamTypeResponse}
	}
	addr, err := netip.ParseAddrPort(info.Address)
	if err != nil {
		return info, &ControlError{inner + ".address", "not an IP address and port"}
	}
	if addr.Port() == 0 {
		return info, &ControlError{inner + ".address", "port 0"}
	}
	return info, nil
}

// AppendRequestControl appends the header part of a request as the frontend
// writes it, byte for byte.
func AppendRequestControl(dst []byte, c *RequestControl) []byte {
	dst = append(dst, `{"id":`...)
	dst = AppendJSONString(dst, c.ID)
	dst = append(dst, `,"request_type":`...)
	dst = AppendJSONString(dst, c.RequestType)
	dst = append(dst, `,"response_type":`...)
	dst = AppendJSONString(dst, c.ResponseType)
	if c.PayloadCodec != "" {
		dst = append(dst, `,"payload_codec":`...)
		dst = AppendJSONString(dst, c.PayloadCodec)
	}
	dst = append(dst, `,"connection_info":{"transport":`...)
	dst = AppendJSONString(dst, c.Connection.Transport)
	dst = append(dst, `,"info":`...)
	dst = AppendJSONString(dst, string(appendInfo(nil, &c.Connection)))
	dst = append(dst, '}')
	if len(c.Metadata) > 0 {
		dst = append(dst, `,"metadata":`...)
		dst = appendStringMap(dst, c.Metadata)
	}
	if c.FrontendSendNanos != 0 {
		dst = append(dst, `,"frontend_send_ts_ns":`...)
		dst = strconv.AppendUint(dst, c.FrontendSendNanos, 10)
	}
	return append(dst, '}')
}

func appendInfo(dst []byte, info *ConnectionInfo) []byte {
	dst = append(dst, `{"address":`...)
	dst = AppendJSONString(dst, info.Address)
	dst = append(dst, `,"subject":`...)
	dst = AppendJSONString(dst, info.Subject)
	dst = append(dst, `,"context":`...)
	dst = AppendJSONString(dst, info.Context)
	dst = append(dst, `,"stream_type":`...)
	dst = AppendJSONString(dst, info.StreamType)
	return append(dst, '}')
}

func appendStringMap(dst []byte, m map[string]string) []byte {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	dst = append(dst, '{')
	for i, k := range keys {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = AppendJSONString(dst, k)
		dst = append(dst, ':')
		dst = AppendJSONString(dst, m[k])
	}
	return append(dst, '}')
}
