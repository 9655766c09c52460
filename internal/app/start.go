package app

import (
	"context"
	"fmt"
	"time"

	"dynworker/pkg/affinity"
	"dynworker/pkg/config"
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/engine/vitals"
	"dynworker/pkg/handlers"
	"dynworker/pkg/ingress/tcpplane"
	"dynworker/pkg/metrics"
	"dynworker/pkg/modelcard"
	"dynworker/pkg/phases"
	"dynworker/pkg/status"

	"golang.org/x/sync/errgroup"
)

// start brings the worker up to the point where frontends send requests.
func (w *worker) start(ctx context.Context) error {
	w.metrics = metrics.New(metrics.Options{Version: w.opts.Version, Namespace: w.cfg.ServingNamespace(), Component: w.cfg.Component, Endpoint: w.cfg.Endpoint, Model: w.cfg.Model.ServedName(), AffinityReasons: affinityReasons(), Detectors: detectors(), Phases: phases.Names(), LostLogLines: w.opts.LostLogLines})
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
	w.model = model
	if w.dialer, err = w.newDialer(); err != nil {
		return err
	}
	w.onStop("response plane", lingerTimeout, w.dialer.Close)
	if err := w.connectAll(ctx); err != nil {
		return err
	}
	if err := w.makeDispatcher(); err != nil {
		return err
	}
	return w.goPublic(ctx)
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
func (w *worker) makeDispatcher() error {
	// The check at start is the same for both handlers. It does not stand in for the handlers' own resolution, which legacy makes at its first request.
	gate, err := w.affinityGate(w.ready)
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
	handler, err := w.newHandler(w.lives, w.ready)
	if err != nil {
		return err
	}
	w.handler = handler
	endpoint := w.metrics.Endpoint()
	endpoint.SetLimits(w.cfg.Admission.MaxRequests, w.cfg.Admission.Queue)
	w.metrics.SetKVCapacity(gate.Ranks(), uint64(w.ready.KV.TotalBlocks))
	w.dispatcher = &dispatcher{
		work: w.work, admission: newAdmission(w.cfg.Admission.MaxRequests, w.cfg.Admission.Queue, w.cfg.Admission.MaxPromptTokens), dialer: w.dialer, handler: handler, abandon: handler.Abandon,
		metrics: endpoint, phases: w.followPhases(), log: w.component("dispatch"), now: time.Now,
	}
	return nil
}

// affinityGate resolves the affinity policy against what an engine said of itself.
func (w *worker) affinityGate(ready *ipc.Ready) (*affinity.Gate, error) {
	facts, err := affinityFacts(ready)
	if err != nil {
		return nil, err
	}
	return affinity.Resolve(facts, affinitySettings(&w.cfg.Affinity))
}

// newHandler makes the configured handler for an engine that said ready of itself.
func (w *worker) newHandler(e handlers.Engine, ready *ipc.Ready) (*handlers.Handler, error) {
	guided := ready.Capabilities.GuidedDecoding
	return handlers.New(handlers.Config{
		Kind: handlers.Kind(w.cfg.Handler), Role: handlers.Role(w.cfg.Role), Machine: w.handovers.slot, DeferLimit: w.cfg.Disaggregation.MaxDeferredAborts, DeferTime: w.cfg.Disaggregation.TransferTimeout, Engine: e, Bounds: ready.Bounds, GuidedDecoding: &guided, ChunkedPrefill: resolvedBool(ready, "enable_chunked_prefill"),
		ResolveGate: func() (*affinity.Gate, error) { return w.affinityGate(ready) },
		Adapters:    adapters(w.cfg.LoRA), MergeTokens: w.cfg.ResponsePlane.MergeTokens, LogConversationIDs: w.cfg.Affinity.LogConversationIDs, Observer: observer{w.metrics, &w.handovers},
		Logger: w.component("handler"), Random: w.opts.Random, CancelGrace: cutTimeout / 2,
	})
}

func affinityReasons() []string {
	var words []string
	for _, r := range affinity.Reasons() {
		words = append(words, string(r))
	}
	return words
}

func detectors() []string {
	var words []string
	for _, d := range vitals.Detectors() {
		words = append(words, string(d))
	}
	return words
}

// goPublic takes an identity, serves the files that the card names, subscribes, and registers, in this order.
func (w *worker) goPublic(ctx context.Context) error {
	var err error
	model := w.model
	if w.session, err = w.etcd.Session(ctx); err != nil {
		return err
	}
	w.onStop("etcd session", stopSession, w.session.Close)
	w.opts.Emergency.add(w.session.Close)
	id := identity{w.cfg.ServingNamespace(), w.cfg.Component, w.cfg.Endpoint, w.session.InstanceID()}
	w.metrics.SetInstance(id.instance)
	if err := w.claimMachine(ctx, id); err != nil {
		return err
	}
	hosting, err := w.serveModelFiles(ctx, model, id)
	if err != nil {
		return err
	}
	spec, err := cardSpec(w.cfg, w.ready)
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
	if err := w.startCanary(); err != nil {
		return err
	}
	w.settled.Store(true)
	w.offerDrain()
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
