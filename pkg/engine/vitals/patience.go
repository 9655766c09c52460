package vitals

import (
	"context"
	"time"
)

// Ticks of running time: a step that is longer than it should be is counted with at most this many times its length.
const maxSteps = 2

// witnessed is how much of the time between two ticks counts as time in which the worker was running. A process that was stopped or a machine that slept shows as one very long step.
func witnessed(elapsed, step time.Duration) time.Duration {
	return max(0, min(elapsed, maxSteps*step))
}

// WithTimeout is context.WithTimeoutCause in running time: a worker that was stopped for a minute does not find on waking that all of its waits are over, although the answers lie in front of it. The end may be late by a tenth of d
// or a second, whichever is less. A d of 0 or less is no bound. The function returned must be called.
func WithTimeout(parent context.Context, d time.Duration, cause error) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(parent)
	if d > 0 {
		go expire(ctx, cancel, d, cause)
	}
	return ctx, func() { cancel(context.Canceled) }
}

func expire(ctx context.Context, cancel context.CancelCauseFunc, d time.Duration, cause error) {
	step := min(max(d/10, time.Millisecond), time.Second)
	tick := time.NewTicker(step)
	defer tick.Stop()
	for last := time.Now(); ; {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			d -= witnessed(now.Sub(last), step)
			last = now
		}
		if d <= 0 {
			cancel(cause)
			return
		}
	}
}
