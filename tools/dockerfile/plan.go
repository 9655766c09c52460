// Package dockerfile reads a Dockerfile with BuildKit's own parser: it turns a target into steps that can be carried out without BuildKit, and holds the file to rules.
//
// It is in a module of its own, so that BuildKit's many dependencies are none of the worker's.
package dockerfile

import (
	"bytes"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"github.com/moby/buildkit/frontend/dockerfile/shell"
)

// Plan is what building one target comes to.
type Plan struct {
	// Stages are those that the target needs, in the order of the file; the last one is the target.
	Stages []Stage `json:"stages"`
	// Context are the files of the build context, relative to its root, without those that .dockerignore leaves out.
	Context []string `json:"context"`
}

// Stage is one FROM with its steps, every variable replaced.
type Stage struct {
	Name string `json:"name"`
	// Base is an image, never another stage.
	Base  string `json:"base"`
	Steps []Step `json:"steps"`
	Image Image  `json:"image"`
}

// Step is one RUN, COPY or WORKDIR. Exactly one of its parts is set.
type Step struct {
	Line    int    `json:"line"`
	Run     *Run   `json:"run,omitempty"`
	Copy    *Copy  `json:"copy,omitempty"`
	Workdir string `json:"workdir,omitempty"`
}

// Run is a command in the stage's file system.
type Run struct {
	Argv    []string `json:"argv"`
	Env     []string `json:"env"`
	Workdir string   `json:"workdir"`
	User    string   `json:"user"`
	// Caches are folders that outlive the build.
	Caches []string `json:"caches"`
}

// Copy brings files from the context, or from another stage, into this one.
type Copy struct {
	// From is the stage, empty for the context.
	From    string   `json:"from"`
	Sources []string `json:"sources"`
	// Dest is absolute; with a slash at its end it is a folder.
	Dest string `json:"dest"`
}

// Image is how a container of the stage is started.
type Image struct {
	Entrypoint []string          `json:"entrypoint"`
	Cmd        []string          `json:"cmd"`
	Env        []string          `json:"env"`
	Labels     map[string]string `json:"labels"`
	User       string            `json:"user"`
	Workdir    string            `json:"workdir"`
	Exposed    []string          `json:"exposed"`
	StopSignal string            `json:"stop_signal"`
}

// MakePlan plans a target with the given build arguments. What a Dockerfile can say and a plan cannot is an error with its line.
func MakePlan(text []byte, target string, args map[string]string) (*Plan, error) {
	p, err := newPlanner(text, args)
	if err != nil {
		return nil, err
	}
	needed, err := p.needed(target)
	if err != nil {
		return nil, err
	}
	plan := &Plan{}
	for _, s := range p.stages {
		if !slices.Contains(needed, s.Name) {
			continue
		}
		stage, err := p.stage(&s)
		if err != nil {
			return nil, fmt.Errorf("stage %s: %w", s.Name, err)
		}
		plan.Stages = append(plan.Stages, *stage)
	}
	return plan, nil
}

// planner knows the file as a whole.
type planner struct {
	lex    *shell.Lex
	stages []instructions.Stage
	// global are the arguments before the first stage, given are those of the build.
	global, given map[string]string
}

func newPlanner(text []byte, args map[string]string) (*planner, error) {
	ast, err := parser.Parse(bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	stages, meta, err := instructions.Parse(ast.AST, nil)
	if err != nil {
		return nil, err
	}
	p := &planner{lex: shell.NewLex(ast.EscapeToken), stages: stages, global: map[string]string{}, given: args}
	for _, cmd := range meta {
		for _, a := range cmd.Args {
			if err := p.argument(a, p.global, p.global); err != nil {
				return nil, err
			}
		}
	}
	for i := range stages {
		if stages[i].Name == "" {
			return nil, fmt.Errorf("stage %d has no name", i)
		}
	}
	return p, nil
}

// argument adds the value of an ARG, if it has one, to into.
func (p *planner) argument(a instructions.KeyValuePairOptional, env, into map[string]string) error {
	if v, ok := p.given[a.Key]; ok {
		into[a.Key] = v
		return nil
	}
	if a.Value == nil {
		if v, ok := p.global[a.Key]; ok {
			into[a.Key] = v
		}
		return nil
	}
	v, err := p.expand(*a.Value, env)
	into[a.Key] = v
	return err
}

func (p *planner) expand(word string, env map[string]string) (string, error) {
	out, _, err := p.lex.ProcessWord(word, shell.EnvsFromSlice(pairs(env)))
	return out, err
}

// needed are the names of the stages that a target copies from, itself included.
func (p *planner) needed(target string) ([]string, error) {
	i := slices.IndexFunc(p.stages, func(s instructions.Stage) bool { return s.Name == target })
	if i < 0 {
		return nil, fmt.Errorf("no stage is named %q", target)
	}
	out := []string{target}
	for _, cmd := range p.stages[i].Commands {
		if c, ok := cmd.(*instructions.CopyCommand); ok && c.From != "" && !slices.Contains(out, c.From) {
			more, err := p.needed(c.From)
			if err != nil {
				return nil, fmt.Errorf("line %d: %w", line(cmd), err)
			}
			out = append(out, more...)
		}
	}
	return out, nil
}

// builder makes one stage.
type builder struct {
	p         *planner
	out       *Stage
	env, args map[string]string
}

func (p *planner) stage(s *instructions.Stage) (*Stage, error) {
	base, err := p.expand(s.BaseName, p.global)
	if err != nil {
		return nil, err
	}
	if slices.ContainsFunc(p.stages, func(other instructions.Stage) bool { return other.Name == base }) {
		return nil, fmt.Errorf("its base is the stage %s; only images are known here", base)
	}
	b := &builder{p: p, out: &Stage{Name: s.Name, Base: base, Image: Image{Labels: map[string]string{}, Workdir: "/"}}, env: map[string]string{}, args: map[string]string{}}
	for _, cmd := range s.Commands {
		if err := b.command(cmd); err != nil {
			return nil, fmt.Errorf("line %d: %w", line(cmd), err)
		}
	}
	b.out.Image.Env = pairs(b.env)
	return b.out, nil
}

func (b *builder) command(cmd instructions.Command) error {
	known := map[string]string{}
	for _, m := range []map[string]string{b.args, b.env} {
		for k, v := range m {
			known[k] = v
		}
	}
	if a, ok := cmd.(*instructions.ArgCommand); ok {
		for _, one := range a.Args {
			if err := b.p.argument(one, known, b.args); err != nil {
				return err
			}
		}
		return nil
	}
	if e, ok := cmd.(instructions.SupportsSingleWordExpansion); ok {
		if err := e.Expand(func(word string) (string, error) { return b.p.expand(word, known) }); err != nil {
			return err
		}
	}
	image := &b.out.Image
	switch c := cmd.(type) {
	case *instructions.EnvCommand:
		for _, e := range c.Env {
			b.env[e.Key] = e.Value
		}
	case *instructions.LabelCommand:
		for _, l := range c.Labels {
			image.Labels[l.Key] = l.Value
		}
	case *instructions.WorkdirCommand:
		image.Workdir = path.Join(image.Workdir, c.Path)
		if path.IsAbs(c.Path) {
			image.Workdir = path.Clean(c.Path)
		}
		b.step(cmd, Step{Workdir: image.Workdir})
	case *instructions.UserCommand:
		image.User = c.User
	case *instructions.ExposeCommand:
		image.Exposed = append(image.Exposed, c.Ports...)
	case *instructions.StopSignalCommand:
		image.StopSignal = c.Signal
	case *instructions.EntrypointCommand:
		image.Entrypoint, image.Cmd = argv(c.ShellDependantCmdLine), nil
	case *instructions.CmdCommand:
		image.Cmd = argv(c.ShellDependantCmdLine)
	case *instructions.RunCommand:
		return b.run(c, known)
	case *instructions.CopyCommand:
		return b.copy(c)
	default:
		return fmt.Errorf("%s has no place in a plan", cmd.Name())
	}
	return nil
}

func (b *builder) step(cmd instructions.Command, s Step) {
	s.Line = line(cmd)
	b.out.Steps = append(b.out.Steps, s)
}

func (b *builder) run(c *instructions.RunCommand, env map[string]string) error {
	if len(c.Files) > 0 {
		return fmt.Errorf("a RUN with a here-document has no place in a plan")
	}
	r := &Run{Argv: argv(c.ShellDependantCmdLine), Env: pairs(env), Workdir: b.out.Image.Workdir, User: b.out.Image.User, Caches: []string{}}
	for _, m := range instructions.GetMounts(c) {
		if m.Type != instructions.MountTypeCache {
			return fmt.Errorf("a mount of type %s has no place in a plan", m.Type)
		}
		r.Caches = append(r.Caches, m.Target)
	}
	b.step(c, Step{Run: r})
	return nil
}

func (b *builder) copy(c *instructions.CopyCommand) error {
	if len(c.SourceContents) > 0 || c.Chown != "" || c.Chmod != "" || c.Parents || c.Link || len(c.ExcludePatterns) > 0 {
		return fmt.Errorf("a COPY with options has no place in a plan")
	}
	dest := c.DestPath
	if !path.IsAbs(dest) {
		dest = path.Join(b.out.Image.Workdir, dest)
	}
	if strings.HasSuffix(c.DestPath, "/") || c.DestPath == "." {
		dest += "/"
	}
	b.step(c, Step{Copy: &Copy{From: c.From, Sources: c.SourcePaths, Dest: dest}})
	return nil
}

// argv is a command line as it is executed; the shell form goes through a shell.
func argv(c instructions.ShellDependantCmdLine) []string {
	if c.PrependShell {
		return []string{"/bin/sh", "-c", strings.Join(c.CmdLine, " ")}
	}
	return c.CmdLine
}

// line is where a command begins.
func line(cmd instructions.Command) int {
	if where := cmd.Location(); len(where) > 0 {
		return where[0].Start.Line
	}
	return 0
}

// pairs writes a map as KEY=VALUE in the order of the keys.
func pairs(m map[string]string) []string {
	out := make([]string, 0, len(m))
	for k, v := range m {
		out = append(out, k+"="+v)
	}
	slices.Sort(out)
	return out
}
