package app

import (
	"context"
	"sync"
	"time"
)

// Emergency is what a process that has to end at once still tries, for a moment: without it a frontend would keep the records of a worker that was cut short until the lease is over. The zero value is ready, and may be shared by the
// worker and whoever ends its process.
type Emergency struct {
	mu sync.Mutex
	do []func(context.Context) error
}

// add notes one thing to try.
func (e *Emergency) add(do func(context.Context) error) {
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.do = append(e.do, do)
}

// Run tries everything side by side and returns when all is done or the time is over. It may be called while the worker runs, from any goroutine.
func (e *Emergency) Run(bound time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	e.mu.Lock()
	list := e.do
	e.mu.Unlock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		var all sync.WaitGroup
		defer all.Wait()
		for _, do := range list {
			all.Go(func() { _ = do(ctx) }) // nobody is left to be told
		}
	}()
	select {
	case <-done:
	case <-ctx.Done():
	}
}
