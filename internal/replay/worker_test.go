package replay

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"dynworker/internal/app"
	"dynworker/internal/cli"
	"dynworker/pkg/discovery"
	"dynworker/pkg/engine/bridge/bridgetest"
	"dynworker/pkg/protocol"

	"github.com/stretchr/testify/require"
)

// setup is one configuration of a worker on the stand-in.
type setup struct {
	// api is the build that the stand-in plays, standin its other switches.
	api     string
	standin []string
	// engine is what stands in the engine file, none if nil.
	engine protocol.Map
	// simulator, if not nil, puts the simulated engine in the stand-in's place, with these arguments as KEY=VALUE.
	simulator []string
	// settings are KEY=VALUE, flags and env what a case says in other ways.
	settings, flags, env []string
	// onLog, if set, is called with each line of the worker's log, on the goroutine that writes it.
	onLog func(line string)
}

// worker is a worker in this process.
type worker struct {
	t         *testing.T
	namespace string
	calls     bridgetest.Log
	log       *lines
	serving   app.Serving
	// instance is the record in etcd, the zero value if the worker never served.
	instance protocol.Instance
	exit     chan int
	code     int
	ended    bool
	// signals are what the worker's supervisor sends it. A second one would end it hard.
	signals   chan os.Signal
	signalled bool
}

var workers atomic.Int64

// run starts a worker and returns when it serves or has ended.
func run(t *testing.T, s setup) *worker {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	w := &worker{t: t, namespace: fmt.Sprintf("replay%d", workers.Add(1)), log: &lines{on: s.onLog}, exit: make(chan int, 1), signals: make(chan os.Signal, 1)}
	w.calls = bridgetest.Log(filepath.Join(t.TempDir(), "calls.jsonl"))
	serving := make(chan app.Serving, 1)
	p := cli.Process{
		Args: append([]string{"serve"}, w.arguments(t, s)...), Environ: w.environ(s), Stdout: w.log, Stderr: w.log, Executable: exe, PlainLog: true,
		OnServing: func(s app.Serving) { serving <- s },
		Exit:      func(code int) { panic(fmt.Sprintf("the worker wants to exit with %d", code)) },
		Signals:   w.signals,
	}
	go func() { w.exit <- p.Run() }()
	t.Cleanup(func() {
		w.stop()
		if t.Failed() {
			t.Logf("end of the log of %s:\n%s", w.namespace, w.log.tail())
		}
	})
	select {
	case w.serving = <-serving:
		w.instance = w.registered()
		require.Equal(t, w.serving.InstanceID, w.instance.InstanceID)
	case w.code = <-w.exit:
		w.ended = true
	case <-time.After(patience):
		t.Fatalf("the worker neither serves nor ends\n%s", w.log)
	}
	return w
}

// arguments is the worker's command line. A case's own settings and flags come last and win.
func (w *worker) arguments(t *testing.T, s setup) []string {
	args := []string{"--model-path", world.model, "--served-model-name", "tiny", "--namespace", w.namespace, "--request-plane", "nats", "--log-level", "info"}
	settings := []string{"etcd.endpoints=" + world.etcd.Endpoint(), "nats.server=" + world.nats.URL(), "system.host=127.0.0.1", "model.files_listen=127.0.0.1:0", "drain.grace=0s", "engine.restart.policy=never"}
	if s.simulator == nil {
		settings = append(settings, "engine.kind=trtllm", "engine.command="+world.python)
	} else {
		settings = append(settings, "engine.kind=sim", "engine.sim.calls_log="+string(w.calls))
	}
	for _, kv := range s.simulator {
		settings = append(settings, "engine.sim."+kv)
	}
	for _, kv := range append(settings, s.settings...) {
		args = append(args, "--set", kv)
	}
	if s.engine != nil {
		args = append(args, "--extra-engine-args", engineFile(t, s.engine))
	}
	return append(args, s.flags...)
}

// engineFile writes arguments of the engine as operators do. JSON is YAML.
func engineFile(t *testing.T, args protocol.Map) string {
	file := filepath.Join(t.TempDir(), "engine.yaml")
	require.NoError(t, os.WriteFile(file, protocol.AppendValue(nil, protocol.CodecJSON, args), 0o600))
	return file
}

// environ is the worker's environment, which its engine inherits.
func (w *worker) environ(s setup) []string {
	env := []string{
		"PATH=" + os.Getenv("PATH"), "PYTHONPATH=" + bridgetest.Dir("standin"), "PYTHONDONTWRITEBYTECODE=1", mark,
		"STANDIN_LOG=" + string(w.calls), "STANDIN_VOCAB=100000",
	}
	if s.api != "" {
		env = append(env, "STANDIN_API="+s.api)
	}
	return append(append(env, s.standin...), s.env...)
}

// registered is the worker's instance record, which is there when it serves.
func (w *worker) registered() protocol.Instance {
	w.t.Helper()
	records := recordsOf(w.t, w.namespace)
	for _, r := range records {
		if strings.HasPrefix(r.Key, protocol.InstancePrefix) {
			i, err := protocol.ParseInstance(r.Value)
			require.NoError(w.t, err)
			return i
		}
	}
	w.t.Fatalf("the worker serves and is not registered; etcd has %v", records)
	return protocol.Instance{}
}

// recordsOf lists what etcd has of a namespace.
func recordsOf(t *testing.T, namespace string) (found []discovery.Entry) {
	t.Helper()
	all, err := world.records.List(limited(t), "")
	require.NoError(t, err)
	for _, r := range all {
		if strings.Contains(r.Key, "/"+namespace+"/") {
			found = append(found, r)
		}
	}
	return found
}

// stop ends the worker as its supervisor does and returns its exit code. It is safe to call twice.
func (w *worker) stop() int {
	w.signal()
	return w.wait()
}

// signal tells the worker to end and does not wait.
func (w *worker) signal() {
	if w.ended || w.signalled {
		return
	}
	w.signalled = true
	w.signals <- syscall.SIGTERM
}

// wait waits for the worker to end and returns its exit code.
func (w *worker) wait() int {
	if w.ended {
		return w.code
	}
	select {
	case w.code = <-w.exit:
		w.ended = true
	case <-time.After(patience):
		w.t.Errorf("the worker does not end\n%s", w.log)
	}
	return w.code
}

// engineLog is what the stand-in was asked to do so far.
func (w *worker) engineLog() []protocol.Map {
	text, err := os.ReadFile(string(w.calls))
	if os.IsNotExist(err) {
		return nil
	}
	require.NoError(w.t, err)
	var all []protocol.Map
	for line := range strings.Lines(string(text)) {
		if !strings.HasSuffix(line, "\n") {
			break // being written
		}
		all = append(all, object(w.t, []byte(line)))
	}
	return all
}

// await waits until the stand-in has logged what a test waits for.
func (w *worker) await(what string, arrived func(byID map[string]*engineSide, nameless []*engineSide) bool) {
	w.t.Helper()
	require.Eventually(w.t, func() bool { return arrived(sortByRequest(w.engineLog())) }, patience, 10*time.Millisecond, what)
}

// limited is a context for one thing that a test waits for.
func limited(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// lines is a log that can be read while it is written.
type lines struct {
	on   func(string)
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	if l.on != nil {
		// The worker's log hands over what has piled up, which may be several lines.
		for line := range strings.Lines(string(p)) {
			l.on(line)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// tail is the end of the log, for a failure's report.
func (l *lines) tail() string {
	const length = 20
	all := strings.SplitAfter(l.String(), "\n")
	return strings.Join(all[max(0, len(all)-length):], "")
}

// messages are the log's lines as objects; lines that are none are left out.
func (l *lines) messages() (all []map[string]any) {
	for line := range strings.Lines(l.String()) {
		var m map[string]any
		if json.Unmarshal([]byte(line), &m) == nil {
			all = append(all, m)
		}
	}
	return all
}
