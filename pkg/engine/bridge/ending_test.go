package bridge_test

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dynworker/pkg/engine/bridge"
	"dynworker/pkg/engine/bridge/bridgetest"
	"dynworker/pkg/engine/ipc"
)

// parentSignal is PARENT_SIGNAL of processes.py: the kernel's word that the
// thread which started the bridge has ended, or its whole process.
const parentSignal = syscall.Signal(34 + 4)

func (c *child) goodbye() string {
	c.t.Helper()
	kind, payload := c.next()
	for kind == ipc.KindOutputs || kind == ipc.KindProgress {
		kind, payload = c.next()
	}
	require.Equal(c.t, ipc.KindGoodbye, kind, "%s", payload)
	g, err := ipc.ParseGoodbye(payload)
	require.NoError(c.t, err)
	return g.Reason
}

// stalled starts a request that has given three tokens and gives no more.
func (c *child) stalled(id uint64) {
	c.t.Helper()
	c.generate(id, []int32{stallsAfterThree}, order(9))
	c.tokens(map[uint64]*answer{}, id, 3)
}

func TestShutdown(t *testing.T) {
	c := start(t, bridgetest.Setup{Env: []string{"STANDIN_WORKERS=1"}}, nil, bridge.Options{})
	c.stalled(1)
	c.send(ipc.Shutdown{DeadlineMillis: patience.Milliseconds()})
	// A request that is cut off gets no last record, which would look like an end.
	kind, _ := c.next()
	require.Equal(t, ipc.KindGoodbye, kind)
	c.requireEOF()
	require.Equal(t, bridge.ExitStopped, c.wait())
	require.Len(t, c.log.Calls(t, "shutdown"), 1)
}

func TestShutdownOfAnEngineThatHangs(t *testing.T) {
	c := start(t, bridgetest.Setup{Env: []string{"STANDIN_SHUTDOWN=hang", "STANDIN_WORKERS=2"}}, nil, bridge.Options{})
	c.send(ipc.Shutdown{DeadlineMillis: 500})
	require.Equal(t, "shutdown", c.goodbye())
	require.Equal(t, bridge.ExitStopTooSlow, c.wait())
}

func TestShutdownOfAnEngineThatFails(t *testing.T) {
	c := start(t, bridgetest.Setup{Env: []string{"STANDIN_SHUTDOWN=fail", "STANDIN_WORKERS=1"}}, nil, bridge.Options{})
	c.send(ipc.Shutdown{DeadlineMillis: patience.Milliseconds()})
	c.goodbye()
	require.Equal(t, bridge.ExitStopped, c.wait())
	require.Contains(t, c.stderr.String(), "stand-in shutdown failed")
}

func TestShutdownWhileTheLoopIsBlocked(t *testing.T) {
	// The fatal error that 90013 records is hidden, so only the order ends it.
	c := start(t, bridgetest.Setup{Env: []string{"STANDIN_HIDE=_fatal_error"}}, nil, bridge.Options{})
	c.generate(1, []int32{90013}, order(9))
	c.tokens(map[uint64]*answer{}, 1, 3)
	c.send(ipc.Shutdown{DeadlineMillis: patience.Milliseconds()})
	c.goodbye()
	require.Equal(t, bridge.ExitStopped, c.wait())
}

func TestShutdownBeforeItIsReady(t *testing.T) {
	t.Run("before the configuration", func(t *testing.T) {
		c := spawn(t, bridgetest.Setup{})
		c.hello()
		c.send(ipc.Shutdown{})
		c.goodbye()
		require.Equal(t, bridge.ExitStopped, c.wait())
	})
	t.Run("during the load", func(t *testing.T) {
		c := spawn(t, bridgetest.Setup{Env: []string{"STANDIN_LOAD_MS=600000"}})
		c.configure(nil, bridge.Options{})
		c.loading()
		c.send(ipc.Shutdown{})
		c.goodbye()
		require.Equal(t, bridge.ExitStopped, c.wait())
	})
}

// loading waits until the engine's constructor runs.
func (c *child) loading() {
	c.t.Helper()
	for {
		p, err := ipc.ParseProgress(c.expect(ipc.KindProgress))
		require.NoError(c.t, err)
		if p.Phase == "load" {
			return
		}
	}
}

func TestTheWorkerIsGone(t *testing.T) {
	tests := []struct {
		name  string
		setup bridgetest.Setup
		until func(c *child)
	}{
		{"before the configuration", bridgetest.Setup{}, func(c *child) { c.hello() }},
		{
			"during the load", bridgetest.Setup{Env: []string{"STANDIN_LOAD_MS=600000"}},
			func(c *child) { c.configure(nil, bridge.Options{}); c.loading() },
		},
		{
			"while it serves", bridgetest.Setup{Env: []string{"STANDIN_WORKERS=2"}},
			func(c *child) { c.configure(nil, bridge.Options{}); c.ready(); c.stalled(1) },
		},
		{
			"with an engine that does not stop", bridgetest.Setup{Env: []string{"STANDIN_SHUTDOWN=hang", "STANDIN_WORKERS=2"}},
			func(c *child) { c.configure(nil, bridge.Options{StopTimeout: 100 * time.Millisecond}); c.ready() },
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := spawn(t, tt.setup)
			tt.until(c)
			require.NoError(t, c.conn.Close())
			require.Equal(t, bridge.ExitWorkerGone, c.wait())
		})
	}
}

// A worker that is gone takes the log with it: what the bridge still has to say
// fails, and must not keep it alive.
func TestTheWorkerIsGoneAndTheLogToo(t *testing.T) {
	l := bridgetest.New(t, bridgetest.Setup{Env: []string{"STANDIN_SHUTDOWN=fail", "STANDIN_WORKERS=1"}})
	command := strings.Join(l.Command, " ")
	l.Command = []string{"/bin/sh", "-c", "exec " + command + " 2>&1 >/dev/null | :"} // a reader that is gone at once
	c := spawnLaunch(t, l)
	c.configure(nil, bridge.Options{})
	c.ready()
	c.generate(1, []int32{1}, order(1<<40, func(g *ipc.Generate) { g.Sampling.IgnoreEOS = ptr(true) }))
	c.tokens(map[uint64]*answer{}, 1, 3)
	require.NoError(t, c.conn.Close())
	c.wait()
}

// The channel may outlive the worker in a process that inherited it.
func TestTheParentIsGoneButTheChannelIsOpen(t *testing.T) {
	l := bridgetest.New(t, bridgetest.Setup{Env: []string{"STANDIN_WORKERS=1"}})
	command := strings.Join(l.Command, " ")
	l.Command = []string{"/bin/sh", "-c", "trap '' TERM; " + command + " & wait"}
	c := spawnLaunch(t, l)
	pid := c.hello().PID
	require.NotEqual(t, c.cmd.Process.Pid, pid)
	c.send(ipc.Configure{Protocol: ipc.Version, Args: mustJSON(args{"model": l.Model})})
	c.ready()
	handle, err := unix.PidfdOpen(pid, 0)
	require.NoError(t, err)
	defer unix.Close(handle)
	require.NoError(t, c.cmd.Process.Kill())
	c.requireEOF()
	c.wait()
	ended := []unix.PollFd{{Fd: int32(handle), Events: unix.POLLIN}} // not our child, so this is the way to wait for it
	n, err := 0, error(unix.EINTR)
	for errors.Is(err, unix.EINTR) {
		n, err = unix.Poll(ended, int(patience.Milliseconds()))
	}
	require.NoError(t, err)
	require.Equal(t, 1, n)
}

// The signal also comes when only the thread that started the bridge has ended.
func TestTheParentSignalAloneIsNoReason(t *testing.T) {
	c := start(t, bridgetest.Setup{}, nil, bridge.Options{})
	for range 3 {
		require.NoError(t, c.cmd.Process.Signal(parentSignal))
	}
	c.generate(1, []int32{5, 6, 7}, order(2))
	require.Equal(t, []uint32{18, 25}, c.answer(1).tokens[0])
}

func TestSignals(t *testing.T) {
	for _, sig := range []os.Signal{unix.SIGTERM, unix.SIGINT} {
		t.Run(sig.String(), func(t *testing.T) {
			c := start(t, bridgetest.Setup{Env: []string{"STANDIN_WORKERS=1"}}, nil, bridge.Options{})
			c.stalled(1)
			require.NoError(t, c.cmd.Process.Signal(sig))
			require.Equal(t, "signal", c.goodbye())
			require.Equal(t, bridge.ExitStopped, c.wait())
		})
	}
	t.Run("during the load", func(t *testing.T) {
		c := spawn(t, bridgetest.Setup{Env: []string{"STANDIN_LOAD_MS=600000"}})
		c.configure(nil, bridge.Options{})
		c.loading()
		require.NoError(t, c.cmd.Process.Signal(unix.SIGTERM))
		c.goodbye()
		require.Equal(t, bridge.ExitStopped, c.wait())
	})
}

// TestFatal is one way a row in which the engine as a whole fails, with another
// request running: that one gets no record of its own.
func TestFatal(t *testing.T) {
	tests := []struct {
		name      string
		setup     bridgetest.Setup
		prompt    int32
		order     *ipc.Generate
		tokens    int
		own       *ipc.RequestError // in the last record of the request itself; nil: no last record
		errorType string
		asked     bool // the engine was asked to shut down
	}{
		{
			name: "an unexpected error out of the stream", prompt: 90006, order: order(9), tokens: 3,
			own:       &ipc.RequestError{Kind: ipc.ErrorFatal, Type: "RuntimeError", Message: "stand-in engine failure"},
			errorType: "RuntimeError", asked: true,
		},
		{
			name: "a fatal error that no request is told", prompt: 90007, order: order(9), tokens: 3,
			errorType: "EngineDeadError",
		},
		{
			name: "the same with the event loop blocked", prompt: 90013, order: order(9), tokens: 3,
			errorType: "EngineDeadError",
		},
		{
			name: "a rank that does not exist", prompt: 5, errorType: "IndexError",
			order: order(9, func(g *ipc.Generate) { g.Scheduling = &ipc.Scheduling{AttentionDPRank: 7} }),
		},
		{
			name: "a call that does not fit the build", setup: bridgetest.Setup{API: "rc19"}, prompt: 5,
			order:     order(9, func(g *ipc.Generate) { g.Conversation = &ipc.Conversation{} }),
			own:       &ipc.RequestError{Kind: ipc.ErrorFatal, Type: "TypeError"},
			errorType: "TypeError", asked: true,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tt.setup.Env = append(tt.setup.Env, "STANDIN_WORKERS=1")
			c := start(t, tt.setup, args{"tensor_parallel_size": 4, "enable_attention_dp": true}, bridge.Options{})
			c.stalled(1)
			c.generate(2, []int32{tt.prompt}, tt.order)
			got := map[uint64]*answer{}
			for {
				kind, payload := c.next()
				if kind == ipc.KindOutputs {
					c.add(got, payload)
					continue
				}
				require.Equal(t, ipc.KindFatal, kind)
				f, err := ipc.ParseFatal(payload)
				require.NoError(t, err)
				require.Equal(t, tt.errorType, f.ErrorType)
				break
			}
			c.requireEOF()
			require.Equal(t, bridge.ExitEngineFailed, c.wait())
			require.Nil(t, got[1])
			if tt.tokens > 0 {
				require.Len(t, got[2].tokens[0], tt.tokens)
			}
			if tt.own == nil {
				require.True(t, got[2] == nil || got[2].last == nil)
			} else {
				require.Equal(t, tt.own.Kind, got[2].lastMeta().Error.Kind)
				require.Equal(t, tt.own.Type, got[2].lastMeta().Error.Type)
				require.Contains(t, got[2].lastMeta().Error.Message, tt.own.Message)
			}
			require.Equal(t, tt.asked, len(c.log.Calls(t, "shutdown")) == 1)
		})
	}
}

func TestTheWorkerBreaksTheProtocol(t *testing.T) {
	frames := map[string][]byte{
		"a frame that flows the other way": {0, 0, 0, 0, byte(ipc.KindOutputs)},
		"no such kind":                     {0, 0, 0, 0, 99},
		"too large":                        {0xff, 0xff, 0xff, 0xff, byte(ipc.KindGenerate)},
		"a request that is too short":      {1, 0, 0, 0, byte(ipc.KindGenerate), 0},
		"a question that is no JSON":       {1, 0, 0, 0, byte(ipc.KindQuery), '{'},
		"an order that is no JSON":         {1, 0, 0, 0, byte(ipc.KindShutdown), '{'},
	}
	for name, frame := range frames {
		t.Run(name, func(t *testing.T) {
			c := start(t, bridgetest.Setup{}, nil, bridge.Options{})
			c.write(frame, nil)
			c.fatal()
			require.Equal(t, bridge.ExitEngineFailed, c.wait())
		})
	}
}

func TestHealth(t *testing.T) {
	health := func(c *child) (healthy bool, detail string) {
		c.t.Helper()
		a := c.query(1, ipc.QueryHealth)
		require.True(c.t, a.OK, a.Error)
		var body struct {
			Healthy bool
			Detail  string
		}
		require.NoError(c.t, json.Unmarshal(a.Body, &body))
		return body.Healthy, body.Detail
	}
	t.Run("turns false", func(t *testing.T) {
		c := start(t, bridgetest.Setup{}, nil, bridge.Options{})
		healthy, _ := health(c)
		require.True(t, healthy)
		c.generate(1, []int32{90010}, order(9))
		c.tokens(map[uint64]*answer{}, 1, 3)
		// The third token is out before the step in which the health turns.
		for healthy {
			healthy, _ = health(c)
		}
	})
	t.Run("raises", func(t *testing.T) {
		c := start(t, bridgetest.Setup{Env: []string{"STANDIN_HEALTH=fail"}}, nil, bridge.Options{})
		a := c.query(1, ipc.QueryHealth)
		require.False(t, a.OK)
		require.Contains(t, a.Error, "stand-in health check failed")
	})
	t.Run("hangs", func(t *testing.T) {
		c := start(t, bridgetest.Setup{Env: []string{"STANDIN_HEALTH=hang"}}, nil, bridge.Options{})
		c.send(ipc.Query{Seq: 8, What: ipc.QueryHealth})
		a := c.query(9, ipc.QueryHealth)
		require.False(t, a.OK, "a check that hangs is not started twice")
		c.generate(1, []int32{5, 6, 7}, order(2)) // and holds up nothing else
		require.Equal(t, []uint32{18, 25}, c.answer(1).tokens[0])
	})
	t.Run("not offered", func(t *testing.T) {
		c := start(t, bridgetest.Setup{Env: []string{"STANDIN_HIDE=_check_health"}}, nil, bridge.Options{})
		healthy, detail := health(c) // the executor's own check is there
		require.True(t, healthy)
		require.Empty(t, detail)
	})
}

func TestStats(t *testing.T) {
	c := start(t, bridgetest.Setup{}, args{"tensor_parallel_size": 2, "enable_attention_dp": true}, bridge.Options{})
	rows := func() (rows []map[string]any) {
		a := c.query(1, ipc.QueryStats)
		require.True(t, a.OK, a.Error)
		var body struct{ Stats []map[string]any }
		require.NoError(t, json.Unmarshal(a.Body, &body))
		return body.Stats
	}
	require.Empty(t, rows(), "nothing has happened yet")
	c.stalled(1)
	got := rows()
	require.Len(t, got, 2)
	require.Equal(t, 1.0, got[0]["numActiveRequests"])
	require.Equal(t, 0.0, got[1]["numActiveRequests"])

	a := c.query(2, "weather")
	require.False(t, a.OK)
	require.Contains(t, a.Error, "weather")
}

func TestStatsThatTheBuildDoesNotHave(t *testing.T) {
	c := start(t, bridgetest.Setup{Env: []string{"STANDIN_HIDE=get_stats_async"}}, nil, bridge.Options{})
	a := c.query(1, ipc.QueryStats)
	require.False(t, a.OK)
	require.Contains(t, a.Error, "get_stats_async")
}

// A worker that does not read makes the bridge wait, and loses nothing.
func TestAWorkerThatReadsLate(t *testing.T) {
	const streams, length = 32, 3000
	c := start(t, bridgetest.Setup{}, nil, bridge.Options{})
	ids := make([]uint64, streams)
	for i := range ids {
		ids[i] = uint64(i)
		c.generate(ids[i], []int32{1}, order(length, func(g *ipc.Generate) { g.Sampling.IgnoreEOS = ptr(true) }))
	}
	// A query's answer would only come behind the tokens that nobody has read.
	c.send(ipc.Query{Seq: 1, What: ipc.QueryStats})
	got := map[uint64]*answer{}
	done := 0
	for done < streams {
		kind, payload, err := c.r.Next()
		require.NoError(t, err)
		if kind == ipc.KindAnswer {
			continue
		}
		c.add(got, payload)
		done = 0
		for _, a := range got {
			if a.last != nil {
				done++
			}
		}
	}
	for _, id := range ids {
		require.Len(t, got[id].tokens[0], length)
	}
}

func TestAWorkerThatDiesWithoutReading(t *testing.T) {
	c := start(t, bridgetest.Setup{}, nil, bridge.Options{})
	for i := range uint64(32) {
		c.generate(i, []int32{1}, order(1<<40, func(g *ipc.Generate) { g.Sampling.IgnoreEOS = ptr(true) }))
	}
	_, _, err := c.r.Next()
	require.False(t, err != nil && !errors.Is(err, io.EOF), "%v", err)
	require.NoError(t, c.conn.Close())
	require.Equal(t, bridge.ExitWorkerGone, c.wait())
}
