package app

import (
	"context"
	"fmt"
	"sync"
	"time"

	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/handlers"
	"dynworker/pkg/metrics"
	"dynworker/pkg/phases"
	"dynworker/pkg/protocol"

	"github.com/rs/zerolog"
)

// phaseObserver counts phases.
type phaseObserver struct{ m *metrics.Worker }

func (o phaseObserver) Entered(p phases.Phase)               { o.m.PhaseEntered(int(p)) }
func (o phaseObserver) Left(p phases.Phase, d time.Duration) { o.m.PhaseLeft(int(p), d) }

// followPhases makes the tracker of all requests and watches it until the worker stops.
func (w *worker) followPhases() *phases.Tracker {
	report := slowReport{log: w.component("dispatch"), metrics: w.metrics}
	tracker := phases.New(phases.Config{After: w.cfg.Log.SlowRequest, Observer: phaseObserver{w.metrics}, Report: report.report})
	ctx, cancel := context.WithCancel(context.Background())
	var watcher sync.WaitGroup
	watcher.Go(func() { tracker.Watch(ctx) })
	w.onStop("slow requests", stopPhases, func(context.Context) error {
		cancel()
		watcher.Wait()
		return nil
	})
	return tracker
}

// stopPhases is more than a look takes.
const stopPhases = time.Second

// slowLineLimit bounds what one look writes to the log: when an engine or a network hangs, it is all requests at once.
const slowLineLimit = 20

// slowReport tells of requests that are stuck.
type slowReport struct {
	log     zerolog.Logger
	metrics *metrics.Worker
}

func (s slowReport) report(found []phases.Slow) {
	left := map[string]int{}
	for i, f := range found {
		if f.First {
			s.metrics.PhaseStuck(int(f.Phase))
		}
		if i < slowLineLimit {
			s.line(f)
			continue
		}
		left[f.Phase.String()]++
	}
	if len(left) > 0 {
		s.log.Warn().Interface("requests_by_phase", left).Msg("more requests make no progress")
	}
}

func (s slowReport) line(f phases.Slow) {
	line, text := s.log.Warn(), "the request makes no progress"
	if f.Over {
		line, text = s.log.Info(), "a request that had made no progress has ended"
	}
	line = line.Str("request_id", f.ID).Str("phase", f.Phase.String()).Dur("silent", f.Silent).Dur("age", f.Age).Uint64("outputs", f.Outputs)
	took := zerolog.Dict()
	for p, d := range f.Took {
		if d > 0 {
			took = took.Dur(phases.Phase(p).String(), d)
		}
	}
	line = line.Dict("took", took)
	if f.Peer != 0 {
		line = line.Str("prefill_worker", fmt.Sprintf("%x", f.Peer))
	}
	line.Msg(text)
}

// handOn notes in which way a request is in the engine from now on.
func handOn(track *phases.Request, call *handlers.Call) func(*ipc.Generate) {
	return func(g *ipc.Generate) {
		if fromPeer(g) {
			track.Fetch(prefillWorker(call.Request))
			return
		}
		track.Enter(phases.Prefill)
	}
}

// prefillWorker is the instance id of the worker that ran the prompt, as the frontend of Dynamo 1.6.1 tells it, or 0.
func prefillWorker(r *protocol.Request) uint64 {
	routing, _ := r.Fields["routing"].(protocol.Map)
	switch id := routing["prefill_worker_id"].(type) {
	case int64:
		return uint64(max(id, 0))
	case uint64:
		return id
	}
	return 0
}
