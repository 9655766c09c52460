package config

import (
	"errors"
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"

	"dynworker/pkg/config/origin"
	"dynworker/pkg/engineargs"
)

// The keys with a value of any shape: arguments for the engine.

// tree is the value of such a key; a key that nobody set is an empty mapping.
func (l *loader) tree(name string) *engineargs.Tree {
	if t := l.trees[name]; t != nil {
		return t
	}
	return engineargs.NewTree(origin.Origin{})
}

// readTree reads the key from the file.
func (f *fileReader) readTree(name string, n *yaml.Node, origin Origin) {
	t := deref(n)
	if t.Kind == yaml.ScalarNode && t.ShortTag() == "!!null" {
		return // like an empty section
	}
	sub, err := engineargs.FromNode(n, origin, nil)
	if err != nil {
		f.problem(treeProblem(name, err, origin))
		return
	}
	f.replaceTree(name, sub, origin)
}

// setTree sets the key as a whole, or one value in it. The value is YAML, so
// that numbers and lists keep their type.
func (l *loader) setTree(key, name, value string, origin Origin) {
	var path []string
	if name != key {
		path = strings.Split(strings.TrimPrefix(name, key+"."), ".")
	}
	for _, p := range path {
		if p == "" {
			l.problem(&Problem{Key: name, Origin: origin, Kind: ErrSyntax, Reason: "has an empty part"})
			return
		}
	}
	n, err := engineargs.Document([]byte(value))
	if err != nil {
		l.problem(&Problem{Key: name, Origin: origin, Kind: ErrValue, Reason: "cannot be read as YAML: " + err.Error()})
		return
	}
	sub := &engineargs.Tree{Value: "", Origin: origin}
	if n != nil {
		if sub, err = engineargs.FromNode(n, origin, path); err != nil {
			l.problem(treeProblem(key, err, origin))
			return
		}
	}
	if len(path) == 0 {
		l.replaceTree(key, sub, origin)
		return
	}
	t := l.tree(key)
	if err := t.Set(path, sub); err != nil {
		l.problem(&Problem{Key: name, Origin: origin, Kind: ErrConflict, Reason: key + "." + err.Error()})
		return
	}
	l.trees[key] = t
}

// replaceTree takes a whole mapping for the key.
func (l *loader) replaceTree(name string, sub *engineargs.Tree, origin Origin) {
	if !sub.IsMap() {
		l.problem(&Problem{Key: name, Origin: origin, Kind: ErrValue, Reason: "must be a mapping"})
		return
	}
	l.trees[name] = sub
	l.origins[name] = origin
}

// override reads the JSON of a flag or variable. Empty text asks for nothing,
// as in Dynamo's own worker.
func (l *loader) override(text string, origin Origin) {
	if text == "" {
		delete(l.trees, overrideKey)
		delete(l.origins, overrideKey)
		return
	}
	if len(text) > engineargs.MaxText {
		l.problem(&Problem{Key: overrideKey, Origin: origin, Kind: ErrValue, Reason: fmt.Sprintf("has %d bytes, more than %d", len(text), engineargs.MaxText)})
		return
	}
	t, warnings, err := engineargs.ReadJSON([]byte(text), origin)
	if err != nil {
		l.problem(treeProblem(overrideKey, err, origin))
		return
	}
	l.argumentWarnings(overrideKey, warnings)
	l.replaceTree(overrideKey, t, origin)
}

// dynamicFlags takes the --trtllm.* flags for the override. They cannot be
// combined with any other.
func (l *loader) dynamicFlags(flags []engineargs.Flag) {
	if len(flags) == 0 {
		return
	}
	first := Origin{Kind: FromFlag, Name: flags[0].Name}
	t, warnings, err := engineargs.ReadFlags(flags)
	if err != nil {
		l.problem(treeProblem(overrideKey, err, first))
		return
	}
	if other := l.trees[overrideKey]; other != nil {
		l.problem(&Problem{Key: overrideKey, Origin: first, Kind: ErrConflict, Reason: fmt.Sprintf("is set already (%s); --override-engine-args and %s* flags cannot be combined", other.Origin, engineargs.FlagPrefix)})
		return
	}
	l.argumentWarnings(overrideKey, warnings)
	l.replaceTree(overrideKey, t, first)
}

// argumentWarnings passes on what a reader of arguments found.
func (l *loader) argumentWarnings(key string, warnings []engineargs.Warning) {
	for _, w := range warnings {
		l.warn(key+"."+w.Path, w.Text)
	}
}

// treeProblem turns the error of a reader into one of the key.
func treeProblem(key string, err error, origin Origin) *Problem {
	p := &Problem{Key: key, Origin: origin, Kind: ErrValue, Reason: err.Error()}
	var e *engineargs.Error
	if errors.As(err, &e) {
		p.Reason, p.Origin = e.Reason, e.Origin
		if len(e.Path) > 0 {
			p.Key += "." + engineargs.Dotted(e.Path)
		}
		if e.Duplicate {
			p.Kind = ErrDuplicateKey
		}
	}
	return p
}

// showTree hides the values of keys that look like secrets, at any depth.
func showTree(v any) any { return engineargs.Hide("", v) }
