package engineargs

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"dynworker/pkg/config/origin"
)

// FlagPrefix begins the dynamic flags: --trtllm.a.b VALUE sets the engine
// argument b in section a.
const FlagPrefix = "--trtllm."

// Flag is a dynamic flag as given.
type Flag struct{ Name, Value string }

// ReadFlags makes a Tree of dynamic flags. Of two flags for the same argument
// the last one counts; where that drops a section, a warning says so.
func ReadFlags(flags []Flag) (*Tree, []Warning, error) {
	var warnings []Warning
	root := NewTree(origin.Origin{Kind: origin.Flag, Name: FlagPrefix + "*"})
	for _, f := range flags {
		o := origin.Origin{Kind: origin.Flag, Name: f.Name}
		path := strings.Split(strings.TrimPrefix(f.Name, FlagPrefix), ".")
		if len(path) > maxDepth {
			return nil, nil, &Error{Path: path[:1], Origin: origin.Origin{Kind: origin.Flag, Name: quote(f.Name)}, Reason: fmt.Sprintf("is nested more than %d levels deep", maxDepth)}
		}
		if !utf8.ValidString(f.Name) || !utf8.ValidString(f.Value) || strings.ContainsRune(f.Name+f.Value, 0) {
			return nil, nil, &Error{Origin: origin.Origin{Kind: origin.Flag, Name: quote(f.Name)}, Reason: "holds bytes that are not text"}
		}
		if slices.Contains(path, "") {
			return nil, nil, &Error{Path: path, Origin: o, Reason: "has an empty part"}
		}
		v, err := guess(f.Value)
		if err != nil {
			return nil, nil, &Error{Path: path, Origin: o, Reason: err.Error()}
		}
		at := root
		for i, p := range path[:len(path)-1] {
			next := at.Children[p]
			switch {
			case next == nil || next.isNull():
				// A null on the way gives way, as in Dynamo.
				next = NewTree(o)
				at.put(p, next)
			case !next.IsMap():
				return nil, nil, &Error{Path: path, Origin: o, Reason: fmt.Sprintf("%s already has the value %s (%s), so nothing can be set below it", Dotted(path[:i+1]), show(path[:i+1], next), next.Origin)}
			}
			at = next
		}
		last := path[len(path)-1]
		if old := at.Children[last]; old != nil && old.Children != nil {
			warnings = append(warnings, Warning{Path: Dotted(path), Text: fmt.Sprintf("%s is replaced as a whole by %s (%s)", show(path, old), show(path, &Tree{Value: v}), o)})
		}
		at.put(last, &Tree{Value: v, Origin: o})
	}
	return root, warnings, nil
}

var (
	pythonInt   = regexp.MustCompile(`^[+-]?[0-9]+(_[0-9]+)*$`)
	pythonFloat = regexp.MustCompile(`^[+-]?(([0-9]+(_[0-9]+)*)?\.[0-9]+(_[0-9]+)*|[0-9]+(_[0-9]+)*\.?)([eE][+-]?[0-9]+(_[0-9]+)*)?$`)
	pythonInf   = regexp.MustCompile(`(?i)^[+-]?(inf|infinity|nan)$`)
)

var errNumber = errors.New("is not a number that can be passed on")

// guess finds the type of a flag's text: null, int, float, bool, and text when
// it is none of these, in this order and in Python's spellings.
func guess(text string) (any, error) {
	switch strings.ToLower(text) {
	case "none", "null":
		return nil, nil
	case "true":
		return true, nil
	case "false":
		return false, nil
	}
	number := strings.ReplaceAll(strings.TrimSpace(text), "_", "")
	switch trimmed := strings.TrimSpace(text); {
	case pythonInt.MatchString(trimmed):
		if v, ok := whole(number, 10); ok {
			return v, nil
		}
		return nil, fmt.Errorf("%s %w", quote(text), errNumber)
	case pythonInf.MatchString(trimmed):
		return nil, fmt.Errorf("%s %w", quote(text), errNumber)
	case pythonFloat.MatchString(trimmed):
		f, err := strconv.ParseFloat(number, 64)
		if err != nil || math.IsInf(f, 0) {
			return nil, fmt.Errorf("%s %w", quote(text), errNumber)
		}
		return f, nil
	}
	return text, nil
}
