package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/engine/ipc"
)

func itoa(n int) string { return strconv.Itoa(n) }

// Every way in which an engine can die with a request open: the request ends
// with ErrEngineDead and the cause, and the record says what happened.
func TestEngineDies(t *testing.T) {
	for mode, check := range map[string]func(t *testing.T, err error, exit *Exit){
		"die-3": func(t *testing.T, err error, exit *Exit) {
			var status *ExitError
			require.ErrorAs(t, err, &status)
			require.Equal(t, 3, status.Code)
			require.Equal(t, &ExitError{Code: 3}, exit.Status)
			require.False(t, exit.Forced)
		},
		"die-9": func(t *testing.T, err error, exit *Exit) {
			require.Equal(t, &ExitError{Code: -1, Signal: syscall.SIGKILL}, exit.Status)
			require.ErrorContains(t, err, "killed by signal 9")
			require.False(t, exit.Forced)
		},
		"fatal": func(t *testing.T, err error, exit *Exit) {
			require.ErrorIs(t, err, ipc.Fatal{ErrorType: "RuntimeError", Message: "CUDA error"})
			require.Equal(t, "engine failed: RuntimeError: CUDA error (engine process exited with status 1)", exit.Error())
		},
		"fatal-linger": func(t *testing.T, err error, exit *Exit) {
			require.ErrorIs(t, err, ipc.Fatal{ErrorType: "RuntimeError", Message: "CUDA error"})
			require.True(t, exit.Forced)
		},
		"garbage": func(t *testing.T, err error, exit *Exit) {
			var protocol *ProtocolError
			require.ErrorAs(t, err, &protocol)
			require.True(t, exit.Forced)
		},
		"close-channel": func(t *testing.T, err error, exit *Exit) {
			require.ErrorIs(t, err, ErrChannelClosed)
			require.True(t, exit.Forced)
		},
	} {
		t.Run(mode, func(t *testing.T) {
			cfg := testConfig(t, mode)
			cfg.settle, cfg.TermTimeout = patience, patience // a busy machine must not change the outcome
			switch mode {
			case "fatal-linger":
				cfg.TermTimeout = 50 * time.Millisecond
			case "close-channel":
				cfg.settle = 50 * time.Millisecond
			}
			p := start(t, cfg)
			s, err := p.Generate(bounded(t), &ipc.Generate{}, []int32{1})
			require.NoError(t, err)
			_, err = s.Next(bounded(t))
			require.ErrorIs(t, err, ErrEngineDead)
			exit := waitDone(t, p)
			check(t, err, exit)
			require.ErrorIs(t, exit, exit.Cause)

			_, again := s.Next(bounded(t))
			require.ErrorIs(t, again, ErrEngineDead)
			_, err = p.Generate(bounded(t), &ipc.Generate{}, []int32{1})
			require.ErrorIs(t, err, ErrEngineDead)
			_, err = p.Query(bounded(t), ipc.QueryHealth)
			require.ErrorIs(t, err, ErrEngineDead)
			s.Cancel()
			s.Close()
			require.NoError(t, p.Stop(bounded(t)))
		})
	}
}

func TestStopGoesFromAskingToKilling(t *testing.T) {
	for mode, signal := range map[string]syscall.Signal{
		"obeys-term": syscall.SIGTERM,
		"stubborn":   syscall.SIGKILL,
	} {
		t.Run(mode, func(t *testing.T) {
			cfg := testConfig(t, mode)
			cfg.StopTimeout, cfg.TermTimeout = 50*time.Millisecond, 200*time.Millisecond
			if signal == syscall.SIGTERM {
				cfg.TermTimeout = patience
			}
			p := start(t, cfg)
			s, err := p.Generate(bounded(t), &ipc.Generate{}, nil)
			require.NoError(t, err)
			require.NoError(t, p.Stop(bounded(t)))
			require.True(t, p.Exit().Forced)
			require.Equal(t, signal, p.Exit().Status.Signal)
			_, err = s.Next(bounded(t))
			require.ErrorIs(t, err, ErrEngineDead)
			require.ErrorIs(t, err, ErrStopped)
		})
	}
}

// A caller that cannot wait for the bounds gets the engine killed at once.
func TestStopInAHurry(t *testing.T) {
	cfg := testConfig(t, "stubborn")
	cfg.StopTimeout, cfg.TermTimeout = time.Hour, time.Hour
	p := start(t, cfg)
	slow := make(chan error, 1)
	go func() { slow <- p.Stop(context.Background()) }()
	cause := errors.New("second signal")
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(cause)
	require.ErrorIs(t, p.Stop(ctx), cause)
	require.NoError(t, <-slow)
	require.Equal(t, syscall.SIGKILL, p.Exit().Status.Signal)
}

func TestNoRequestSlipsInWhileStopping(t *testing.T) {
	cfg := testConfig(t, "stubborn")
	cfg.StopTimeout, cfg.TermTimeout = time.Hour, time.Hour
	p := start(t, cfg)
	p.requestStop()
	_, err := p.Generate(bounded(t), &ipc.Generate{}, nil)
	require.ErrorIs(t, err, ErrStopped)
	require.NotErrorIs(t, err, ErrEngineDead)
}

// What an engine leaves behind in its group is killed with it; what has left
// the group can neither delay the report of the death nor be waited for.
func TestDescendantsDoNotDelayTheEnd(t *testing.T) {
	var log logBuffer
	cfg := testConfig(t, "grandchild")
	cfg.Logger, cfg.settle = log.logger(), patience
	p := start(t, cfg)
	s, err := p.Generate(bounded(t), &ipc.Generate{}, nil)
	require.NoError(t, err)
	_, err = s.Next(bounded(t))
	require.ErrorContains(t, err, "status 3")
	exit := waitDone(t, p)
	require.Equal(t, 3, exit.Status.Code)

	var pids []int
	for _, line := range exit.Lines {
		var pid int
		if _, err := fmt.Sscanf(line, "left behind %d", &pid); err == nil {
			pids = append(pids, pid)
		}
	}
	require.Len(t, pids, 2)
	require.NoError(t, syscall.Kill(pids[1], syscall.SIGKILL), "the one that left the group was still there")
	requireGone(t, pids[0])
}

// requireGone waits until a process that is no child of ours is dead. Whoever
// inherited it may not reap it, so a zombie counts as dead.
func requireGone(t *testing.T, pid int) {
	t.Helper()
	require.Eventually(t, func() bool {
		state, err := processState(pid)
		return err != nil || state == "Z"
	}, patience, 10*time.Millisecond)
}

func TestOutputIsLoggedAtABoundedRate(t *testing.T) {
	var log logBuffer
	cfg := testConfig(t, "flood")
	cfg.Logger = log.logger()
	cfg.OutputRate, cfg.OutputBurst = 1, 10
	p := start(t, cfg)
	_, err := p.Generate(bounded(t), &ipc.Generate{}, nil)
	require.NoError(t, err)
	exit := waitDone(t, p)
	require.Len(t, exit.Lines, keptLines)
	require.Equal(t, fmt.Sprintf("[TRT-LLM] [W] warning %d", floodLines-1), exit.Lines[keptLines-1])

	var logged, dropped int
	for _, e := range log.entries(t) {
		if e["message"] == "engine output" {
			logged++
			require.Equal(t, "warn", e["level"])
			require.Equal(t, "stderr", e["stream"])
		}
		if n, ok := e["dropped"].(float64); ok {
			dropped += int(n)
		}
	}
	require.GreaterOrEqual(t, logged, 10)
	require.Equal(t, floodLines, logged+dropped, "every line is either logged or counted")
	require.EqualValues(t, dropped, exit.DroppedLines)
	require.Less(t, logged, floodLines/10)
}

func TestOverlongLinesAreCut(t *testing.T) {
	var log logBuffer
	cfg := testConfig(t, "long-line")
	cfg.OutputLogger = ptr(log.logger())
	p := start(t, cfg)
	_, err := p.Generate(bounded(t), &ipc.Generate{}, nil)
	require.NoError(t, err)
	exit := waitDone(t, p)
	require.Equal(t, []string{strings.Repeat("x", maxLine) + cutMark, "after", "no end"}, exit.Lines)
	for _, e := range log.entries(t) {
		require.Equal(t, "engine output", e["message"], "nothing else goes to the output's logger")
	}
}

func TestExitRecordInTheLog(t *testing.T) {
	var log logBuffer
	l := log.logger()
	exit := &Exit{
		Cause: io.ErrUnexpectedEOF, PID: 12, Status: &ExitError{Code: -1, Signal: syscall.SIGABRT},
		Goodbye: "bye", Forced: true, Lines: []string{"a", "b"}, DroppedLines: 3,
	}
	l.Error().Object("engine", exit).Msg("engine died")
	require.Equal(t, map[string]any{
		"cause": "unexpected EOF", "pid": 12.0, "forced": true, "exit_code": -1.0, "signal": "aborted",
		"goodbye": "bye", "dropped_lines": 3.0, "last_lines": []any{"a", "b"},
	}, log.entries(t)[0]["engine"])
}

func ptr[T any](v T) *T { return &v }
