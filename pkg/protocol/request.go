package protocol

import "fmt"

// TokensState tells in which form the prompt was there.
type TokensState uint8

// The forms.
const (
	TokensAbsent TokensState = iota // no token_ids key
	TokensNull                      // token_ids is null
	TokensList                      // a list, perhaps empty
)

// Request is the body of a generation request.
type Request struct {
	// TokenIDs is the prompt; every id is at least 0.
	TokenIDs    []int32
	TokensState TokensState
	// Packed tells that the ids came, and are to be written, as msgpack bin of
	// little-endian 32-bit integers. The frontend does that when it runs with
	// DYN_TOKEN_IDS_AS_BYTES. Without effect in JSON.
	Packed bool
	// Fields are all other members of the body.
	Fields Map
}

// NotMapError tells that a body is well-formed but not a map.
type NotMapError struct {
	// Kind is what it is instead: "list", "string", "null", …
	Kind string
}

func (e *NotMapError) Error() string { return "request body is a " + e.Kind + ", not a map" }

// FieldError tells which field of a body has a wrong value.
type FieldError struct {
	// Field is the path of the field, like "token_ids[3]".
	Field string
	// Reason does not repeat the value.
	Reason string
}

func (e *FieldError) Error() string { return fmt.Sprintf("%s: %s", e.Field, e.Reason) }

// ParseRequest decodes the body of a request. Token ids go straight into a
// slice. Errors are *DecodeError, *NotMapError and *FieldError.
func ParseRequest(c Codec, body []byte) (*Request, error) { panic("not yet") }

// Append appends the body of a request, keys sorted. A member token_ids of
// Fields is ignored.
func (r *Request) Append(dst []byte, c Codec) []byte { panic("not yet") }
