package dockerfile

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
)

// Images are the targets that are shipped.
var Images = []string{"worker", "sim"}

// copied are the only files that an image gets from another stage, and their places: the one binary and its init.
var copied = map[string]string{"/out/worker": "/usr/local/bin/worker", "/usr/bin/tini-static": "/usr/bin/tini"}

var (
	numericUser = regexp.MustCompile(`^[1-9][0-9]*:[1-9][0-9]*$`)
	tagged      = regexp.MustCompile(`(:[A-Za-z0-9_][A-Za-z0-9_.-]*|@sha256:[0-9a-f]{64})$`)
	install     = regexp.MustCompile(`\bapt(-get)? (-\S+ )*install\b`)
	download    = regexp.MustCompile(`\b(curl|wget|git clone|pip3? install|go install|go get)\b`)
)

// Check holds a Dockerfile to the rules of this project and returns what breaks them. context are the files that the build sees.
func Check(text []byte, context []string) ([]string, error) {
	p, err := newPlanner(text, nil)
	if err != nil {
		return nil, err
	}
	c := &checker{context: context}
	for _, s := range p.stages {
		for _, cmd := range s.Commands {
			c.instruction(cmd)
		}
	}
	if len(c.broken) > 0 {
		return c.broken, nil // a plan may not even be possible
	}
	for _, target := range Images {
		plan, err := MakePlan(text, target, nil)
		if err != nil {
			return nil, err
		}
		for i := range plan.Stages {
			c.stage(&plan.Stages[i])
		}
		c.image(&plan.Stages[len(plan.Stages)-1])
	}
	return c.broken, nil
}

type checker struct {
	context []string
	broken  []string
}

func (c *checker) breaks(format string, args ...any) {
	if problem := fmt.Sprintf(format, args...); !slices.Contains(c.broken, problem) {
		c.broken = append(c.broken, problem)
	}
}

// instruction checks what may be said at all.
func (c *checker) instruction(cmd instructions.Command) {
	switch cmd := cmd.(type) {
	case *instructions.AddCommand:
		c.breaks("line %d: ADD fetches and unpacks unseen; COPY does neither", line(cmd))
	case *instructions.EntrypointCommand:
		if cmd.PrependShell {
			c.breaks("line %d: ENTRYPOINT in shell form makes a shell PID 1, which swallows SIGTERM", line(cmd))
		}
	case *instructions.CmdCommand:
		if cmd.PrependShell {
			c.breaks("line %d: CMD in shell form", line(cmd))
		}
	case *instructions.ShellCommand, *instructions.OnbuildCommand, *instructions.HealthCheckCommand, *instructions.VolumeCommand:
		c.breaks("line %d: %s has no place here", line(cmd), strings.ToUpper(cmd.Name()))
	}
}

// stage checks how a stage comes about.
func (c *checker) stage(s *Stage) {
	if !tagged.MatchString(s.Base) || strings.HasSuffix(s.Base, ":latest") {
		c.breaks("stage %s: its base %q is not pinned to a version", s.Name, s.Base)
	}
	for _, step := range s.Steps {
		switch {
		case step.Run != nil:
			c.run(step.Line, strings.Join(step.Run.Argv, " "))
		case step.Copy != nil && step.Copy.From == "":
			c.fromContext(step.Line, step.Copy)
		}
	}
}

func (c *checker) run(line int, command string) {
	if install.MatchString(command) {
		for _, part := range []string{"apt-get update", "--no-install-recommends", "rm -rf /var/lib/apt/lists/*", "--yes"} {
			if !strings.Contains(command, part) {
				c.breaks("line %d: installs packages without %s", line, part)
			}
		}
	}
	if found := download.FindString(command); found != "" {
		c.breaks("line %d: %s brings in something without a version or checksum of its own", line, found)
	}
	if strings.Contains(command, "go build") && !strings.Contains(command, " -trimpath ") {
		c.breaks("line %d: builds without -trimpath", line)
	}
	if strings.Contains(command, "-z now") || strings.Contains(command, "-z,now") {
		c.breaks("line %d: links with -z now, but the driver's library may not be there", line)
	}
}

// fromContext checks that what is copied is there, since a list of what is left out is easily too long.
func (c *checker) fromContext(line int, cp *Copy) {
	for _, source := range cp.Sources {
		source = path.Clean(source)
		there := slices.ContainsFunc(c.context, func(f string) bool { return source == "." || f == source || strings.HasPrefix(f, source+"/") })
		if !there {
			c.breaks("line %d: %s is not in the build's context", line, source)
		}
	}
}

// image checks how a container starts and what is in its image.
func (c *checker) image(s *Stage) {
	i := &s.Image
	if !slices.Equal(i.Entrypoint, []string{"/usr/bin/tini", "--", "/usr/local/bin/worker"}) {
		c.breaks("stage %s: ENTRYPOINT is %q; it has to be the worker under tini, which signals the worker alone", s.Name, i.Entrypoint)
	}
	if len(i.Cmd) == 0 || i.Cmd[0] != "serve" {
		c.breaks("stage %s: CMD %q does not serve", s.Name, i.Cmd)
	}
	if !numericUser.MatchString(i.User) {
		c.breaks("stage %s: USER %q is not a number other than root's with a group", s.Name, i.User)
	}
	if i.StopSignal != "" && i.StopSignal != "SIGTERM" {
		c.breaks("stage %s: STOPSIGNAL %s does not start a drain", s.Name, i.StopSignal)
	}
	if len(i.Exposed) == 0 {
		c.breaks("stage %s: no EXPOSE", s.Name)
	}
	for _, name := range []string{"title", "description", "version"} {
		if i.Labels["org.opencontainers.image."+name] == "" {
			c.breaks("stage %s: no label for its %s", s.Name, name)
		}
	}
	got := map[string]string{}
	for _, step := range s.Steps {
		if step.Run != nil && install.MatchString(strings.Join(step.Run.Argv, " ")) {
			c.breaks("line %d: an image gets packages that its base does not have", step.Line)
		}
		if cp := step.Copy; cp != nil && cp.From != "" {
			for _, source := range cp.Sources {
				got[source] = cp.Dest
			}
		}
	}
	for source, dest := range got {
		if copied[source] != dest {
			c.breaks("stage %s: %s is copied to %s; only the binary and its init come from another stage", s.Name, source, dest)
		}
	}
	if len(got) != len(copied) {
		c.breaks("stage %s: gets %d files from other stages, not %d", s.Name, len(got), len(copied))
	}
}
