package engine

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dynworker/pkg/engine/ipc"
)

func TestStartAndStop(t *testing.T) {
	p := start(t, testConfig(t, "good"))
	require.Equal(t, "test", p.Ready().Engine)
	require.Nil(t, p.Exit())

	sid, err := unix.Getsid(p.PID())
	require.NoError(t, err)
	require.Equal(t, p.PID(), sid, "the engine has a session of its own")

	require.NoError(t, p.Stop(bounded(t)))
	exit := p.Exit()
	require.ErrorIs(t, exit, ErrStopped)
	require.Equal(t, &ExitError{Code: 0}, exit.Status)
	require.Equal(t, "asked to", exit.Goodbye)
	require.False(t, exit.Forced)
	require.NoError(t, p.Stop(bounded(t)), "stopping again is harmless")
	_, err = p.Generate(bounded(t), &ipc.Generate{}, nil)
	require.ErrorIs(t, err, ErrEngineDead)
	require.ErrorIs(t, err, ErrStopped)
}

func TestStartFailures(t *testing.T) {
	short := 200 * time.Millisecond
	for mode, tc := range map[string]struct {
		change func(*Config)
		check  func(t *testing.T, err *StartError)
	}{
		"silent": {
			func(c *Config) { c.HelloTimeout = short },
			func(t *testing.T, err *StartError) {
				require.Equal(t, &TimeoutError{Waiting: "hello", Bound: short}, err.Err)
				require.True(t, err.Exit.Forced)
			},
		},
		"hello-silent": {
			func(c *Config) { c.StartInactivity = short },
			func(t *testing.T, err *StartError) {
				require.Equal(t, &TimeoutError{Waiting: "progress or ready message", Bound: short}, err.Err)
			},
		},
		"wrong-version": {nil, func(t *testing.T, err *StartError) {
			var version *VersionError
			require.ErrorAs(t, err, &version)
			require.Equal(t, 99, version.Engine)
			require.Contains(t, err.Error(), "speaks engine protocol 99, this worker speaks 1")
		}},
		"no-hello": {nil, func(t *testing.T, err *StartError) {
			var protocol *ProtocolError
			require.ErrorAs(t, err, &protocol)
		}},
		"hello-twice": {nil, func(t *testing.T, err *StartError) {
			var protocol *ProtocolError
			require.ErrorAs(t, err, &protocol)
		}},
		"exit-3": {nil, func(t *testing.T, err *StartError) {
			require.Equal(t, &ExitError{Code: 3}, err.Err)
			require.Contains(t, err.Error(), "exited with status 3")
			require.Contains(t, err.Error(), "| ModuleNotFoundError")
		}},
		"hello-fatal": {nil, func(t *testing.T, err *StartError) {
			var fatal ipc.Fatal
			require.ErrorAs(t, err, &fatal)
			require.Contains(t, err.Error(), "ValueError: no such model")
			require.Equal(t, &ExitError{Code: 1}, err.Exit.Status)
			require.Contains(t, err.Error(), "status 1")
		}},
	} {
		t.Run(mode, func(t *testing.T) {
			cfg := testConfig(t, mode)
			cfg.settle, cfg.TermTimeout = patience, patience // a busy machine must not change the outcome
			if tc.change != nil {
				tc.change(&cfg)
			}
			p, err := Start(bounded(t), cfg)
			require.Nil(t, p)
			var start *StartError
			require.ErrorAs(t, err, &start)
			tc.check(t, start)
			require.NotNil(t, start.Exit.Status, "nothing is left running")
			require.ErrorIs(t, syscall.Kill(start.Exit.PID, 0), syscall.ESRCH)
		})
	}
}

func TestStartWithoutAProgram(t *testing.T) {
	cfg := testConfig(t, "good")
	cfg.Command = []string{filepath.Join(t.TempDir(), "no-such-engine")}
	_, err := Start(bounded(t), cfg)
	require.ErrorIs(t, err, os.ErrNotExist)
	var start *StartError
	require.ErrorAs(t, err, &start)
	require.Nil(t, start.Exit)

	cfg.Command = nil
	_, err = Start(bounded(t), cfg)
	require.ErrorContains(t, err, "no engine command")
}

func TestStartIsAbandonedWithItsContext(t *testing.T) {
	cause := errors.New("the operator changed their mind")
	ctx, cancel := context.WithCancelCause(bounded(t))
	cfg := testConfig(t, "hello-silent")
	time.AfterFunc(100*time.Millisecond, func() { cancel(cause) })
	_, err := Start(ctx, cfg)
	require.ErrorIs(t, err, cause)
}

// The environment is what the caller says, and the only descriptors that the
// engine has are its own: a second engine must not hold the first one's channel.
func TestEngineInheritsNothing(t *testing.T) {
	t.Setenv("A_SECRET_OF_THE_WORKER", "1")
	require.Equal(t, []string{"A=1", ipc.EnvFD + "=3"}, childEnv([]string{"A=1", ipc.EnvFD + "=77"}))
	first := start(t, testConfig(t, "report-fds"))
	second := start(t, testConfig(t, "report-fds"))
	require.Equal(t, "1", first.Ready().Version, "number of sockets")
	require.Equal(t, "1", second.Ready().Version, "number of sockets")
	environ, err := os.ReadFile(filepath.Join("/proc", itoa(second.PID()), "environ"))
	require.NoError(t, err)
	require.NotContains(t, string(environ), "A_SECRET")
}

// A worker that is killed takes its engines with it.
func TestEnginesDieWithTheWorker(t *testing.T) {
	fifos := []string{filepath.Join(t.TempDir(), "a"), filepath.Join(t.TempDir(), "b")}
	for _, f := range fifos {
		require.NoError(t, unix.Mkfifo(f, 0o600))
	}
	exe, err := os.Executable()
	require.NoError(t, err)
	worker := exec.Command(exe)
	worker.Env = []string{modeEnv + "=worker", argEnv + "=" + fifos[0] + "," + fifos[1]}
	stdout, err := worker.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, worker.Start())
	defer func() { _ = worker.Wait() }()

	ends := make(chan error, len(fifos))
	for _, path := range fifos {
		go func() {
			// Opening waits for the engine to open its end, reading for its death.
			f, err := os.Open(path)
			if err == nil {
				defer f.Close()
				_, err = f.Read(make([]byte, 1))
			}
			ends <- err
		}()
	}
	said := make([]byte, 7)
	_, err = stdout.Read(said)
	require.NoError(t, err)
	require.Equal(t, "started", string(said))
	select {
	case err := <-ends:
		require.FailNow(t, "an engine ended before its worker", "%v", err)
	default:
	}
	require.NoError(t, worker.Process.Kill())
	for range fifos {
		select {
		case err := <-ends:
			require.ErrorContains(t, err, "EOF")
		case <-time.After(patience):
			require.FailNow(t, "an engine outlived its worker")
		}
	}
}
