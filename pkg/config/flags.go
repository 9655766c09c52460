package config

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/pflag"

	"dynworker/pkg/engineargs"
)

// assignment is one flag as given, in the order of the command line. It has a
// binding when it sets something, or a variable when its like in the
// environment sets nothing; --set has neither.
type assignment struct {
	binding  *binding
	variable *Variable
	text     string
	origin   Origin
}

// commandLine is what the options say before anything is looked up.
type commandLine struct {
	file        string // of --config; empty without
	assignments []assignment
	dynamic     []engineargs.Flag // --trtllm.*
}

// recorder is a pflag.Value that keeps every occurrence in order: the last one
// wins across different spellings of the same setting, as in Python's parser.
type recorder struct {
	line   *commandLine
	b      *binding
	v      *Variable
	name   string
	negate bool
}

// isSwitch reports whether the flag needs no value.
func (r *recorder) isSwitch() bool {
	return r.b != nil && r.b.negatable || r.v != nil && r.v.arg == ""
}

func (r *recorder) String() string { return "" }

// Type is the placeholder in help; pflag shows none for "bool".
func (r *recorder) Type() string {
	switch {
	case r.isSwitch():
		return "bool"
	case r.b != nil:
		return r.b.arg
	case r.v != nil:
		return r.v.arg
	}
	return "KEY=VALUE"
}

func (r *recorder) Set(text string) error {
	origin := Origin{Kind: FromFlag, Name: r.name}
	if r.b == nil && r.v == nil {
		origin.Kind = FromSet
	}
	if r.isSwitch() {
		// pflag hands over what stands behind "=", or true.
		on, err := parseBool(text)
		if err != nil {
			return err
		}
		text = fmt.Sprint(on != r.negate)
	}
	r.line.assignments = append(r.line.assignments, assignment{binding: r.b, variable: r.v, text: text, origin: origin})
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
	add := func(r *recorder, usage string) {
		f := fs.VarPF(r, strings.TrimPrefix(r.name, "--"), "", usage)
		if !r.isSwitch() {
			return
		}
		f.NoOptDefVal = "true"
		no := *r
		no.name, no.negate = "--no-"+f.Name, true
		fs.VarPF(&no, "no-"+f.Name, "", "The opposite of "+r.name+".").NoOptDefVal = "true"
	}
	for _, b := range bindings {
		for i, name := range b.flags {
			usage := b.usage()
			if i > 0 {
				usage = "Same as " + b.flags[0] + "."
			}
			add(&recorder{line: line, b: b, name: name}, usage)
		}
	}
	for i := range others {
		if v := &others[i]; v.Flag != "" {
			add(&recorder{line: line, v: v, name: v.Flag}, v.usage())
		}
	}
	return fs
}

func (v *Variable) usage() string {
	return fmt.Sprintf("%s: %s. [%s]", v.Status, v.Note, v.Name)
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
	args, err := line.scan(fs, args)
	if err != nil {
		return nil, err
	}
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
		return Origin{Kind: FromFlag, Name: "--" + f.Name}, flagKey(f)
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
	fs.VisitAll(func(f *pflag.Flag) {
		// Flags that set nothing are understood, but nobody has to know them.
		if r, ok := f.Value.(*recorder); ok && r.v != nil {
			f.Hidden = true
		}
	})
	return fs.FlagUsagesWrapped(0) + "      --trtllm.SECTION.NAME VALUE\n                  Sets any argument of TensorRT-LLM; a number, true, false or none is taken for what it is. [" + overrideKey + "]\n"
}

// commandLineLayer applies flags and --set in the order in which they came. A
// whole endpoint address wins over a --namespace beside it, wherever it
// stands, as in Dynamo's own worker.
func (l *loader) commandLineLayer(line *commandLine) {
	var late []func()
	for _, a := range line.assignments {
		switch {
		case a.variable != nil:
			l.setsNothing(a.variable, a.text, a.origin)
		case a.binding == nil:
			l.applySet(a.text, a.origin)
		case a.binding.keys[0] == endpointKey:
			late = append(late, func() { l.apply(a.binding, a.text, a.origin) })
		default:
			l.apply(a.binding, a.text, a.origin)
		}
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
	for _, k := range []string{argsKey, overrideKey} {
		if name == k || strings.HasPrefix(name, k+".") {
			l.setTree(k, name, value, origin)
			return
		}
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
