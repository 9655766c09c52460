package app

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"dynworker/internal/caller"
	"dynworker/internal/testenv"
	"dynworker/internal/testenv/embedded"
	"dynworker/pkg/config"
	"dynworker/pkg/discovery"
	"dynworker/pkg/engine/sim"
	"dynworker/pkg/ingress/natsplane"
	"dynworker/pkg/protocol"
	"dynworker/testdata"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
)

// TestMain makes the test program its own simulated engine, as the worker's binary is.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == EngineCommand {
		os.Exit(sim.Main())
	}
	testenv.Main(m)
}

// patience bounds everything that a test waits for; only a worker that hangs reaches it.
const patience = 90 * time.Second

// world is etcd, NATS and a model folder.
type world struct {
	t     *testing.T
	etcd  *embedded.Etcd
	nats  *embedded.NATS
	model string
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, etcd: testenv.StartEtcd(t, embedded.EtcdOptions{}), nats: testenv.StartNATS(t, embedded.NATSOptions{}), model: t.TempDir()}
	require.NoError(t, testdata.WriteModel(w.model))
	return w
}

// lines is a log that can be read while it is written.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// running is a worker that serves.
type running struct {
	t       *testing.T
	world   *world
	serving Serving
	cancel  context.CancelFunc
	ended   chan error
	result  error
	once    sync.Once
	log     *lines
	calls   string
}

// settings are what every worker of a test has; later ones win.
func (w *world) settings(extra []string) []string {
	base := []string{
		"model.path=" + w.model, "model.name=tiny", "engine.kind=sim", "etcd.endpoints=[" + w.etcd.Endpoint() + "]", "nats.server=" + w.nats.URL(),
		"request_plane.kind=nats", "request_plane.tcp.host=127.0.0.1", "system.host=127.0.0.1", "system.port=0", "drain.grace=1s", "drain.budget=60s",
	}
	var args []string
	for _, s := range append(base, extra...) {
		args = append(args, "--set", s)
	}
	return args
}

// launch starts a worker and does not wait.
func (w *world) launch(extra ...string) *running {
	exe, err := os.Executable()
	require.NoError(w.t, err)
	r := &running{t: w.t, world: w, ended: make(chan error, 1), log: &lines{}, calls: filepath.Join(w.t.TempDir(), "calls.jsonl")}
	cfg, _, err := config.Load(w.settings(append(extra, "engine.sim.calls_log="+r.calls)), nil, nil)
	require.NoError(w.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	serving := make(chan Serving, 1)
	go func() {
		r.ended <- Run(ctx, cfg, Options{Version: "test", Logger: zerolog.New(r.log), Executable: exe, OnServing: func(s Serving) { serving <- s }})
		close(serving)
	}()
	w.t.Cleanup(func() {
		_ = r.stop()
		if w.t.Failed() {
			w.t.Logf("log of worker %x:\n%s", r.serving.InstanceID, r.log)
		}
	})
	r.serving = <-serving
	return r
}

// start starts a worker that has to come up.
func (w *world) start(extra ...string) *running {
	r := w.launch(extra...)
	if r.serving.InstanceID == 0 {
		w.t.Fatalf("the worker did not start: %v\n%s", r.peek(), r.log)
	}
	return r
}

// peek is the result of a worker that has ended.
func (r *running) peek() error {
	r.once.Do(func() { r.result = <-r.ended })
	return r.result
}

// stop ends the worker as SIGTERM does and waits for it.
func (r *running) stop() error {
	r.cancel()
	return r.wait()
}

// wait waits for the worker to end by itself.
func (r *running) wait() error {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = r.peek()
	}()
	select {
	case <-done:
		return r.result
	case <-time.After(patience):
		r.t.Fatalf("the worker does not end\n%s", r.log)
		return nil
	}
}

// records lists what is in etcd.
func (w *world) records() map[string]string {
	c, err := discovery.Connect(w.t.Context(), discovery.Config{Endpoints: []string{w.etcd.Endpoint()}, Logger: zerolog.Nop()})
	require.NoError(w.t, err)
	defer c.Close()
	all, err := c.List(w.t.Context(), "v1/")
	require.NoError(w.t, err)
	out := map[string]string{}
	for _, r := range all {
		out[r.Key] = string(r.Value)
	}
	return out
}

// instance is the record of a worker.
func (r *running) instance() protocol.Instance {
	for key, value := range r.world.records() {
		if strings.HasPrefix(key, protocol.InstancePrefix) {
			i, err := protocol.ParseInstance([]byte(value))
			require.NoError(r.t, err)
			if i.InstanceID == r.serving.InstanceID {
				return i
			}
		}
	}
	r.t.Fatalf("worker %x is not in etcd", r.serving.InstanceID)
	return protocol.Instance{}
}

func (w *world) caller() *caller.Caller {
	c, err := caller.New(w.t.Context(), caller.Config{NATS: &natsplane.ConnConfig{URL: w.nats.URL()}, Logger: zerolog.Nop()})
	require.NoError(w.t, err)
	w.t.Cleanup(func() { require.NoError(w.t, c.Close()) })
	return c
}

// ask is a request for a number of tokens.
func ask(tokens int, change func(protocol.Map)) *protocol.Request {
	fields := protocol.Map{"stop_conditions": protocol.Map{"max_tokens": int64(tokens)}, "sampling_options": protocol.Map{}, "output_options": protocol.Map{}, "routing": protocol.Map{}}
	if change != nil {
		change(fields)
	}
	return &protocol.Request{TokenIDs: prompt, TokensState: protocol.TokensList, Fields: fields}
}

var prompt = []int32{5, 6, 7}

func salt(s string) func(protocol.Map) {
	return func(m protocol.Map) { m["routing"] = protocol.Map{"cache_salt": s} }
}

// answer is what came of a request.
type answer struct {
	tokens []uint32
	chunks int
	finish protocol.FinishReason
	text   string // of an error chunk
	err    error  // an error item, or what ended the stream before its end mark
}

// read takes a stream to its end.
func read(s *caller.Stream) (a answer) {
	defer func() { _ = s.Close() }()
	for {
		item, err := s.Next()
		switch {
		case errors.Is(err, io.EOF):
			return a
		case err != nil:
			a.err = err
			return a
		case item.Err != nil:
			a.err = item.Err
		case item.Chunk != nil:
			a.tokens = append(a.tokens, item.Chunk.TokenIDs...)
			a.chunks++
			if item.Chunk.Finish != protocol.FinishNone {
				a.finish, a.text = item.Chunk.Finish, item.Chunk.ErrorText
			}
		}
	}
}

// expected is what the simulated engine generates for the prompt.
func expected(n int) []uint32 { return sim.Continue(sim.Args{}.Text(), prompt, 0, n) }

// timeout is a context for one call.
func timeout(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

var nopLogger = zerolog.Nop()

func load(args []string) (*config.Config, error) {
	cfg, _, err := config.Load(args, nil, nil)
	return cfg, err
}

// enginePID is the process of the engine that was started last.
func (r *running) enginePID() int {
	pid := 0
	for line := range strings.SplitSeq(r.log.String(), "\n") {
		var l struct {
			Message string `json:"message"`
			PID     int    `json:"pid"`
		}
		if json.Unmarshal([]byte(line), &l) == nil && l.Message == "engine spawned" {
			pid = l.PID
		}
	}
	require.NotZero(r.t, pid)
	return pid
}
