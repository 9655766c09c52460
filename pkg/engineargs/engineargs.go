// Package engineargs works out the arguments of a TensorRT-LLM engine as the
// Python worker of Dynamo 1.6.1 does, so that a launch that was written for it
// arrives at the same engine.
//
// Three readers turn text into a Tree: ReadYAML (an engine file, with the YAML
// 1.1 that PyYAML reads), ReadJSON (an override) and ReadFlags (the dynamic
// --trtllm.a.b flags). Resolve then merges, weakest first: the worker's
// settings, the engine file, arguments written in the worker's own file, and
// the override; the rules of the merge differ from layer to layer and stand in
// merge.go. Every value of the result knows where it came from, and whatever a
// merge drops is a Warning.
//
// Which arguments exist, and of what type they are, is the engine's affair:
// nothing is checked here but what the merge itself or the worker depends on.
//
// The package knows no flags, no environment and no disk, and imports the
// standard library, a YAML parser and two leaf packages only.
package engineargs

import (
	"fmt"
	"strings"

	"dynworker/pkg/config/origin"
)

// Error is something wrong with an argument or with the text that holds it.
type Error struct {
	// Path is the argument from the top, empty for a text as a whole.
	Path   []string
	Origin origin.Origin
	// Reason says what is wrong, without argument and place.
	Reason string
	// Duplicate tells a key that stands twice from anything else.
	Duplicate bool
}

// Error is one line: argument, reason, place.
func (e *Error) Error() string {
	text := e.Reason
	if len(e.Path) > 0 {
		text = Dotted(e.Path) + ": " + text
	}
	if e.Origin.Kind != origin.Default {
		text += fmt.Sprintf(" (%s)", e.Origin)
	}
	return text
}

// Errors are all that were found.
type Errors []*Error

// Error has one line an error.
func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, x := range e {
		lines[i] = x.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap lets errors.As see each of them.
func (e Errors) Unwrap() []error {
	out := make([]error, len(e))
	for i, x := range e {
		out[i] = x
	}
	return out
}

// Warning is something that is allowed but probably not meant.
type Warning struct {
	// Path is the dotted argument.
	Path string
	// Text says what happens, with old and new value and their places. Values
	// that look secret are left out.
	Text string
}

// String is "path: text".
func (w Warning) String() string { return w.Path + ": " + w.Text }

// Dotted joins a path for people.
func Dotted(path []string) string { return strings.Join(path, ".") }
