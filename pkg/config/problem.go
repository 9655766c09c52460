package config

import (
	"errors"
	"strings"

	"dynworker/pkg/config/origin"
)

// ErrHelp is what Load returns when the command line asks for help; Usage has
// the text.
var ErrHelp = errors.New("help requested")

// The kinds of a Problem, for errors.Is.
var (
	// ErrUnknownKey is a key or flag that does not exist.
	ErrUnknownKey = errors.New("unknown key")
	// ErrDuplicateKey is a key that stands twice in the file.
	ErrDuplicateKey = errors.New("duplicate key")
	// ErrSyntax is a file or command line that cannot be read as one.
	ErrSyntax = errors.New("syntax error")
	// ErrValue is a value of the wrong type or out of range.
	ErrValue = errors.New("invalid value")
	// ErrConflict is a value that does not go together with another one.
	ErrConflict = errors.New("conflicting settings")
	// ErrUnsupported is a wish for something that this worker does not have.
	ErrUnsupported = errors.New("not supported")
	// ErrFile is a file that is missing or cannot be read.
	ErrFile = errors.New("file error")
)

// OriginKind is the layer of a value.
type OriginKind = origin.Kind

// The layers, from the weakest to the strongest.
const (
	FromDefault = origin.Default
	FromFile    = origin.File
	FromEnv     = origin.Env
	FromFlag    = origin.Flag
	FromSet     = origin.Set
)

// Origin is the place that a value came from.
type Origin = origin.Origin

// Problem is one mistake in the configuration.
type Problem struct {
	// Key is the dotted key. It is the name of the variable or flag where that
	// has no key, and empty when a whole file or command line is unreadable.
	Key    string
	Origin Origin
	// Kind is one of the sentinel errors above.
	Kind error
	// Reason says what is wrong, without the value of a secret.
	Reason string
	// Suggestion is what was probably meant, or empty.
	Suggestion string
	// Err is the cause, where there is one.
	Err error
}

// Error is a single line: key, reason, suggestion, origin.
func (p *Problem) Error() string {
	var b strings.Builder
	if p.Key != "" {
		b.WriteString(p.Key + ": ")
	}
	b.WriteString(p.Reason)
	if p.Suggestion != "" {
		b.WriteString("; did you mean " + p.Suggestion + "?")
	}
	if p.Origin.Kind != FromDefault && p.Origin.Name != p.Key {
		b.WriteString(" (" + p.Origin.String() + ")")
	}
	return b.String()
}

// Unwrap gives the kind and the cause.
func (p *Problem) Unwrap() []error {
	if p.Err == nil {
		return []error{p.Kind}
	}
	return []error{p.Kind, p.Err}
}

// Errors are all the problems that were found, in the order of the layers and
// of the file.
type Errors []*Problem

// Error has one line a problem.
func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, p := range e {
		lines[i] = p.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap lets errors.Is and errors.As see every problem.
func (e Errors) Unwrap() []error {
	out := make([]error, len(e))
	for i, p := range e {
		out[i] = p
	}
	return out
}

// Keys are the offending keys, each once, in the order of the problems.
func (e Errors) Keys() []string {
	var out []string
	seen := map[string]bool{}
	for _, p := range e {
		if !seen[p.Key] {
			seen[p.Key] = true
			out = append(out, p.Key)
		}
	}
	return out
}

// err avoids the trap of a nil slice inside a non-nil error.
func (e Errors) err() error {
	if len(e) == 0 {
		return nil
	}
	return e
}

// Warning is something that is allowed but probably not meant.
type Warning struct {
	// Subject is the key, variable or flag.
	Subject string
	Text    string
}

// String is "subject: text".
func (w Warning) String() string { return w.Subject + ": " + w.Text }
