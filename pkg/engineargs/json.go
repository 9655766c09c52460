package engineargs

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"dynworker/pkg/config/origin"
)

// ReadJSON reads an override: a JSON object, every value of which gets the
// origin. Of a key that stands twice the last one counts, with a warning.
func ReadJSON(text []byte, o origin.Origin) (*Tree, []Warning, error) {
	r := &jsonReader{dec: json.NewDecoder(bytes.NewReader(text)), origin: o}
	r.dec.UseNumber()
	if !utf8.Valid(text) {
		return nil, nil, &Error{Origin: o, Reason: "is not valid UTF-8"}
	}
	token, err := r.next(nil)
	if err != nil {
		return nil, nil, err
	}
	if token != json.Delim('{') {
		return nil, nil, &Error{Origin: o, Reason: "is not a JSON object"}
	}
	t, err := r.object(nil)
	if err != nil {
		return nil, nil, err
	}
	if _, err := r.dec.Token(); !errors.Is(err, io.EOF) {
		return nil, nil, &Error{Origin: o, Reason: "goes on behind the end of the JSON object"}
	}
	return t, r.warnings, nil
}

type jsonReader struct {
	dec      *json.Decoder
	origin   origin.Origin
	warnings []Warning
	budget   budget
}

func (r *jsonReader) fail(path []string, format string, args ...any) error {
	return &Error{Path: slices.Clone(path), Origin: r.origin, Reason: fmt.Sprintf(format, args...)}
}

func (r *jsonReader) next(path []string) (json.Token, error) {
	token, err := r.dec.Token()
	if err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, r.fail(path, "cannot be read as JSON: %s", err)
	}
	if reason := r.budget.spend(len(path)); reason != "" {
		return nil, r.fail(path, "%s", reason)
	}
	return token, nil
}

func (r *jsonReader) object(path []string) (*Tree, error) {
	t := NewTree(r.origin)
	for r.dec.More() {
		token, err := r.next(path)
		if err != nil {
			return nil, err
		}
		name := token.(string) // the decoder takes nothing else here
		below := append(path[:len(path):len(path)], name)
		if t.Children[name] != nil {
			r.warnings = append(r.warnings, Warning{Path: Dotted(below), Text: fmt.Sprintf("stands twice in one object; the last value counts (%s)", r.origin)})
		}
		sub, err := r.value(below)
		if err != nil {
			return nil, err
		}
		t.put(name, sub)
	}
	_, err := r.next(path) // the closing brace
	return t, err
}

func (r *jsonReader) value(path []string) (*Tree, error) {
	token, err := r.next(path)
	if err != nil {
		return nil, err
	}
	leaf := &Tree{Origin: r.origin}
	switch token := token.(type) {
	case json.Delim:
		if token == '{' {
			return r.object(path)
		}
		leaf.Value, err = r.list(path)
	case json.Number:
		leaf.Value, err = r.number(path, token.String())
	default:
		leaf.Value = token
	}
	return leaf, err
}

func (r *jsonReader) list(path []string) (any, error) {
	list := []any{}
	for r.dec.More() {
		sub, err := r.value(append(path[:len(path):len(path)], strconv.Itoa(len(list))))
		if err != nil {
			return nil, err
		}
		list = append(list, sub.Plain())
	}
	_, err := r.next(path)
	return list, err
}

func (r *jsonReader) number(path []string, text string) (any, error) {
	if !strings.ContainsAny(text, ".eE") {
		if v, ok := whole(text, 10); ok {
			return v, nil
		}
	} else if f, err := strconv.ParseFloat(text, 64); err == nil {
		return f, nil
	}
	return nil, r.fail(path, "%s is not a number that can be passed on", quote(text))
}

// whole reads digits with an optional sign as int64, or else as uint64.
func whole(text string, base int) (any, bool) {
	if i, err := strconv.ParseInt(text, base, 64); err == nil {
		return i, true
	}
	if u, err := strconv.ParseUint(strings.TrimPrefix(text, "+"), base, 64); err == nil {
		return u, true
	}
	return nil, false
}

// appendJSON writes one value of a Tree.
func appendJSON(b []byte, v any) []byte {
	switch v := v.(type) {
	case nil:
		return append(b, "null"...)
	case bool:
		return strconv.AppendBool(b, v)
	case int:
		return strconv.AppendInt(b, int64(v), 10)
	case int64:
		return strconv.AppendInt(b, v, 10)
	case uint64:
		return strconv.AppendUint(b, v, 10)
	case float64:
		return appendFloat(b, v)
	case string:
		return appendString(b, v)
	case []any:
		b = append(b, '[')
		for i, x := range v {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendJSON(b, x)
		}
		return append(b, ']')
	case map[string]any:
		b = append(b, '{')
		for i, k := range slices.Sorted(maps.Keys(v)) {
			if i > 0 {
				b = append(b, ',')
			}
			b = append(appendString(b, k), ':')
			b = appendJSON(b, v[k])
		}
		return append(b, '}')
	}
	panic(fmt.Sprintf("engineargs: a value of type %T in a tree", v))
}

func appendFloat(b []byte, f float64) []byte {
	start := len(b)
	format := byte('f')
	if a := math.Abs(f); a != 0 && (a < 1e-6 || a >= 1e16) {
		format = 'e'
	}
	b = strconv.AppendFloat(b, f, format, -1, 64)
	if !bytes.ContainsAny(b[start:], ".e") {
		b = append(b, ".0"...)
	}
	return b
}

func appendString(b []byte, s string) []byte {
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(s) // a string can always be encoded
	return append(b, bytes.TrimSuffix(out.Bytes(), []byte("\n"))...)
}
