package config

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"dynworker/internal/logging/redact"
	"dynworker/pkg/engineargs"
)

// Setting is one line of a report.
type Setting struct {
	// Key is the dotted key; for engine.args and the override of engine
	// arguments there is one setting a leaf.
	Key string
	// Value is YAML on one line, secrets replaced by <secret>.
	Value  string
	Origin Origin
	// Secret says that the value is never shown.
	Secret bool
}

// Report says what Load did: every setting in the order of worker.yaml, with
// its origin, and what is worth a warning.
type Report struct {
	// File is the configuration file, or empty.
	File     string
	Settings []Setting
	Warnings []Warning
}

// fill adds the settings. It works on whatever could be read, so that `worker
// check` can show it beside the problems.
func (r *Report) fill(c *Config, l *loader) {
	for _, k := range keys {
		if k.kind != kindMap {
			r.Settings = append(r.Settings, Setting{Key: k.name, Value: k.shown(c), Origin: l.origins[k.name], Secret: k.secret})
			continue
		}
		r.Settings = append(r.Settings, leaves(k.name, l.tree(k.name))...)
	}
}

// Lookup finds a setting by its key.
func (r *Report) Lookup(key string) (Setting, bool) {
	for _, s := range r.Settings {
		if s.Key == key {
			return s, true
		}
	}
	return Setting{}, false
}

// WriteTo prints one line a setting, "key: value  # origin". The lines are
// aligned for reading; the warnings are not among them.
func (r *Report) WriteTo(w io.Writer) (int64, error) { return writeSettings(w, r.Settings) }

func writeSettings(w io.Writer, settings []Setting) (int64, error) {
	width := 0
	for _, s := range settings {
		if n := len(s.Key) + len(s.Value) + 2; n > width && n <= 72 {
			width = n
		}
	}
	var total int64
	for _, s := range settings {
		text := s.Key + ": " + s.Value
		n, err := fmt.Fprintf(w, "%-*s  # %s\n", width, text, s.Origin)
		total += int64(n)
		if err != nil {
			return total, err
		}
	}
	return total, nil
}

// WriteTo prints the engine's arguments like the settings, and then the facts.
// Each part has a heading.
func (r *Resolved) WriteTo(w io.Writer) (int64, error) {
	var total int64
	heading := func(text string) error {
		n, err := fmt.Fprintf(w, "\n# %s\n", text)
		total += int64(n)
		return err
	}
	if r.Engine != nil {
		if err := heading("arguments of the engine"); err != nil {
			return total, err
		}
		n, err := writeSettings(w, leaves("", r.Engine.Args))
		total += n
		if err != nil {
			return total, err
		}
	}
	if err := heading("what follows"); err != nil {
		return total, err
	}
	for _, f := range r.Summary {
		n, err := fmt.Fprintf(w, "%s: %s\n", f.Name, flow(f.Value))
		total += int64(n)
		if err != nil {
			return total, err
		}
	}
	return total, nil
}

// leaves makes a setting of every value in a tree of arguments.
func leaves(prefix string, t *engineargs.Tree) []Setting {
	var out []Setting
	t.Walk(func(path []string, leaf *engineargs.Tree) {
		if prefix != "" {
			path = append([]string{prefix}, path...)
		}
		name := path[len(path)-1]
		out = append(out, Setting{Key: engineargs.Dotted(path), Value: flow(engineargs.Hide(name, leaf.Value)), Origin: leaf.Origin, Secret: redact.SecretName(name)})
	})
	return out
}

// shown renders the key's value in c without secrets.
func (k *key) shown(c *Config) string {
	v := k.value(c)
	switch {
	case k.secret:
		v = redact.Secret(v.(string))
	case k.show != nil:
		v = k.show(v)
	}
	return flow(v)
}

func showAddress(v any) any {
	parts := strings.Split(redact.Address(v.(string)), ",")
	return strings.Join(parts, ",")
}

func showAddresses(v any) any {
	out := []string{}
	for _, s := range v.([]string) {
		out = append(out, redact.Address(s))
	}
	return out
}

func showArgs(v any) any { return redact.Args(v.([]string)) }

func showEnv(v any) any {
	out := []string{}
	for _, s := range v.([]string) {
		name, value, _ := strings.Cut(s, "=")
		out = append(out, name+"="+redact.Named(name, value))
	}
	return out
}

// flow writes a value as YAML on one line.
func flow(v any) string {
	switch v := v.(type) {
	case nil:
		return "null"
	case string:
		return scalar(v)
	case bool, int, int64, uint64:
		return fmt.Sprint(v)
	case float64:
		// YAML takes 1e+06 for a float only with a dot in front of the e.
		s := strconv.FormatFloat(v, 'g', -1, 64)
		if !strings.Contains(s, ".") {
			mantissa, exponent, hasExponent := strings.Cut(s, "e")
			s = mantissa + ".0"
			if hasExponent {
				s += "e" + exponent
			}
		}
		return s
	case time.Duration:
		return formatDuration(v)
	case []Adapter:
		list := make([]string, len(v))
		for i, a := range v {
			list[i] = "{name: " + scalar(a.Name) + ", path: " + scalar(a.Path) + "}"
		}
		return "[" + strings.Join(list, ", ") + "]"
	case []string:
		list := make([]string, len(v))
		for i, s := range v {
			list[i] = scalar(s)
		}
		return "[" + strings.Join(list, ", ") + "]"
	case []any:
		list := make([]string, len(v))
		for i, x := range v {
			list[i] = flow(x)
		}
		return "[" + strings.Join(list, ", ") + "]"
	case map[string]any:
		list := make([]string, 0, len(v))
		for _, k := range slices.Sorted(maps.Keys(v)) {
			list = append(list, scalar(k)+": "+flow(v[k]))
		}
		return "{" + strings.Join(list, ", ") + "}"
	}
	return scalar(fmt.Sprint(v))
}

// scalar writes text plainly where YAML reads it back as the same text, and
// in double quotes elsewhere.
func scalar(s string) string {
	if plainText(s) {
		var n yaml.Node
		err := yaml.Unmarshal([]byte("["+s+"]"), &n)
		if err == nil && len(n.Content) == 1 && len(n.Content[0].Content) == 1 {
			if e := n.Content[0].Content[0]; e.Kind == yaml.ScalarNode && e.ShortTag() == "!!str" && e.Value == s {
				return s
			}
		}
	}
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(s); err != nil {
		return strconv.Quote(s)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

func plainText(s string) bool {
	if s == "" {
		return false
	}
	for _, r := range s {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', strings.ContainsRune("_./@+=:~-<>", r):
		default:
			return false
		}
	}
	return true
}
