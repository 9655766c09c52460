// Package engine runs an inference engine as a child process and makes it
// look like a function: a prompt goes in, a stream of tokens comes out.
//
// The child may be anything that speaks the protocol of pkg/engine/ipc
// (docs/engine-protocol.md): the Python bridge around TensorRT-LLM
// (pkg/engine/bridge) or the simulated engine (pkg/engine/sim). It is treated
// as untrusted input: whatever it writes, prints or fails to do, the worker
// keeps running, no stream is left without an end, and every wait is bounded.
//
// # Ownership
//
// A Process owns four goroutines: one reads the channel and hands tokens to
// streams, one writes the channel, one waits for the child, one decides about
// its end. All of them are gone when Done is closed. Methods of a Process may
// be called from any goroutine; Next of a Stream belongs to one goroutine.
//
// The parts are kept apart so that each can be replaced: child.go knows
// processes and signals, startup.go the handshake, demux.go and stream.go the
// protocol, stop.go the order of ending. Restarting a dead engine is not done
// here: a Process is one life.
package engine

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"time"

	"github.com/rs/zerolog"

	"dynworker/pkg/engine/ipc"
)

// Config says how to start an engine and how long to wait for it. Zero values
// of the durations and sizes mean the defaults named here.
type Config struct {
	// Command is the program and its arguments. A program without a slash is
	// looked up in the worker's PATH.
	Command []string
	// Env is the complete environment of the engine as KEY=VALUE; nothing is
	// inherited. The variable that names the channel is added.
	Env []string
	// Dir is the engine's working directory; empty is the worker's own.
	Dir string
	// Configure is what the engine is told after its hello. Its Protocol field
	// is filled in.
	Configure ipc.Configure

	// HelloTimeout bounds the time from the spawn to the hello (60 s).
	HelloTimeout time.Duration
	// StartInactivity is how long a loading engine may be silent on its channel
	// before the start is given up (10 min). Each progress message starts it anew.
	StartInactivity time.Duration
	// StartTimeout bounds the whole start however active the engine is; 0 is no bound.
	StartTimeout time.Duration
	// StopTimeout is how long an engine may take to obey a shutdown message (10 s).
	StopTimeout time.Duration
	// TermTimeout is how long it may then take to obey SIGTERM (5 s).
	TermTimeout time.Duration
	// KillTimeout is how long to wait for the kernel after SIGKILL (10 s). A
	// process that is still there is reported and left behind.
	KillTimeout time.Duration

	// MaxPending bounds the bytes of output that one stream may hold for a slow
	// reader (8 MiB, and what prompt log probabilities need on top).
	MaxPending int
	// MaxQueued bounds the bytes waiting to be written to the engine; Generate
	// waits when it is reached (128 MiB).
	MaxQueued int

	// KeepSteps hands out every record as an Output of its own. Without it the
	// records of a choice that wait for a slow reader are merged into one.
	KeepSteps bool

	// OutputRate is how many lines a second of the engine's stdout and stderr
	// are logged (50), OutputBurst how many at once (200). The rest is counted.
	OutputRate  int
	OutputBurst int

	// Logger receives what the worker has to say about the engine.
	Logger zerolog.Logger
	// OutputLogger receives the engine's own lines; nil means Logger. It is apart
	// so that the two can have different levels.
	OutputLogger *zerolog.Logger

	// OnProgress, OnStats and OnEvents are told about messages of their kinds.
	// They run on the goroutine that reads the channel and must not block. The
	// payload of OnEvents (a JSON array) is valid during the call only.
	OnProgress func(ipc.Progress)
	OnStats    func(Stats)
	OnEvents   func(payload []byte)

	// settle bounds how long the second sign of an engine's death is waited for
	// after the first; tests change it.
	settle time.Duration
}

// withDefaults returns c with every zero duration and size replaced.
func (c Config) withDefaults() Config {
	setDefault(&c.HelloTimeout, 60*time.Second)
	setDefault(&c.StartInactivity, 10*time.Minute)
	setDefault(&c.StopTimeout, 10*time.Second)
	setDefault(&c.TermTimeout, 5*time.Second)
	setDefault(&c.KillTimeout, 10*time.Second)
	setDefault(&c.settle, time.Second)
	setDefault(&c.MaxPending, 8<<20)
	setDefault(&c.MaxQueued, 128<<20)
	setDefault(&c.OutputRate, 50)
	setDefault(&c.OutputBurst, 200)
	if c.OutputLogger == nil {
		c.OutputLogger = &c.Logger
	}
	c.Configure.Protocol = ipc.Version
	return c
}

func setDefault[T time.Duration | int](v *T, d T) {
	if *v <= 0 {
		*v = d
	}
}

// ErrEngineDead is wrapped by every error that means: the engine process is
// gone or its channel is, nothing more will come. What killed it is wrapped
// alongside.
var ErrEngineDead = errors.New("engine is dead")

// ErrStopped is the cause of an engine's end when Stop was called. New
// requests get it (not ErrEngineDead) while the engine is still stopping.
var ErrStopped = errors.New("engine was stopped")

// ErrChannelClosed is the cause when the engine closed its end of the channel
// without a word and without exiting in time.
var ErrChannelClosed = errors.New("engine closed its channel")

// ErrOverflow ends a stream whose reader fell so far behind, or whose engine
// sent so much, that its pending output passed the limit.
var ErrOverflow = errors.New("engine stream holds too much undelivered output")

// ErrClosed is returned by Next of a stream that was closed.
var ErrClosed = errors.New("engine stream is closed")

// VersionError means that engine and worker speak different protocol versions.
type VersionError struct {
	Engine, Worker int
	Program        string // the engine program's name and version
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("engine %s speaks engine protocol %d, this worker speaks %d: run the engine program that belongs to this worker's release",
		e.Program, e.Engine, e.Worker)
}

// TimeoutError means that a step of the engine's start took too long.
type TimeoutError struct {
	Waiting string        // what was waited for
	Bound   time.Duration // how long
}

func (e *TimeoutError) Error() string {
	return fmt.Sprintf("engine: no %s within %v", e.Waiting, e.Bound)
}

// ProtocolError means that the engine broke the protocol in a way that leaves
// the channel useless.
type ProtocolError struct {
	Reason string
	Err    error
}

func (e *ProtocolError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("engine broke the protocol: %s: %v", e.Reason, e.Err)
	}
	return "engine broke the protocol: " + e.Reason
}

// Unwrap returns the parser's error, if there was one.
func (e *ProtocolError) Unwrap() error { return e.Err }

// ExitError says how the engine process ended.
type ExitError struct {
	Code   int            // exit status; -1 when a signal ended the process
	Signal syscall.Signal // 0 when it exited
}

func (e *ExitError) Error() string {
	if e.Signal != 0 {
		return fmt.Sprintf("engine process was killed by signal %d (%v)", int(e.Signal), e.Signal)
	}
	return fmt.Sprintf("engine process exited with status %d", e.Code)
}

// Exit is the record of an engine's end.
type Exit struct {
	// Cause is why: ErrStopped, an ipc.Fatal, a *ProtocolError, an *ExitError,
	// ErrChannelClosed, or what made the start fail.
	Cause error
	PID   int
	// Status is how the process ended; nil when there was no process or it
	// outlived SIGKILL and KillTimeout.
	Status *ExitError
	// Goodbye is the reason given in the engine's goodbye message, if it sent one.
	Goodbye string
	// Forced says that the engine did not obey the shutdown message and had to
	// be signalled.
	Forced bool
	// Lines are the last lines of stdout and stderr, oldest first.
	Lines []string
	// DroppedLines is how many lines were not logged because of the rate limit.
	DroppedLines uint64
}

// Error gives the cause and the exit status on one line, without the engine's
// output.
func (e *Exit) Error() string {
	var status *ExitError
	if e.Status == nil || errors.As(e.Cause, &status) {
		return e.Cause.Error()
	}
	return fmt.Sprintf("%v (%v)", e.Cause, e.Status)
}

// Unwrap returns the cause.
func (e *Exit) Unwrap() error { return e.Cause }

// MarshalZerologObject writes the whole record, output included: the report
// for the log when an engine has died.
func (e *Exit) MarshalZerologObject(ev *zerolog.Event) {
	ev.AnErr("cause", e.Cause).Int("pid", e.PID).Bool("forced", e.Forced)
	if e.Status != nil {
		ev.Int("exit_code", e.Status.Code)
		if e.Status.Signal != 0 {
			ev.Stringer("signal", e.Status.Signal)
		}
	}
	if e.Goodbye != "" {
		ev.Str("goodbye", e.Goodbye)
	}
	if e.DroppedLines > 0 {
		ev.Uint64("dropped_lines", e.DroppedLines)
	}
	if len(e.Lines) > 0 {
		ev.Strs("last_lines", e.Lines)
	}
}

// StartError is returned when an engine could not be started. Whatever had
// been spawned is gone by then.
type StartError struct {
	Err  error
	Exit *Exit // nil when nothing was spawned
}

// Error is for a person at a terminal: the cause, how the process ended, and
// the last lines that it printed.
func (e *StartError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "start engine: %v", e.Err)
	if e.Exit == nil {
		return b.String()
	}
	var status *ExitError
	if e.Exit.Status != nil && !errors.As(e.Err, &status) {
		fmt.Fprintf(&b, " (%v)", e.Exit.Status)
	}
	if lines := e.Exit.Lines; len(lines) > 0 {
		b.WriteString("; last lines of its output:")
		for _, line := range lines[max(0, len(lines)-startErrorLines):] {
			b.WriteString("\n  | " + line)
		}
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *StartError) Unwrap() error { return e.Err }

// startErrorLines is how much output a StartError shows; Exit holds more.
const startErrorLines = 20
