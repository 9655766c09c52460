package config

import (
	"errors"
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"

	"dynworker/pkg/engineargs"
)

// Adapter is a LoRA adapter that requests can name.
type Adapter struct {
	Name string `mapstructure:"name"`
	// Path is the adapter's folder or file, as the engine finds it.
	Path string `mapstructure:"path"`
}

// parseAdapters reads the YAML list of a --set.
func parseAdapters(text string) ([]Adapter, error) {
	n, err := engineargs.Document([]byte(text))
	if err != nil {
		return nil, fmt.Errorf("cannot be read as a YAML list: %w", err)
	}
	if n == nil {
		return []Adapter{}, nil
	}
	return adaptersFromNode(n)
}

func adaptersFromNode(n *yaml.Node) ([]Adapter, error) {
	n = deref(n)
	if n.Kind != yaml.SequenceNode {
		return nil, fmt.Errorf("is %s, but must be a list such as [{name: sql, path: /adapters/sql}]", describe(n))
	}
	out := make([]Adapter, 0, len(n.Content))
	for i, c := range n.Content {
		a, err := adapterFromNode(deref(c))
		if err != nil {
			return nil, fmt.Errorf("entry %d %w", i+1, err)
		}
		out = append(out, a)
	}
	return out, nil
}

func adapterFromNode(n *yaml.Node) (Adapter, error) {
	var a Adapter
	if n.Kind != yaml.MappingNode {
		return a, fmt.Errorf("is %s, but must be a mapping with name and path", describe(n))
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := deref(n.Content[i]).Value
		var field *string
		switch key {
		case "name":
			field = &a.Name
		case "path":
			field = &a.Path
		default:
			return a, &valueError{kind: ErrUnknownKey, reason: fmt.Sprintf("holds the unknown key %s", quote(key)), suggestion: nearest(key, []string{"name", "path"})}
		}
		if seen[key] {
			return a, &valueError{kind: ErrDuplicateKey, reason: fmt.Sprintf("holds %s twice", key)}
		}
		seen[key] = true
		text, err := stringFromNode(n.Content[i+1])
		if err != nil {
			return a, fmt.Errorf("has a %s that %w", key, err)
		}
		*field = text
	}
	return a, nil
}

// adapters is the rule for the list as a whole.
func adapters(v any) error {
	seen := map[string]bool{}
	for i, a := range v.([]Adapter) {
		switch {
		case strings.TrimSpace(a.Name) == "":
			return fmt.Errorf("entry %d has no name", i+1)
		case strings.TrimSpace(a.Path) == "":
			return fmt.Errorf("entry %d has no path", i+1)
		case strings.ContainsRune(a.Name+a.Path, 0):
			return fmt.Errorf("entry %d holds a zero byte", i+1)
		case seen[a.Name]:
			return fmt.Errorf("holds %s twice", quote(a.Name))
		}
		seen[a.Name] = true
	}
	return nil
}

// fraction is the rule for a share of memory.
func fraction(v any) error {
	if f := v.(float64); f <= 0 || f > 1 {
		return fmt.Errorf("%s is not above 0 and at most 1", flow(f))
	}
	return nil
}

// share is a fraction that may be nothing.
func share(v any) error {
	if f := v.(float64); f != f || f < 0 || f > 1 {
		return fmt.Errorf("%s is not between 0 and 1", flow(f))
	}
	return nil
}

// loadFormat refuses the one format that needs a helper in the worker.
func loadFormat(v any) error {
	switch v.(string) {
	case "":
		return errors.New("is empty; auto is the default")
	case "gms":
		return &valueError{kind: ErrUnsupported, reason: "the GPU memory service (gms) is not supported"}
	}
	return nil
}

// guidedBackend checks against the choices of Dynamo 1.6.1; empty is none.
func guidedBackend(v any) error {
	known := []string{"xgrammar", "llguidance"}
	s := v.(string)
	if s == "" || s == known[0] || s == known[1] {
		return nil
	}
	return &valueError{kind: ErrValue, reason: fmt.Sprintf("%s is not one of %s", quote(s), strings.Join(known, ", ")), suggestion: nearest(s, known)}
}
