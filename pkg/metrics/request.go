package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// ErrorType says in which step a request failed. The names are Dynamo's.
type ErrorType uint8

// The error types.
const (
	ErrorDeserialization ErrorType = iota // the body could not be decoded
	ErrorInvalidMessage                   // the message was no request
	ErrorResponseStream                   // the frontend could not be called back
	ErrorGenerate                         // the handler or the engine failed
	ErrorSerialization                    // the answer could not be encoded
	ErrorPublishResponse                  // the answer could not be sent
	ErrorPublishFinal                     // the end of the answer could not be sent
	numErrorTypes
)

var errorTypes = [numErrorTypes]string{
	"deserialization", "invalid_message", "response_stream", "generate", "serialization", "publish_response", "publish_final",
}

func (e ErrorType) String() string { return errorTypes[e] }

// Cancel says why a request ended early.
type Cancel uint8

// The causes.
const (
	CancelStop     Cancel = iota // the frontend said stop
	CancelKill                   // the frontend said kill
	CancelReset                  // the connection broke
	CancelProtocol               // the frontend sent nonsense
	CancelWrite                  // the frontend did not take the answer
	CancelShutdown               // the worker stopped
	numCancels
)

var cancels = [numCancels]string{"stop", "kill", "reset", "protocol", "write", "shutdown"}

func (c Cancel) String() string { return cancels[c] }

// Refusal says why a request was not taken up.
type Refusal uint8

// The reasons.
const (
	RefusedOverloaded  Refusal = iota // no room
	RefusedUnavailable                // stopping, or without an engine
	numRefusals
)

var refusals = [numRefusals]string{"overloaded", "unavailable"}

func (r Refusal) String() string { return refusals[r] }

// phase is how far a request has come.
type phase uint8

const (
	beforeAccept phase = iota
	beforeFirstToken
	midStream
	numPhases
)

var phases = [numPhases]string{"before_accept", "before_first_token", "mid_stream"}

// Endpoint is the set of metrics of one served endpoint.
type Endpoint struct {
	now func() time.Time

	requests, requestBytes, responseBytes, cancellations prometheus.Counter
	inflight                                             prometheus.Gauge
	duration                                             prometheus.Observer
	errors                                               [numErrorTypes]prometheus.Counter

	transit, firstResponse, permitWait, firstToken prometheus.Observer
	queueDepth, requestQueue                       prometheus.Gauge
	poolActive, engineRequests                     prometheus.Gauge
	queueCapacity, poolCapacity                    prometheus.Gauge
	rejected, enqueueRejected                      prometheus.Counter

	streams        prometheus.Gauge
	frames         prometheus.Counter
	tokensPerFrame *tokenHistogram
	requestErrors  [numPhases][numErrorTypes]prometheus.Counter
	cancels        [numCancels]prometheus.Counter
	refused        [numRefusals]prometheus.Counter
}

// newEndpoint resolves all label values that can occur, so that counting never
// looks one up and every series exists from the start.
func newEndpoint(b *builder, o Options, now func() time.Time) *Endpoint {
	labels := []string{o.Endpoint, o.Model, o.Model}
	counter := func(f Family) prometheus.Counter { return b.counterVec(f).WithLabelValues(labels...) }
	e := &Endpoint{
		now:            now,
		requests:       counter(famRequests),
		duration:       b.histogramVec(famDuration).WithLabelValues(labels...),
		inflight:       b.gaugeVec(famInflight).WithLabelValues(labels...),
		requestBytes:   counter(famRequestBytes),
		responseBytes:  counter(famResponseBytes),
		cancellations:  counter(famCancellations),
		transit:        b.histogram(famTransit),
		firstResponse:  b.histogram(famFirstResponse),
		queueDepth:     b.gauge(famQueueDepth),
		queueCapacity:  b.gauge(famQueueCapacity),
		permitWait:     b.histogram(famPermitWait),
		poolActive:     b.gauge(famPoolActive),
		poolCapacity:   b.gauge(famPoolCapacity),
		rejected:       b.counter(famRejected),
		engineRequests: b.gauge(famEngineRequests),
		requestQueue:   b.gauge(famRequestQueue),

		enqueueRejected: b.counter(famEnqueueRejected),

		streams:        b.gauge(famStreams),
		frames:         b.counter(famFrames),
		tokensPerFrame: b.tokenHistogram(famTokensPerFrame),
		firstToken:     b.histogram(famFirstToken),
	}
	errors, requestErrors := b.counterVec(famErrors), b.counterVec(famRequestErrors)
	for i, name := range errorTypes {
		e.errors[i] = errors.WithLabelValues(append(labels[:3:3], name)...)
		for p, phase := range phases {
			e.requestErrors[p][i] = requestErrors.WithLabelValues(phase, name)
		}
	}
	cancelled, refused := b.counterVec(famCancels), b.counterVec(famRefused)
	for i, name := range cancels {
		e.cancels[i] = cancelled.WithLabelValues(name)
	}
	for i, name := range refusals {
		e.refused[i] = refused.WithLabelValues(name)
	}
	return e
}

// SetLimits says how many requests may run and how many may wait; 0 slots
// means that requests are not limited.
func (e *Endpoint) SetLimits(slots, queue int) {
	e.poolCapacity.Set(float64(slots))
	e.queueCapacity.Set(float64(queue))
}

// Refused counts a request that was not taken up.
func (e *Endpoint) Refused(r Refusal) {
	e.refused[r].Inc()
	switch r {
	case RefusedOverloaded:
		e.rejected.Inc()
	case RefusedUnavailable:
		e.enqueueRejected.Inc()
	}
}

// Begin counts a request that was taken up: size is that of the message that
// brought it in bytes, transit how long it was under way, or 0 when that is not
// known. The caller calls End, whatever happens.
func (e *Endpoint) Begin(size int, transit time.Duration) *Request {
	e.requests.Inc()
	e.requestBytes.Add(float64(max(size, 0)))
	e.inflight.Inc()
	if transit > 0 {
		e.transit.Observe(transit.Seconds())
	}
	return &Request{e: e, began: e.now()}
}

// Request counts what becomes of one request. It holds the gauges that the
// request is part of and gives them back when it ends. Its methods are for one
// goroutine at a time; all of them but Failed do nothing after End.
type Request struct {
	e       *Endpoint
	began   time.Time
	waiting time.Time // since when it waits for a slot; zero when it does not
	phase   phase
	running bool
	opened  bool
	ended   bool
}

// Opened notes that the response stream is connected to the frontend.
func (r *Request) Opened() {
	if !r.opened && !r.ended {
		r.opened = true
		r.e.streams.Inc()
	}
}

// Accepted notes that the frontend was told that its request is accepted.
func (r *Request) Accepted() {
	if r.phase == beforeAccept && !r.ended {
		r.phase = beforeFirstToken
		r.e.firstResponse.Observe(r.e.now().Sub(r.began).Seconds())
	}
}

// Waiting notes that the request waits for a slot from now on.
func (r *Request) Waiting() {
	if r.waiting.IsZero() && !r.running && !r.ended {
		r.waiting = r.e.now()
		r.e.queueDepth.Inc()
		r.e.requestQueue.Inc()
	}
}

// Running notes that the request has a slot and is the engine's from now on.
func (r *Request) Running() {
	if r.running || r.ended {
		return
	}
	var waited time.Duration
	if !r.waiting.IsZero() {
		waited = r.e.now().Sub(r.waiting)
	}
	r.stopWaiting()
	r.running = true
	r.e.permitWait.Observe(max(waited, 0).Seconds())
	r.e.poolActive.Inc()
	r.e.engineRequests.Inc()
}

func (r *Request) stopWaiting() {
	if !r.waiting.IsZero() {
		r.waiting = time.Time{}
		r.e.queueDepth.Dec()
		r.e.requestQueue.Dec()
	}
}

// FirstResponse notes that the first chunk of the answer is there.
func (r *Request) FirstResponse() {
	if r.phase != midStream && !r.ended {
		r.phase = midStream
		r.e.firstToken.Observe(r.e.now().Sub(r.began).Seconds())
	}
}

// Frame counts a chunk of the answer and the tokens in it.
func (r *Request) Frame(tokens int) {
	if r.ended {
		return
	}
	r.e.frames.Inc()
	if tokens > 0 {
		r.e.tokensPerFrame.observe(tokens)
	}
}

// ResponseBytes counts bytes of the answer.
func (r *Request) ResponseBytes(n int64) {
	if n > 0 && !r.ended {
		r.e.responseBytes.Add(float64(n))
	}
}

// Failed counts an error, by its type and by how far the request had come.
func (r *Request) Failed(t ErrorType) {
	r.e.errors[t].Inc()
	r.e.requestErrors[r.phase][t].Inc()
}

// Cancelled counts that the request ended early.
func (r *Request) Cancelled(c Cancel) {
	if r.ended {
		return
	}
	r.e.cancels[c].Inc()
	if c != CancelShutdown { // Dynamo's counter is about callers
		r.e.cancellations.Inc()
	}
}

// End gives back every gauge that the request holds and counts how long it
// took. Calling it again does nothing.
func (r *Request) End() {
	if r.ended {
		return
	}
	r.ended = true
	r.stopWaiting()
	if r.running {
		r.e.poolActive.Dec()
		r.e.engineRequests.Dec()
	}
	if r.opened {
		r.e.streams.Dec()
	}
	r.e.inflight.Dec()
	r.e.duration.Observe(max(r.e.now().Sub(r.began), 0).Seconds())
}
