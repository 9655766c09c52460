package config

import (
	"fmt"
	"strings"
)

const referenceHead = `# Configuration of the worker: every key with its default.
#
# A value here gives way to an environment variable, and that to the command
# line (the flag, or --set key=value). "worker check --config FILE" prints what
# comes out, with the origin of each value. Unknown keys are errors. Durations
# carry a unit. Relative paths are relative to the folder of this file.
#
# This file is generated from the table in pkg/config:
#   go test ./pkg/config -run TestReferenceFile -update
`

// Reference is the text of configs/worker.yaml: all keys with their defaults
// and what they mean.
func Reference() string {
	return referenceHead + (&document{c: Default(), comments: true}).render()
}

// YAML is the configuration as a file: what Load would read back to the same
// values, but for secrets, which are replaced by <secret>.
func (c *Config) YAML() string {
	return (&document{c: c}).render()
}

type document struct {
	c        *Config
	comments bool
	b        strings.Builder
}

func (d *document) render() string {
	var open []string // the sections around the current line
	for _, k := range keys {
		parts := strings.Split(k.name, ".")
		path, last := parts[:len(parts)-1], parts[len(parts)-1]
		same := 0
		for same < len(open) && same < len(path) && open[same] == path[same] {
			same++
		}
		if d.comments && same == 0 && (len(path) > 0 || len(open) > 0) {
			d.b.WriteString("\n")
		}
		for i := same; i < len(path); i++ {
			fmt.Fprintf(&d.b, "%s%s:\n", strings.Repeat("  ", i), path[i])
		}
		open = path
		indent := strings.Repeat("  ", len(path))
		if d.comments {
			if len(path) == 0 && d.b.Len() == 0 {
				d.b.WriteString("\n")
			}
			fmt.Fprintf(&d.b, "%s# %s%s\n", indent, k.doc, k.where())
		}
		fmt.Fprintf(&d.b, "%s%s: %s\n", indent, last, k.shown(d.c))
	}
	return d.b.String()
}

// where names the variable and the flag of the key.
func (k *key) where() string {
	var names []string
	for _, b := range bindings {
		for i, n := range b.keys {
			if n != k.name {
				continue
			}
			names = append(names, b.env)
			if i == 0 && len(b.flags) > 0 {
				names = append(names, b.flags[0])
			}
		}
	}
	if len(names) == 0 {
		return ""
	}
	return " [" + strings.Join(names, ", ") + "]"
}
