package wire

import (
	"bytes"
	"encoding/json"
	"unicode/utf8"
)

// object is a JSON object whose members are still text. Going through it keeps
// names case-sensitive, as the frontend's are, and tells which field is wrong.
// It points into the text that it was read from.
type object struct {
	name    string // path of the object, empty for the outermost
	members []member
	first   [8]member // room for the members of all headers that there are
}

// member is a name without quotes and its value as JSON.
type member struct {
	name  []byte
	value []byte
}

// read takes the members out of b. The reading is in two steps, because the
// library's check costs little and its decoder much: what has passed the check
// can be cut apart without any doubt.
func (o *object) read(name string, b []byte) error {
	o.name, o.members = name, o.first[:0]
	if !utf8.Valid(b) {
		return &ControlError{name, "not UTF-8"}
	}
	b = bytes.Trim(b, jsonSpace)
	if len(b) == 0 || b[0] != '{' || !json.Valid(b) {
		return &ControlError{name, "not a JSON object"}
	}
	for at := skipSpace(b, 1); b[at] == '"'; {
		end := stringEnd(b, at)
		m := member{name: b[at+1 : end-1]}
		if bytes.IndexByte(m.name, '\\') >= 0 {
			m.name = []byte(unquote(b[at:end]))
		}
		at = skipSpace(b, skipSpace(b, end)+1) // behind the colon
		end = valueEnd(b, at)
		m.value = b[at:end]
		o.members = append(o.members, m)
		if at = skipSpace(b, end); b[at] == ',' {
			at = skipSpace(b, at+1)
		}
	}
	return nil
}

const jsonSpace = " \t\r\n"

func skipSpace(b []byte, at int) int {
	for b[at] == ' ' || b[at] == '\t' || b[at] == '\r' || b[at] == '\n' {
		at++
	}
	return at
}

// stringEnd is the offset behind the string that begins at the quote at.
func stringEnd(b []byte, at int) int {
	for at++; b[at] != '"'; at++ {
		if b[at] == '\\' {
			at++
		}
	}
	return at + 1
}

// valueEnd is the offset behind the value that begins at at and is followed by
// something, as every member of an object is.
func valueEnd(b []byte, at int) int {
	depth := 0
	for {
		switch b[at] {
		case '"':
			at = stringEnd(b, at)
			if depth == 0 {
				return at
			}
			continue
		case '{', '[':
			depth++
		case '}', ']':
			if depth == 0 {
				return at
			}
			if depth--; depth == 0 {
				return at + 1
			}
		case ',', ' ', '\t', '\r', '\n':
			if depth == 0 {
				return at
			}
		}
		at++
	}
}

// unquote gives the text of a JSON string that has been checked.
func unquote(quoted []byte) string {
	inside := quoted[1 : len(quoted)-1]
	if bytes.IndexByte(inside, '\\') < 0 {
		return string(inside)
	}
	out := make([]byte, 0, len(inside))
	for i := 0; i < len(inside); i++ {
		c := inside[i]
		if c == '\\' {
			i++
			if c = inside[i]; c != '"' && c != '\\' && c != '/' {
				return unquoteAny(quoted)
			}
		}
		out = append(out, c)
	}
	return string(out)
}

// unquoteAny knows the escapes that headers do not have.
func unquoteAny(quoted []byte) string {
	var s string
	if err := json.Unmarshal(quoted, &s); err != nil {
		panic("wire: a checked string cannot be read: " + err.Error())
	}
	return s
}

// value is a member as JSON, nil when it is missing. Of several with one name
// the last counts.
func (o *object) value(field string) []byte {
	for i := len(o.members) - 1; i >= 0; i-- {
		if string(o.members[i].name) == field {
			return o.members[i].value
		}
	}
	return nil
}

// has tells whether a member is there and not null.
func (o *object) has(field string) bool {
	raw := o.value(field)
	return raw != nil && string(raw) != "null"
}

// text returns a member that must be a string.
func (o *object) text(field string) (string, error) {
	raw := o.value(field)
	switch {
	case raw == nil || string(raw) == "null":
		return "", &ControlError{o.path(field), "missing"}
	case raw[0] != '"':
		return "", &ControlError{o.path(field), "not a string"}
	}
	return unquote(raw), nil
}

func (o *object) path(field string) string {
	if o.name == "" {
		return field
	}
	return o.name + "." + field
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
