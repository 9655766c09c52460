// Command demo shows the whole worker on one machine with nothing installed but Go: etcd and NATS run inside it, the worker serves a simulated engine in a subprocess, and a client plays conversations over the real planes.
//
// It prints the answers as they stream and, after each turn, what the worker did with it; it ends by itself with a summary. The exit code is 0 only if every turn was answered and every conversation stayed on its rank.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"dynworker/internal/app"
	"dynworker/internal/cli"
	"dynworker/internal/logging"
	"dynworker/internal/testenv/embedded"
	"dynworker/pkg/config"
	"dynworker/testdata"
)

func main() {
	p, err := cli.OSProcess()
	if err == nil && len(p.Args) > 0 {
		// The worker starts its simulated engine as a subcommand of the running program, which is this one.
		os.Exit(p.Run())
	}
	if err == nil {
		err = demo(p)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// patience bounds everything that the demo waits for.
const patience = time.Minute

func demo(p *cli.Process) (err error) {
	ctx, cancel := context.WithTimeoutCause(context.Background(), 3*patience, errors.New("the demo took too long"))
	defer cancel()
	dir, err := os.MkdirTemp("", "dynworker-demo-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	started := time.Now()

	etcd, err := embedded.NewEtcd(embedded.EtcdOptions{})
	if err != nil {
		return fmt.Errorf("embedded etcd: %w", err)
	}
	defer func() { err = errors.Join(err, etcd.Close()) }()
	nats, err := embedded.NewNATS(embedded.NATSOptions{})
	if err != nil {
		return fmt.Errorf("embedded NATS: %w", err)
	}
	defer func() { err = errors.Join(err, nats.Close()) }()
	fmt.Printf("etcd %s, NATS %s, both inside this process\n", etcd.Endpoint(), nats.URL())

	w, err := startWorker(ctx, p, dir, etcd.Endpoint(), nats.URL())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.stop()) }()
	fmt.Printf("worker %x registered %v after the start, its engine is a subprocess with 4 attention-DP ranks\n\n", w.serving.InstanceID, time.Since(started).Round(time.Millisecond))

	text, err := newTokenizer()
	if err != nil {
		return err
	}
	c, err := newClient(ctx, w, text, etcd.Endpoint(), nats.URL())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	return c.play(ctx, os.Stdout)
}

// worker is the worker as it runs inside the demo.
type worker struct {
	cancel  context.CancelFunc
	ended   chan error
	serving app.Serving
	// log is the worker's log, calls what its engine was asked.
	log, calls string
}

// startWorker runs a worker as "worker serve" would, configured by nothing but --set, and returns when it is registered.
func startWorker(ctx context.Context, p *cli.Process, dir, etcd, nats string) (*worker, error) {
	model := filepath.Join(dir, "model")
	if err := os.Mkdir(model, 0o755); err != nil {
		return nil, err
	}
	if err := testdata.WriteModel(model); err != nil {
		return nil, fmt.Errorf("write the model folder: %w", err)
	}
	w := &worker{log: filepath.Join(dir, "worker.log"), calls: filepath.Join(dir, "calls.jsonl"), ended: make(chan error, 1)}
	var args []string
	for _, setting := range []string{
		"model.path=" + model, "model.name=tiny", "engine.kind=sim", "engine.sim.attention_dp_size=4", "engine.sim.conversation_affinity=true", "engine.sim.token_delay=8ms", "engine.sim.calls_log=" + w.calls,
		"etcd.endpoints=[" + etcd + "]", "request_plane.kind=nats", "nats.server=" + nats, "system.host=127.0.0.1", "system.port=0", "drain.grace=1s", "drain.budget=10s",
	} {
		args = append(args, "--set", setting)
	}
	cfg, _, err := config.Load(args, nil, nil)
	if err != nil {
		return nil, err
	}
	file, err := os.Create(w.log)
	if err != nil {
		return nil, err
	}
	log, err := logging.New(logging.Options{Writer: file})
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	serving := make(chan app.Serving, 1)
	run, cancel := context.WithCancel(ctx)
	w.cancel = cancel
	go func() {
		err := app.Run(run, cfg, app.Options{Version: cli.Version, Logger: log, Executable: p.Executable, Environ: p.Environ, OnServing: func(s app.Serving) { serving <- s }})
		w.ended <- errors.Join(err, file.Close())
	}()
	select {
	case w.serving = <-serving:
		return w, nil
	case err := <-w.ended:
		cancel()
		return nil, fmt.Errorf("the worker did not start: %w\n%s", err, tail(w.log))
	}
}

// stop drains the worker as SIGTERM would.
func (w *worker) stop() error {
	w.cancel()
	if err := <-w.ended; err != nil {
		return fmt.Errorf("the worker did not stop cleanly: %w\n%s", err, tail(w.log))
	}
	fmt.Println("the worker drained and its engine is gone")
	return nil
}

// tail is the end of a file, for error messages.
func tail(name string) string {
	data, err := os.ReadFile(name)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	return strings.Join(lines[max(0, len(lines)-15):], "\n")
}
