// Package app is the whole worker: it starts the parts in order, joins them, watches them, and stops them so that no answer is lost.
//
// The order at start is: system server (so that probes find the port open), then engine, etcd and request plane side by side, then everything that has to hold before a frontend may know of the worker (affinity gate, handler, model
// files), then the subscription, and last the records in etcd. The way out is the reverse; drain.go has its steps and their bounds.
//
// Run is the only entry. One Run owns everything that it starts and has ended it when it returns.
package app

import (
	"context"
	"io"
	"sync/atomic"
	"time"

	"dynworker/pkg/config"
	"dynworker/pkg/discovery"
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/engine/vitals"
	"dynworker/pkg/handlers"
	"dynworker/pkg/metrics"
	"dynworker/pkg/modelcard"
	"dynworker/pkg/respstream"
	"dynworker/pkg/status"

	"github.com/rs/zerolog"
)

// Options are what a worker needs besides its configuration.
type Options struct {
	// Version of the worker, for records and metrics.
	Version string
	Logger  zerolog.Logger
	// Executable is the program that the simulated engine is a subcommand of, usually the worker's own.
	Executable string
	// Environ is the environment that the engine inherits.
	Environ []string
	// Resolved is what Resolve made of the configuration; nil leaves it to the start.
	Resolved *config.Resolved
	// LostLogLines counts the log lines that the logger's stream did not take; nil means that none are lost.
	LostLogLines func() uint64
	// Random makes ids; nil means crypto/rand.
	Random io.Reader
	// Emergency, if set, learns what is to be tried when the process is ended before Run has returned.
	Emergency *Emergency
	// OnServing, if set, is called once when the worker is registered.
	OnServing func(Serving)
}

// Serving says where a worker that has just registered is reached.
type Serving struct {
	InstanceID uint64
	// SystemAddress is the address of the system server, empty when it is off.
	SystemAddress string
}

// worker is one run of the program.
type worker struct {
	cfg     *config.Config
	opts    Options
	log     zerolog.Logger
	started time.Time

	health     *status.Health
	metrics    *metrics.Worker
	system     *status.Server
	lives      *lives
	etcd       *discovery.Client
	session    *discovery.Session
	plane      requestPlane
	dialer     *respstream.Dialer
	dispatcher *dispatcher
	handler    *handlers.Handler
	handovers  handovers
	// drainRequest is a drain over HTTP.
	drainRequest *drainRequest

	work       context.Context
	cancelWork context.CancelCauseFunc
	// ready is what the first life of the engine said of itself; records and handler hold to it.
	ready *ipc.Ready
	// model and records are what the worker goes into service with.
	model   *modelcard.Model
	records []discovery.Record
	// engineFailure is why there is no engine, nil while there is one or none has been yet.
	engineFailure atomic.Pointer[vitals.Failure]
	// settled is true between registration and withdrawal.
	settled atomic.Bool
	// instanceKey is the record that makes frontends send requests here.
	instanceKey string
	// stops end what was started, in the order of starting.
	stops []stop
}

// stop ends one part within its bound.
type stop struct {
	name  string
	bound time.Duration
	do    func(context.Context) error
}

// Run serves until ctx ends, then drains and returns nil; or it returns why it could not start or go on. ErrEngineDied is such a reason.
func Run(ctx context.Context, cfg *config.Config, o Options) error {
	w := &worker{cfg: cfg, opts: o, log: o.Logger, started: time.Now(), drainRequest: newDrainRequest()}
	w.work, w.cancelWork = context.WithCancelCause(context.Background())
	defer w.cancelWork(nil)
	defer w.stopAll()
	if err := w.start(ctx); err != nil {
		if ctx.Err() != nil {
			w.log.Info().Msg("stopped while starting")
			return nil
		}
		return err
	}
	return w.serve(ctx)
}

// onStop notes how to end a part that was just started.
func (w *worker) onStop(name string, bound time.Duration, do func(context.Context) error) {
	w.stops = append(w.stops, stop{name, bound, do})
}

// stopAll ends every part, last started first, each within its bound.
func (w *worker) stopAll() {
	for i := len(w.stops) - 1; i >= 0; i-- {
		s := w.stops[i]
		if err := bounded(s.bound, s.do); err != nil {
			w.log.Warn().Err(err).Str("part", s.name).Msg("a part did not stop cleanly")
		}
	}
}

func (w *worker) component(name string) zerolog.Logger {
	return w.log.With().Str("component", name).Logger()
}
