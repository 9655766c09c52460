package wire

import (
	"bytes"
	"encoding/json"
	"unicode/utf8"
)

// object is a JSON object whose members are still text. Going through it keeps
// names case-sensitive, as the frontend's are, and tells which field is wrong.
type object struct {
	name   string // path of the object, empty for the outermost
	fields map[string]json.RawMessage
}

func parseObject(name string, b []byte) (object, error) {
	o := object{name: name}
	if !utf8.Valid(b) {
		return o, &ControlError{name, "not UTF-8"}
	}
	if err := json.Unmarshal(b, &o.fields); err != nil || o.fields == nil {
		return o, &ControlError{name, "not a JSON object"}
	}
	return o, nil
}

// has tells whether a member is there and not null.
func (o object) has(field string) bool {
	raw, ok := o.fields[field]
	return ok && !bytes.Equal(raw, []byte("null"))
}

// text returns a member that must be a string.
func (o object) text(field string) (string, error) {
	path := field
	if o.name != "" {
		path = o.name + "." + field
	}
	if !o.has(field) {
		return "", &ControlError{path, "missing"}
	}
	var s string
	if err := json.Unmarshal(o.fields[field], &s); err != nil {
		return "", &ControlError{path, "not a string"}
	}
	return s, nil
}

const hexDigits = "0123456789abcdef"

// AppendJSONString appends s as a JSON string with the escapes that the frontend's
// JSON library writes, so that headers come out byte-equal. Bytes that are not
// UTF-8 become U+FFFD.
func AppendJSONString(dst []byte, s string) []byte {
	dst = append(dst, '"')
	start := 0
	for i := 0; i < len(s); {
		b := s[i]
		if b >= utf8.RuneSelf {
			r, n := utf8.DecodeRuneInString(s[i:])
			if r == utf8.RuneError && n == 1 {
				dst = append(dst, s[start:i]...)
				dst = append(dst, "\uFFFD"...)
				start = i + n
			}
			i += n
			continue
		}
		if b >= ' ' && b != '"' && b != '\\' {
			i++
			continue
		}
		dst = append(dst, s[start:i]...)
		switch b {
		case '"', '\\':
			dst = append(dst, '\\', b)
		case '\b':
			dst = append(dst, '\\', 'b')
		case '\f':
			dst = append(dst, '\\', 'f')
		case '\n':
			dst = append(dst, '\\', 'n')
		case '\r':
			dst = append(dst, '\\', 'r')
		case '\t':
			dst = append(dst, '\\', 't')
		default:
			dst = append(dst, '\\', 'u', '0', '0', hexDigits[b>>4], hexDigits[b&15])
		}
		i++
		start = i
	}
	dst = append(dst, s[start:]...)
	return append(dst, '"')
}
