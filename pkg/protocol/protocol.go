// Package protocol holds what travels inside the frames of pkg/wire: request
// bodies, response items, errors, and the records that a worker writes to etcd,
// as Dynamo 1.6.1 reads and writes them.
//
// Bodies come in two codecs, msgpack and JSON; an answer uses the codec of its
// request. Both decoders are our own, because what they read comes from the
// network: lengths are compared with the bytes at hand before memory is taken,
// nesting and the number of values are bounded, integers never pass through a
// float. The encoders of response items append to a caller's slice and do not
// allocate.
//
// The package does no I/O, keeps no state and starts nothing; all functions may
// be called from many goroutines. Errors do not repeat the text they complain
// about, since that may be somebody's prompt.
package protocol

import "fmt"

// Codec is an encoding of bodies.
type Codec uint8

// The codecs. The zero value is JSON, which is also what the frontend means
// when a request or an instance record names none.
const (
	CodecJSON Codec = iota
	CodecMsgpack
)

// UnknownCodecError tells that a codec's name is not one of ours.
type UnknownCodecError struct{ Name string }

func (e *UnknownCodecError) Error() string {
	return fmt.Sprintf("unknown codec %.40q, want json or msgpack", e.Name)
}

// ParseCodec reads a codec's name as the control header and the instance record
// spell it; the empty name is JSON. The error is an *UnknownCodecError.
func ParseCodec(name string) (Codec, error) {
	switch name {
	case "json", "":
		return CodecJSON, nil
	case "msgpack":
		return CodecMsgpack, nil
	default:
		return CodecJSON, &UnknownCodecError{Name: name}
	}
}

func (c Codec) String() string {
	if c == CodecMsgpack {
		return "msgpack"
	}
	return "json"
}
