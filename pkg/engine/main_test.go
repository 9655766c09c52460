package engine

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"dynworker/pkg/engine/ipc"
)

// modeEnv makes the test binary play an engine: its value names one of modes.
const modeEnv = "ENGINE_TEST_MODE"

// argEnv carries a mode's argument.
const argEnv = "ENGINE_TEST_ARG"

// patience bounds waits that only a bug or a dead machine can make that long.
const patience = 60 * time.Second

func TestMain(m *testing.M) {
	if mode := os.Getenv(modeEnv); mode != "" {
		os.Exit(playEngine(mode))
	}
	goleak.VerifyTestMain(m)
}

// peer is the engine's side of a channel, for engines that follow a script.
type peer struct {
	conn io.ReadWriteCloser
	r    *ipc.Reader
}

func newPeer(conn io.ReadWriteCloser) *peer { return &peer{conn: conn, r: ipc.NewReader(conn, 0)} }

func (p *peer) write(b []byte, err error) {
	if err != nil {
		panic(err)
	}
	_, _ = p.conn.Write(b) // the worker may have gone; then the next read ends the script
}

func (p *peer) send(m ipc.Message) { p.write(ipc.AppendMessage(nil, m)) }

func (p *peer) outputs(outs ...ipc.Output) {
	b := ipc.BeginFrame(nil, ipc.KindOutputs)
	var err error
	for i := range outs {
		if b, err = ipc.AppendOutput(b, &outs[i]); err != nil {
			panic(err)
		}
	}
	p.write(ipc.EndFrame(b, 0))
}

// next returns the next message; ok is false at the end of the channel.
func (p *peer) next() (kind ipc.Kind, payload []byte, ok bool) {
	kind, payload, err := p.r.Next()
	return kind, payload, err == nil
}

// until reads up to a message of a kind and returns its payload.
func (p *peer) until(want ipc.Kind) (payload []byte, ok bool) {
	for {
		kind, payload, ok := p.next()
		if !ok || kind == want {
			return payload, ok
		}
	}
}

func (p *peer) hello() {
	p.send(ipc.Hello{Protocol: ipc.Version, Engine: "test", Version: "1", PID: os.Getpid()})
}

func (p *peer) becomeReady() {
	p.hello()
	p.until(ipc.KindConfigure)
	p.send(ipc.Ready{Engine: "test", Version: "1", AttentionDPSize: 1})
}

// modes are the engines that the test binary can play.
var modes = map[string]func(p *peer) int{
	"silent":        func(p *peer) int { p.until(0); return 0 },
	"wrong-version": func(p *peer) int { p.send(ipc.Hello{Protocol: 99, Engine: "test"}); p.until(0); return 0 },
	"no-hello":      func(p *peer) int { p.send(ipc.Progress{Phase: "x"}); p.until(0); return 0 },
	"hello-silent":  func(p *peer) int { p.hello(); p.until(0); return 0 },
	"hello-twice":   func(p *peer) int { p.hello(); p.hello(); p.until(0); return 0 },
	"exit-3": func(p *peer) int {
		fmt.Fprintln(os.Stderr, "ModuleNotFoundError: no module named tensorrt_llm")
		return 3
	},
	"hello-fatal": func(p *peer) int {
		p.hello()
		p.until(ipc.KindConfigure)
		p.send(ipc.Fatal{ErrorType: "ValueError", Message: "no such model"})
		return 1
	},
	"flood":        playFlood,
	"long-line":    playLongLine,
	"good":         playGood,
	"die-3":        func(p *peer) int { p.becomeReady(); p.until(ipc.KindGenerate); return 3 },
	"die-9":        func(p *peer) int { p.becomeReady(); p.until(ipc.KindGenerate); return suicide() },
	"fatal":        func(p *peer) int { playFatal(p); return 1 },
	"fatal-linger": func(p *peer) int { playFatal(p); return linger() },
	"garbage": func(p *peer) int {
		p.becomeReady()
		p.until(ipc.KindGenerate)
		p.write([]byte("Loading weights: 12%\n"), nil)
		return linger()
	},
	"close-channel": func(p *peer) int { p.becomeReady(); p.until(ipc.KindGenerate); p.conn.Close(); return linger() },
	"stubborn": func(p *peer) int {
		signal.Ignore(syscall.SIGTERM)
		p.becomeReady()
		p.until(0)
		return linger()
	},
	"obeys-term": func(p *peer) int {
		p.becomeReady()
		for { // the shutdown message is read and ignored
			if _, _, ok := p.next(); !ok {
				return linger()
			}
		}
	},
	"grandchild": playGrandchild,
	"sleeper":    func(*peer) int { return linger() },
	"report-fds": playReportFDs,
	"worker":     playWorker,
	"watched":    playWatched,
}

func playEngine(mode string) int {
	play := modes[mode]
	if play == nil {
		fmt.Fprintln(os.Stderr, "no such mode:", mode)
		return 99
	}
	var p *peer
	if fd, err := strconv.Atoi(os.Getenv(ipc.EnvFD)); err == nil {
		unix.CloseOnExec(fd)
		conn, err := net.FileConn(os.NewFile(uintptr(fd), "channel"))
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 98
		}
		_ = unix.Close(fd) // the connection works on a duplicate
		p = newPeer(conn)
	}
	return play(p)
}

// linger stands for an engine that hangs: it is the test's business to end it,
// and the alarm's if the test has died.
func linger() int {
	<-time.After(2 * patience)
	return 97
}

func suicide() int {
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	return linger()
}

func playFatal(p *peer) {
	p.becomeReady()
	p.until(ipc.KindGenerate)
	p.send(ipc.Fatal{ErrorType: "RuntimeError", Message: "CUDA error"})
}

// playGood answers every request with its prompt, a token a record, and obeys.
func playGood(p *peer) int {
	p.becomeReady()
	for {
		kind, payload, ok := p.next()
		switch {
		case !ok:
			return 4
		case kind == ipc.KindGenerate:
			req, err := ipc.ParseGenerate(payload)
			if err != nil {
				return 5
			}
			for i, t := range req.Tokens {
				o := ipc.Output{ID: req.ID, Tokens: []uint32{uint32(t)}}
				if i == len(req.Tokens)-1 {
					o.Last, o.Meta = true, &ipc.Meta{FinishReason: "length"}
				}
				p.outputs(o)
			}
		case kind == ipc.KindQuery:
			q, _ := ipc.ParseQuery(payload)
			p.write(ipc.AppendJSON(nil, ipc.KindAnswer, map[string]any{
				"seq": q.Seq, "ok": q.What == ipc.QueryHealth, "healthy": true, "error": "unknown query",
			}))
		case kind == ipc.KindShutdown:
			p.send(ipc.Goodbye{Reason: "asked to"})
			return 0
		}
	}
}

// floodLines is more than any rate limit lets through.
const floodLines = 20000

func playFlood(p *peer) int {
	p.becomeReady()
	w := bufio.NewWriter(os.Stderr)
	for i := range floodLines {
		fmt.Fprintf(w, "[TRT-LLM] [W] warning %d\n", i)
	}
	w.Flush()
	p.until(ipc.KindGenerate)
	return 1
}

func playLongLine(p *peer) int {
	p.becomeReady()
	os.Stdout.Write(bytes.Repeat([]byte("x"), 1<<20))
	fmt.Print("\nafter\nno end")
	p.until(ipc.KindGenerate)
	return 1
}

// playGrandchild leaves two processes behind that hold stdout open: one in the
// engine's group and one that has left it.
func playGrandchild(p *peer) int {
	p.becomeReady()
	for _, attr := range []*syscall.SysProcAttr{{}, {Setsid: true}} {
		cmd := exec.Command(os.Args[0])
		cmd.Env = []string{modeEnv + "=sleeper"}
		cmd.Stdout, cmd.SysProcAttr = os.Stdout, attr
		if err := cmd.Start(); err != nil {
			return 96
		}
		fmt.Println("left behind", cmd.Process.Pid)
	}
	p.until(ipc.KindGenerate)
	return 3
}

func playReportFDs(p *peer) int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 95
	}
	sockets := 0
	for _, e := range entries {
		if to, _ := os.Readlink("/proc/self/fd/" + e.Name()); strings.HasPrefix(to, "socket:") {
			sockets++
		}
	}
	p.send(ipc.Hello{Protocol: ipc.Version, Engine: "test", Version: fmt.Sprint(sockets)})
	p.until(ipc.KindConfigure)
	p.send(ipc.Ready{Engine: "test", Version: fmt.Sprint(sockets), AttentionDPSize: 1})
	p.until(0)
	return 0
}

// playWorker is a worker with two engines that waits to be killed.
func playWorker(*peer) int {
	for _, fifo := range strings.Split(os.Getenv(argEnv), ",") {
		_, err := Start(context.Background(), Config{
			Command: []string{os.Args[0]}, Env: []string{modeEnv + "=watched", argEnv + "=" + fifo}, Logger: zerolog.Nop(),
		})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 94
		}
	}
	fmt.Println("started")
	return linger()
}

// playWatched holds a FIFO open for as long as it lives, and lives until its
// channel ends.
func playWatched(p *peer) int {
	f, err := os.OpenFile(os.Getenv(argEnv), os.O_WRONLY, 0)
	if err != nil {
		return 93
	}
	defer f.Close()
	p.becomeReady()
	p.until(0)
	return 0
}

// logBuffer is a log that a test can read while it is written.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logBuffer) entries(t *testing.T) []map[string]any {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []map[string]any
	for line := range strings.Lines(l.buf.String()) {
		var e map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &e))
		all = append(all, e)
	}
	return all
}

func (l *logBuffer) logger() zerolog.Logger { return zerolog.New(l) }

// testConfig runs the test binary as an engine in the given mode.
func testConfig(t *testing.T, mode string) Config {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	dir := t.TempDir()
	return Config{
		// Built with -cover, the child would complain on stderr without a place for its counters.
		Command: []string{exe}, Env: []string{modeEnv + "=" + mode, "GOCOVERDIR=" + dir}, Dir: dir,
		Configure: ipc.Configure{WorkerVersion: "test"},
		Logger:    zerolog.Nop(),
	}
}

// bounded is a context for things that must happen.
func bounded(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

func start(t *testing.T, cfg Config) *Process {
	t.Helper()
	p, err := Start(bounded(t), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { stop(t, p) })
	return p
}

// stop ends an engine at the end of a test, without ceremony.
func stop(t testing.TB, p *Process) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_ = p.Stop(ctx)
	require.NotNil(t, p.Exit())
}

func waitDone(t *testing.T, p *Process) *Exit {
	t.Helper()
	select {
	case <-p.Done():
	case <-time.After(patience):
		require.FailNow(t, "the engine's end was not noticed")
	}
	return p.Exit()
}

// processState is the state letter of a process; an error means it is gone.
func processState(pid int) (string, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	return fields[0], nil
}
