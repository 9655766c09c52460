package app

import (
	"context"
	"errors"
	"fmt"
	"time"

	"dynworker/pkg/affinity"
	"dynworker/pkg/handlers"
	"dynworker/pkg/metrics"
	"dynworker/pkg/status"
)

// serve waits for the end and brings it about.
func (w *worker) serve(ctx context.Context) error {
	watching, stopWatching := context.WithCancel(context.Background())
	lost := make(chan error, 1)
	go func() { lost <- w.lives.supervise(watching) }()
	supervised := true
	defer func() {
		// The engine is looked after through the whole drain, so that one that fails then does not hold it up.
		w.lives.settle()
		stopWatching()
		if supervised {
			<-lost
		}
	}()
	select {
	case <-ctx.Done():
		return w.drain()
	case <-w.drainRequest.asked:
		return w.drainAndStay(ctx)
	case err := <-lost:
		supervised = false
		return w.engineLost(err)
	case <-w.systemDone():
		return errors.Join(fmt.Errorf("system server: %w", w.system.Err()), w.drain())
	}
}

func (w *worker) systemDone() <-chan struct{} {
	if w.system == nil {
		return nil
	}
	return w.system.Done()
}

// engineLost ends a worker that has no engine and gets none, or cannot go back into service with the one it has. What was in flight has got its migratable end from the handlers, which see the engine's death in their streams.
func (w *worker) engineLost(why error) error {
	w.health.Condition("engine").Fail(why.Error())
	w.dispatcher.refuse("the worker has lost its engine")
	problems := []error{why, w.withdraw()}
	w.dispatcher.admission.stop()
	problems = append(problems, bounded(intakeTimeout, w.plane.drain), w.cut())
	return errors.Join(problems...)
}

func (w *worker) logTransition(t status.Transition) {
	if t.Component == status.ComponentWorker {
		w.metrics.SetReady(t.OK)
	}
	// Parts are not well yet while the worker starts and no more while it ends; only in between is that worth a warning.
	line := w.log.Info()
	if !t.OK {
		if w.settled.Load() {
			line = w.log.Warn()
		}
		line = line.Str("reason", t.Reason)
	}
	line.Str("part", t.Component).Bool("ok", t.OK).Dur("lasted", t.Lasted).Msg("health")
}

// observer counts for the handlers.
type observer struct {
	m         *metrics.Worker
	handovers *handovers
}

func (o observer) AffinityDecided(r affinity.Reason)  { o.m.AffinityDecided(string(r)) }
func (o observer) PromptTokens(prompt, cached int)    { o.m.PromptTokens(prompt, cached) }
func (o observer) GeneratedTokens(n int)              { o.m.GeneratedTokens(n) }
func (o observer) EngineOverran()                     { o.m.EngineOverran() }
func (o observer) AbortDeferred(how handlers.Outcome) { o.m.AbortDeferred(string(how)) }

func (o observer) HandedOver() {
	o.m.HandedOver()
	o.handovers.went(time.Now())
}
