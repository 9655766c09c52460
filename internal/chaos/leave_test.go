package chaos

import (
	"context"
	"sync"
	"sync/atomic"

	"dynworker/internal/caller"
	"dynworker/pkg/protocol"

	"github.com/stretchr/testify/require"
)

// answerLength is how many tokens somebody who leaves has asked for.
const answerLength = 12

// phase is a moment of an answer.
type phase struct {
	name string
	// tokens is after how many of them it is; negative is before the worker's word that it takes the request has been read.
	tokens int
}

var phases = []phase{{"before the prologue", -1}, {"before the first token", 0}, {"after the first token", 1}, {"in the middle", answerLength / 2}, {"before the end mark", answerLength}}

// leavers returns a function that sends requests to a worker and leaves each at a phase, and tells how many were open at once at most. Half of them go without a word, half as a frontend does whose client has gone.
func (w *world) leavers(n *node) func(count int, p phase) (peak int64) {
	c := w.caller()
	var instance protocol.Instance
	for _, i := range w.instances() {
		if i.InstanceID == n.instance {
			instance = i
		}
	}
	require.NotZero(w.t, instance.InstanceID)
	return func(count int, p phase) int64 {
		ctx, cancel := context.WithTimeout(w.t.Context(), patience)
		defer cancel()
		var open, peak atomic.Int64
		var all sync.WaitGroup
		failed := make(chan error, count)
		begin := make(chan struct{}, 120)
		for k := range count {
			begin <- struct{}{}
			all.Go(func() {
				defer func() { <-begin }()
				now := open.Add(1)
				defer open.Add(-1)
				for old := peak.Load(); now > old && !peak.CompareAndSwap(old, now); old = peak.Load() {
				}
				failed <- leave(ctx, c, instance, p, k%2 == 0)
			})
		}
		all.Wait()
		close(failed)
		for err := range failed {
			require.NoError(w.t, err)
		}
		return peak.Load()
	}
}

// leave sends one request and goes.
func leave(ctx context.Context, c *caller.Caller, i protocol.Instance, p phase, silently bool) error {
	s, err := c.Do(ctx, call(i, []int32{7, 8, 9}, answerLength, ""))
	if err != nil {
		return err
	}
	if silently {
		defer s.Reset()
	} else {
		defer func() { _ = s.Close() }()
	}
	if p.tokens < 0 {
		return nil
	}
	if err := s.Prologue(); err != nil {
		return err
	}
	for tokens := 0; tokens < p.tokens; {
		item, err := s.Next()
		if err != nil {
			return err
		}
		if item.Err != nil {
			return item.Err
		}
		if item.Chunk != nil {
			tokens += len(item.Chunk.TokenIDs)
		}
	}
	return nil
}
