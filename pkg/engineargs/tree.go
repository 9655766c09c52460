package engineargs

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"dynworker/internal/logging/redact"
	"dynworker/pkg/config/origin"
)

// Tree is a mapping of arguments, or one value in it, with an origin for every
// value. Its keys are the engine's, so nothing is known about them and nothing
// is changed.
type Tree struct {
	// Children are the entries of a mapping that has some. A mapping without
	// any is a value, an empty map[string]any.
	Children map[string]*Tree
	// Value is nil, bool, int64, uint64 (above the range of int64 only),
	// float64 (finite), string, []any or map[string]any of these.
	Value  any
	Origin origin.Origin
	// typed marks a section that the Python worker holds as an object rather
	// than as a dict: an override replaces it as a whole.
	typed bool
}

// NewTree is an empty mapping.
func NewTree(o origin.Origin) *Tree { return &Tree{Value: map[string]any{}, Origin: o} }

// IsMap reports whether t is a mapping.
func (t *Tree) IsMap() bool {
	_, empty := t.Value.(map[string]any)
	return t.Children != nil || empty
}

func (t *Tree) isNull() bool { return t.Children == nil && t.Value == nil }

// Get finds the argument at path, or nil.
func (t *Tree) Get(path ...string) *Tree {
	for _, p := range path {
		if t = t.Children[p]; t == nil {
			return nil
		}
	}
	return t
}

// put sets one entry of a mapping.
func (t *Tree) put(key string, sub *Tree) {
	if t.Children == nil {
		t.Value, t.Children = nil, map[string]*Tree{}
	}
	t.Children[key] = sub
}

// drop removes one entry of a mapping and returns it, or nil.
func (t *Tree) drop(key string) *Tree {
	sub := t.Children[key]
	delete(t.Children, key)
	if sub != nil && len(t.Children) == 0 {
		t.Value, t.Children = map[string]any{}, nil
	}
	return sub
}

// Set replaces what is at path, making mappings on the way. It fails where a
// value stands in the way.
func (t *Tree) Set(path []string, sub *Tree) error {
	for i, p := range path {
		if !t.IsMap() {
			return fmt.Errorf("%s has a value, so nothing can be set below it", Dotted(path[:i]))
		}
		if i == len(path)-1 {
			t.put(p, sub)
			return nil
		}
		if t.Children[p] == nil {
			t.put(p, NewTree(sub.Origin))
		}
		t = t.Children[p]
	}
	return nil
}

// clone copies the mappings; the values inside are never changed.
func (t *Tree) clone() *Tree {
	c := *t
	if t.Children != nil {
		c.Children = make(map[string]*Tree, len(t.Children))
		for k, sub := range t.Children {
			c.Children[k] = sub.clone()
		}
	}
	return &c
}

// Plain is the tree without origins.
func (t *Tree) Plain() any {
	if t.Children == nil {
		return t.Value
	}
	m := make(map[string]any, len(t.Children))
	for k, c := range t.Children {
		m[k] = c.Plain()
	}
	return m
}

// Map is Plain for a mapping; never nil.
func (t *Tree) Map() map[string]any {
	m, _ := t.Plain().(map[string]any)
	if m == nil {
		m = map[string]any{}
	}
	return m
}

// Walk calls f for each value, in sorted order. path is valid during the call.
func (t *Tree) Walk(f func(path []string, leaf *Tree)) { t.walk(nil, f) }

func (t *Tree) walk(path []string, f func(path []string, leaf *Tree)) {
	if t.Children == nil {
		f(path, t)
		return
	}
	for _, k := range slices.Sorted(maps.Keys(t.Children)) {
		t.Children[k].walk(append(path[:len(path):len(path)], k), f)
	}
}

// MarshalJSON writes the tree as the engine's process reads it: keys sorted,
// and a float always with a point or an exponent, so that it stays one.
func (t *Tree) MarshalJSON() ([]byte, error) { return appendJSON(nil, t.Plain()), nil }

// Hide replaces values of keys that look like secrets, at any depth. name is
// the key of v itself.
func Hide(name string, v any) any {
	switch v := v.(type) {
	case map[string]any:
		out := make(map[string]any, len(v))
		for k, x := range v {
			out[k] = Hide(k, x)
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i, x := range v {
			out[i] = Hide(name, x)
		}
		return out
	case string:
		return redact.Named(name, v)
	case nil, bool:
		return v
	}
	if redact.SecretName(name) {
		return redact.Mark
	}
	return v
}

// show renders the value at path for a message, cut to what fits into a line.
func show(path []string, t *Tree) string {
	const limit = 200
	name := ""
	if len(path) > 0 {
		name = path[len(path)-1]
	}
	s := string(appendJSON(nil, Hide(name, t.Plain())))
	if len(s) > limit {
		s = strings.ToValidUTF8(s[:limit], "") + "…"
	}
	return s
}

// quote shows a wrong text, cut to a length that fits into a line.
func quote(s string) string {
	const limit = 80
	s = redact.URLs(s)
	if len(s) > limit {
		s = strings.ToValidUTF8(s[:limit], "") + "…"
	}
	return strconv.Quote(s)
}
