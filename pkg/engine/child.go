package engine

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dynworker/pkg/engine/ipc"
)

// runner is the engine process as the protocol code sees it. The seam is here
// so that an engine can also live in the worker's process (Attach), and so that
// another way of running and killing a process tree can take its place.
type runner interface {
	// pid is the process id, 0 when there is no process.
	pid() int
	// exited is closed when the process is gone and reaped.
	exited() <-chan struct{}
	// status is how it ended; valid after exited, nil when there was no process.
	status() *ExitError
	// terminate asks the whole process group to end, kill ends it. Both are
	// harmless when the process is gone.
	terminate()
	kill()
	// release frees what is left, after a bounded wait for the last output.
	release()
}

// channelFD is the descriptor at which the child finds its end of the channel:
// the first one after stdin, stdout and stderr.
const channelFD = 3

// pipeDelay bounds how long a descendant that outlived the engine may hold its
// stdout or stderr open.
const pipeDelay = 2 * time.Second

// child runs an engine as an operating system process in its own session, so
// that a signal to the worker's process group (Ctrl-C, a container's init) does
// not reach the engine before the worker has decided what to do.
type child struct {
	cmd     *exec.Cmd
	pipes   []*os.File // our ends of its stdout and stderr
	readers sync.WaitGroup
	done    chan struct{}
	exit    *ExitError

	mu   sync.Mutex
	gone bool // the pid may belong to someone else from now on
}

// spawn starts the process and returns the worker's end of its channel. No
// other process gets hold of that end (it is close-on-exec from birth), so the
// worker's death closes it, and that is what tells the engine to end.
func spawn(cfg *Config, out *outputLog) (net.Conn, *child, error) {
	if len(cfg.Command) == 0 {
		return nil, nil, errors.New("no engine command given")
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make the engine channel: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "engine channel"), os.NewFile(uintptr(fds[1]), "engine channel (child)")
	defer theirs.Close()
	conn, err := net.FileConn(ours)
	ours.Close() // FileConn works on a duplicate
	if err != nil {
		return nil, nil, fmt.Errorf("make the engine channel: %w", err)
	}

	c := &child{cmd: exec.Command(cfg.Command[0], cfg.Command[1:]...), done: make(chan struct{})}
	c.cmd.Dir = cfg.Dir
	c.cmd.Env = childEnv(cfg.Env)
	c.cmd.ExtraFiles = []*os.File{theirs}
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := c.start(out); err != nil {
		conn.Close()
		return nil, nil, fmt.Errorf("spawn: %w", err)
	}
	go c.wait()
	return conn, c, nil
}

// start runs the command with its output going to out. The pipes are ours and
// not os/exec's, because its Wait would keep the exit status back for as long
// as a descendant holds a pipe open.
func (c *child) start(out *outputLog) error {
	stdoutR, stdoutW, err := os.Pipe()
	if err != nil {
		return err
	}
	defer stdoutW.Close()
	stderrR, stderrW, err := os.Pipe()
	if err != nil {
		stdoutR.Close()
		return err
	}
	defer stderrW.Close()
	c.pipes = []*os.File{stdoutR, stderrR}
	c.cmd.Stdout, c.cmd.Stderr = stdoutW, stderrW
	if err := c.cmd.Start(); err != nil {
		stdoutR.Close()
		stderrR.Close()
		return err
	}
	for i, stream := range []string{"stdout", "stderr"} {
		c.readers.Go(func() {
			w := out.writer(stream)
			_, _ = io.Copy(w, c.pipes[i]) // ends with the last writer, or in release
			w.finish()
		})
	}
	return nil
}

// release waits for the last output. A descendant that outlived the engine may
// hold a pipe open; it is not waited for longer than pipeDelay.
func (c *child) release() {
	for _, r := range c.pipes {
		_ = r.SetReadDeadline(time.Now().Add(pipeDelay))
	}
	c.readers.Wait()
	for _, r := range c.pipes {
		_ = r.Close()
	}
}

// childEnv is env with the channel's descriptor, and without one that the
// worker may have inherited itself.
func childEnv(env []string) []string {
	clean := slices.DeleteFunc(slices.Clone(env), func(kv string) bool {
		return strings.HasPrefix(kv, ipc.EnvFD+"=")
	})
	return append(clean, fmt.Sprintf("%s=%d", ipc.EnvFD, channelFD))
}

// wait is the only place that reaps the child. Between the child's death and
// its reaping the pid, and with it the process group's id, cannot be given to
// anyone else: the one moment at which killing what the engine left behind in
// its group is safe.
func (c *child) wait() {
	defer close(c.done)
	pid := c.cmd.Process.Pid
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	c.kill()
	c.mu.Lock()
	c.gone = true
	c.mu.Unlock()
	_ = c.cmd.Wait() // its error repeats the status
	c.exit = exitError(c.cmd.ProcessState)
}

func exitError(s *os.ProcessState) *ExitError {
	if s == nil {
		return nil
	}
	if ws, ok := s.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return &ExitError{Code: -1, Signal: ws.Signal()}
	}
	return &ExitError{Code: s.ExitCode()}
}

func (c *child) pid() int                { return c.cmd.Process.Pid }
func (c *child) exited() <-chan struct{} { return c.done }
func (c *child) status() *ExitError      { return c.exit }
func (c *child) terminate()              { c.signal(unix.SIGTERM) }
func (c *child) kill()                   { c.signal(unix.SIGKILL) }

// signal sends sig to the engine's process group.
func (c *child) signal(sig syscall.Signal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.gone {
		_ = unix.Kill(-c.cmd.Process.Pid, sig) // ESRCH: nobody left, which is what was wanted
	}
}

// guest stands in for a process when the engine runs inside the worker: it is
// gone when its channel is.
type guest struct {
	conn net.Conn
	done <-chan struct{}
}

func (g guest) pid() int                { return 0 }
func (g guest) exited() <-chan struct{} { return g.done }
func (g guest) status() *ExitError      { return nil }
func (g guest) terminate()              { g.kill() }
func (g guest) kill()                   { _ = g.conn.Close() }
func (g guest) release()                {}
