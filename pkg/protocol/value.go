package protocol

import "fmt"

// Map is a decoded object. A decoded tree consists of nil, bool, int64, uint64
// (only above the range of int64), float64, string, []byte (msgpack bin), []any
// and Map. A 32-bit float of msgpack becomes float64(float32). An integer stays
// an integer in both codecs; a JSON number with a fraction or an exponent is a
// float64 even when its value is whole.
type Map = map[string]any

// Member is one entry of an Object.
type Member struct {
	Key   string
	Value any
}

// Object is a map whose order is kept when it is encoded. Decoders never make
// one.
type Object []Member

// Bounds of a decoded tree.
const (
	// MaxDepth is how deep lists and maps may be nested.
	MaxDepth = 64
	// MaxValues is how many values one body may hold, every key, member and
	// element counted, the prompt's token ids left out. It bounds the memory of
	// a decoded tree whatever the size of the body.
	MaxValues = 1 << 20
)

// DecodeError tells why and where a body is not what its codec allows.
type DecodeError struct {
	Codec Codec
	// Offset is the position in bytes from the start of the body.
	Offset int
	// Reason is one of a fixed set of phrases.
	Reason string
}

func (e *DecodeError) Error() string {
	return fmt.Sprintf("%s body: %s at byte %d", e.Codec, e.Reason, e.Offset)
}

// DecodeValue decodes one whole body. What the package comment says about
// hostile input holds: nesting is at most MaxDepth, there are at most MaxValues
// values, keys are strings and differ, text is UTF-8 and nothing follows the
// value. The error is a *DecodeError.
func DecodeValue(c Codec, b []byte) (any, error) {
	if c == CodecMsgpack {
		return decodeMsgpack(b)
	}
	return decodeJSON(b)
}
