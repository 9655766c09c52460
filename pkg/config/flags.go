package config

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/pflag"
)

// assignment is one flag as given, in the order of the command line.
type assignment struct {
	binding *binding
	text    string
	origin  Origin
}

// commandLine is what the options say before anything is looked up.
type commandLine struct {
	file        string // of --config; empty without
	assignments []assignment
	sets        []assignment // --set key=value; binding is nil
	order       []bool       // true where the next one is of sets
}

// recorder is a pflag.Value that keeps every occurrence in order: the last one
// wins across different spellings of the same setting, as in Python's parser.
type recorder struct {
	line   *commandLine
	b      *binding
	name   string
	negate bool
}

func (r *recorder) String() string { return "" }

// Type is the placeholder in help; pflag shows none for "bool".
func (r *recorder) Type() string {
	switch {
	case r.b == nil:
		return "KEY=VALUE"
	case r.b.negatable:
		return "bool"
	}
	return r.b.arg
}

func (r *recorder) Set(text string) error {
	if r.b == nil {
		r.line.sets = append(r.line.sets, assignment{text: text, origin: Origin{Kind: FromSet, Name: "--set"}})
		r.line.order = append(r.line.order, true)
		return nil
	}
	if r.b.negatable {
		// pflag hands over what stands behind "=", or true.
		on, err := parseBool(text)
		if err != nil {
			return err
		}
		text = fmt.Sprint(on != r.negate)
	}
	r.line.assignments = append(r.line.assignments, assignment{binding: r.b, text: text, origin: Origin{Kind: FromFlag, Name: r.name}})
	r.line.order = append(r.line.order, false)
	return nil
}

// flagSet builds the flags. They write into line.
func flagSet(line *commandLine) *pflag.FlagSet {
	fs := pflag.NewFlagSet("worker", pflag.ContinueOnError)
	fs.SortFlags = false
	fs.SetOutput(io.Discard)
	fs.Usage = func() {}
	fs.StringVar(&line.file, "config", "", "Configuration file (YAML).")
	fs.Lookup("config").DefValue = ""
	fs.Var(&recorder{line: line, name: "--set"}, "set", "Sets any key; may be repeated. Lists are separated by commas.")
	for _, b := range bindings {
		for i, name := range b.flags {
			usage := b.usage()
			if i > 0 {
				usage = "Same as " + b.flags[0] + "."
			}
			f := fs.VarPF(&recorder{line: line, b: b, name: name}, strings.TrimPrefix(name, "--"), "", usage)
			if b.negatable {
				f.NoOptDefVal = "true"
				no := "--no-" + strings.TrimPrefix(name, "--")
				fs.VarPF(&recorder{line: line, b: b, name: no, negate: true}, strings.TrimPrefix(no, "--"), "", "The opposite of "+name+".").NoOptDefVal = "true"
			}
		}
	}
	return fs
}

func (b *binding) usage() string {
	doc := b.note
	if doc == "" {
		doc = byName[b.keys[0]].doc
	}
	return fmt.Sprintf("%s [%s, %s]", doc, b.keys[0], b.env)
}

// parseArgs reads the options of a subcommand. It returns ErrHelp, or a
// *Problem.
func parseArgs(args []string) (*commandLine, error) {
	line := &commandLine{}
	fs := flagSet(line)
	if err := fs.Parse(args); err != nil {
		return nil, flagProblem(fs, err)
	}
	if rest := fs.Args(); len(rest) > 0 {
		return nil, &Problem{Key: rest[0], Kind: ErrSyntax, Reason: "is no option; options begin with two dashes"}
	}
	if fs.Changed("config") && line.file == "" {
		return nil, &Problem{Key: "--config", Kind: ErrValue, Reason: "needs the name of a file"}
	}
	return line, nil
}

func flagProblem(fs *pflag.FlagSet, err error) error {
	var (
		unknown *pflag.NotExistError
		missing *pflag.ValueRequiredError
		invalid *pflag.InvalidValueError
		syntax  *pflag.InvalidSyntaxError
	)
	flagOrigin := func(f *pflag.Flag) (Origin, string) {
		o := Origin{Kind: FromFlag, Name: "--" + f.Name}
		if r, ok := f.Value.(*recorder); ok && r.b != nil {
			return o, r.b.keys[0]
		}
		return o, o.Name
	}
	switch {
	case errors.Is(err, pflag.ErrHelp):
		return ErrHelp
	case errors.As(err, &unknown):
		name := "--" + unknown.GetSpecifiedName()
		if unknown.GetSpecifiedShortnames() != "" {
			name = "-" + unknown.GetSpecifiedShortnames()
		}
		var names []string
		fs.VisitAll(func(f *pflag.Flag) { names = append(names, "--"+f.Name) })
		return &Problem{Key: name, Kind: ErrUnknownKey, Reason: "unknown flag", Suggestion: nearest(name, names)}
	case errors.As(err, &missing):
		o, k := flagOrigin(missing.GetFlag())
		return &Problem{Key: k, Origin: o, Kind: ErrValue, Reason: "needs a value"}
	case errors.As(err, &invalid):
		o, k := flagOrigin(invalid.GetFlag())
		return &Problem{Key: k, Origin: o, Kind: ErrValue, Reason: invalid.Unwrap().Error()}
	case errors.As(err, &syntax):
		return &Problem{Key: syntax.GetSpecifiedFlag(), Kind: ErrSyntax, Reason: "is not an option"}
	}
	return &Problem{Kind: ErrSyntax, Reason: err.Error()}
}

// Usage describes the options that Load understands, one a line.
func Usage() string {
	fs := flagSet(&commandLine{})
	fs.Lookup("config").Usage = "Configuration `FILE` (YAML)."
	return fs.FlagUsagesWrapped(0)
}

// commandLineLayer applies flags and --set in the order in which they came. A
// whole endpoint address wins over a --namespace beside it, wherever it
// stands, as in Dynamo's own worker.
func (l *loader) commandLineLayer(line *commandLine) {
	next := struct{ set, flag int }{}
	var late []func()
	for _, isSet := range line.order {
		if isSet {
			a := line.sets[next.set]
			next.set++
			l.applySet(a.text, a.origin)
			continue
		}
		a := line.assignments[next.flag]
		next.flag++
		if a.binding.keys[0] == endpointKey {
			late = append(late, func() { l.apply(a.binding, a.text, a.origin) })
			continue
		}
		l.apply(a.binding, a.text, a.origin)
	}
	for _, f := range late {
		f()
	}
}

// applySet handles one --set key=value.
func (l *loader) applySet(text string, origin Origin) {
	name, value, ok := strings.Cut(text, "=")
	name = strings.TrimSpace(name)
	if !ok || name == "" {
		l.problem(&Problem{Key: "--set", Kind: ErrSyntax, Origin: origin, Reason: setShape(name) + " is not of the form key=value"})
		return
	}
	if name == argsKey || strings.HasPrefix(name, argsKey+".") {
		l.setArgs(name, value, origin)
		return
	}
	if name == endpointKey {
		l.applySettings(name, toEndpoint, value, origin)
		return
	}
	k := byName[name]
	if k == nil {
		l.problem(unknownKey(name, origin))
		return
	}
	l.applySettings(name, toText(name), value, origin)
}

// setShape shows the start of a --set that has no value, up to where a secret
// might begin.
func setShape(text string) string {
	end := strings.IndexFunc(text, func(r rune) bool {
		return r != '.' && r != '_' && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9')
	})
	if end >= 0 {
		text = text[:end] + "…"
	}
	return quote(text)
}

// setArgs sets engine.args as a whole, or one value in it. The value is YAML,
// so that numbers and lists keep their type.
func (l *loader) setArgs(name, value string, origin Origin) {
	path := strings.Split(name, ".")[2:]
	for _, p := range path {
		if p == "" {
			l.problem(&Problem{Key: name, Origin: origin, Kind: ErrSyntax, Reason: "has an empty part"})
			return
		}
	}
	n, err := parseYAML([]byte(value))
	if err != nil {
		l.problem(&Problem{Key: name, Origin: origin, Kind: ErrValue, Reason: "cannot be read as YAML: " + err.Error()})
		return
	}
	b := &treeBuilder{origin: origin}
	sub := &tree{value: "", origin: origin}
	if n != nil {
		if sub, err = b.build(n, path); err != nil {
			l.problem(argsProblem(err, origin))
			return
		}
	}
	if len(path) == 0 {
		l.replaceArgs(sub, origin)
		return
	}
	if err := l.args.set(path, sub); err != nil {
		l.problem(&Problem{Key: name, Origin: origin, Kind: ErrConflict, Reason: err.Error()})
	}
}
