package app

import (
	"context"
	"errors"
	"fmt"

	"dynworker/pkg/affinity"
	"dynworker/pkg/metrics"
	"dynworker/pkg/status"
)

// serve waits for the end and brings it about.
func (w *worker) serve(ctx context.Context) error {
	watching, stopWatching := context.WithCancel(w.work)
	defer stopWatching()
	ill := make(chan error, 1)
	go func() { ill <- watchEngine(watching, w.engine, engineCheckInterval, engineCheckTimeout) }()
	defer func() {
		stopWatching()
		<-ill
	}()
	select {
	case <-ctx.Done():
		return w.drain()
	case <-w.engine.Done():
		return w.engineDied()
	case why := <-ill:
		ill <- nil
		return w.engineIll(ctx, why)
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

// engineIll ends an engine that is alive but not well, and the worker with it. Without a reason the watch ended because something else did.
func (w *worker) engineIll(ctx context.Context, why error) error {
	if why == nil {
		select {
		case <-w.engine.Done():
			return w.engineDied()
		case <-ctx.Done():
			return w.drain()
		}
	}
	w.log.Error().Err(why).Msg("the engine is not well and is ended")
	w.health.Condition("engine").Fail(why.Error())
	w.dispatcher.refuse("the engine is not well")
	err := bounded(w.cfg.Engine.StopTimeout+stopSlack, w.engine.Stop)
	return errors.Join(fmt.Errorf("%w: %w", ErrEngineDied, why), err, w.engineDied())
}

// engineDied ends a worker without an engine. What was in flight has got its migratable end from the handlers, which see the engine's death in their streams.
func (w *worker) engineDied() error {
	exit := w.engine.Exit()
	w.health.Condition("engine").Fail("died: " + exit.Error())
	w.dispatcher.refuse("the engine died")
	w.metrics.EngineExited("died")
	w.log.Error().EmbedObject(exit).Msg("engine died")
	problems := []error{fmt.Errorf("%w: %w", ErrEngineDied, exit), w.withdraw()}
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
type observer struct{ m *metrics.Worker }

func (o observer) AffinityDecided(r affinity.Reason) { o.m.AffinityDecided(string(r)) }
func (o observer) PromptTokens(prompt, cached int)   { o.m.PromptTokens(prompt, cached) }
func (o observer) GeneratedTokens(n int)             { o.m.GeneratedTokens(n) }
func (o observer) EngineOverran()                    { o.m.EngineOverran() }
