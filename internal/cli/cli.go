// Package cli is the command line of the worker: serve, check, ask, drain, version, and the hidden command that is the simulated engine.
//
// It is a package and not part of cmd/worker because cmd/demo is the same program with servers in it. It knows exit codes and prints for people; the work is done in internal/app.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"dynworker/internal/app"
	"dynworker/internal/logging"
	"dynworker/pkg/config"
	"dynworker/pkg/engine/sim"
)

// Exit codes. docs/operations.md explains them to operators.
const (
	// ExitOK: served and drained, or did what was asked.
	ExitOK = 0
	// ExitFailure: could not start, or the engine died, or the question got no answer.
	ExitFailure = 1
	// ExitConfig: a setting, a file or a flag is wrong; the message names it.
	ExitConfig = 2
	// ExitForced: a second signal cut the drain short.
	ExitForced = 3
)

// Version is the worker's version; a release build sets it with -ldflags "-X dynworker/internal/cli.Version=…".
var Version = "dev"

// Process is what a command may use of its process.
type Process struct {
	Args    []string // without the program's name
	Environ []string
	Stdout  io.Writer
	Stderr  io.Writer
	// Executable is the path of the running program.
	Executable string
	// OnServing is passed on to the worker, for programs that have one inside.
	OnServing func(app.Serving)
	// PlainLog writes log lines in place, for programs that follow the log and never block it.
	PlainLog bool
	// Exit ends the process at once; os.Exit in a real one.
	Exit func(code int)
	// Signals stand in for SIGTERM and SIGINT where several workers share a process; nil means the real ones.
	Signals <-chan os.Signal
}

// OSProcess is the process as it is.
func OSProcess() (*Process, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the running program: %w", err)
	}
	return &Process{Args: os.Args[1:], Environ: os.Environ(), Stdout: os.Stdout, Stderr: os.Stderr, Executable: exe, Exit: os.Exit}, nil
}

const usage = `worker: a Dynamo worker for TensorRT-LLM

  worker serve [--config FILE] [--set key=value …]   serve (also without the word when only flags are given)
  worker check [--config FILE] [--set key=value …]   load the configuration, print every setting and engine argument and where it came from
  worker ask   --tokens 1,2,3 [options]              send one request to a registered worker and print the answer
  worker drain [--wait] [--config FILE] …            take the worker on this host out of service; for a preStop hook
  worker version                                     print the version

`

// Run runs one command and returns the process's exit code.
func (p *Process) Run() int {
	command, args := "serve", p.Args
	if len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		command, args = args[0], args[1:]
	} else if len(args) > 0 && (args[0] == "--help" || args[0] == "-h") {
		command = "help"
	}
	switch command {
	case "serve":
		return p.serve(args)
	case "check":
		return p.check(args)
	case "ask":
		return p.ask(args)
	case "drain":
		return p.drain(args)
	case "version":
		fmt.Fprintln(p.Stdout, Version)
		return ExitOK
	case "help":
		fmt.Fprint(p.Stdout, usage, config.Usage())
		return ExitOK
	case app.EngineCommand:
		return sim.Main()
	}
	fmt.Fprintf(p.Stderr, "worker: unknown command %q\n\n%s", command, usage)
	return ExitConfig
}

// loaded is a configuration and what it comes to.
type loaded struct {
	cfg      *config.Config
	report   *config.Report
	resolved *config.Resolved
}

// warnings are all that are worth one.
func (l *loaded) warnings() []config.Warning {
	all := l.report.Warnings
	if l.resolved != nil {
		all = append(all[:len(all):len(all)], l.resolved.Warnings...)
	}
	return all
}

// servable finds what keeps a configuration from being served here and now: roles that are not to be had yet, and files that are not there.
func (l *loaded) servable() error {
	var all config.Errors
	for _, err := range []error{l.cfg.CheckServing(), l.cfg.CheckFiles(nil)} {
		var some config.Errors
		if errors.As(err, &some) {
			all = append(all, some...)
		}
	}
	if len(all) == 0 {
		return nil
	}
	return all
}

// load reads the configuration of a worker and works out the arguments of its engine.
func (p *Process) load(args []string) (*loaded, error) {
	cfg, report, err := config.Load(args, p.Environ, os.ReadFile)
	l := &loaded{cfg: cfg, report: report}
	if err == nil {
		l.resolved, err = app.Resolve(cfg, p.Environ)
	}
	return l, err
}

// loadClient reads the configuration for a command that serves nothing.
func (p *Process) loadClient(args []string) (*config.Config, int) {
	cfg, _, err := config.Load(args, p.Environ, os.ReadFile)
	return cfg, p.complain(err)
}

// complain prints every problem on a line of its own and returns the exit code for them.
func (p *Process) complain(err error) int {
	var problems config.Errors
	switch {
	case err == nil:
		return ExitOK
	case errors.Is(err, config.ErrHelp):
		fmt.Fprint(p.Stdout, usage, config.Usage())
	case errors.As(err, &problems):
		for _, problem := range problems {
			fmt.Fprintln(p.Stderr, "worker: "+problem.Error())
		}
	default:
		fmt.Fprintln(p.Stderr, "worker: "+err.Error())
	}
	return ExitConfig
}

func (p *Process) serve(args []string) int {
	l, err := p.load(args)
	if err == nil {
		err = l.servable()
	}
	if err != nil {
		return p.complain(err)
	}
	p.tuneMemory()
	cfg := l.cfg
	stream, closeStream := p.logStream()
	defer closeStream()
	log, err := logging.New(logging.Options{Level: cfg.Log.Level, Format: logging.Format(cfg.Log.Format), Writer: p.logWriter(stream)})
	if err != nil {
		fmt.Fprintln(p.Stderr, "worker: "+err.Error())
		return ExitConfig
	}
	for _, warning := range l.warnings() {
		log.Warn().Msg(warning.String())
	}
	emergency := &app.Emergency{}
	ctx, stop := p.signals(func() {
		emergency.Run(emergencyTimeout)
		closeStream()
	})
	defer stop()
	log.Info().Str("version", Version).Int("pid", os.Getpid()).Str("handler", cfg.Handler).Str("engine", cfg.Engine.Kind).Str("request_plane", cfg.RequestPlane.Kind).Str("namespace", cfg.ServingNamespace()).Msg("worker starts")
	err = app.Run(ctx, cfg, app.Options{Version: Version, Logger: log, Executable: p.Executable, Environ: p.Environ, Resolved: l.resolved, LostLogLines: stream.Lost, Emergency: emergency, OnServing: p.OnServing})
	if err != nil {
		log.Error().Err(err).Msg("worker ends")
		return ExitFailure
	}
	log.Info().Msg("worker ends")
	return ExitOK
}

// logStream is where log lines go. Serving never waits for it, and a log collector that goes away does not take the worker along: without a taker for SIGPIPE, Go ends a program whose stderr is a broken pipe.
func (p *Process) logStream() (stream *logging.Detached, flush func()) {
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	stream = logging.Detach(p.Stderr)
	return stream, func() {
		ctx, cancel := context.WithTimeout(context.Background(), flushTimeout)
		defer cancel()
		// What could not be written in time is lost; there is nowhere left to say so.
		_ = stream.Close(ctx)
	}
}

// heapGrowth is how much the heap may grow between two collections, in percent. The worker's live heap is a few MiB, so that twice Go's own value costs little memory and saves half of the collections.
const heapGrowth = 200

// tuneMemory sets the collector up for a small heap, unless the operator has done it.
func (p *Process) tuneMemory() {
	if !slices.ContainsFunc(p.Environ, func(kv string) bool { return strings.HasPrefix(kv, "GOGC=") }) {
		debug.SetGCPercent(heapGrowth)
	}
}

func (p *Process) logWriter(stream *logging.Detached) io.Writer {
	if p.PlainLog {
		return p.Stderr
	}
	return stream
}

// flushTimeout bounds how long the last log lines may keep an ending process.
const flushTimeout = time.Second

// emergencyTimeout bounds what a second signal still lets the worker try: to take its records out of discovery.
const emergencyTimeout = time.Second

// signals gives a context that ends with the first SIGTERM or SIGINT. The second one ends the process, after last.
func (p *Process) signals(last func()) (context.Context, func()) {
	ctx, cancel := context.WithCancel(context.Background())
	got, unsubscribe := p.Signals, func() {}
	if got == nil {
		real := make(chan os.Signal, 2)
		signal.Notify(real, syscall.SIGTERM, syscall.SIGINT)
		got, unsubscribe = real, func() { signal.Stop(real) }
	}
	done := make(chan struct{})
	go func() {
		for {
			select {
			case <-got:
			case <-done:
				return
			}
			if ctx.Err() != nil {
				last()
				p.Exit(ExitForced)
			}
			cancel()
		}
	}()
	return ctx, func() {
		unsubscribe()
		close(done)
		cancel()
	}
}
