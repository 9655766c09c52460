package vitals

import (
	"context"
	"encoding/json"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// patient is an engine whose answers to health checks are scripted; without one left it does not answer.
type patient []string

func (p *patient) query(ctx context.Context) (json.RawMessage, error) {
	if len(*p) == 0 {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	a := (*p)[0]
	*p = (*p)[1:]
	if a == "" {
		return nil, errors.New("cannot")
	}
	return json.RawMessage(a), nil
}

func TestAsk(t *testing.T) {
	const good = `{"healthy":true}`
	for name, c := range map[string]struct {
		answers patient
		want    string
		after   time.Duration
	}{
		"silent":    {patient{good, good}, "no answer to a health check within 30s", 36 * time.Second},
		"ill":       {patient{good, `{"healthy":false,"detail":"rank 3 is gone"}`}, "not healthy: rank 3 is gone", 4 * time.Second},
		"confused":  {patient{`{}`}, "does not say", 2 * time.Second},
		"no object": {patient{`[]`}, "health check: ", 2 * time.Second},
		"failing":   {patient{""}, "health check: cannot", 2 * time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			f := Ask(t.Context(), Questions{Interval: 2 * time.Second, Timeout: 30 * time.Second}, c.answers.query)
			require.NotNil(t, f, name)
			require.Equal(t, Health, f.Detector, name)
			require.ErrorContains(t, f, c.want, name)
			require.Equal(t, c.after, time.Since(start), name)
		})
	}
	for name, q := range map[string]Questions{"it waits for ever": {Interval: time.Second}, "it is off": {}} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			require.Nil(t, Ask(ctx, q, new(patient).query), name)
		})
	}
}

// A worker that was stopped for a minute finds an answer that came at once, and an expired clock; the answer has to count.
func TestTimeInWhichTheWorkerDidNotRunIsNoTime(t *testing.T) {
	require.Equal(t, time.Second, witnessed(time.Second, time.Second))
	require.Equal(t, 2*time.Second, witnessed(time.Minute, time.Second), "a long step is a gap")
	require.Zero(t, witnessed(-time.Minute, time.Second))
	synctest.Test(t, func(t *testing.T) {
		why := errors.New("too long")
		start := time.Now()
		ctx, cancel := WithTimeout(t.Context(), 30*time.Second, why)
		defer cancel()
		<-ctx.Done()
		require.Equal(t, 30*time.Second, time.Since(start))
		require.ErrorIs(t, context.Cause(ctx), why)

		ctx, cancel = WithTimeout(t.Context(), 0, why)
		time.Sleep(time.Hour)
		require.NoError(t, ctx.Err(), "no bound")
		cancel()
		require.ErrorIs(t, context.Cause(ctx), context.Canceled)
	})
}
