package app

import (
	"context"
	"encoding/json"
	"sync"

	"dynworker/pkg/config"
	"dynworker/pkg/status"
)

// DrainPath is the route on the system server that drains the worker. It stands with the control routes of Dynamo 1.6.1's TensorRT-LLM workers and has their form.
const DrainPath = "control/drain"

// DrainState is how far a drain has come.
type DrainState string

// The states of a drain, in their order.
const (
	// Draining: the worker is out of discovery and finishes what it has.
	Draining DrainState = "draining"
	// Drained: nothing is left. The process goes on until it is told to end, so that its supervisor does not start it anew.
	Drained DrainState = "drained"
)

// DrainAnswer is the body of an answer of the route.
type DrainAnswer struct {
	Status DrainState `json:"status"`
	// InFlight is the number of requests that the worker still has.
	InFlight int `json:"in_flight"`
}

// drainRequest is a drain that somebody asked for while the worker runs.
type drainRequest struct {
	// asked is closed by the first who asks.
	asked chan struct{}
	once  sync.Once
	// drained is closed when nothing is left.
	drained chan struct{}
}

func newDrainRequest() *drainRequest {
	return &drainRequest{asked: make(chan struct{}), drained: make(chan struct{})}
}

// offerDrain makes the route answer, if it is wanted. Asking again tells how far the drain has come.
func (w *worker) offerDrain() {
	if w.system == nil || w.cfg.Drain.Route == config.DrainOff {
		return
	}
	w.system.HandleAdmin(DrainPath, status.AdminRoute{LocalOnly: w.cfg.Drain.Route == config.DrainLocal, Do: func(context.Context, json.RawMessage) (any, error) {
		w.drainRequest.once.Do(func() {
			w.log.Info().Msg("asked to drain over HTTP")
			close(w.drainRequest.asked)
		})
		held, _ := w.dispatcher.admission.counts()
		answer := DrainAnswer{Status: Draining, InFlight: held}
		select {
		case <-w.drainRequest.drained:
			answer.Status = Drained
		default:
		}
		return answer, nil
	}})
}

// drainAndStay drains as a signal does, and then takes the card away as well and waits for the signal. The records of a worker that is drained but not ended would otherwise keep a model in the frontends' lists that nobody serves.
func (w *worker) drainAndStay(ctx context.Context) error {
	problem := w.drain()
	if err := bounded(withdrawTimeout, func(ctx context.Context) error { return w.session.Withdraw(ctx) }); err != nil {
		w.log.Warn().Err(err).Msg("the records could not be withdrawn yet")
	}
	close(w.drainRequest.drained)
	w.log.Info().Msg("drained; waiting for the signal to end")
	select {
	case <-ctx.Done():
	case <-w.systemDone():
	}
	return problem
}
