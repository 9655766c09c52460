package app

import (
	"context"
	"errors"
	"fmt"
	"time"

	"dynworker/pkg/handlers"
)

// Bounds of the steps on the way out that have no setting of their own.
const (
	withdrawTimeout = 3 * time.Second
	intakeTimeout   = 2 * time.Second
	cutTimeout      = 10 * time.Second
	lingerTimeout   = 3 * time.Second
	stopServer      = 2 * time.Second
	stopSlack       = 20 * time.Second
	stopPlane       = 3 * time.Second
	stopSession     = 5 * time.Second
	// quietTime is how long no request may have arrived before a withdrawn worker believes that no frontend sends any more. Frontends were seen to follow a withdrawal within 16 ms.
	quietTime = 500 * time.Millisecond
)

// drain ends service without losing an answer: withdraw, serve on until it is quiet, refuse, finish what runs within the budget, cut the rest as migratable. It always gets to its end; an error says what was not clean.
func (w *worker) drain() error {
	budget, cancel := context.WithTimeout(context.Background(), w.cfg.Drain.Budget)
	defer cancel()
	w.log.Info().Dur("budget", w.cfg.Drain.Budget).Msg("draining")
	w.settled.Store(false)
	w.health.Hold("draining", "the worker is draining")
	// An engine that is being started would keep requests waiting that another worker can serve now.
	alive := w.lives.settle()
	problems := []error{w.withdraw()}
	if alive {
		w.awaitQuiet(budget)
	}
	w.dispatcher.admission.stop()
	problems = append(problems, bounded(intakeTimeout, w.plane.drain))
	if err := w.dispatcher.admission.wait(budget); err != nil {
		held, _ := w.dispatcher.admission.counts()
		w.log.Warn().Int("requests", held).Msg("drain budget used up; the rest is handed to other workers")
		problems = append(problems, w.cut())
	}
	problems = append(problems, w.settleHandovers(budget))
	return errors.Join(problems...)
}

// withdraw takes the worker out of discovery, so that no new requests are sent here.
func (w *worker) withdraw() error {
	w.settled.Store(false)
	return bounded(withdrawTimeout, func(ctx context.Context) error { return w.session.Withdraw(ctx, w.instanceKey) })
}

// awaitQuiet serves on until no request has arrived for a while, at most as long as the grace and the budget allow.
func (w *worker) awaitQuiet(budget context.Context) {
	ctx, cancel := context.WithTimeout(budget, w.cfg.Drain.Grace)
	defer cancel()
	_, seen := w.dispatcher.admission.counts()
	tick := time.NewTicker(quietTime)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		_, now := w.dispatcher.admission.counts()
		if now == seen {
			return
		}
		seen = now
	}
}

// cut ends all requests that still run as migratable and waits for their handlers.
func (w *worker) cut() error {
	w.cancelWork(handlers.ErrShutdown)
	err := bounded(cutTimeout, w.dispatcher.admission.wait)
	if err != nil {
		held, _ := w.dispatcher.admission.counts()
		return fmt.Errorf("%d requests did not end: %w", held, err)
	}
	return nil
}

// bounded runs a step with a context of its own, since the one that ended the worker is over.
func bounded(d time.Duration, step func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return step(ctx)
}
