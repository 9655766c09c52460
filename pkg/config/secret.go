package config

import (
	"fmt"

	"dynworker/internal/logging/redact"
)

// Secret is text that must not be shown: every way of formatting or encoding
// it writes "<secret>", or nothing when it is empty. Convert it to string to
// use it.
type Secret string

// String implements fmt.Stringer.
func (s Secret) String() string { return redact.Secret(string(s)) }

// Format implements fmt.Formatter, so that no verb gets around String.
func (s Secret) Format(f fmt.State, verb rune) {
	if verb == 'q' || (verb == 'v' && f.Flag('#')) {
		fmt.Fprintf(f, "%q", redact.Secret(string(s)))
		return
	}
	fmt.Fprint(f, redact.Secret(string(s)))
}

// MarshalText implements encoding.TextMarshaler, which JSON uses as well.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// MarshalYAML keeps yaml from looking at the string underneath.
func (s Secret) MarshalYAML() (any, error) { return s.String(), nil }
