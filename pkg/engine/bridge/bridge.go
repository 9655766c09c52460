// Package bridge carries the engine program that runs TensorRT-LLM: a small
// Python package, embedded in the worker's binary, that speaks the protocol of
// pkg/engine/ipc on one side and calls tensorrt_llm.LLM on the other.
//
// The worker writes the program to a directory of its own (Install) and starts
// it like any other engine (Command, pkg/engine). It has to be a real file:
// MPI and multiprocessing import a program's main file again in every rank that
// they spawn, so a program passed on the command line or read from a pipe could
// not run a model on more than one GPU.
//
// The program needs Python 3.10 or later, Linux, and nothing beside the
// standard library and the tensorrt_llm package of the environment that it is
// started in. It decides and checks nothing that the worker has decided or
// checked. What the package's build can do is found out by probing and reported
// in the handshake; see python/dynworker_bridge/probes.py.
//
// testdata/standin is a tensorrt_llm without a GPU; bridgetest starts the
// program on it.
package bridge

import (
	"embed"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// The files are named by pattern because embedding a folder leaves out
// __init__.py and would take in whatever a Python run has left there.
//
//go:embed python/*.py python/dynworker_bridge/*.py
var program embed.FS

// mainFile is the file to start, relative to where Install wrote the program.
const mainFile = "dynworker_engine.py"

// Install writes the program into a new directory below dir, readable by this
// user only, and returns the path of the file to start. The caller removes the
// file's directory once the engine is gone.
func Install(dir string) (path string, err error) {
	home, err := os.MkdirTemp(dir, "engine-program-")
	if err != nil {
		return "", fmt.Errorf("install the engine program: %w", err)
	}
	if err := copyTree(home); err != nil {
		_ = os.RemoveAll(home)
		return "", fmt.Errorf("install the engine program: %w", err)
	}
	return filepath.Join(home, mainFile), nil
}

func copyTree(home string) error {
	files, err := fs.Sub(program, "python")
	if err != nil {
		return err
	}
	return fs.WalkDir(files, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || name == "." {
			return err
		}
		target := filepath.Join(home, filepath.FromSlash(name))
		if entry.IsDir() {
			return os.Mkdir(target, 0o700)
		}
		text, err := fs.ReadFile(files, name)
		if err != nil {
			return err
		}
		return os.WriteFile(target, text, 0o600)
	})
}

// Command is the command line that starts the installed program at path with
// the given Python interpreter. -u keeps the order of what is printed.
func Command(python, path string) []string {
	return []string{python, "-u", path}
}

// AbortPolicy says what a cancel does to a request in the engine.
type AbortPolicy string

const (
	// AbortAtOnce aborts at any time, except that a request whose KV blocks are
	// on their way from a prefill worker is aborted when its first token is there.
	AbortAtOnce AbortPolicy = "abort"
	// AbortAfterFirstToken never aborts a request before its first token.
	AbortAfterFirstToken AbortPolicy = "first_token"
	// Detach never aborts: the request runs to its end and nobody listens.
	Detach AbortPolicy = "detach"
)

// Options are the program's own settings, for ipc.Configure. Zero values mean
// the defaults named here.
type Options struct {
	Abort AbortPolicy // AbortAtOnce
	// AbortGrace is how long an aborted request may take to end by itself (2 s).
	// One that was still queued never does; the program then ends it.
	AbortGrace time.Duration
	// FirstTokenWait is how long an abort waits for a first token (60 s).
	FirstTokenWait time.Duration
	// ProgressInterval is the time between two signs of life during the load (5 s).
	// They stop when the load uses no processor time.
	ProgressInterval time.Duration
	// WatchInterval is the time between two looks at the engine's recorded fatal
	// error and at the parent process (250 ms).
	WatchInterval time.Duration
	// StopTimeout bounds the engine's shutdown where the worker gave no deadline:
	// after a fatal error, on SIGTERM, and when the worker is gone (3 s).
	StopTimeout time.Duration
}

// MarshalJSON writes what is set, in the program's own names and units.
func (o Options) MarshalJSON() ([]byte, error) {
	return marshalOptions(o)
}

// Exit statuses of the program. A status below 0 or above these is a crash.
const (
	ExitStopped      = 0 // stopped by the worker, in time
	ExitEngineFailed = 1 // the engine failed after it had been ready
	ExitNoChannel    = 2 // not started by a worker
	ExitLoadFailed   = 3 // configuration refused, or the engine could not be built
	ExitWorkerGone   = 4 // the worker's end of the channel closed
	ExitStopTooSlow  = 5 // stopped by the worker, but not in time
)
