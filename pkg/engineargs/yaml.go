package engineargs

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"dynworker/pkg/config/origin"
)

// Document parses text that holds at most one YAML document; nothing but
// comments gives nil.
func Document(text []byte) (*yaml.Node, error) {
	dec := yaml.NewDecoder(strings.NewReader(string(text)))
	var doc, second yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil, nil
	case err != nil:
		return nil, errors.New(strings.TrimPrefix(err.Error(), "yaml: "))
	}
	if err := dec.Decode(&second); err == nil {
		return nil, fmt.Errorf("line %d: a second document begins here; only one is allowed", second.Line)
	} else if !errors.Is(err, io.EOF) {
		return nil, errors.New(strings.TrimPrefix(err.Error(), "yaml: "))
	}
	if len(doc.Content) == 0 {
		return nil, nil
	}
	return doc.Content[0], nil
}

// ReadYAML reads an engine file as PyYAML would: YAML 1.1, in which yes and on
// are true, 010 is eight and 1e5 is text; merge keys; the last of a doubled key
// (with a warning). An empty file gives nil. What JSON has no form for (dates,
// infinities, binary) is refused.
func ReadYAML(file string, text []byte) (*Tree, []Warning, error) {
	o := origin.Origin{Kind: origin.File, Name: file}
	if len(text) > MaxText {
		return nil, nil, &Error{Origin: o, Reason: fmt.Sprintf("has %d bytes, more than %d", len(text), MaxText)}
	}
	root, err := Document(text)
	if err != nil {
		return nil, nil, &Error{Origin: o, Reason: "cannot be read as YAML: " + err.Error()}
	}
	if root == nil {
		return nil, nil, nil
	}
	b := &builder{origin: o, python: true}
	t, err := b.build(root, nil)
	switch {
	case err != nil:
		return nil, nil, err
	case t.isNull():
		return nil, nil, nil
	case !t.IsMap():
		return nil, nil, &Error{Origin: o.AtLine(root.Line), Reason: "is not a mapping of arguments to values"}
	}
	return t, b.warnings, nil
}

// FromNode takes arguments out of a file of the worker's own, which is YAML 1.2
// and holds no key twice. at is the origin of a node without a line.
func FromNode(n *yaml.Node, at origin.Origin, path []string) (*Tree, error) {
	return (&builder{origin: at}).build(n, path)
}

// builder turns YAML into a Tree, or into plain values inside of lists.
type builder struct {
	origin origin.Origin
	// python reads as PyYAML does.
	python   bool
	budget   budget
	warnings []Warning
}

func (b *builder) fail(path []string, n *yaml.Node, format string, args ...any) error {
	return &Error{Path: slices.Clone(path), Origin: b.origin.AtLine(n.Line), Reason: fmt.Sprintf(format, args...)}
}

func (b *builder) spend(path []string, n *yaml.Node) error {
	if reason := b.budget.spend(len(path)); reason != "" {
		return b.fail(path, n, "%s", reason)
	}
	return nil
}

func (b *builder) build(n *yaml.Node, path []string) (*Tree, error) {
	target, err := b.deref(n, path)
	if err != nil {
		return nil, err
	}
	if target.Kind != yaml.MappingNode || len(target.Content) == 0 {
		v, err := b.plain(target, path)
		if err != nil {
			return nil, err
		}
		return &Tree{Value: v, Origin: b.origin.AtLine(n.Line)}, nil
	}
	t := NewTree(b.origin.AtLine(n.Line))
	err = b.each(target, path, func(name string, v *yaml.Node, path []string) error {
		sub, err := b.build(v, path)
		if err == nil {
			t.put(name, sub)
		}
		return err
	})
	return t, err
}

// plain is build for places without origins of their own.
func (b *builder) plain(n *yaml.Node, path []string) (any, error) {
	n, err := b.deref(n, path)
	if err != nil {
		return nil, err
	}
	if err := b.spend(path, n); err != nil {
		return nil, err
	}
	switch n.Kind {
	case yaml.MappingNode:
		m := map[string]any{}
		err := b.each(n, path, func(name string, v *yaml.Node, path []string) error {
			x, err := b.plain(v, path)
			m[name] = x
			return err
		})
		return m, err
	case yaml.SequenceNode:
		if err := b.checkTag(n, path, "!!seq"); err != nil {
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
		v, reason := b.scalar(n)
		if reason != "" {
			return nil, b.fail(path, n, "%s", reason)
		}
		return v, nil
	}
	return nil, b.fail(path, n, "is neither a value, a list nor a mapping")
}

// deref follows an alias. A cycle is found by the limit on depth.
func (b *builder) deref(n *yaml.Node, path []string) (*yaml.Node, error) {
	for range maxDepth {
		if n.Kind != yaml.AliasNode {
			return n, nil
		}
		n = n.Alias
	}
	return nil, b.fail(path, n, "is an alias of an alias without end")
}

func (b *builder) checkTag(n *yaml.Node, path []string, want string) error {
	if tag := n.ShortTag(); tag != want {
		return b.fail(path, n, "has the type %s, which cannot be passed on", quote(tag))
	}
	return nil
}

// each calls f for the entries of a mapping, merged ones first. Of a doubled
// key only the last entry is passed, or the mapping refused.
func (b *builder) each(n *yaml.Node, path []string, f func(name string, v *yaml.Node, path []string) error) error {
	if err := b.spend(path, n); err != nil {
		return err
	}
	if err := b.checkTag(n, path, "!!map"); err != nil {
		return err
	}
	merged, err := b.merged(n, path)
	if err != nil {
		return err
	}
	own := map[string]*yaml.Node{}
	var entries []entry
	for i := 0; i+1 < len(n.Content); i += 2 {
		kn, err := b.deref(n.Content[i], path)
		if err != nil {
			return err
		}
		if b.isMerge(kn) {
			continue
		}
		name, reason := b.key(kn)
		if reason != "" {
			return b.fail(path, kn, "%s", reason)
		}
		below := append(path[:len(path):len(path)], name)
		if first := own[name]; first != nil {
			if !b.python {
				return &Error{Path: below, Origin: b.origin.AtLine(kn.Line), Reason: fmt.Sprintf("stands twice, first on line %d", first.Line), Duplicate: true}
			}
			b.warnings = append(b.warnings, Warning{Path: Dotted(below), Text: fmt.Sprintf("stands twice, first on line %d; the value on line %d counts (%s)", first.Line, kn.Line, b.origin)})
		}
		own[name] = kn
		entries = append(entries, entry{name, n.Content[i+1]})
	}
	last := map[string]int{}
	entries = append(merged, entries...)
	for i, e := range entries {
		last[e.name] = i
	}
	for i, e := range entries {
		if last[e.name] != i {
			continue
		}
		if err := f(e.name, e.value, append(path[:len(path):len(path)], e.name)); err != nil {
			return err
		}
	}
	return nil
}

type entry struct {
	name  string
	value *yaml.Node
}

func (b *builder) isMerge(key *yaml.Node) bool {
	return b.python && key.Kind == yaml.ScalarNode && key.ShortTag() == "!!merge"
}

// merged collects what the merge keys of a mapping bring in, weakest first.
func (b *builder) merged(n *yaml.Node, path []string) ([]entry, error) {
	var out []entry
	for i := 0; i+1 < len(n.Content); i += 2 {
		kn, err := b.deref(n.Content[i], path)
		if err != nil {
			return nil, err
		}
		if !b.isMerge(kn) {
			continue
		}
		source, err := b.deref(n.Content[i+1], path)
		if err != nil {
			return nil, err
		}
		sources := []*yaml.Node{source}
		if source.Kind == yaml.SequenceNode {
			sources = slices.Clone(source.Content)
			slices.Reverse(sources) // the first of the list wins
		}
		for _, s := range sources {
			s, err := b.deref(s, path)
			if err != nil {
				return nil, err
			}
			if s.Kind != yaml.MappingNode {
				return nil, b.fail(append(path[:len(path):len(path)], "<<"), kn, "merges something that is not a mapping")
			}
			// Depth grows with the path, so a mapping that merges itself ends.
			err = b.each(s, append(path[:len(path):len(path)], "<<"), func(name string, v *yaml.Node, _ []string) error {
				out = append(out, entry{name, v})
				return nil
			})
			if err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

// key reads the name of an entry. A number as a key (a map from sizes, say) is
// text for JSON.
func (b *builder) key(n *yaml.Node) (name, reason string) {
	const notText = "holds a key that is not plain text"
	if n.Kind != yaml.ScalarNode {
		return "", notText
	}
	if !b.python {
		if tag := n.ShortTag(); tag == "!!null" || tag == "!!merge" {
			return "", notText
		}
		return n.Value, ""
	}
	v, reason := b.scalar(n)
	switch v := v.(type) {
	case string:
		return v, reason
	case int64, uint64, float64:
		return string(appendJSON(nil, v)), ""
	case bool:
		return "", fmt.Sprintf("holds the key %s, which YAML 1.1 takes for true or false; put it in quotes", n.Value)
	}
	if reason == "" {
		reason = notText
	}
	return "", reason
}
