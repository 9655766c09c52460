package config

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"dynworker/internal/logging/redact"
)

// tree holds engine.args with an origin for every leaf. Its keys are the
// engine's, so nothing is known about them here and nothing is changed.
type tree struct {
	children map[string]*tree // nil for a leaf
	value    any              // of a leaf; an empty mapping is one
	origin   Origin
}

// Limits that keep a file with aliases of aliases from growing without end.
const (
	maxTreeDepth = 64
	maxTreeNodes = 50_000
)

// treeError names the place below engine.args.
type treeError struct {
	path   []string
	line   int
	kind   error
	reason string
}

func (e *treeError) Error() string { return e.reason }

// treeBuilder turns YAML into a tree, or into plain values inside of lists.
type treeBuilder struct {
	origin Origin // of a node without a line of its own
	nodes  int
}

func (b *treeBuilder) fail(path []string, n *yaml.Node, format string, args ...any) error {
	return &treeError{path: slices.Clone(path), line: n.Line, kind: ErrValue, reason: fmt.Sprintf(format, args...)}
}

func (b *treeBuilder) at(n *yaml.Node) Origin {
	o := b.origin
	if o.Kind == FromFile {
		o.Line = n.Line
	}
	return o
}

func (b *treeBuilder) build(n *yaml.Node, path []string) (*tree, error) {
	target := deref(n)
	if target.Kind != yaml.MappingNode || len(target.Content) == 0 {
		v, err := b.plain(n, path)
		if err != nil {
			return nil, err
		}
		return &tree{value: v, origin: b.at(n)}, nil
	}
	t := &tree{children: map[string]*tree{}, origin: b.at(n)}
	err := b.each(target, path, func(k string, v *yaml.Node, path []string) error {
		child, err := b.build(v, path)
		t.children[k] = child
		return err
	})
	return t, err
}

// plain is build for places without origins of their own.
func (b *treeBuilder) plain(n *yaml.Node, path []string) (any, error) {
	n = deref(n)
	switch n.Kind {
	case yaml.MappingNode:
		m := map[string]any{}
		err := b.each(n, path, func(k string, v *yaml.Node, path []string) error {
			x, err := b.plain(v, path)
			m[k] = x
			return err
		})
		return m, err
	case yaml.SequenceNode:
		if err := b.count(n, path); err != nil {
			return nil, err
		}
		list := make([]any, 0, len(n.Content))
		for i, c := range n.Content {
			v, err := b.plain(c, append(path[:len(path):len(path)], strconv.Itoa(i)))
			if err != nil {
				return nil, err
			}
			list = append(list, v)
		}
		return list, nil
	case yaml.ScalarNode:
		return b.scalar(n, path)
	}
	return nil, b.fail(path, n, "is neither a value, a list nor a mapping")
}

func (b *treeBuilder) count(n *yaml.Node, path []string) error {
	b.nodes += len(n.Content) + 1
	if b.nodes > maxTreeNodes {
		return b.fail(path, n, "holds more than %d values", maxTreeNodes)
	}
	if len(path) > maxTreeDepth {
		return b.fail(path, n, "is nested more than %d levels deep", maxTreeDepth)
	}
	return nil
}

func (b *treeBuilder) each(n *yaml.Node, path []string, f func(k string, v *yaml.Node, path []string) error) error {
	if err := b.count(n, path); err != nil {
		return err
	}
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		kn := deref(n.Content[i])
		if kn.Kind != yaml.ScalarNode || kn.ShortTag() == "!!null" || kn.ShortTag() == "!!merge" {
			return b.fail(path, kn, "holds a key that is not plain text")
		}
		// A number as a key (a map from sizes, say) is text for JSON.
		name := kn.Value
		below := append(path[:len(path):len(path)], name)
		if line, ok := seen[name]; ok {
			return &treeError{path: below, line: kn.Line, kind: ErrDuplicateKey, reason: fmt.Sprintf("stands twice, first on line %d", line)}
		}
		seen[name] = kn.Line
		if err := f(name, n.Content[i+1], below); err != nil {
			return err
		}
	}
	return nil
}

func (b *treeBuilder) scalar(n *yaml.Node, path []string) (any, error) {
	switch n.ShortTag() {
	case "!!null":
		return nil, nil
	case "!!bool":
		var v bool
		if n.Decode(&v) == nil {
			return v, nil
		}
	case "!!int":
		var i int64
		if n.Decode(&i) == nil {
			return i, nil
		}
		var u uint64
		if n.Decode(&u) == nil {
			return u, nil
		}
		return nil, b.fail(path, n, "%s is not a number that can be passed on", quote(n.Value))
	case "!!float":
		var f float64
		if n.Decode(&f) == nil && !math.IsNaN(f) && !math.IsInf(f, 0) {
			return f, nil
		}
		return nil, b.fail(path, n, "%s is not a number that can be passed on", quote(n.Value))
	case "!!str", "!!timestamp":
		return n.Value, nil
	}
	return nil, b.fail(path, n, "has the type %s, which cannot be passed on", quote(n.Tag))
}

// set replaces what is at path, making mappings on the way.
func (t *tree) set(path []string, sub *tree) error {
	for i, p := range path {
		if t.children == nil {
			if m, ok := t.value.(map[string]any); !ok || len(m) != 0 {
				return fmt.Errorf("%s has a value, so nothing can be set below it", strings.Join(append([]string{argsKey}, path[:i]...), "."))
			}
			t.value, t.children = nil, map[string]*tree{}
		}
		if i == len(path)-1 {
			t.children[p] = sub
			return nil
		}
		if t.children[p] == nil {
			t.children[p] = newTree()
		}
		t = t.children[p]
	}
	return nil
}

// newTree is an empty mapping.
func newTree() *tree { return &tree{value: map[string]any{}} }

// plainMap is the tree as the engine gets it.
func (t *tree) plainMap() map[string]any {
	m, _ := t.plain().(map[string]any)
	if m == nil {
		m = map[string]any{}
	}
	return m
}

func (t *tree) plain() any {
	if t.children == nil {
		return t.value
	}
	m := make(map[string]any, len(t.children))
	for k, c := range t.children {
		m[k] = c.plain()
	}
	return m
}

// walk calls f for each leaf in sorted order.
func (t *tree) walk(path []string, f func(path []string, leaf *tree)) {
	if t.children == nil {
		f(path, t)
		return
	}
	for _, k := range slices.Sorted(maps.Keys(t.children)) {
		t.children[k].walk(append(path[:len(path):len(path)], k), f)
	}
}

// showTree hides the values of keys that look like secrets, at any depth.
func showTree(v any) any { return hide("", v) }

func hide(name string, v any) any {
	switch v := v.(type) {
	case map[string]any:
		out := make(map[string]any, len(v))
		for k, x := range v {
			out[k] = hide(k, x)
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i, x := range v {
			out[i] = hide(name, x)
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
