package protocol

import (
	"bytes"
	"encoding/json"

	"dynworker/pkg/wire"
)

// ExtractJSON gives the value at a path of map keys in a body as JSON with the
// map keys in the order in which they came. A decoded Map has no order, but the
// order of a schema's properties decides in which order a guided answer may
// have them. The body must have passed ParseRequest; false means that there is
// nothing at the path. The error is a *DecodeError.
func ExtractJSON(c Codec, body []byte, path ...string) (json.RawMessage, bool, error) {
	if c == CodecJSON {
		return extractFromJSON(body, path)
	}
	r := msgpackReader{b: body, budget: MaxValues}
	for _, key := range path {
		found, err := r.enter(key)
		if err != nil || !found {
			return nil, false, err
		}
	}
	out, err := r.appendJSON(nil, 0)
	if err != nil {
		return nil, false, err
	}
	return out, true, nil
}

func extractFromJSON(body []byte, path []string) (json.RawMessage, bool, error) {
	at := json.RawMessage(body)
	for _, key := range path {
		var m map[string]json.RawMessage
		if err := json.Unmarshal(at, &m); err != nil {
			return nil, false, &DecodeError{Codec: CodecJSON, Reason: reasonSyntax}
		}
		next, ok := m[key]
		if !ok {
			return nil, false, nil
		}
		at = next
	}
	var out bytes.Buffer
	if err := json.Compact(&out, at); err != nil {
		return nil, false, &DecodeError{Codec: CodecJSON, Reason: reasonSyntax}
	}
	return out.Bytes(), true, nil
}

// enter moves to the value of a key of the map that comes next. It reports
// false when that is no map or has no such key.
func (r *msgpackReader) enter(key string) (bool, error) {
	h, err := r.head()
	if err != nil || h.kind != kindMap {
		return false, err
	}
	for range h.size {
		k, err := r.key()
		if err != nil {
			return false, err
		}
		if k == key {
			return true, nil
		}
		if err := r.skip(0); err != nil {
			return false, err
		}
	}
	return false, nil
}

// skip moves behind the next value without making it.
func (r *msgpackReader) skip(depth int) error {
	start := r.off
	h, err := r.head()
	if err != nil {
		return err
	}
	inside := 0
	switch h.kind {
	case kindString, kindBytes:
		r.off += h.size
	case kindList:
		inside = h.size
	case kindMap:
		inside = 2 * h.size
	}
	if inside > 0 && depth >= MaxDepth {
		return r.fail(start, reasonDepth)
	}
	for range inside {
		if err := r.skip(depth + 1); err != nil {
			return err
		}
	}
	return nil
}

// appendJSON appends the next value as JSON, maps in their own order.
func (r *msgpackReader) appendJSON(dst []byte, depth int) ([]byte, error) {
	start := r.off
	h, err := r.head()
	if err != nil {
		return nil, err
	}
	if h.kind != kindList && h.kind != kindMap {
		v, err := r.rest(start, h, depth)
		if err != nil {
			return nil, err
		}
		return AppendValue(dst, CodecJSON, v), nil
	}
	if depth >= MaxDepth {
		return nil, r.fail(start, reasonDepth)
	}
	ends := "[]"
	if h.kind == kindMap {
		ends = "{}"
	}
	dst = append(dst, ends[0])
	for i := range h.size {
		if i > 0 {
			dst = append(dst, ',')
		}
		if h.kind == kindMap {
			key, err := r.key()
			if err != nil {
				return nil, err
			}
			dst = append(wire.AppendJSONString(dst, key), ':')
		}
		if dst, err = r.appendJSON(dst, depth+1); err != nil {
			return nil, err
		}
	}
	return append(dst, ends[1]), nil
}
