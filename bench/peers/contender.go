package main

import (
	"context"
	"embed"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"dynworker/bench/meter"
	"dynworker/bench/rig"
)

// standin is a package tensorrt_llm of our own, with what else Dynamo's worker imports, for both the Python worker and our bridge.
//
//go:embed all:standin
var standin embed.FS

// contender is a way to serve tokens.
type contender struct {
	name string
	// tree counts all processes below the worker; without it the engine is not part of the cost.
	tree bool
	// start runs it at a pace, one token a stream each delay, and waits until it is registered.
	start func(ctx context.Context, delay time.Duration) (*rig.Worker, error)
	// paced tells whether it can keep a given pace.
	paced func(delay time.Duration) bool
}

func (c *contender) cost(pid int) (meter.Cost, error) {
	if c.tree {
		return meter.Tree(pid)
	}
	return meter.One(pid)
}

// field is everything that contenders need.
type field struct {
	rig     *rig.Rig
	python  string
	standin string
	log     io.Writer
	runs    int
}

// newField writes the stand-in to dir and finds a Python with Dynamo in it, installing it when there is none.
func newField(r *rig.Rig, dir, python string, log io.Writer) (*field, error) {
	f := &field{rig: r, python: python, standin: filepath.Join(dir, "standin"), log: log}
	files, err := fs.Sub(standin, "standin")
	if err != nil {
		return nil, err
	}
	if err := os.CopyFS(f.standin, files); err != nil {
		return nil, err
	}
	if f.python == "" {
		if f.python, err = provision(); err != nil {
			return nil, err
		}
	}
	return f, nil
}

// provision uses the environment of scripts/interop, which has the same parts.
func provision() (string, error) {
	cmd := exec.Command("python3", "-c", "import sys; from interop_lib import provision as p; print(p.frontend_python(lambda *a: print(*a, file=sys.stderr)))")
	cmd.Env = append(os.Environ(), "PYTHONPATH=scripts", "PYTHONDONTWRITEBYTECODE=1")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("install Dynamo from PyPI (run this from the top of the repository): %w", err)
	}
	return string(out[:max(len(out)-1, 0)]), nil
}

func (f *field) namespace() string {
	f.runs++
	return fmt.Sprintf("peer%d", f.runs)
}

// contenders are all that can be compared, ours first.
func (f *field) contenders() []*contender {
	return []*contender{
		{name: "daemon", paced: always, start: f.daemon},
		{name: "daemon+bridge", tree: true, paced: always, start: f.bridge},
		{name: "trtllm worker", tree: true, paced: always, start: f.trtllm},
		{name: "mocker", tree: true, paced: never, start: f.mocker},
		{name: "sample worker", tree: true, paced: always, start: f.sample},
	}
}

func always(time.Duration) bool { return true }

// never is for a worker whose pace comes out of a model of its own: only "as fast as it can" is the same thing for it as for the others.
func never(delay time.Duration) bool { return delay == 0 }

// daemon is our worker with the simulated engine beside it; one frame a token, as the others send.
func (f *field) daemon(ctx context.Context, delay time.Duration) (*rig.Worker, error) {
	return f.rig.Start(ctx, f.log, []string{"model.path=" + f.rig.Model, "model.name=tiny", "engine.kind=sim", "engine.sim.token_delay=" + delay.String(), "engine.sim.max_batch_size=16384", "log.level=warn", "response_plane.merge_tokens=false"}, nil)
}

func millis(delay time.Duration) string {
	return strconv.FormatFloat(float64(delay)/float64(time.Millisecond), 'f', -1, 64)
}

// environ is the environment of every process that runs the stand-in.
func (f *field) environ(delay time.Duration) []string {
	return []string{"HF_HUB_OFFLINE=1", "STANDIN_API=rc21", "STANDIN_LOG=", "STANDIN_DELAY_MS=" + millis(delay), "PYTHONPATH=" + f.standin, "PYTHONDONTWRITEBYTECODE=1"}
}

// bridge is our worker with the stand-in behind the Python bridge.
func (f *field) bridge(ctx context.Context, delay time.Duration) (*rig.Worker, error) {
	return f.rig.StartWith(ctx, f.log, f.environ(delay), []string{"model.path=" + f.rig.Model, "model.name=tiny", "engine.kind=trtllm", "engine.command=[" + f.python + "]", "engine.trtllm.max_seq_len=8192", "log.level=warn", "response_plane.merge_tokens=false"})
}

// trtllm is Dynamo's own worker on the stand-in.
func (f *field) trtllm(ctx context.Context, delay time.Duration) (*rig.Worker, error) {
	return f.rig.StartCommand(ctx, f.log, f.namespace(), f.environ(delay), []string{
		f.python, "-m", "dynamo.trtllm", "--model", f.rig.Model, "--served-model-name", "tiny", "--max-seq-len", "8192", "--discovery-backend", "etcd", "--request-plane", "nats", "--event-plane", "nats",
	})
}

// mocker is Dynamo's simulated engine in Rust, without delays.
func (f *field) mocker(ctx context.Context, _ time.Duration) (*rig.Worker, error) {
	return f.rig.StartCommand(ctx, f.log, f.namespace(), []string{"HF_HUB_OFFLINE=1"}, []string{
		f.python, "-m", "dynamo.mocker", "--model-path", f.rig.Model, "--model-name", "tiny", "--engine-type", "trtllm", "--speedup-ratio", "0", "--discovery-backend", "etcd", "--request-plane", "nats", "--event-plane", "nats",
	})
}

// sample is the sample worker of Dynamo's Python runtime.
func (f *field) sample(ctx context.Context, delay time.Duration) (*rig.Worker, error) {
	namespace := f.namespace()
	return f.rig.StartCommand(ctx, f.log, namespace, []string{"HF_HUB_OFFLINE=1"}, []string{
		f.python, "-m", "dynamo.common.backend.sample_main", "--model-name", f.rig.Model, "--namespace", namespace, "--delay", strconv.FormatFloat(delay.Seconds(), 'f', -1, 64), "--max-tokens", "8192", "--discovery-backend", "etcd", "--request-plane", "nats", "--event-plane", "nats",
	})
}
