package config

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/viper"
	"go.yaml.in/yaml/v3"
)

// maxFileSize bounds configuration and payload files; both are written by
// hand.
const maxFileSize = 1 << 20

// Load reads the configuration. args are the options of the command line
// without program and subcommand, environ is what os.Environ returns, readFile
// reads the file named by --config (and @file values) and defaults to
// os.ReadFile.
//
// The report is never nil: it holds warnings also when Load fails. The error
// is ErrHelp, or an Errors with every problem that was found. Files that the
// configuration names are not looked at; CheckFiles does that.
func Load(args, environ []string, readFile func(string) ([]byte, error)) (*Config, *Report, error) {
	if readFile == nil {
		readFile = os.ReadFile
	}
	l := &loader{
		readFile: readFile,
		report:   &Report{},
		origins:  map[string]Origin{},
		args:     newTree(),
		environ:  map[string]string{},
	}
	line, err := parseArgs(args)
	if err != nil {
		var p *Problem
		if errors.As(err, &p) {
			return nil, l.report, Errors{p}
		}
		return nil, l.report, err
	}
	if line.file != "" {
		l.report.File = line.file
		l.fileLayer(line.file)
	}
	l.endLayer()
	l.environLayer(environ)
	l.endLayer()
	l.commandLineLayer(line)
	l.endLayer()

	cfg := l.assemble()
	if len(l.problems) == 0 {
		if err := cfg.Validate(); err != nil {
			var more Errors
			errors.As(err, &more)
			l.problems = append(l.problems, more...)
		}
	}
	l.advise(cfg)
	l.report.fill(cfg, l)
	if err := l.problems.err(); err != nil {
		return nil, l.report, err
	}
	return cfg, l.report, nil
}

// loader collects the layers.
type loader struct {
	readFile func(string) ([]byte, error)
	environ  map[string]string
	report   *Report
	problems Errors

	// current is the layer being read, layers are the finished ones.
	current map[string]any
	layers  []map[string]any
	origins map[string]Origin
	args    *tree

	// whole is where a complete endpoint address was given, for advise.
	whole Origin
}

func (l *loader) problem(p *Problem) { l.problems = append(l.problems, p) }

func (l *loader) warn(subject, text string) {
	l.report.Warnings = append(l.report.Warnings, Warning{Subject: subject, Text: text})
}

func (l *loader) put(s setting, origin Origin) {
	if l.current == nil {
		l.current = map[string]any{}
	}
	l.current[s.key] = s.value
	l.origins[s.key] = origin
}

func (l *loader) endLayer() {
	l.layers = append(l.layers, l.current)
	l.current = nil
}

// apply reads the text of a variable or flag.
func (l *loader) apply(b *binding, text string, origin Origin) {
	l.applySettings(b.keys[0], b.to, text, origin)
}

func (l *loader) applySettings(name string, to convert, text string, origin Origin) {
	settings, err := to(text)
	if err != nil {
		l.problem(l.valueProblem(name, origin, err))
		return
	}
	for _, s := range settings {
		if err := l.finish(&s); err != nil {
			l.problem(l.valueProblem(s.key, origin, err))
			continue
		}
		l.put(s, origin)
	}
	if len(settings) > 1 && name == endpointKey {
		l.whole = origin
	}
}

// valueProblem completes the reason that a rule or a conversion gave. What a
// secret holds is never in it.
func (l *loader) valueProblem(name string, origin Origin, err error) *Problem {
	p := &Problem{Key: name, Origin: origin, Kind: ErrValue, Reason: err.Error()}
	var ke *keyError
	if errors.As(err, &ke) {
		p.Key = ke.key
	}
	var ve *valueError
	if errors.As(err, &ve) {
		p.Kind, p.Suggestion, p.Err = ve.kind, ve.suggestion, ve.err
	}
	return p
}

func unknownKey(name string, origin Origin) *Problem {
	p := &Problem{Key: name, Origin: origin, Kind: ErrUnknownKey, Reason: "unknown key", Suggestion: nearestKey(name)}
	if sections[name] {
		p.Reason, p.Suggestion = "is a section, not a key", ""
	}
	return p
}

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
	root, err := parseYAML(b)
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
			f.readArgs(vn, origin)
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

func (f *fileReader) readArgs(n *yaml.Node, origin Origin) {
	t := deref(n)
	if t.Kind == yaml.ScalarNode && t.ShortTag() == "!!null" {
		return // like an empty section
	}
	b := &treeBuilder{origin: origin}
	sub, err := b.build(n, nil)
	if err != nil {
		f.problem(argsProblem(err, origin))
		return
	}
	f.replaceArgs(sub, origin)
}

// replaceArgs takes a whole mapping for engine.args.
func (l *loader) replaceArgs(sub *tree, origin Origin) {
	if _, ok := sub.value.(map[string]any); sub.children == nil && !ok {
		l.problem(&Problem{Key: argsKey, Origin: origin, Kind: ErrValue, Reason: "must be a mapping"})
		return
	}
	l.args = sub
	l.origins[argsKey] = origin
}

func argsProblem(err error, origin Origin) *Problem {
	p := &Problem{Key: argsKey, Origin: origin, Kind: ErrValue, Reason: err.Error()}
	var te *treeError
	if errors.As(err, &te) {
		p.Kind = te.kind
		p.Key = strings.Join(append([]string{argsKey}, te.path...), ".")
		if origin.Kind == FromFile {
			p.Origin.Line = te.line
		}
	}
	return p
}

// finish does what no rule can, as it needs the world outside: it replaces
// @file by what the file holds, and expands the name of a template as Dynamo
// does.
func (l *loader) finish(s *setting) error {
	switch s.key {
	case payloadKey:
		name, ok := strings.CutPrefix(s.value.(string), "@")
		if !ok {
			return nil
		}
		b, err := l.readFile(name)
		if err != nil {
			return &valueError{kind: ErrFile, reason: fmt.Sprintf("%s cannot be read: %s", quote(name), fileReason(err)), err: err}
		}
		if len(b) > maxFileSize {
			return &valueError{kind: ErrFile, reason: fmt.Sprintf("%s has %d bytes, more than %d", quote(name), len(b), maxFileSize)}
		}
		s.value = strings.TrimSpace(string(b))
		if s.value == "" {
			return fmt.Errorf("%s is empty", quote(name))
		}
		return payload(s.value)
	case templateKey:
		path := os.Expand(s.value.(string), func(name string) string { return l.environ[name] })
		if rest, ok := strings.CutPrefix(path, "~/"); ok && l.environ["HOME"] != "" {
			path = filepath.Join(l.environ["HOME"], rest)
		}
		s.value = path
	}
	return nil
}

// assemble stacks defaults and layers in viper and fills the struct. Values
// have been checked and have their final type, so viper converts nothing.
func (l *loader) assemble() *Config {
	v := viper.New()
	for _, k := range keys {
		if k.kind != kindMap {
			v.SetDefault(k.name, k.def)
		}
	}
	for _, layer := range l.layers {
		nested := map[string]any{}
		for _, name := range slices.Sorted(maps.Keys(layer)) {
			nest(nested, name, layer[name])
		}
		if err := v.MergeConfigMap(nested); err != nil {
			panic(fmt.Sprintf("config: merging checked values: %v", err))
		}
	}
	cfg := &Config{}
	if err := v.UnmarshalExact(cfg); err != nil {
		// The table of keys and the struct are of one make, see init; a
		// difference is a mistake in this package and never in the input.
		panic(fmt.Sprintf("config: filling the struct: %v", err))
	}
	cfg.Engine.Args = l.args.plainMap()
	// A file that spells the default out wishes for nothing.
	cfg.Affinity.OverrideSet = cfg.Affinity.Override || l.origins["affinity.override"].Kind > FromFile
	cfg.origins = l.origins
	return cfg
}

func nest(m map[string]any, name string, value any) {
	parts := strings.Split(name, ".")
	for _, p := range parts[:len(parts)-1] {
		sub, ok := m[p].(map[string]any)
		if !ok {
			sub = map[string]any{}
			m[p] = sub
		}
		m = sub
	}
	m[parts[len(parts)-1]] = value
}

// advise warns about what is allowed but probably not meant.
func (l *loader) advise(c *Config) {
	if ns := l.origins["namespace"]; l.whole != (Origin{}) && ns != l.whole {
		l.warn("namespace", fmt.Sprintf("the one of %s replaces the one in the endpoint of %s; Dynamo's own worker would keep the endpoint's", ns, l.whole))
	}
	if o := l.origins["affinity.override"]; !c.Affinity.Override && o.Kind == FromFlag {
		l.warn(o.Name, "does not turn conversation affinity off where the engine's configuration turns it on; the engine decides")
	}
	if c.Model.CustomJinjaTemplate != "" && !slices.Contains(c.Model.EndpointTypes, "chat") {
		l.warn("model.custom_jinja_template", "has no effect without the endpoint type chat")
	}
	if c.NATS.Username != "" && (c.NATS.Token != "" || c.NATS.NKey != "" || c.NATS.CredentialsFile != "") {
		l.warn("nats.username", "is used, so nats.token, nats.nkey and nats.credentials_file are not")
	} else if c.NATS.Token != "" && (c.NATS.NKey != "" || c.NATS.CredentialsFile != "") {
		l.warn("nats.token", "is used, so nats.nkey and nats.credentials_file are not")
	} else if c.NATS.NKey != "" && c.NATS.CredentialsFile != "" {
		l.warn("nats.nkey", "is used, so nats.credentials_file is not")
	}
	if c.Engine.Kind != EngineSim {
		for _, k := range keys {
			// A file that shows all keys sets these, too; only a change counts.
			if o, ok := l.origins[k.name]; ok && strings.HasPrefix(k.name, simPrefix) && k.value(c) != k.def {
				l.warn(k.name, fmt.Sprintf("has no effect with engine.kind %s (%s)", c.Engine.Kind, o))
			}
		}
	}
	if c.ResponsePlane.TLS.Insecure {
		l.warn("response_plane.tls.insecure", "frontends are not verified")
	}
	if c.NATS.TLS.Insecure {
		l.warn("nats.tls.insecure", "the NATS server is not verified")
	}
}
