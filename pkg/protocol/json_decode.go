package protocol

import (
	"math"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// Phrases that only JSON needs.
const (
	reasonSyntax    = "not JSON"
	reasonControl   = "control character in a string"
	reasonEscape    = "bad escape in a string"
	reasonSurrogate = "half a surrogate pair in a string"
	reasonInteger   = "integer is out of range"
	reasonFloat     = "number is out of range"
)

// jsonReader walks over one body. The standard library's decoder is not used:
// it folds the case of keys, keeps the last of two equal ones, repairs bad text
// and knows integers only through json.Number.
type jsonReader struct {
	b      []byte
	off    int
	budget int
}

func (r *jsonReader) fail(off int, reason string) error {
	return &DecodeError{Codec: CodecJSON, Offset: off, Reason: reason}
}

// peek skips white space and returns the next byte without taking it.
func (r *jsonReader) peek() (byte, error) {
	for ; r.off < len(r.b); r.off++ {
		switch c := r.b[r.off]; c {
		case ' ', '\t', '\n', '\r':
		default:
			return c, nil
		}
	}
	return 0, r.fail(r.off, reasonEnd)
}

// expect takes one given byte.
func (r *jsonReader) expect(want byte) error {
	c, err := r.peek()
	if err != nil {
		return err
	}
	if c != want {
		return r.fail(r.off, reasonSyntax)
	}
	r.off++
	return nil
}

// more is called after an element: it takes a comma, or the closing byte and
// returns false.
func (r *jsonReader) more(closing byte) (bool, error) {
	c, err := r.peek()
	if err != nil {
		return false, err
	}
	switch c {
	case ',':
		r.off++
		return true, nil
	case closing:
		r.off++
		return false, nil
	default:
		return false, r.fail(r.off, reasonSyntax)
	}
}

// empty takes the closing byte if it is next.
func (r *jsonReader) empty(closing byte) (bool, error) {
	c, err := r.peek()
	if err != nil || c != closing {
		return false, err
	}
	r.off++
	return true, nil
}

func (r *jsonReader) claim(n int) error {
	if r.budget < n {
		return r.fail(r.off, reasonValues)
	}
	r.budget -= n
	return nil
}

// value reads one value; depth is how many containers it is in.
func (r *jsonReader) value(depth int) (any, error) {
	c, err := r.peek()
	if err != nil {
		return nil, err
	}
	switch c {
	case '{':
		return r.object(depth)
	case '[':
		return r.list(depth)
	case '"':
		return r.text()
	case 't':
		return true, r.word("true")
	case 'f':
		return false, r.word("false")
	case 'n':
		return nil, r.word("null")
	default:
		return r.number()
	}
}

func (r *jsonReader) word(w string) error {
	if rest := r.b[r.off:]; len(rest) < len(w) {
		return r.fail(len(r.b), reasonEnd)
	} else if string(rest[:len(w)]) != w {
		return r.fail(r.off, reasonSyntax)
	}
	r.off += len(w)
	return nil
}

func (r *jsonReader) object(depth int) (Map, error) {
	if depth >= MaxDepth {
		return nil, r.fail(r.off, reasonDepth)
	}
	r.off++
	m := Map{}
	if done, err := r.empty('}'); done || err != nil {
		return m, err
	}
	for {
		at := r.off
		key, err := r.key()
		if err != nil {
			return nil, err
		}
		if _, dup := m[key]; dup {
			return nil, r.fail(at, reasonDuplicate)
		}
		if m[key], err = r.value(depth + 1); err != nil {
			return nil, err
		}
		if again, err := r.more('}'); err != nil {
			return nil, err
		} else if !again {
			return m, nil
		}
	}
}

// key reads a member's name and the colon.
func (r *jsonReader) key() (string, error) {
	if err := r.claim(2); err != nil {
		return "", err
	}
	c, err := r.peek()
	if err != nil {
		return "", err
	}
	if c != '"' {
		return "", r.fail(r.off, reasonKey)
	}
	key, err := r.text()
	if err != nil {
		return "", err
	}
	return key, r.expect(':')
}

func (r *jsonReader) list(depth int) ([]any, error) {
	if depth >= MaxDepth {
		return nil, r.fail(r.off, reasonDepth)
	}
	r.off++
	list := []any{}
	if done, err := r.empty(']'); done || err != nil {
		return list, err
	}
	for {
		if err := r.claim(1); err != nil {
			return nil, err
		}
		v, err := r.value(depth + 1)
		if err != nil {
			return nil, err
		}
		list = append(list, v)
		if again, err := r.more(']'); err != nil {
			return nil, err
		} else if !again {
			return list, nil
		}
	}
}

// text reads a string; the next byte is its quote.
func (r *jsonReader) text() (string, error) {
	start := r.off + 1
	for i := start; i < len(r.b); i++ {
		switch c := r.b[i]; {
		case c == '"':
			raw := r.b[start:i]
			if !utf8.Valid(raw) {
				return "", r.fail(start, reasonUTF8)
			}
			r.off = i + 1
			return string(raw), nil
		case c == '\\':
			return r.escaped(start, i)
		case c < ' ':
			return "", r.fail(i, reasonControl)
		}
	}
	return "", r.fail(len(r.b), reasonEnd)
}

// escaped reads a string that has a backslash, the first of them at i.
func (r *jsonReader) escaped(start, i int) (string, error) {
	out := append(make([]byte, 0, 2*(i-start)+16), r.b[start:i]...)
	for i < len(r.b) {
		switch c := r.b[i]; {
		case c == '"':
			if !utf8.Valid(out) {
				return "", r.fail(start, reasonUTF8)
			}
			r.off = i + 1
			return string(out), nil
		case c == '\\':
			var err error
			if out, i, err = r.escape(out, i); err != nil {
				return "", err
			}
		case c < ' ':
			return "", r.fail(i, reasonControl)
		default:
			out = append(out, c)
			i++
		}
	}
	return "", r.fail(len(r.b), reasonEnd)
}

var simpleEscapes = [256]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// escape reads the escape at i and returns where it ends.
func (r *jsonReader) escape(out []byte, i int) ([]byte, int, error) {
	if i+1 >= len(r.b) {
		return nil, 0, r.fail(len(r.b), reasonEnd)
	}
	c := r.b[i+1]
	if c != 'u' {
		if simpleEscapes[c] == 0 {
			return nil, 0, r.fail(i, reasonEscape)
		}
		return append(out, simpleEscapes[c]), i + 2, nil
	}
	u, err := r.hex4(i)
	if err != nil {
		return nil, 0, err
	}
	end := i + 6
	if utf16.IsSurrogate(u) {
		if end >= len(r.b) {
			return nil, 0, r.fail(len(r.b), reasonEnd)
		}
		if r.b[end] != '\\' || end+1 < len(r.b) && r.b[end+1] != 'u' {
			return nil, 0, r.fail(i, reasonSurrogate)
		}
		low, err := r.hex4(end)
		if err != nil {
			return nil, 0, err
		}
		if u = utf16.DecodeRune(u, low); u == utf8.RuneError {
			return nil, 0, r.fail(i, reasonSurrogate)
		}
		end += 6
	}
	return utf8.AppendRune(out, u), end, nil
}

// hex4 reads the four digits of the \u escape at i.
func (r *jsonReader) hex4(i int) (rune, error) {
	if i+6 > len(r.b) {
		return 0, r.fail(len(r.b), reasonEnd)
	}
	var u rune
	for _, c := range r.b[i+2 : i+6] {
		u <<= 4
		switch {
		case c >= '0' && c <= '9':
			u |= rune(c - '0')
		case c >= 'a' && c <= 'f':
			u |= rune(c-'a') + 10
		case c >= 'A' && c <= 'F':
			u |= rune(c-'A') + 10
		default:
			return 0, r.fail(i, reasonEscape)
		}
	}
	return u, nil
}

// number reads an integer or a float. An integer beyond 64 bits is refused
// rather than rounded: it may be an id.
func (r *jsonReader) number() (any, error) {
	start := r.off
	whole, err := r.scanNumber()
	if err != nil {
		return nil, err
	}
	text := string(r.b[start:r.off])
	if whole {
		if i, err := strconv.ParseInt(text, 10, 64); err == nil {
			return i, nil
		}
		if u, err := strconv.ParseUint(text, 10, 64); err == nil {
			return u, nil
		}
		return nil, r.fail(start, reasonInteger)
	}
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsInf(f, 0) {
		return nil, r.fail(start, reasonFloat)
	}
	return f, nil
}

// scanNumber moves behind a number and tells whether it is an integer.
func (r *jsonReader) scanNumber() (whole bool, err error) {
	if r.b[r.off] == '-' {
		r.off++
	}
	zero := r.off < len(r.b) && r.b[r.off] == '0'
	n, err := r.digits()
	if err != nil {
		return false, err
	}
	if zero && n > 1 {
		return false, r.fail(r.off-n, reasonSyntax)
	}
	whole = true
	if r.off < len(r.b) && r.b[r.off] == '.' {
		whole = false
		r.off++
		if _, err := r.digits(); err != nil {
			return false, err
		}
	}
	if r.off < len(r.b) && (r.b[r.off] == 'e' || r.b[r.off] == 'E') {
		whole = false
		r.off++
		if r.off < len(r.b) && (r.b[r.off] == '+' || r.b[r.off] == '-') {
			r.off++
		}
		if _, err := r.digits(); err != nil {
			return false, err
		}
	}
	return whole, nil
}

// digits takes at least one digit.
func (r *jsonReader) digits() (n int, err error) {
	for r.off+n < len(r.b) && r.b[r.off+n] >= '0' && r.b[r.off+n] <= '9' {
		n++
	}
	if n == 0 {
		if r.off == len(r.b) {
			return 0, r.fail(r.off, reasonEnd)
		}
		return 0, r.fail(r.off, reasonSyntax)
	}
	r.off += n
	return n, nil
}

// finish checks that only white space is left.
func (r *jsonReader) finish() error {
	if _, err := r.peek(); err == nil {
		return r.fail(r.off, reasonTrailing)
	}
	return nil
}

func decodeJSON(b []byte) (any, error) {
	r := jsonReader{b: b, budget: MaxValues}
	v, err := r.value(0)
	if err != nil {
		return nil, err
	}
	if err := r.finish(); err != nil {
		return nil, err
	}
	return v, nil
}
