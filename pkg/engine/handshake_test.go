package engine

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"

	"dynworker/pkg/engine/ipc"
)

// said is a message that the engine sends some time after the one before.
type said struct {
	after time.Duration
	msg   any
}

func runHandshake(t *testing.T, cfg Config, script []said) (ready *ipc.Ready, took time.Duration, err error) {
	t.Helper()
	cfg.Logger = zerolog.Nop()
	cfg = cfg.withDefaults()
	messages := make(chan any)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		for _, s := range script {
			select {
			case <-time.After(s.after):
			case <-ctx.Done():
				return
			}
			select {
			case messages <- s.msg:
			case <-ctx.Done():
				return
			}
		}
	}()
	h := handshake{
		cfg: &cfg, messages: messages, ended: make(chan struct{}),
		configure: func() error { return nil },
	}
	begin := time.Now()
	ready, err = h.run(t.Context())
	return ready, time.Since(begin), err
}

func hello() ipc.Hello { return ipc.Hello{Protocol: ipc.Version} }

// Loading may take hours as long as the engine says something now and then.
func TestProgressBuysTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		script := []said{{59 * time.Second, hello()}}
		for range 100 {
			script = append(script, said{9*time.Minute + 59*time.Second, ipc.Progress{Phase: "weights"}})
		}
		script = append(script, said{9 * time.Minute, ipc.Ready{Engine: "slow"}})
		ready, took, err := runHandshake(t, Config{}, script)
		require.NoError(t, err)
		require.Equal(t, "slow", ready.Engine)
		require.Greater(t, took, 16*time.Hour)
	})
}

func TestSilenceEndsTheStart(t *testing.T) {
	for name, tc := range map[string]struct {
		cfg    Config
		script []said
		want   error
		after  time.Duration
	}{
		"no hello": {Config{}, nil, &TimeoutError{"hello", time.Minute}, time.Minute},
		"silent while loading": {
			Config{StartInactivity: 2 * time.Minute},
			[]said{{0, hello()}, {time.Minute, ipc.Progress{}}, {2*time.Minute + time.Second, ipc.Ready{}}},
			&TimeoutError{"progress or ready message", 2 * time.Minute}, 3 * time.Minute,
		},
		"active but too slow": {
			Config{StartTimeout: 150 * time.Second},
			[]said{{0, hello()}, {time.Minute, ipc.Progress{}}, {time.Minute, ipc.Progress{}}, {time.Minute, ipc.Ready{}}},
			&TimeoutError{"ready message since the engine was started", 150 * time.Second}, 150 * time.Second,
		},
		"too slow to say hello": {
			Config{StartTimeout: 30 * time.Second}, nil,
			&TimeoutError{"ready message since the engine was started", 30 * time.Second}, 30 * time.Second,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, took, err := runHandshake(t, tc.cfg, tc.script)
				require.Equal(t, tc.want, err)
				require.Equal(t, tc.after, took)
			})
		})
	}
}

func TestHandshakeEndsWithTheEngine(t *testing.T) {
	cfg := Config{Logger: zerolog.Nop()}.withDefaults()
	ended := make(chan struct{})
	close(ended)
	cause := errors.New("it died")
	h := handshake{cfg: &cfg, messages: make(chan any), ended: ended, cause: func() error { return cause }}
	_, err := h.run(t.Context())
	require.Equal(t, cause, err)
}

func TestHandshakeEndsWithItsContext(t *testing.T) {
	cfg := Config{Logger: zerolog.Nop()}.withDefaults()
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	h := handshake{cfg: &cfg, messages: make(chan any), ended: make(chan struct{})}
	_, err := h.run(ctx)
	require.Equal(t, cause, err)
}

func TestHandshakeCannotConfigure(t *testing.T) {
	cfg := Config{Logger: zerolog.Nop()}.withDefaults()
	messages := make(chan any, 1)
	messages <- hello()
	cause := errors.New("args are no JSON")
	h := handshake{cfg: &cfg, messages: messages, ended: make(chan struct{}), configure: func() error { return cause }}
	_, err := h.run(t.Context())
	require.ErrorIs(t, err, cause)
}
