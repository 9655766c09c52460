// Package chaos is the fault suite as a Go test: workers with simulated engines, real etcd and NATS, many callers, and everything that can break between them. What scripts/chaos shows with the real frontend and with processes that are
// killed, this shows without Python: every request that was in flight when something broke ends with the right text or with an error that says what it is.
package chaos

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"dynworker/internal/app"
	"dynworker/internal/testenv"
	"dynworker/internal/testenv/embedded"
	"dynworker/pkg/config"
	"dynworker/pkg/discovery"
	"dynworker/pkg/engine/sim"
	"dynworker/pkg/protocol"
	"dynworker/testdata"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
)

// TestMain makes the test program its own simulated engine, as the worker's binary is.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == app.EngineCommand {
		os.Exit(sim.Main())
	}
	testenv.Main(m)
}

// patience bounds everything that a test waits for; only something that hangs reaches it.
const patience = 90 * time.Second

// world is etcd, NATS, a model folder, and the workers on them.
type world struct {
	t       *testing.T
	etcd    *embedded.Etcd
	nats    *embedded.NATS
	model   string
	records *discovery.Client
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, etcd: testenv.StartEtcd(t, embedded.EtcdOptions{}), nats: testenv.StartNATS(t, embedded.NATSOptions{}), model: t.TempDir()}
	require.NoError(t, testdata.WriteModel(w.model))
	var err error
	w.records, err = discovery.Connect(t.Context(), discovery.Config{Endpoints: []string{w.etcd.Endpoint()}, Logger: zerolog.Nop()})
	require.NoError(t, err)
	t.Cleanup(w.records.Close)
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

func (l *lines) count(words string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), words)
}

// without is the log without the lines that have these words.
func (l *lines) without(words string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var rest strings.Builder
	for line := range strings.Lines(l.text.String()) {
		if !strings.Contains(line, words) {
			rest.WriteString(line)
		}
	}
	return rest.String()
}

// node is a worker in this process.
type node struct {
	t        *testing.T
	instance uint64
	system   string
	log      lines
	cancel   context.CancelFunc
	ended    chan struct{}
	err      error
}

// start starts a worker and waits until it serves.
func (w *world) start(settings ...string) *node {
	exe, err := os.Executable()
	require.NoError(w.t, err)
	var args []string
	for _, s := range append([]string{
		"model.path=" + w.model, "model.name=tiny", "engine.kind=sim", "etcd.endpoints=[" + w.etcd.Endpoint() + "]", "nats.server=" + w.nats.URL(),
		"request_plane.kind=nats", "system.host=127.0.0.1", "system.port=0", "etcd.lease_ttl=3s", "drain.grace=1s", "drain.budget=60s",
		"engine.sim.token_delay=25ms", "engine.stop_timeout=1s", "engine.restart.backoff=1ms", "engine.restart.backoff_max=1ms",
	}, settings...) {
		args = append(args, "--set", s)
	}
	cfg, _, err := config.Load(args, nil, nil)
	require.NoError(w.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	n := &node{t: w.t, cancel: cancel, ended: make(chan struct{})}
	serving := make(chan app.Serving, 1)
	go func() {
		defer close(n.ended)
		n.err = app.Run(ctx, cfg, app.Options{Version: "test", Logger: zerolog.New(&n.log), Executable: exe, OnServing: func(s app.Serving) { serving <- s }})
	}()
	w.t.Cleanup(func() {
		n.stop()
		if w.t.Failed() {
			w.t.Logf("log of worker %x:\n%s", n.instance, n.log.without("request accepted"))
		}
	})
	select {
	case s := <-serving:
		n.instance, n.system = s.InstanceID, s.SystemAddress
	case <-n.ended:
		require.NoError(w.t, n.err, "the worker did not start")
	}
	return n
}

// stop ends the worker as SIGTERM does and waits for it.
func (n *node) stop() {
	n.cancel()
	select {
	case <-n.ended:
	case <-time.After(patience):
		n.t.Fatal("a worker does not end")
	}
}

// enginePID is the process id of the engine that was spawned last.
func (n *node) enginePID() int {
	n.log.mu.Lock()
	defer n.log.mu.Unlock()
	pid := 0
	for line := range strings.SplitSeq(n.log.text.String(), "\n") {
		var l struct {
			Message string `json:"message"`
			PID     int    `json:"pid"`
		}
		if json.Unmarshal([]byte(line), &l) == nil && l.Message == "engine spawned" {
			pid = l.PID
		}
	}
	require.NotZero(n.t, pid)
	return pid
}

// metric is the sum over the samples of a family whose labels contain a text.
func (n *node) metric(name, labels string) (sum float64) {
	ctx, cancel := context.WithTimeout(n.t.Context(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+n.system+"/metrics", nil)
	require.NoError(n.t, err)
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	require.NoError(n.t, err)
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	require.NoError(n.t, err)
	for line := range strings.SplitSeq(string(body), "\n") {
		series, value, _ := strings.Cut(line, " ")
		family, rest, _ := strings.Cut(series, "{")
		if family == name && strings.Contains(rest, labels) {
			v, err := strconv.ParseFloat(value, 64)
			require.NoError(n.t, err)
			sum += v
		}
	}
	return sum
}

// instances are the records that frontends see, none while etcd is away.
func (w *world) instances() []protocol.Instance {
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Second)
	defer cancel()
	records, err := w.records.List(ctx, protocol.InstancePrefix)
	if err != nil {
		return nil
	}
	var all []protocol.Instance
	for _, r := range records {
		i, err := protocol.ParseInstance(r.Value)
		require.NoError(w.t, err)
		all = append(all, i)
	}
	return all
}
