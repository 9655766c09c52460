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
	// MaxDepth is how deep arrays and maps may be nested.
	MaxDepth = 64
	// MaxValues is how many values one body may hold, each element, key and
	// member counted, the prompt's token ids left out. It bounds the memory of
	// a decoded tree to some dozens of MiB whatever the size of the body.
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

// DecodeValue decodes one whole body. The error is a *DecodeError.
func DecodeValue(c Codec, b []byte) (any, error) {
	panic("not yet")
}

// AppendValue appends v, which is built of the types of a decoded tree, of
// Object, of other integer, float, string, slice and string-keyed map types, or
// of KVCacheHit. Keys of maps are sorted. A float that JSON cannot express is
// written as null there, and bytes as a list of numbers, which is what the
// frontend's JSON library reads bytes from. Text that is not UTF-8 is repaired.
// It panics for a type that has no encoding.
func AppendValue(dst []byte, c Codec, v any) []byte {
	panic("not yet")
}
