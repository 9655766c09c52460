package modelcard

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// decodeLenient decodes a config.json. Frontends read that one file as JSON5,
// and model authors make use of it: Python writes NaN and Infinity as bare
// words, and people leave comments and trailing commas. A bare word of that
// kind becomes null; everything that is needed from the file is an integer or
// a string. Other JSON5 (single quotes, bare keys) does not occur in such
// files and is refused.
func decodeLenient(b []byte, v any) error {
	if !json.Valid(b) {
		b = toStrict(b)
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("not valid JSON: %w", err)
	}
	return nil
}

// toStrict rewrites the tolerated deviations. What it does not know it leaves
// alone, for the decoder to complain about.
func toStrict(b []byte) []byte {
	out := make([]byte, 0, len(b))
	comma := -1     // where in out a comma stands that may turn out to trail
	var before byte // the last byte that is neither space nor comment
	for i := 0; i < len(b); {
		switch c := b[i]; {
		case c == '"':
			n := stringLen(b[i:])
			out = append(out, b[i:i+n]...)
			i += n
			comma, before = -1, '"'
		case c == '/' && i+1 < len(b) && b[i+1] == '/':
			if n := bytes.IndexByte(b[i:], '\n'); n >= 0 {
				i += n
			} else {
				i = len(b)
			}
		case c == '/' && i+1 < len(b) && b[i+1] == '*':
			if n := bytes.Index(b[i+2:], []byte("*/")); n >= 0 {
				i += n + 4
				out = append(out, ' ') // a comment separates words
			} else {
				out = append(out, b[i:]...) // unterminated: not ours to mend
				i = len(b)
			}
		case c == ',':
			if comma = -1; before != ',' && before != '[' && before != '{' {
				comma = len(out)
			}
			before = c
			out = append(out, c)
			i++
		case c == '}' || c == ']':
			if comma >= 0 {
				out[comma] = ' '
				comma = -1
			}
			before = c
			out = append(out, c)
			i++
		case c == ' ' || c == '\t' || c == '\n' || c == '\r':
			out = append(out, c)
			i++
		default:
			comma, before = -1, c
			if n := nonFiniteLen(b[i:]); n > 0 {
				out = append(out, "null"...)
				i += n
				continue
			}
			// A whole word at once, so that the tail of one is not taken for
			// another.
			n := wordLen(b[i:])
			out = append(out, b[i:i+n]...)
			i += n
		}
	}
	return out
}

// stringLen is the length of the string that b begins with, quotes included,
// or all of b when it does not end.
func stringLen(b []byte) int {
	for i := 1; i < len(b); i++ {
		switch b[i] {
		case '\\':
			i++
		case '"':
			return i + 1
		}
	}
	return len(b)
}

// nonFiniteLen is the length of a leading NaN or (signed) Infinity, else 0.
func nonFiniteLen(b []byte) int {
	n := wordLen(b)
	switch string(b[:n]) {
	case "NaN", "Infinity", "-Infinity", "+Infinity", "-NaN", "+NaN":
		return n
	}
	return 0
}

// wordLen is the length of the leading run of what numbers and words are made
// of, at least 1.
func wordLen(b []byte) int {
	n := 0
	for n < len(b) {
		c := b[n]
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '+' || c == '.' || c == '_' {
			n++
			continue
		}
		break
	}
	return max(n, 1)
}
