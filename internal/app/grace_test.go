package app

import (
	"context"
	"os"
	"testing"
	"time"

	"dynworker/pkg/config"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
)

// TestLongestStopCoversEveryStep adds up the bounds of what a worker with everything switched on has to stop, so that a part that is new cannot be forgotten in LongestStop.
func TestLongestStopCoversEveryStep(t *testing.T) {
	exe, err := os.Executable()
	require.NoError(t, err)
	for name, extra := range map[string][]string{
		"system server": {"system.port=0", "health_check.enabled=true"},
		"files alone":   {"system.port=-1", "health_check.enabled=true"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg, _, err := config.Load(newWorld(t).settings(extra), nil, nil)
			require.NoError(t, err)
			w := &worker{cfg: cfg, opts: Options{Executable: exe}, log: zerolog.Nop(), started: time.Now()}
			w.work, w.cancelWork = context.WithCancelCause(context.Background())
			defer w.cancelWork(nil)
			defer w.stopAll()
			require.NoError(t, w.start(t.Context()))
			total := cfg.Drain.Budget + withdrawTimeout + intakeTimeout + cutTimeout
			for _, s := range w.stops {
				total += s.bound
			}
			require.GreaterOrEqual(t, LongestStop(cfg), total)
			require.Less(t, LongestStop(cfg)-total, 10*time.Second, "steps that no longer exist are counted")
		})
	}
}
