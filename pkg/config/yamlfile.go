package config

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"dynworker/pkg/engineargs"
)

// fileLayer reads the YAML file.
func (l *loader) fileLayer(file string) {
	origin := Origin{Kind: FromFile, Name: file}
	b, err := l.readFile(file)
	if err != nil {
		l.problem(&Problem{Key: "--config", Origin: origin, Kind: ErrFile, Reason: "cannot be read: " + fileReason(err), Err: err})
		return
	}
	if len(b) > maxFileSize {
		l.problem(&Problem{Key: "--config", Origin: origin, Kind: ErrFile, Reason: fmt.Sprintf("has %d bytes, more than %d", len(b), maxFileSize)})
		return
	}
	root, err := engineargs.Document(b)
	if err != nil {
		l.problem(&Problem{Origin: origin, Kind: ErrSyntax, Reason: "cannot be read as YAML: " + err.Error()})
		return
	}
	if root == nil || (root.Kind == yaml.ScalarNode && root.ShortTag() == "!!null") {
		return // an empty file changes nothing
	}
	f := &fileReader{loader: l, file: file}
	f.section(root, "")
	if f.endpoint != nil {
		f.endpoint()
	}
}

// fileReason leaves out the path that os errors repeat.
func fileReason(err error) string {
	var pe *os.PathError
	if errors.As(err, &pe) {
		return pe.Err.Error()
	}
	return err.Error()
}

// fileReader walks the file against the table of keys.
type fileReader struct {
	*loader
	file string
	// endpoint is applied last: a whole address wins over its neighbours.
	endpoint func()
}

func (f *fileReader) at(n *yaml.Node) Origin {
	return Origin{Kind: FromFile, Name: f.file, Line: n.Line}
}

func (f *fileReader) section(n *yaml.Node, prefix string) {
	origin := f.at(n)
	n = deref(n)
	name := strings.TrimSuffix(prefix, ".")
	if n.Kind != yaml.MappingNode {
		if prefix != "" && n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" {
			return // a section whose lines are all commented out
		}
		f.problem(&Problem{Key: name, Origin: origin, Kind: ErrValue, Reason: fmt.Sprintf("is %s, but must be a mapping of keys to values", describe(n))})
		return
	}
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		kn, vn := deref(n.Content[i]), n.Content[i+1]
		origin := f.at(n.Content[i])
		if kn.Kind != yaml.ScalarNode || kn.ShortTag() == "!!null" {
			f.problem(&Problem{Key: name, Origin: origin, Kind: ErrSyntax, Reason: "holds a key that is not plain text"})
			continue
		}
		if kn.ShortTag() == "!!merge" {
			f.problem(&Problem{Key: prefix + "<<", Origin: origin, Kind: ErrUnsupported, Reason: "merging of mappings is not supported"})
			continue
		}
		full := prefix + kn.Value
		if line, ok := seen[full]; ok {
			f.problem(&Problem{Key: full, Origin: origin, Kind: ErrDuplicateKey, Reason: fmt.Sprintf("stands twice, first on line %d", line)})
			continue
		}
		seen[full] = kn.Line
		switch k := byName[full]; {
		case strings.Contains(kn.Value, "."):
			p := unknownKey(full, origin)
			if byName[full] != nil {
				p.Reason, p.Suggestion = "is written with dots; nest it in sections instead", ""
			}
			f.problem(p)
		case sections[full]:
			f.section(vn, full+".")
		case k == nil:
			f.problem(unknownKey(full, origin))
		case k.kind == kindMap:
			f.readTree(k.name, vn, origin)
		default:
			f.read(k, vn, origin)
		}
	}
}

// read reads one value. The origin is the line of the key, also for values
// that go over several lines.
func (f *fileReader) read(k *key, n *yaml.Node, origin Origin) {
	v, err := fromNode(k, n)
	if err != nil {
		f.problem(f.valueProblem(k.name, origin, err))
		return
	}
	if k.name == endpointKey {
		f.endpoint = func() { f.applySettings(k.name, toEndpoint, v.(string), origin) }
		return
	}
	v = f.resolve(k, v)
	f.applySettings(k.name, func(string) ([]setting, error) {
		s, err := one(k.name, v)
		return []setting{s}, err
	}, "", origin)
}

// resolve makes a relative path one below the folder of the file. The other
// layers are about the current folder and stay as they are.
func (f *fileReader) resolve(k *key, v any) any {
	dir := filepath.Dir(f.file)
	switch {
	case k.path:
		s := v.(string)
		if s == "" || IsPEM(s) {
			return v
		}
		if k.name == templateKey && (strings.HasPrefix(s, "~/") || strings.HasPrefix(s, "$")) {
			return v // expanded later
		}
		if k.name == payloadKey {
			if rest, ok := strings.CutPrefix(s, "@"); ok {
				return "@" + inFolder(dir, rest)
			}
			return v
		}
		return inFolder(dir, s)
	case k.kind == kindAdapters:
		list := slices.Clone(v.([]Adapter))
		for i := range list {
			if list[i].Path != "" {
				list[i].Path = inFolder(dir, list[i].Path)
			}
		}
		return list
	case k.name == "engine.command":
		// As a shell does: a name without a slash is looked up in PATH.
		list := slices.Clone(v.([]string))
		if len(list) > 0 && strings.Contains(list[0], "/") {
			list[0] = inFolder(dir, list[0])
		}
		return list
	}
	return v
}

func inFolder(dir, path string) string {
	if filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(dir, path)
}
