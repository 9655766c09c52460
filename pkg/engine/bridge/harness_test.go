package bridge_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"dynworker/pkg/engine/bridge"
	"dynworker/pkg/engine/bridge/bridgetest"
	"dynworker/pkg/engine/ipc"
)

// patience bounds waits that only a bug or a dead machine can make that long.
const patience = 60 * time.Second

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// child is a bridge process and the worker's end of its channel, used directly
// so that these tests see every frame.
type child struct {
	t      *testing.T
	log    bridgetest.Log
	cmd    *exec.Cmd
	conn   net.Conn
	r      *ipc.Reader
	stdout output
	stderr output
	exited chan struct{}
}

// output collects what the process prints.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

type args map[string]any

// spawn starts a bridge and leaves it before its hello.
func spawn(t *testing.T, setup bridgetest.Setup) *child {
	t.Helper()
	return spawnLaunch(t, bridgetest.New(t, setup))
}

func spawnLaunch(t *testing.T, l bridgetest.Launch) *child {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	ours, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	defer theirs.Close()
	conn, err := net.FileConn(ours)
	ours.Close()
	require.NoError(t, err)
	require.NoError(t, conn.SetDeadline(time.Now().Add(2*patience)))

	c := &child{t: t, log: l.Log, conn: conn, r: ipc.NewReader(conn, 0), exited: make(chan struct{})}
	c.cmd = exec.Command(l.Command[0], l.Command[1:]...)
	c.cmd.Env = append(l.Env, ipc.EnvFD+"=3")
	c.cmd.ExtraFiles = []*os.File{theirs}
	c.cmd.Stdout, c.cmd.Stderr = &c.stdout, &c.stderr
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	c.cmd.WaitDelay = time.Second
	require.NoError(t, c.cmd.Start())
	go func() {
		_ = c.cmd.Wait() // the status is looked at in wait
		close(c.exited)
	}()
	t.Cleanup(func() {
		conn.Close()
		c.wait()
		c.requireNobodyLeft()
		if t.Failed() {
			t.Logf("the bridge printed:\n%s", c.stderr.String())
		}
	})
	return c
}

// start starts a bridge and returns when it is ready.
func start(t *testing.T, setup bridgetest.Setup, a args, o bridge.Options) *child {
	t.Helper()
	c := spawn(t, setup)
	c.configure(a, o)
	c.ready()
	return c
}

// configure reads the hello and sends the engine arguments, the model added.
func (c *child) configure(a args, o bridge.Options) {
	c.t.Helper()
	c.hello()
	all := args{"model": bridgetest.Dir("model")}
	for k, v := range a {
		all[k] = v
	}
	c.send(ipc.Configure{Protocol: ipc.Version, Args: mustJSON(all), Options: mustJSON(o)})
}

func (c *child) hello() ipc.Hello {
	c.t.Helper()
	hello, err := ipc.ParseHello(c.expect(ipc.KindHello))
	require.NoError(c.t, err)
	return hello
}

// ready skips progress messages.
func (c *child) ready() ipc.Ready {
	c.t.Helper()
	for {
		kind, payload := c.next()
		if kind == ipc.KindProgress {
			continue
		}
		require.Equal(c.t, ipc.KindReady, kind, "%s", payload)
		ready, err := ipc.ParseReady(payload)
		require.NoError(c.t, err)
		return ready
	}
}

func (c *child) next() (ipc.Kind, []byte) {
	c.t.Helper()
	kind, payload, err := c.r.Next()
	require.NoError(c.t, err, "the bridge printed:\n%s", c.stderr.String())
	return kind, payload
}

func (c *child) expect(want ipc.Kind) []byte {
	c.t.Helper()
	kind, payload := c.next()
	require.Equal(c.t, want, kind, "%s", payload)
	return payload
}

// fatal skips up to the fatal message.
func (c *child) fatal() ipc.Fatal {
	c.t.Helper()
	for {
		kind, payload := c.next()
		if kind != ipc.KindFatal {
			require.Contains(c.t, []ipc.Kind{ipc.KindProgress, ipc.KindOutputs}, kind)
			continue
		}
		f, err := ipc.ParseFatal(payload)
		require.NoError(c.t, err)
		return f
	}
}

func (c *child) send(m ipc.Message) {
	c.t.Helper()
	c.write(ipc.AppendMessage(nil, m))
}

func (c *child) write(b []byte, err error) {
	c.t.Helper()
	require.NoError(c.t, err)
	_, err = c.conn.Write(b)
	require.NoError(c.t, err)
}

// order is a request as most tests want it: streaming, max tokens, the default
// priority, and whatever the options change.
func order(maxTokens int64, change ...func(*ipc.Generate)) *ipc.Generate {
	g := &ipc.Generate{Streaming: true, Priority: ptr(0.5), Sampling: ipc.Sampling{MaxTokens: &maxTokens}}
	for _, f := range change {
		f(g)
	}
	return g
}

func (c *child) generate(id uint64, prompt []int32, g *ipc.Generate) {
	c.t.Helper()
	c.write(ipc.AppendGenerate(nil, id, prompt, g))
}

func (c *child) cancel(id uint64) {
	c.t.Helper()
	c.write(ipc.AppendCancel(nil, id), nil)
}

// answer is what came for one request.
type answer struct {
	tokens map[uint16][]uint32
	probs  map[uint16][]ipc.TokenLogProb
	metas  map[uint16][]ipc.Meta
	last   *ipc.Output
}

func (a *answer) lastMeta() ipc.Meta {
	if a.last.Meta == nil {
		return ipc.Meta{}
	}
	return *a.last.Meta
}

// answers collects outputs until all the given requests have had their last
// record; one record more for a request that has ended fails the test.
func (c *child) answers(ids ...uint64) map[uint64]*answer {
	c.t.Helper()
	return c.collect(func(got map[uint64]*answer) bool {
		for _, id := range ids {
			if got[id] == nil || got[id].last == nil {
				return false
			}
		}
		return true
	})
}

// answer collects the outputs of one request that runs alone.
func (c *child) answer(id uint64) *answer {
	c.t.Helper()
	return c.answers(id)[id]
}

func (c *child) collect(enough func(map[uint64]*answer) bool) map[uint64]*answer {
	c.t.Helper()
	got := map[uint64]*answer{}
	for !enough(got) {
		c.add(got, c.expect(ipc.KindOutputs))
	}
	return got
}

func (c *child) add(got map[uint64]*answer, payload []byte) {
	c.t.Helper()
	outs, err := ipc.ParseOutputs(payload)
	require.NoError(c.t, err)
	for i := range outs {
		o := &outs[i]
		a := got[o.ID]
		if a == nil {
			a = &answer{tokens: map[uint16][]uint32{}, probs: map[uint16][]ipc.TokenLogProb{}, metas: map[uint16][]ipc.Meta{}}
			got[o.ID] = a
		}
		require.Nil(c.t, a.last, "request %d goes on after its last record", o.ID)
		a.tokens[o.Index] = append(a.tokens[o.Index], o.Tokens...)
		a.probs[o.Index] = append(a.probs[o.Index], o.LogProbs...)
		if o.Meta != nil {
			a.metas[o.Index] = append(a.metas[o.Index], *o.Meta)
		}
		if o.Last {
			a.last = o
		}
	}
}

// query asks and returns the answer, which must be the next message that is no output.
func (c *child) query(seq uint64, what string) ipc.Answer {
	c.t.Helper()
	c.send(ipc.Query{Seq: seq, What: what})
	kind, payload := c.next()
	for kind == ipc.KindOutputs {
		kind, payload = c.next()
	}
	require.Equal(c.t, ipc.KindAnswer, kind)
	a, err := ipc.ParseAnswer(payload)
	require.NoError(c.t, err)
	require.Equal(c.t, seq, a.Seq)
	return a
}

// wait returns the exit status once the process is gone.
func (c *child) wait() int {
	c.t.Helper()
	select {
	case <-c.exited:
		return c.cmd.ProcessState.ExitCode()
	case <-time.After(patience):
		_ = c.cmd.Process.Kill()
		<-c.exited
		require.Fail(c.t, "the bridge did not end", "it printed:\n%s", c.stderr.String())
		return -1
	}
}

// requireEOF reads to the end of the channel and fails on a frame.
func (c *child) requireEOF() {
	c.t.Helper()
	_, payload, err := c.r.Next()
	require.True(c.t, errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET), "got %v %s", err, payload)
}

// requireNobodyLeft looks for processes of the bridge's group and for the
// workers that the stand-in started in sessions of their own.
func (c *child) requireNobodyLeft() {
	c.t.Helper()
	entries, err := os.ReadDir("/proc")
	require.NoError(c.t, err)
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			state, group := stat(pid)
			require.False(c.t, alive(state) && group == c.cmd.Process.Pid, "process %d of the bridge's group lives on", pid)
		}
	}
	for _, pid := range workers(c.t, c.log) {
		state, _ := stat(pid)
		require.False(c.t, alive(state), "worker process %d lives on", pid)
	}
}

func workers(t *testing.T, log bridgetest.Log) (pids []int) {
	for _, call := range log.Calls(t, "workers") {
		for _, pid := range call["pids"].([]any) {
			pids = append(pids, int(pid.(float64)))
		}
	}
	return pids
}

// stat gives a process's state letter and group; no letter without a process.
func stat(pid int) (state string, group int) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", 0
	}
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	group, _ = strconv.Atoi(fields[2])
	return fields[0], group
}

// alive tells a running process from none and from one that only waits to be reaped.
func alive(state string) bool { return state != "" && state != "Z" && state != "X" }

func itoa(n int) string { return strconv.Itoa(n) }

func ptr[T any](v T) *T { return &v }

func mustJSON(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}
