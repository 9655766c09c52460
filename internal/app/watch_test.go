package app

import (
	"context"
	"encoding/json"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"dynworker/internal/caller"
	"dynworker/pkg/protocol"

	"github.com/stretchr/testify/require"
)

// patient is an engine whose answers to health checks are scripted; without one left it does not answer.
type patient struct {
	answers []string
	done    chan struct{}
}

func (p *patient) Done() <-chan struct{} { return p.done }

func (p *patient) Query(ctx context.Context, _ string) (json.RawMessage, error) {
	if len(p.answers) == 0 {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	a := p.answers[0]
	p.answers = p.answers[1:]
	if a == "" {
		return nil, errors.New("cannot")
	}
	return json.RawMessage(a), nil
}

func TestWatchEngine(t *testing.T) {
	const good = `{"healthy":true}`
	for name, c := range map[string]struct {
		answers []string
		want    string
		after   time.Duration
	}{
		"silent":    {[]string{good, good}, "no answer to a health check within 30s", 36 * time.Second},
		"ill":       {[]string{good, `{"healthy":false,"detail":"rank 3 is gone"}`}, "not healthy: rank 3 is gone", 4 * time.Second},
		"confused":  {[]string{`{}`}, "does not say", 2 * time.Second},
		"no object": {[]string{`[]`}, "health check: ", 2 * time.Second},
		"failing":   {[]string{""}, "health check: cannot", 2 * time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			err := watchEngine(t.Context(), &patient{answers: c.answers, done: make(chan struct{})}, 2*time.Second, 30*time.Second)
			require.ErrorContains(t, err, c.want, name)
			require.Equal(t, c.after, time.Since(start), name)
		})
	}
	synctest.Test(t, func(t *testing.T) {
		p := &patient{done: make(chan struct{})}
		close(p.done)
		require.NoError(t, watchEngine(t.Context(), p, 2*time.Second, 30*time.Second), "an engine that has ended is no matter of health")
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(3*time.Second, cancel)
		require.NoError(t, watchEngine(ctx, &patient{done: make(chan struct{})}, 2*time.Second, 30*time.Second))
	})
}

func TestAnEngineThatIsAliveButIllEndsTheWorker(t *testing.T) {
	w := newWorld(t)
	r := w.start("engine.stop_timeout=1s")
	s, err := w.caller().Do(timeout(t), caller.Call{Transport: r.instance().Transport, Codec: protocol.CodecMsgpack, Request: ask(10, salt("sim:unhealthy:3"))})
	require.NoError(t, err)
	a := read(s)
	var cut *protocol.Error
	require.ErrorAs(t, a.err, &cut)
	require.True(t, cut.Migratable())
	require.ErrorIs(t, r.wait(), ErrEngineDied)
	require.ErrorContains(t, r.wait(), "not healthy")
	require.Empty(t, w.records())
}
