// Package app is the whole worker: it starts the parts in order, joins them, watches them, and stops them so that no answer is lost.
//
// The order at start is: system server (so that probes find the port open), then engine, etcd and request plane side by side, then everything that has to hold before a frontend may know of the worker (affinity gate, handler, model
// files), then the subscription, and last the records in etcd. The way out is the reverse; drain.go has its steps and their bounds.
//
// Run is the only entry. One Run owns everything that it starts and has ended it when it returns.
package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"dynworker/pkg/affinity"
	"dynworker/pkg/config"
	"dynworker/pkg/discovery"
	"dynworker/pkg/engine"
	"dynworker/pkg/handlers"
	"dynworker/pkg/ingress/tcpplane"
	"dynworker/pkg/metrics"
	"dynworker/pkg/modelcard"
	"dynworker/pkg/respstream"
	"dynworker/pkg/status"

	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"
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
	// Random makes ids; nil means crypto/rand.
	Random io.Reader
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
	engine     *engine.Process
	etcd       *discovery.Client
	session    *discovery.Session
	plane      requestPlane
	dialer     *respstream.Dialer
	dispatcher *dispatcher

	work       context.Context
	cancelWork context.CancelCauseFunc
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
	w := &worker{cfg: cfg, opts: o, log: o.Logger, started: time.Now()}
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

// start brings the worker up to the point where frontends send requests.
func (w *worker) start(ctx context.Context) error {
	w.metrics = metrics.New(metrics.Options{Version: w.opts.Version, Namespace: w.cfg.ServingNamespace(), Component: w.cfg.Component, Endpoint: w.cfg.Endpoint, Model: w.cfg.Model.ServedName(), AffinityReasons: affinityReasons()})
	w.health = status.NewHealth(status.Options{StartReady: w.cfg.System.StartingHealthStatus == config.StatusReady, OnTransition: w.logTransition})
	// Declared before anything can be well, so that readiness cannot flicker.
	w.health.Condition("engine")
	w.health.Condition("etcd")
	if w.cfg.RequestPlane.Kind == config.PlaneNATS {
		w.health.Condition("nats")
	}
	w.health.Endpoint(w.cfg.Endpoint)
	if err := w.openSystem(ctx); err != nil {
		return err
	}
	model, err := modelcard.Load(w.cfg.Model.Path, modelcard.Options{LocalOnly: w.cfg.Model.Files == config.FilesLocal, CustomTemplate: w.cfg.Model.CustomJinjaTemplate})
	if err != nil {
		return err
	}
	if w.dialer, err = w.newDialer(); err != nil {
		return err
	}
	w.onStop("response plane", lingerTimeout, w.dialer.Close)
	if err := w.connectAll(ctx); err != nil {
		return err
	}
	if err := w.makeDispatcher(model); err != nil {
		return err
	}
	return w.goPublic(ctx, model)
}

func (w *worker) openSystem(ctx context.Context) error {
	c := &w.cfg.System
	if !c.Enabled() {
		return nil
	}
	server, err := status.Listen(ctx, status.Config{Host: c.Host, Port: c.Port, HealthPath: c.HealthPath, LivePath: c.LivePath, Health: w.health, Metrics: w.metrics.Handler(), Logger: w.component("system")})
	if err != nil {
		return err
	}
	w.system = server
	w.onStop("system server", stopServer, server.Close)
	w.log.Info().Stringer("address", server.Addr()).Msg("system server open")
	return nil
}

// connectAll starts the engine and connects to etcd and to the request plane at the same time: an engine can load for many minutes, and an address that is wrong should not take as long to show.
func (w *worker) connectAll(ctx context.Context) error {
	var plane requestPlane
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return w.startEngine(ctx) })
	g.Go(func() (err error) {
		w.health.Condition("etcd").Fail("connecting")
		w.etcd, err = w.connectEtcd(ctx)
		return err
	})
	g.Go(func() (err error) {
		plane, err = w.connectPlane(ctx)
		return err
	})
	err := g.Wait()
	if plane != nil {
		w.plane = plane
		w.onStop("request plane", stopPlane, plane.close)
	}
	if w.etcd != nil {
		w.onStop("etcd client", stopSession, func(context.Context) error {
			w.etcd.Close()
			return nil
		})
	}
	return err
}

func (w *worker) connectPlane(ctx context.Context) (requestPlane, error) {
	if w.cfg.RequestPlane.Kind == config.PlaneNATS {
		w.health.Condition("nats").Fail("connecting")
		return w.connectNATS(ctx)
	}
	c := &w.cfg.RequestPlane.TCP
	conf := tcpplane.Config{Host: c.Host, Port: uint16(c.Port), MaxMessage: c.MaxMessageSize, TLSTimeout: c.TLS.HandshakeTimeout, Observer: w.observeIngress, Logger: w.component("tcp")}
	var err error
	if conf.TLS, err = tcpplane.ServerTLS(c.TLS.CertFile, c.TLS.KeyFile, c.TLS.ClientCAFile); err != nil {
		return nil, fmt.Errorf("request_plane.tcp.tls: %w", err)
	}
	plane, err := tcpplane.Listen(conf)
	if err != nil {
		return nil, err
	}
	w.log.Info().Stringer("address", plane.AddrPort()).Int("max_message_bytes", plane.MaxMessage()).Msg("TCP request plane open")
	return tcpRequests{plane}, nil
}

// makeDispatcher settles everything that a wrong setting could still spoil, so that such a worker never registers.
func (w *worker) makeDispatcher(model *modelcard.Model) error {
	ready := w.engine.Ready()
	facts, err := affinityFacts(ready)
	if err != nil {
		return err
	}
	settings := affinitySettings(&w.cfg.Affinity)
	// The check at start is the same for both handlers. It does not stand in for the handlers' own resolution, which legacy makes at its first request.
	gate, err := affinity.Resolve(facts, settings)
	if err != nil {
		return err
	}
	for _, warning := range gate.Warnings() {
		w.log.Warn().Str("component", "affinity").Msg(warning)
	}
	if gate.Origin() == affinity.FromToleratedOverride {
		w.metrics.AffinityDisagreement()
	}
	w.log.Info().Bool("policy", gate.On()).Str("origin", string(gate.Origin())).Str("rank_source", string(gate.Source())).Int("ranks", gate.Ranks()).Msg("conversation affinity")
	guided := ready.Capabilities.GuidedDecoding
	handler, err := handlers.New(handlers.Config{
		Kind: handlers.Kind(w.cfg.Handler), Engine: engineAdapter{w.engine}, Bounds: ready.Bounds, GuidedDecoding: &guided, ChunkedPrefill: resolvedBool(ready, "enable_chunked_prefill"),
		ResolveGate: func() (*affinity.Gate, error) { return affinity.Resolve(facts, settings) },
		MergeTokens: w.cfg.ResponsePlane.MergeTokens, LogConversationIDs: w.cfg.Affinity.LogConversationIDs, Observer: observer{w.metrics},
		Logger: w.component("handler"), Random: w.opts.Random, CancelGrace: cutTimeout / 2,
	})
	if err != nil {
		return err
	}
	endpoint := w.metrics.Endpoint()
	endpoint.SetLimits(w.cfg.Admission.MaxRequests, w.cfg.Admission.Queue)
	w.metrics.SetKVCapacity(gate.Ranks(), uint64(ready.KV.TotalBlocks))
	w.dispatcher = &dispatcher{
		work: w.work, admission: newAdmission(w.cfg.Admission.MaxRequests, w.cfg.Admission.Queue), dialer: w.dialer, handler: handler,
		metrics: endpoint, log: w.component("dispatch"), now: time.Now,
	}
	return nil
}

func affinityReasons() []string {
	var words []string
	for _, r := range affinity.Reasons() {
		words = append(words, string(r))
	}
	return words
}

// goPublic takes an identity, serves the files that the card names, subscribes, and registers, in this order.
func (w *worker) goPublic(ctx context.Context, model *modelcard.Model) error {
	var err error
	if w.session, err = w.etcd.Session(ctx); err != nil {
		return err
	}
	w.onStop("etcd session", stopSession, w.session.Close)
	id := identity{w.cfg.ServingNamespace(), w.cfg.Component, w.cfg.Endpoint, w.session.InstanceID()}
	w.metrics.SetInstance(id.instance)
	hosting, err := w.serveModelFiles(ctx, model, id)
	if err != nil {
		return err
	}
	spec, err := w.cardSpec()
	if err != nil {
		return err
	}
	card, err := model.Card(spec, hosting)
	if err != nil {
		return err
	}
	for _, f := range model.Skipped() {
		w.log.Warn().Str("file", f.Name).Str("reason", f.Reason).Msg("a file of the model folder is not part of the card")
	}
	if sum, err := modelcard.Sum(&card); err == nil {
		// Frontends use only workers whose sums are equal; this line is where an operator finds the odd one out.
		w.log.Info().Str("mdcsum", sum).Msg("model card made")
	}
	transport, err := w.plane.open(ctx, id, w.dispatcher)
	if err != nil {
		return err
	}
	if err := w.register(ctx, id, transport, card); err != nil {
		return err
	}
	if err := w.startCanary(model); err != nil {
		return err
	}
	w.settled.Store(true)
	took := time.Since(w.started)
	w.metrics.Loaded(took)
	w.log.Info().Dur("after", took).Msg("serving")
	if w.opts.OnServing != nil {
		s := Serving{InstanceID: id.instance}
		if w.system != nil {
			s.SystemAddress = w.system.Addr().String()
		}
		w.opts.OnServing(s)
	}
	return nil
}

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
