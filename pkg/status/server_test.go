package status

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
)

// patience bounds every wait of these tests; none of them depends on how long
// anything takes.
const patience = 60 * time.Second

func serve(t *testing.T, cfg Config) *Server {
	t.Helper()
	if cfg.Health == nil {
		cfg.Health = NewHealth(Options{})
	}
	cfg.Host, cfg.Logger = "127.0.0.1", zerolog.Nop()
	s, err := Listen(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { closeServer(t, s) })
	return s
}

func closeServer(t *testing.T, s *Server) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(t, s.Close(ctx))
}

type answer struct {
	code        int
	contentType string
	length      int64
	header      http.Header
	body        string
}

func ask(t *testing.T, s *Server, method, path, body string) answer {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "http://"+s.Addr().String()+path, strings.NewReader(body))
	require.NoError(t, err)
	req.Close = true // keep-alive connections would outlive the test
	res, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	return answer{res.StatusCode, res.Header.Get("Content-Type"), res.ContentLength, res.Header, string(b)}
}

func TestHealthBody(t *testing.T) {
	c := newClock()
	h := NewHealth(Options{Now: c.now})
	s := serve(t, Config{Health: h})
	etcd := h.Condition("etcd")
	generate := h.Endpoint("generate")
	half := 0.5
	h.SetProgress("engine", "loading", &half)
	c.advance(10*time.Second + 218905839)

	got := ask(t, s, "GET", "/health", "")
	require.Equal(t, 503, got.code)
	require.Equal(t, "text/plain; charset=utf-8", got.contentType)
	require.Equal(t, `{"status":"notready","uptime":{"secs":10,"nanos":218905839},"endpoints":{"generate":"notready"},`+
		`"reasons":[{"component":"endpoint/generate","since":"2026-12-01T04:00:00Z","reason":"not registered"},`+
		`{"component":"etcd","since":"2026-12-01T04:00:00Z","reason":"not reported yet"}],`+
		`"startup":{"phase":"engine","detail":"loading","fraction":0.5,"since":"2026-12-01T04:00:00Z"}}`, got.body)

	etcd.OK()
	generate.Ready()
	h.ClearProgress()
	got = ask(t, s, "GET", "/health", "")
	require.Equal(t, 200, got.code)
	// Recorded from a Dynamo 1.6.1 worker, less its other endpoints.
	require.Equal(t, `{"status":"ready","uptime":{"secs":10,"nanos":218905839},"endpoints":{"generate":"ready"}}`, got.body)

	head := ask(t, s, "HEAD", "/health", "")
	require.Equal(t, 200, head.code)
	require.Empty(t, head.body)
	require.EqualValues(t, len(got.body), head.length)
}

// A kubelet that restarts a worker because it loads, drains or has a hanging
// engine makes things worse: /live says only that the process answers.
func TestLiveWhateverHealthSays(t *testing.T) {
	h := NewHealth(Options{})
	s := serve(t, Config{Health: h})
	engine := h.Condition("engine")
	h.Endpoint("generate").Ready()

	for _, step := range []struct {
		name   string
		do     func()
		health int
	}{
		{"loading", func() {}, 503},
		{"ready", engine.OK, 200},
		{"engine hangs", func() { engine.Fail("no answer for 30 s") }, 503},
		{"draining", func() { h.Hold("draining", "stopping") }, 503},
	} {
		step.do()
		require.Equal(t, step.health, ask(t, s, "GET", "/health", "").code, step.name)
		got := ask(t, s, "GET", "/live", "")
		require.Equal(t, 200, got.code, step.name)
		require.Regexp(t, `^{"status":"live","uptime":{"secs":\d+,"nanos":\d+}}$`, got.body)
	}
}

// Neither probe waits for a callback that hangs, nor does a reporter.
func TestProbesDoNotWaitForCallbacks(t *testing.T) {
	entered, release := make(chan struct{}), make(chan struct{})
	done := make(chan struct{})
	h := NewHealth(Options{OnTransition: func(tr Transition) {
		if tr.Component == "etcd" {
			close(entered)
			<-release
		}
	}})
	s := serve(t, Config{Health: h})
	etcd, nats := h.Condition("etcd"), h.Condition("nats")
	go func() { defer close(done); etcd.Fail("gone") }()
	<-entered
	nats.OK() // does not wait for the callback either
	require.Equal(t, 200, ask(t, s, "GET", "/live", "").code)
	require.Contains(t, ask(t, s, "GET", "/health", "").body, `"reason":"gone"`)
	close(release)
	<-done
}

// /live does not touch the health model's lock at all.
func TestLiveTakesNoLock(t *testing.T) {
	h := NewHealth(Options{})
	s := serve(t, Config{Health: h})
	h.mu.Lock()
	defer h.mu.Unlock()
	require.Equal(t, 200, ask(t, s, "GET", "/live", "").code)
	require.False(t, h.Ready())
}

// Answers of a Dynamo 1.6.1 worker's system server, recorded.
func TestRecordedAnswers(t *testing.T) {
	s := serve(t, Config{})
	s.HandleEngine("known", func(context.Context, json.RawMessage) (any, error) { return nil, errors.New("boom") })
	for _, c := range []struct {
		method, path, body string
		code               int
		want               string
	}{
		{"GET", "/engine/foo", "", 404, `{"error":"Route not found","message":"Route /engine/foo not found"}`},
		{"GET", "/metadata", "", 404, "Discovery metadata not available"},
		{"GET", "/nope", "", 404, "Route not found"},
		{"GET", "/", "", 404, "Route not found"},
		{"GET", "/engine/", "", 404, "Route not found"},
		{"GET", "/metrics", "", 404, "Route not found"}, // none given here
		{"GET", "/v1/metadata/a/b/c/d/_base/config.json", "", 404, "Not found"},
		{"POST", "/engine/known", "", 500, `{"error":"Handler error","message":"boom"}`},
		{"GET", "/health/", "", 404, "Route not found"},
		{"GET", "//health", "", 404, "Route not found"},
	} {
		got := ask(t, s, c.method, c.path, c.body)
		require.Equal(t, c.code, got.code, c.path)
		require.Equal(t, c.want, got.body, c.path)
		require.Equal(t, "text/plain; charset=utf-8", got.contentType, c.path)
	}

	// The text of a JSON error is that of the decoder; its frame is recorded.
	got := ask(t, s, "POST", "/engine/foo", "{")
	require.Equal(t, 400, got.code)
	require.Regexp(t, `^{"error":"Invalid JSON","message":".+"}$`, got.body)

	got = ask(t, s, "POST", "/health", "")
	require.Equal(t, 405, got.code)
	require.Equal(t, "GET,HEAD", got.header.Get("Allow"))
	require.Empty(t, got.body)
}

func TestEngineRoutes(t *testing.T) {
	s := serve(t, Config{})
	s.HandleEngine("/update/model_taints", func(_ context.Context, body json.RawMessage) (any, error) {
		return map[string]any{"status": "ok", "got": body}, nil
	})
	got := ask(t, s, "POST", "/engine/update/model_taints", `{"taints":["b"]}`)
	require.Equal(t, 200, got.code)
	require.Equal(t, `{"got":{"taints":["b"]},"status":"ok"}`, got.body)
	require.Equal(t, `{"got":{},"status":"ok"}`, ask(t, s, "GET", "/engine/update/model_taints", "").body, "no body is {}")

	got = ask(t, s, "POST", "/engine/update/model_taints", `"`+strings.Repeat("x", maxEngineBody)+`"`)
	require.Equal(t, 413, got.code)
	require.Equal(t, `{"error":"Body too large","message":"the body has more than 2097152 bytes"}`, got.body)

	s.HandleEngine("update/model_taints", func(context.Context, json.RawMessage) (any, error) {
		return func() {}, nil // no JSON for this
	})
	require.Equal(t, 500, ask(t, s, "GET", "/engine/update/model_taints", "").code)

	s.HandleEngine("update/model_taints", nil)
	require.Equal(t, 404, ask(t, s, "GET", "/engine/update/model_taints", "").code)
}

func TestMounts(t *testing.T) {
	s := serve(t, Config{
		HealthPath: "/{ready}", // no pattern, just text
		LivePath:   "/alive",
		Metrics:    http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "some_metric 1\n") }),
	})
	require.Equal(t, 503, ask(t, s, "GET", "/%7Bready%7D", "").code)
	require.Equal(t, 200, ask(t, s, "GET", "/alive", "").code)
	require.Equal(t, 404, ask(t, s, "GET", "/live", "").code)
	require.Equal(t, 404, ask(t, s, "GET", "/health", "").code)
	require.Equal(t, "some_metric 1\n", ask(t, s, "GET", "/metrics", "").body)

	s.MountMetadata(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.URL.Path) }))
	require.Equal(t, "/v1/metadata/ns/c/e/tiny/_base/config.json", ask(t, s, "GET", "/v1/metadata/ns/c/e/tiny/_base/config.json", "").body)
	require.Equal(t, 404, ask(t, s, "GET", "/v1/metadata", "").code)
}

func TestFilesOnlyServer(t *testing.T) {
	files := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "file") })
	s, err := ListenFiles(t.Context(), "127.0.0.1", 0, files, zerolog.Nop())
	require.NoError(t, err)
	defer closeServer(t, s)
	require.Equal(t, "file", ask(t, s, "GET", "/v1/metadata/a", "").body)
	for _, path := range []string{"/health", "/live", "/metrics", "/metadata", "/engine/x"} {
		got := ask(t, s, "GET", path, "")
		require.Equal(t, 404, got.code, path)
		require.Equal(t, "Route not found", got.body, path)
	}
}

func TestBadPaths(t *testing.T) {
	for _, c := range []struct{ health, live, want string }{
		{"health", "", `health path "health" does not begin with a slash`},
		{"", "/metrics", `live path "/metrics" is taken by another route`},
		{"/engine/health", "", `health path "/engine/health" is taken by another route`},
		{"/x", "/x", `health path and live path are both "/x"`},
		{"/live", "", `health path and live path are both "/live"`},
	} {
		s, err := Listen(t.Context(), Config{Host: "127.0.0.1", Health: NewHealth(Options{}), HealthPath: c.health, LivePath: c.live})
		require.ErrorContains(t, err, c.want)
		require.Nil(t, s)
	}
	_, err := Listen(t.Context(), Config{})
	require.ErrorContains(t, err, "no health model")
}

func TestPortInUseIsSaidPlainly(t *testing.T) {
	first := serve(t, Config{})
	port := int(first.Addr().Port())
	_, err := Listen(t.Context(), Config{Host: "127.0.0.1", Port: port, Health: NewHealth(Options{}), Logger: zerolog.Nop()})
	var bind *BindError
	require.ErrorAs(t, err, &bind)
	require.True(t, bind.InUse())
	require.ErrorContains(t, err, fmt.Sprintf("system server: cannot listen on 127.0.0.1:%d: address already in use by ", port))
	checkHolder(t, bind)

	_, err = ListenFiles(t.Context(), "127.0.0.1", port, nil, zerolog.Nop())
	require.ErrorContains(t, err, "model file server: cannot listen on 127.0.0.1")
}

func TestAddressThatIsNotOurs(t *testing.T) {
	// 192.0.2.0/24 is reserved for documentation: no host has it.
	_, err := Listen(t.Context(), Config{Host: "192.0.2.1", Port: 1, Health: NewHealth(Options{}), Logger: zerolog.Nop()})
	var bind *BindError
	require.ErrorAs(t, err, &bind)
	require.False(t, bind.InUse())
	require.ErrorContains(t, err, "system server: cannot listen on 192.0.2.1:1: ")
}

func TestCloseWaitsForRequests(t *testing.T) {
	s, err := Listen(t.Context(), Config{Host: "127.0.0.1", Health: NewHealth(Options{}), Logger: zerolog.Nop()})
	require.NoError(t, err)
	entered, release := make(chan struct{}), make(chan struct{})
	s.HandleEngine("slow", func(context.Context, json.RawMessage) (any, error) {
		close(entered)
		<-release
		return "done", nil
	})
	got := make(chan answer)
	go func() { got <- ask(t, s, "GET", "/engine/slow", "") }()
	<-entered
	closed := make(chan struct{})
	go func() { defer close(closed); closeServer(t, s) }()
	<-s.Done() // no longer accepts
	close(release)
	require.Equal(t, `"done"`, (<-got).body)
	<-closed
	require.NoError(t, s.Err())
	closeServer(t, s) // twice is fine
}

func TestCloseIsBounded(t *testing.T) {
	s, err := Listen(t.Context(), Config{Host: "127.0.0.1", Health: NewHealth(Options{}), Logger: zerolog.Nop()})
	require.NoError(t, err)
	entered, left := make(chan struct{}), make(chan struct{})
	s.HandleEngine("hangs", func(ctx context.Context, _ json.RawMessage) (any, error) {
		close(entered)
		<-ctx.Done() // only ends because the server is closed
		close(left)
		return nil, ctx.Err()
	})
	conn, err := net.Dial("tcp", s.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	_, err = io.WriteString(conn, "GET /engine/hangs HTTP/1.1\r\nHost: x\r\n\r\n")
	require.NoError(t, err)
	<-entered
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // no patience at all
	require.ErrorIs(t, s.Close(ctx), context.Canceled)
	<-left
}

// The context that Listen gets bounds the binding, not the life of the server.
func TestServerOutlivesListenContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	s, err := Listen(ctx, Config{Host: "127.0.0.1", Health: NewHealth(Options{}), Logger: zerolog.Nop()})
	require.NoError(t, err)
	defer closeServer(t, s)
	cancel()
	s.HandleEngine("ctx", func(ctx context.Context, _ json.RawMessage) (any, error) { return ctx.Err() == nil, nil })
	require.Equal(t, "true", ask(t, s, "GET", "/engine/ctx", "").body)
}
