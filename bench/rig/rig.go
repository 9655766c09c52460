// Package rig starts the worker as a process of its own, with etcd and NATS inside the calling program, for measurements and for checks on machines that have an engine which tests do not have.
package rig

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"dynworker/internal/testenv/embedded"
	"dynworker/pkg/discovery"
	"dynworker/pkg/protocol"
	"dynworker/testdata"

	"github.com/rs/zerolog"
)

// Rig is everything around a worker. Its zero value is not usable.
type Rig struct {
	// Model is a folder with the project's small tokenizer model.
	Model string

	dir, binary string
	started     int // workers so far
	etcd        *embedded.Etcd
	nats        *embedded.NATS
}

// New builds the worker and starts the servers.
func New() (r *Rig, err error) {
	dir, err := os.MkdirTemp("", "dynworker-rig-")
	if err != nil {
		return nil, err
	}
	r = &Rig{dir: dir, binary: filepath.Join(dir, "worker"), Model: filepath.Join(dir, "model")}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close())
		}
	}()
	build := exec.Command("go", "build", "-o", r.binary, "dynworker/cmd/worker")
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		return r, fmt.Errorf("build the worker: %w", err)
	}
	if err := os.Mkdir(r.Model, 0o755); err != nil {
		return r, err
	}
	if err := testdata.WriteModel(r.Model); err != nil {
		return r, err
	}
	if r.etcd, err = embedded.NewEtcd(embedded.EtcdOptions{}); err != nil {
		return r, err
	}
	r.nats, err = embedded.NewNATS(embedded.NATSOptions{})
	return r, err
}

// NATS is the address of the NATS server.
func (r *Rig) NATS() string { return r.nats.URL() }

// Close ends the servers and removes what New made.
func (r *Rig) Close() error {
	var problems []error
	if r.nats != nil {
		problems = append(problems, r.nats.Close())
	}
	if r.etcd != nil {
		problems = append(problems, r.etcd.Close())
	}
	return errors.Join(append(problems, os.RemoveAll(r.dir))...)
}

// Worker is a worker process that is registered.
type Worker struct {
	PID    int
	Target protocol.Instance
	// Started is the time from the spawn to the registration.
	Started time.Duration

	cmd  *exec.Cmd
	done chan struct{} // closed when the process has ended
	err  error         // how; read after done
}

// Start runs "worker serve" over NATS with further settings (key=value) and options, and returns when it is registered. Its log goes to log.
func (r *Rig) Start(ctx context.Context, log io.Writer, settings, options []string) (*Worker, error) {
	return r.serve(ctx, log, nil, settings, options)
}

// StartWith is Start with further environment variables.
func (r *Rig) StartWith(ctx context.Context, log io.Writer, env, settings []string) (*Worker, error) {
	return r.serve(ctx, log, env, settings, nil)
}

func (r *Rig) serve(ctx context.Context, log io.Writer, env, settings, options []string) (*Worker, error) {
	r.started++
	namespace := fmt.Sprintf("rig%d", r.started)
	argv := []string{r.binary, "serve"}
	for _, s := range append([]string{"namespace=" + namespace, "etcd.endpoints=[" + r.etcd.Endpoint() + "]", "nats.server=" + r.nats.URL(), "request_plane.kind=nats", "drain.grace=0s"}, settings...) {
		argv = append(argv, "--set", s)
	}
	return r.StartCommand(ctx, log, namespace, env, append(argv, options...))
}

// StartCommand runs a worker of whatever make, which is told in its environment (and env) to use the rig's servers and to register in the given namespace, and returns when it is registered there. Namespaces must not be used twice: a
// worker that was killed stays registered until its lease ends.
func (r *Rig) StartCommand(ctx context.Context, log io.Writer, namespace string, env, argv []string) (*Worker, error) {
	client, err := discovery.Connect(ctx, discovery.Config{Endpoints: []string{r.etcd.Endpoint()}, Logger: zerolog.Nop()})
	if err != nil {
		return nil, err
	}
	defer client.Close()
	w := &Worker{cmd: exec.CommandContext(ctx, argv[0], argv[1:]...), done: make(chan struct{})}
	w.cmd.Env = append(append(os.Environ(), "ETCD_ENDPOINTS="+r.etcd.Endpoint(), "NATS_SERVER="+r.nats.URL(), "DYN_NAMESPACE="+namespace), env...)
	w.cmd.Stdout, w.cmd.Stderr = log, log
	w.cmd.Cancel = func() error { return w.cmd.Process.Signal(syscall.SIGTERM) }
	begin := time.Now()
	if err := w.cmd.Start(); err != nil {
		return nil, err
	}
	w.PID = w.cmd.Process.Pid
	go func() {
		w.err = w.cmd.Wait()
		close(w.done)
	}()
	found := make(chan protocol.Instance, 1)
	watching, stop := context.WithCancel(ctx)
	watched := make(chan error, 1)
	go func() {
		watched <- client.Watch(watching, protocol.InstancePrefix+namespace+"/", func(e discovery.Event) {
			if target, err := protocol.ParseInstance(e.Value); err == nil && !e.Gone && target.Endpoint == "generate" {
				select {
				case found <- target:
				default:
				}
			}
		})
	}()
	defer func() {
		stop()
		<-watched
	}()
	select {
	case w.Target = <-found:
		w.Started = time.Since(begin)
		return w, nil
	case <-w.done:
		return nil, fmt.Errorf("the worker ended before it was registered: %w", w.err)
	case <-ctx.Done():
		return nil, errors.Join(context.Cause(ctx), w.Stop())
	}
}

// Stop drains the worker as its supervisor would and waits for its end.
func (w *Worker) Stop() error {
	if err := w.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-w.done
	return w.err
}
