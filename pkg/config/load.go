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

	"dynworker/pkg/engineargs"
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
		trees:    map[string]*engineargs.Tree{},
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
	l.dynamicFlags(line.dynamic)

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
	// trees are the keys with a value of any shape.
	trees map[string]*engineargs.Tree

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
	if b.deprecated != nil {
		l.warn(origin.Name, "is deprecated; use "+b.deprecated(origin))
	}
	if b.keys[0] == overrideKey {
		l.override(text, origin)
		return
	}
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
	cfg.trees = l.trees
	cfg.Engine.Args = l.tree(argsKey).Map()
	cfg.Engine.TRTLLM.OverrideEngineArgs = l.tree(overrideKey).Map()
	// A worker that only prefills is found under a component of its own.
	if cfg.Role == RolePrefill && l.origins["component"].Kind == FromDefault {
		cfg.Component = "prefill"
	}
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
