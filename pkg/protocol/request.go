package protocol

import (
	"encoding/binary"
	"fmt"
	"slices"
)

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

func (e *NotMapError) Error() string { return "request body is " + article(e.Kind) + ", not a map" }

// FieldError tells which field of a body or record has a wrong value.
type FieldError struct {
	// Field is the path of the field, like "token_ids[3]".
	Field string
	// Reason does not repeat the value.
	Reason string
}

func (e *FieldError) Error() string { return fmt.Sprintf("%s: %s", e.Field, e.Reason) }

// ParseRequest decodes the body of a request. Token ids go straight into a
// slice. Errors are *DecodeError, *NotMapError and *FieldError; the first fault
// in the order of the body is reported.
func ParseRequest(c Codec, body []byte) (*Request, error) {
	if c == CodecMsgpack {
		return parseMsgpackRequest(body)
	}
	return parseJSONRequest(body)
}

func parseMsgpackRequest(body []byte) (*Request, error) {
	r := msgpackReader{b: body, budget: MaxValues}
	h, err := r.head()
	if err != nil {
		return nil, err
	}
	if h.kind != kindMap {
		// Decide first whether it is msgpack at all.
		if _, err := decodeMsgpack(body); err != nil {
			return nil, err
		}
		return nil, &NotMapError{Kind: kindNames[h.kind]}
	}
	if err := r.claim(0, 2*h.size); err != nil {
		return nil, err
	}
	req := &Request{Fields: make(Map, h.size)}
	for range h.size {
		at := r.off
		key, err := r.key()
		if err != nil {
			return nil, err
		}
		if req.has(key) {
			return nil, r.fail(at, reasonDuplicate)
		}
		if key == tokenField {
			err = r.tokens(req)
		} else {
			req.Fields[key], err = r.value(1)
		}
		if err != nil {
			return nil, err
		}
	}
	if err := r.finish(); err != nil {
		return nil, err
	}
	return req, nil
}

func parseJSONRequest(body []byte) (*Request, error) {
	r := jsonReader{b: body, budget: MaxValues}
	c, err := r.peek()
	if err != nil {
		return nil, err
	}
	if c != '{' {
		v, err := decodeJSON(body)
		if err != nil {
			return nil, err
		}
		return nil, &NotMapError{Kind: kindNames[kindOf(v)]}
	}
	r.off++
	req := &Request{Fields: Map{}}
	done, err := r.empty('}')
	for err == nil && !done {
		if _, err = r.peek(); err != nil {
			break
		}
		var again bool
		if err = r.member(req); err == nil {
			again, err = r.more('}')
		}
		done = !again
	}
	if err == nil {
		err = r.finish()
	}
	if err != nil {
		return nil, err
	}
	return req, nil
}

func (r *jsonReader) member(req *Request) error {
	at := r.off
	key, err := r.key()
	if err != nil {
		return err
	}
	if req.has(key) {
		return r.fail(at, reasonDuplicate)
	}
	if key == tokenField {
		return r.tokens(req)
	}
	req.Fields[key], err = r.value(1)
	return err
}

// has tells whether a member was read before.
func (r *Request) has(key string) bool {
	if key == tokenField {
		return r.TokensState != TokensAbsent
	}
	_, ok := r.Fields[key]
	return ok
}

// Append appends the body of a request, keys sorted. A member token_ids of
// Fields is ignored.
func (r *Request) Append(dst []byte, c Codec) []byte {
	keys := make([]string, 0, len(r.Fields)+1)
	for k := range r.Fields {
		if k != tokenField {
			keys = append(keys, k)
		}
	}
	if r.TokensState != TokensAbsent {
		keys = append(keys, tokenField)
	}
	slices.Sort(keys)

	dst = c.mapHead(dst, len(keys))
	for i, k := range keys {
		dst = c.key(dst, i, k)
		if k == tokenField {
			dst = r.appendTokens(dst, c)
		} else {
			dst = AppendValue(dst, c, r.Fields[k])
		}
	}
	return c.mapEnd(dst)
}

func (r *Request) appendTokens(dst []byte, c Codec) []byte {
	switch {
	case r.TokensState == TokensNull:
		return AppendValue(dst, c, nil)
	case c == CodecMsgpack && r.Packed:
		dst = appendMsgpackBinHead(dst, 4*len(r.TokenIDs))
		for _, id := range r.TokenIDs {
			dst = binary.LittleEndian.AppendUint32(dst, uint32(id))
		}
		return dst
	default:
		return AppendValue(dst, c, r.TokenIDs)
	}
}
