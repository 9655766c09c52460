package config

import (
	"fmt"
	"strings"

	"github.com/spf13/pflag"

	"dynworker/pkg/engineargs"
)

// scan does what Python's parser does and pflag does not: it takes dynamic
// flags out, writes abbreviated flags in full, never takes a flag for the value
// of the one before it, and joins the values of a flag that has several.
func (line *commandLine) scan(fs *pflag.FlagSet, args []string) ([]string, error) {
	var out []string
	for i := 0; i < len(args); i++ {
		arg := args[i]
		value := func() (string, bool) {
			if i+1 >= len(args) || strings.HasPrefix(args[i+1], "--") {
				return "", false
			}
			i++
			return args[i], true
		}
		switch {
		case arg == "--":
			return append(out, args[i:]...), nil
		case strings.HasPrefix(arg, engineargs.FlagPrefix):
			if err := line.scanDynamic(arg, value); err != nil {
				return nil, err
			}
		case strings.HasPrefix(arg, "--"):
			name, text, assigned := strings.Cut(arg, "=")
			f, err := fullFlag(fs, name)
			if err != nil {
				return nil, err
			}
			if f == nil {
				return append(out, args[i:]...), nil // pflag says what is wrong
			}
			if f.NoOptDefVal == "" && !assigned {
				if text, assigned = value(); !assigned {
					return nil, &Problem{Key: flagKey(f), Origin: Origin{Kind: FromFlag, Name: "--" + f.Name}, Kind: ErrValue, Reason: "needs a value"}
				}
			}
			for several(f) {
				more, ok := value()
				if !ok {
					break
				}
				text += " " + more
			}
			full := "--" + f.Name
			if assigned {
				full += "=" + text
			}
			out = append(out, full)
		default:
			out = append(out, arg)
		}
	}
	return out, nil
}

// scanDynamic takes --trtllm.a.b and the value behind it.
func (line *commandLine) scanDynamic(arg string, value func() (string, bool)) error {
	name, _, assigned := strings.Cut(arg, "=")
	problem := &Problem{Key: name, Kind: ErrSyntax}
	if assigned {
		problem.Reason = "takes its value as the next word, not after an equals sign"
		return problem
	}
	text, ok := value()
	if !ok {
		problem.Reason = "needs a value"
		return problem
	}
	line.dynamic = append(line.dynamic, engineargs.Flag{Name: name, Value: text})
	return nil
}

// fullFlag finds the flag that name is, or that it alone is the beginning of.
// A flag that does not exist gives nil.
func fullFlag(fs *pflag.FlagSet, name string) (*pflag.Flag, error) {
	name = strings.TrimPrefix(name, "--")
	if f := fs.Lookup(name); f != nil {
		return f, nil
	}
	var found []*pflag.Flag
	if name != "" {
		fs.VisitAll(func(f *pflag.Flag) {
			if strings.HasPrefix(f.Name, name) {
				found = append(found, f)
			}
		})
	}
	switch len(found) {
	case 0:
		return nil, nil
	case 1:
		return found[0], nil
	}
	var names []string
	for _, f := range found {
		names = append(names, "--"+f.Name)
	}
	return nil, &Problem{Key: "--" + name, Kind: ErrUnknownKey, Reason: fmt.Sprintf("could be any of %s", strings.Join(names, ", "))}
}

// several reports whether a flag takes all the words up to the next flag.
func several(f *pflag.Flag) bool {
	r, ok := f.Value.(*recorder)
	return ok && r.v != nil && r.v.several
}

// flagKey is what problems of a flag are reported under.
func flagKey(f *pflag.Flag) string {
	if r, ok := f.Value.(*recorder); ok && r.b != nil {
		return r.b.keys[0]
	}
	return "--" + f.Name
}
