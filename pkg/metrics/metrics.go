// Package metrics holds every metric of the worker: its name, its labels and
// what it means, in one place. Families that Dynamo 1.6.1's workers have keep
// their names, labels and buckets (recorded), so that dashboards keep working;
// the families that only this worker has begin with "dynworker_". docs/metrics.md
// lists them all and is tested against this package.
//
// Callers count through typed methods and never see a label. What is called on
// the token path is resolved once and costs an atomic addition or two. Gauges
// of things in progress are only reached through a [Request], whose End puts
// everything back whatever happened in between, so that no early return can
// leave a gauge behind.
//
// Everything works from the first moment, before the worker has an instance id;
// the label worker_id appears with [Worker.SetInstance]. All methods may be
// called from many goroutines.
package metrics

import (
	"net/http"
	"runtime"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Options are what a [Worker]'s metrics are made of.
type Options struct {
	// Version of the worker, for dynworker_build_info.
	Version string
	// Namespace, Component and Endpoint under which the worker serves, and the
	// name of the Model that it serves.
	Namespace, Component, Endpoint, Model string
	// AffinityReasons are the values that AffinityDecided is called with; those
	// given here exist from the start, at zero.
	AffinityReasons []string
	// Detectors are the values that EngineFailed is called with; like the reasons.
	Detectors []string
	// Phases are the values of the label phase; PhaseEntered, PhaseLeft and
	// PhaseStuck are called with an index into them.
	Phases []string
	// LostLogLines is a total; nil means that it stays 0.
	LostLogLines func() uint64
	// Now replaces the clock in tests; nil means time.Now.
	Now func() time.Time
}

// Worker is the set of metrics of one worker.
type Worker struct {
	gatherer *gatherer
	endpoint *Endpoint

	phases                    []phaseMetrics
	engineUp                  prometheus.Gauge
	engineStarts              prometheus.Counter
	engineFailures            *prometheus.CounterVec
	engineRestarts            *prometheus.CounterVec
	engineServing             prometheus.Gauge
	engineFailed              prometheus.Gauge
	heldRequests, heldBlocks  prometheus.Gauge
	streamStalls              prometheus.Counter
	suspects                  prometheus.Counter
	now                       func() time.Time
	engineOverran             prometheus.Counter
	handovers                 prometheus.Counter
	deferredAborts            *prometheus.CounterVec
	promptTokens              prometheus.Counter
	cachedTokens              prometheus.Counter
	generatedTokens           prometheus.Counter
	affinityDecisions         *prometheus.CounterVec
	affinityDisagreement      prometheus.Gauge
	ingressEvents             *prometheus.CounterVec
	modelFiles                *prometheus.CounterVec
	ready                     prometheus.Gauge
	totalBlocks, usedFraction *prometheus.GaugeVec
	loadTime                  *prometheus.GaugeVec
	model, component          string

	registered, leaseLosses, reregistrations atomic.Uint64
	natsHealthy, natsReconnects              atomic.Uint64
}

// New makes the metrics of a worker; its uptime starts now.
func New(o Options) *Worker {
	b := newBuilder()
	w := newWorker(b, o)
	b.plain.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return w
}

// newWorker makes every family with b.
func newWorker(b *builder, o Options) *Worker {
	now := o.Now
	if now == nil {
		now = time.Now
	}
	w := &Worker{model: o.Model, component: o.Component}
	w.endpoint = newEndpoint(b, o, now)

	w.phases = newPhases(b, o.Phases)

	started := now()
	b.uptime(func() float64 { return now().Sub(started).Seconds() })
	w.loadTime = b.gaugeVec(famLoadTime)
	w.totalBlocks = b.gaugeVec(famTotalBlocks)
	w.usedFraction = b.gaugeVec(famCacheUsage)

	b.gaugeVec(famBuildInfo).WithLabelValues(o.Version, runtime.Version()).Set(1)
	w.ready = b.gauge(famReady)
	w.engineUp = b.gauge(famEngineUp)
	w.engineStarts = b.counter(famEngineStarts)
	w.now = now
	w.engineFailures = b.counterVec(famEngineFailures)
	w.engineRestarts = b.counterVec(famEngineRestarts)
	for _, d := range o.Detectors {
		w.engineFailures.WithLabelValues(d)
		w.engineRestarts.WithLabelValues(d)
	}
	w.engineServing = b.gauge(famEngineServing)
	w.engineFailed = b.gauge(famEngineFailed)
	w.heldRequests, w.heldBlocks = b.gauge(famHeldRequests), b.gauge(famHeldBlocks)
	w.streamStalls = b.counter(famStreamStalls)
	w.suspects = b.counter(famSuspects)
	w.engineOverran = b.counter(famEngineOverran)
	w.handovers = b.counter(famHandovers)
	w.deferredAborts = b.counterVec(famDeferredAborts)
	w.promptTokens = b.counter(famPromptTokens)
	w.cachedTokens = b.counter(famCachedTokens)
	w.generatedTokens = b.counter(famTokens)
	w.affinityDecisions = b.counterVec(famAffinityDecisions)
	for _, r := range o.AffinityReasons {
		w.affinityDecisions.WithLabelValues(r)
	}
	w.affinityDisagreement = b.gauge(famAffinityDisagreement)
	w.ingressEvents = b.counterVec(famIngressEvents)
	w.modelFiles = b.counterVec(famModelFiles)
	b.counterFunc(famLostLogLines, func() float64 {
		if o.LostLogLines == nil {
			return 0
		}
		return float64(o.LostLogLines())
	})
	b.gaugeFunc(famRegistered, load(&w.registered))
	b.counterFunc(famLeaseLosses, load(&w.leaseLosses))
	b.counterFunc(famReregistrations, load(&w.reregistrations))
	b.gaugeFunc(famNATSHealthy, load(&w.natsHealthy))
	b.counterFunc(famNATSReconnects, load(&w.natsReconnects))

	w.gatherer = newGatherer(b, o.Namespace, o.Component)
	return w
}

func load(n *atomic.Uint64) func() float64 {
	return func() float64 { return float64(n.Load()) }
}

func boolToUint(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

// Handler answers with all metrics in Prometheus text format.
func (w *Worker) Handler() http.Handler {
	return promhttp.HandlerFor(w.gatherer, promhttp.HandlerOpts{ErrorHandling: promhttp.HTTPErrorOnError})
}

// Endpoint gives the metrics of the endpoint that the worker serves.
func (w *Worker) Endpoint() *Endpoint { return w.endpoint }

// SetInstance gives the component families their label worker_id, which is the
// instance id in hexadecimal.
func (w *Worker) SetInstance(id uint64) { w.gatherer.setWorker(strconv.FormatUint(id, 16)) }

// SetReady says whether the worker is ready, as /health tells it.
func (w *Worker) SetReady(ready bool) { w.ready.Set(float64(boolToUint(ready))) }

// Loaded says how long it took until the model could be used.
func (w *Worker) Loaded(took time.Duration) {
	w.loadTime.WithLabelValues(w.component, w.model).Set(took.Seconds())
}

// EngineStarted counts an engine that became ready.
func (w *Worker) EngineStarted() {
	w.engineStarts.Inc()
	w.engineUp.Set(1)
}

// EngineFailed counts an engine that failed or never became ready; detector is
// one word out of Options.Detectors.
func (w *Worker) EngineFailed(detector string) {
	w.engineFailures.WithLabelValues(detector).Inc()
	w.engineFailed.Set(seconds(w.now()))
	w.EngineGone()
}

// EngineGone says that no engine serves any more.
func (w *Worker) EngineGone() {
	w.engineUp.Set(0)
	w.EngineHolds(0, 0)
	w.engineServing.Set(0)
}

// EngineServing says that an engine serves from now on.
func (w *Worker) EngineServing() { w.engineServing.Set(seconds(w.now())) }

// EngineRestarted counts an engine that serves in place of one that failed;
// detector is what had found that out.
func (w *Worker) EngineRestarted(detector string) {
	w.engineRestarts.WithLabelValues(detector).Inc()
}

// EngineHolds sets how many prefilled requests the engine holds for decode
// engines, and how many KV blocks they have. EngineGone makes both 0.
func (w *Worker) EngineHolds(requests, blocks int) {
	w.heldRequests.Set(float64(requests))
	w.heldBlocks.Set(float64(blocks))
}

// StreamStalled counts a request that was taken from an engine which gave
// nothing for it.
func (w *Worker) StreamStalled() { w.streamStalls.Inc() }

// RequestSuspected counts a request that is not moved on because engines failed
// with it in flight.
func (w *Worker) RequestSuspected() { w.suspects.Inc() }

func seconds(t time.Time) float64 { return float64(t.UnixMilli()) / 1000 }

// EngineOverran counts a request for which the engine sent more tokens than it
// was asked for.
func (w *Worker) EngineOverran() { w.engineOverran.Inc() }

// HandedOver counts a prompt that was handed over to a decode worker.
func (w *Worker) HandedOver() { w.handovers.Inc() }

// AbortDeferred counts an abort that waited for a transfer of KV blocks; how it
// ended is one word out of a small set.
func (w *Worker) AbortDeferred(how string) { w.deferredAborts.WithLabelValues(how).Inc() }

// SetKVCapacity says how many KV blocks each of the ranks has.
func (w *Worker) SetKVCapacity(ranks int, blocks uint64) {
	for rank := range ranks {
		w.totalBlocks.WithLabelValues(w.component, strconv.Itoa(rank), w.model).Set(float64(blocks))
	}
}

// SetKVUsage says what part of a rank's KV blocks is in use, from 0 to 1.
func (w *Worker) SetKVUsage(rank int, fraction float64) {
	w.usedFraction.WithLabelValues(w.component, strconv.Itoa(rank), w.model).Set(fraction)
}

// PromptTokens counts a prompt and how much of it the engine had in its cache.
func (w *Worker) PromptTokens(prompt, cached int) {
	w.promptTokens.Add(float64(max(prompt, 0)))
	w.cachedTokens.Add(float64(max(cached, 0)))
}

// GeneratedTokens counts tokens on their way to the caller.
func (w *Worker) GeneratedTokens(n int) {
	if n > 0 {
		w.generatedTokens.Add(float64(n))
	}
}

// AffinityDecided counts why a request was placed as it was.
func (w *Worker) AffinityDecided(reason string) { w.affinityDecisions.WithLabelValues(reason).Inc() }

// AffinityDisagreement notes that the worker serves although the operator's
// conversation-affinity switch and the engine's configuration disagree.
func (w *Worker) AffinityDisagreement() { w.affinityDisagreement.Set(1) }

// IngressEvent counts something that befell a request plane outside of any
// admitted request. Plane and event are words out of small sets.
func (w *Worker) IngressEvent(plane, event string, count int) {
	w.ingressEvents.WithLabelValues(plane, event).Add(float64(max(count, 0)))
}

// ModelFileServed counts a model file that a frontend fetched. The name is one
// out of the model card's.
func (w *Worker) ModelFileServed(name string) { w.modelFiles.WithLabelValues(name).Inc() }

// DiscoveryState takes over what the etcd session says of itself; the counts
// are totals.
func (w *Worker) DiscoveryState(registered bool, leaseLosses, reregistrations uint64) {
	w.registered.Store(boolToUint(registered))
	w.leaseLosses.Store(leaseLosses)
	w.reregistrations.Store(reregistrations)
}

// NATSState takes over what the NATS connection says of itself; reconnects is
// a total.
func (w *Worker) NATSState(healthy bool, reconnects uint64) {
	w.natsHealthy.Store(boolToUint(healthy))
	w.natsReconnects.Store(reconnects)
}
