package engine

import (
	"context"
	"fmt"
	"time"

	"dynworker/pkg/engine/ipc"
)

// handshake is the part of an engine's start that is only messages and time.
// It knows neither processes nor sockets, so that its timing can be tested
// exactly.
type handshake struct {
	cfg *Config
	// messages yields hello, progress and ready as they arrive.
	messages <-chan any
	// ended is closed when the engine or its channel is gone; cause then says why.
	ended <-chan struct{}
	cause func() error
	// configure is called once, after a hello of the right version.
	configure func() error
}

// run returns the engine's ready message, or why there will be none.
func (h *handshake) run(ctx context.Context) (*ipc.Ready, error) {
	var overall <-chan time.Time
	if h.cfg.StartTimeout > 0 {
		t := time.NewTimer(h.cfg.StartTimeout)
		defer t.Stop()
		overall = t.C
	}
	if err := h.hello(ctx, overall); err != nil {
		return nil, err
	}
	if err := h.configure(); err != nil {
		return nil, fmt.Errorf("configure the engine: %w", err)
	}
	return h.load(ctx, overall)
}

func (h *handshake) hello(ctx context.Context, overall <-chan time.Time) error {
	msg, err := h.next(ctx, overall, "hello", h.cfg.HelloTimeout)
	if err != nil {
		return err
	}
	hello, ok := msg.(ipc.Hello)
	if !ok {
		return &ProtocolError{Reason: "its first message is not a hello"}
	}
	if hello.Protocol != ipc.Version {
		return &VersionError{Engine: hello.Protocol, Worker: ipc.Version, Program: hello.Engine + " " + hello.Version}
	}
	h.cfg.Logger.Info().Str("engine", hello.Engine).Str("version", hello.Version).Int("pid", hello.PID).Msg("engine said hello")
	return nil
}

// load waits for ready; every message that is not ready buys more time.
func (h *handshake) load(ctx context.Context, overall <-chan time.Time) (*ipc.Ready, error) {
	phase := ""
	for {
		msg, err := h.next(ctx, overall, "progress or ready message", h.cfg.StartInactivity)
		if err != nil {
			return nil, err
		}
		switch m := msg.(type) {
		case ipc.Ready:
			return &m, nil
		case ipc.Progress:
			if m.Phase != phase {
				phase = m.Phase
				h.cfg.Logger.Info().Str("phase", m.Phase).Str("detail", m.Detail).Msg("engine is loading")
			}
		default:
			return nil, &ProtocolError{Reason: "it said hello twice"}
		}
	}
}

func (h *handshake) next(ctx context.Context, overall <-chan time.Time, what string, bound time.Duration) (any, error) {
	silent := time.NewTimer(bound)
	defer silent.Stop()
	select {
	case msg := <-h.messages:
		return msg, nil
	case <-h.ended:
		return nil, h.cause()
	case <-silent.C:
		return nil, &TimeoutError{Waiting: what, Bound: bound}
	case <-overall:
		return nil, &TimeoutError{Waiting: "ready message since the engine was started", Bound: h.cfg.StartTimeout}
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}
