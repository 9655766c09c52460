package status

import (
	"context"
	"errors"
	"fmt"
	"io"
	stdlog "log"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"
)

// Paths that the server answers at. The first two can be moved by
// configuration, the others are where Dynamo's frontend and tools expect them.
const (
	DefaultHealthPath = "/health"
	DefaultLivePath   = "/live"
	MetricsPath       = "/metrics"
	// MetadataPrefix is what the path of every served model file begins with.
	MetadataPrefix = "/v1/metadata/"
	// EnginePrefix is what the path of every engine route begins with.
	EnginePrefix = "/engine/"

	metadataPath = "/metadata"
)

// Bounds of one connection. A client gets writeTimeout to take a whole
// answer: a frontend gives itself as long for one model file.
const (
	readHeaderTimeout = 5 * time.Second
	readTimeout       = 30 * time.Second
	writeTimeout      = 5 * time.Minute
	idleTimeout       = time.Minute
	maxHeaderBytes    = 16 << 10
)

const contentTypeText = "text/plain; charset=utf-8"

// Config is what a system server is made of.
type Config struct {
	// Host to bind; empty means all addresses.
	Host string
	// Port to bind, 0 for any free one.
	Port int
	// HealthPath and LivePath; empty means the defaults.
	HealthPath, LivePath string
	// Health is required.
	Health *Health
	// Metrics answers /metrics; nil makes it a 404.
	Metrics http.Handler
	Logger  zerolog.Logger
}

// Server is a listening HTTP server: the system server, or the model file
// server that stands in for it when the system port is off.
type Server struct {
	what     string // for messages
	log      zerolog.Logger
	listener net.Listener
	http     *http.Server
	cancel   context.CancelFunc // ends the base context of all requests
	done     chan struct{}
	err      error // why serving ended; read after done

	health     *Health // nil for a model file server
	healthPath string
	livePath   string
	metrics    http.Handler

	mu       sync.RWMutex
	metadata http.Handler
	engine   map[string]EngineRoute
	admin    map[string]AdminRoute
}

// Listen binds the address and answers from then on. It is meant to be the
// first thing that a starting worker does, so that probes find the port open
// whatever else takes its time. An address that cannot be bound is a
// [*BindError].
func Listen(ctx context.Context, cfg Config) (*Server, error) {
	if cfg.Health == nil {
		return nil, errors.New("system server: no health model given")
	}
	s := &Server{
		what:       "system server",
		health:     cfg.Health,
		healthPath: cfg.HealthPath,
		livePath:   cfg.LivePath,
		metrics:    cfg.Metrics,
	}
	if s.healthPath == "" {
		s.healthPath = DefaultHealthPath
	}
	if s.livePath == "" {
		s.livePath = DefaultLivePath
	}
	if err := checkPaths(s.healthPath, s.livePath); err != nil {
		return nil, fmt.Errorf("system server: %w", err)
	}
	return s.listen(ctx, cfg.Host, cfg.Port, cfg.Logger)
}

// ListenFiles binds a server that answers nothing but model files, for workers
// whose system port is off and whose frontends share no disk with them.
func ListenFiles(ctx context.Context, host string, port int, files http.Handler, log zerolog.Logger) (*Server, error) {
	s := &Server{what: "model file server", metadata: files}
	return s.listen(ctx, host, port, log)
}

// checkPaths refuses probe paths that could never be reached.
func checkPaths(health, live string) error {
	for _, p := range []struct{ name, path string }{{"health", health}, {"live", live}} {
		switch {
		case !strings.HasPrefix(p.path, "/"):
			return fmt.Errorf("%s path %q does not begin with a slash", p.name, p.path)
		case p.path == MetricsPath, p.path == metadataPath,
			strings.HasPrefix(p.path, MetadataPrefix), strings.HasPrefix(p.path, EnginePrefix):
			return fmt.Errorf("%s path %q is taken by another route", p.name, p.path)
		}
	}
	if health == live {
		return fmt.Errorf("health path and live path are both %q", health)
	}
	return nil
}

func (s *Server) listen(ctx context.Context, host string, port int, log zerolog.Logger) (*Server, error) {
	addr := net.JoinHostPort(strings.Trim(host, "[]"), strconv.Itoa(port))
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, newBindError(s.what, addr, port, err)
	}
	base, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.log = log
	s.listener = l
	s.cancel = cancel
	s.done = make(chan struct{})
	s.http = &http.Server{
		Handler:           s,
		ReadHeaderTimeout: readHeaderTimeout,
		ReadTimeout:       readTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		BaseContext:       func(net.Listener) context.Context { return base },
		ErrorLog:          stdlog.New(logWriter{log: log, what: s.what}, "", 0),
	}
	go func() {
		defer close(s.done)
		if err := s.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			s.err = fmt.Errorf("%s: %w", s.what, err)
			log.Error().Err(err).Str("address", l.Addr().String()).Msg(s.what + " ended")
		}
	}()
	return s, nil
}

// Addr is the address that was bound, with the real port.
func (s *Server) Addr() netip.AddrPort {
	ap, err := netip.ParseAddrPort(s.listener.Addr().String())
	if err != nil { // a TCP listener's address always parses
		return netip.AddrPort{}
	}
	return ap
}

// Done is closed when the server no longer serves, after Close or by itself.
func (s *Server) Done() <-chan struct{} { return s.done }

// Err says why the server stopped by itself; nil while it serves and after
// Close.
func (s *Server) Err() error {
	select {
	case <-s.done:
		return s.err
	default:
		return nil
	}
}

// MountMetadata gives everything below [MetadataPrefix] to h, with the path
// unchanged. Until then such requests are answered with 404.
func (s *Server) MountMetadata(h http.Handler) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.metadata = h
}

// Close stops accepting, lets requests in progress finish until ctx ends, and
// then cuts them. It may be called twice.
func (s *Server) Close(ctx context.Context) error {
	err := s.http.Shutdown(ctx)
	s.cancel()
	if err != nil {
		err = fmt.Errorf("%s: requests were cut short: %w", s.what, errors.Join(err, s.http.Close()))
	}
	<-s.done
	return err
}

// ServeHTTP routes a request. Routes are compared as text, not as patterns:
// two of them come from the configuration.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := r.URL.Path
	switch {
	case strings.HasPrefix(path, MetadataPrefix):
		s.mu.RLock()
		h := s.metadata
		s.mu.RUnlock()
		if h == nil {
			writeText(w, http.StatusNotFound, "Not found")
			return
		}
		h.ServeHTTP(w, r)
	case s.health == nil:
		notFound(w)
	case path == s.livePath:
		if readOnly(w, r) {
			s.serveLive(w)
		}
	case path == s.healthPath:
		if readOnly(w, r) {
			s.serveHealth(w)
		}
	case path == MetricsPath && s.metrics != nil:
		if readOnly(w, r) {
			s.metrics.ServeHTTP(w, r)
		}
	case path == metadataPath:
		// Recorded answer of a worker that is not discovered through Kubernetes.
		if readOnly(w, r) {
			writeText(w, http.StatusNotFound, "Discovery metadata not available")
		}
	case strings.HasPrefix(path, EnginePrefix) && len(path) > len(EnginePrefix):
		s.serveEngine(w, r, path[len(EnginePrefix):])
	default:
		notFound(w)
	}
}

func notFound(w http.ResponseWriter) { writeText(w, http.StatusNotFound, "Route not found") }

// readOnly answers 405 to anything but GET and HEAD.
func readOnly(w http.ResponseWriter, r *http.Request) bool {
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		return true
	}
	w.Header().Set("Allow", "GET,HEAD")
	w.WriteHeader(http.StatusMethodNotAllowed)
	return false
}

func writeText(w http.ResponseWriter, code int, body string) {
	w.Header().Set("Content-Type", contentTypeText)
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(code)
	_, _ = io.WriteString(w, body) // a client that left needs no answer
}

// logWriter takes the lines of net/http's own error log.
type logWriter struct {
	log  zerolog.Logger
	what string
}

func (l logWriter) Write(p []byte) (int, error) {
	l.log.Warn().Str("detail", strings.TrimSpace(string(p))).Msg(l.what + ": connection error")
	return len(p), nil
}
