package app

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync/atomic"
	"time"

	"dynworker/pkg/handlers"
	"dynworker/pkg/ingress"
	"dynworker/pkg/metrics"
	"dynworker/pkg/phases"
	"dynworker/pkg/protocol"
	"dynworker/pkg/respstream"

	"github.com/rs/zerolog"
)

// generator is what the dispatcher needs of a handler.
type generator interface {
	Generate(ctx context.Context, call *handlers.Call, out handlers.Sink) error
}

// dispatcher takes requests from the planes to the handler and their answers back. Whatever it admits it answers: with a stream, with an error item, or, when the caller cannot be reached, with a count and a log line.
type dispatcher struct {
	// work is the parent of all requests; cancelling it with handlers.ErrShutdown cuts them.
	work      context.Context
	admission *admission
	dialer    *respstream.Dialer
	handler   generator
	// abandon is told of requests whose caller cannot be reached; nil when that is of no consequence.
	abandon func(context.Context, *handlers.Call) error
	metrics *metrics.Endpoint
	phases  *phases.Tracker
	log     zerolog.Logger
	now     func() time.Time
	// refusing is not nil while the worker is known to be unable to serve.
	refusing atomic.Pointer[string]
	// lastGood is when a request last got a frame that was no error, in nanoseconds since 1970; the canary waits for it to be old.
	lastGood atomic.Int64
}

// refuse makes the dispatcher turn requests away as unavailable, or serve again when the reason is empty.
func (d *dispatcher) refuse(reason string) {
	if reason == "" {
		d.refusing.Store(nil)
		return
	}
	d.refusing.Store(&reason)
}

// Admit implements ingress.Admitter.
func (d *dispatcher) Admit(del *ingress.Delivery) (start func(), refusal *ingress.Refusal) {
	if reason := d.refusing.Load(); reason != nil {
		d.metrics.Refused(metrics.RefusedUnavailable)
		return nil, &ingress.Refusal{Kind: ingress.Unavailable, Reason: *reason}
	}
	tokens := d.promptTokens(del)
	switch d.admission.enter(tokens) {
	case tooLong:
		d.metrics.Refused(metrics.RefusedOverloaded)
		return nil, &ingress.Refusal{Kind: ingress.Overloaded, Reason: fmt.Sprintf("a prompt of %d tokens has no room beside those that are held: %d prompt tokens are the limit", tokens, d.admission.maxTokens)}
	case full:
		d.metrics.Refused(metrics.RefusedOverloaded)
		return nil, &ingress.Refusal{Kind: ingress.Overloaded, Reason: fmt.Sprintf("%d requests are running or waiting", d.admission.capacity)}
	case closed:
		d.metrics.Refused(metrics.RefusedUnavailable)
		return nil, &ingress.Refusal{Kind: ingress.Unavailable, Reason: "the worker is shutting down"}
	}
	return func() {
		defer d.admission.leave(tokens)
		d.serve(del)
	}, nil
}

// promptTokens is how much of the limit on tokens a request takes, 0 without such a limit. The body is not decoded for it: this runs where all requests come in.
func (d *dispatcher) promptTokens(del *ingress.Delivery) int {
	if !d.admission.limitsTokens() || del.BodyErr != nil {
		return 0
	}
	codec, err := protocol.ParseCodec(del.Control.PayloadCodec)
	if err != nil {
		return 0
	}
	return protocol.PromptLength(codec, del.Body)
}

// serve answers one admitted request.
func (d *dispatcher) serve(del *ingress.Delivery) {
	count := d.metrics.Begin(del.Size, transit(del))
	defer count.End()
	track := d.phases.Begin(del.RequestID)
	defer track.End()
	log := d.log.With().Str("request_id", del.RequestID).Logger()
	stream, err := d.dialer.Dial(d.work, del.Control.Connection)
	if err != nil {
		count.Failed(metrics.ErrorResponseStream)
		// The dialer warns once a minute for an address; this line is for whoever looks for one request.
		log.Debug().Err(err).Str("address", del.Control.Connection.Address).Msg("cannot call the frontend back; the request is lost to it")
		if _, call, problem := decode(del); problem == nil {
			d.leaveNothing(call)
		}
		return
	}
	count.Opened()
	defer func() {
		count.ResponseBytes(stream.BytesOut())
		if p := recover(); p != nil {
			stream.Abort()
			count.Failed(metrics.ErrorGenerate)
			log.Error().Interface("panic", p).Bytes("stack", debug.Stack()).Msg("request handler panicked")
		}
	}()
	codec, call, problem := decode(del)
	stream.SetCodec(codec)
	if err := stream.Accept(); err != nil {
		if problem == nil {
			d.leaveNothing(call)
		}
		d.settle(stream, count, log, fmt.Errorf("%w: %w", handlers.ErrClientGone, err))
		return
	}
	count.Accepted()
	if problem != nil {
		count.Failed(metrics.ErrorDeserialization)
		d.settle(stream, count, log, problem)
		return
	}
	count.Waiting()
	track.Enter(phases.Queue)
	release, err := d.admission.slot(stream.Context())
	if err != nil {
		if !errors.Is(err, handlers.ErrShutdown) {
			d.leaveNothing(call)
		}
		d.settle(stream, count, log, waited(err))
		return
	}
	defer release()
	count.Running()
	call.Submitted = handOn(track, call)
	out := &countingSink{Stream: stream, count: count, track: track, dispatcher: d}
	d.settle(stream, count, log, d.handler.Generate(stream.Context(), call, out))
}

// waited says what became of a request that never got a slot.
func waited(cause error) error {
	if errors.Is(cause, handlers.ErrShutdown) {
		return protocol.EngineShutdown("the worker shut down before the request was started")
	}
	return fmt.Errorf("%w: %w", handlers.ErrClientGone, cause)
}

// decode reads the body. problem is an error for the caller; it comes with the codec in which the caller can read it.
func decode(del *ingress.Delivery) (codec protocol.Codec, call *handlers.Call, problem error) {
	codec, err := protocol.ParseCodec(del.Control.PayloadCodec)
	if err != nil {
		return protocol.CodecJSON, nil, protocol.InvalidArgument("request body: %s", err)
	}
	if del.BodyErr != nil {
		return codec, nil, protocol.InvalidArgument("request body: %s", del.BodyErr)
	}
	request, err := protocol.ParseRequest(codec, del.Body)
	if err != nil {
		return codec, nil, protocol.InvalidArgument("request body: %s", err)
	}
	call = &handlers.Call{ID: del.RequestID, Request: request, Body: del.Body, Codec: codec, Trace: trace(del)}
	return codec, call, nil
}

func trace(del *ingress.Delivery) map[string]string {
	headers := map[string]string{}
	if del.Traceparent != "" {
		headers["traceparent"] = del.Traceparent
	}
	if del.Tracestate != "" {
		headers["tracestate"] = del.Tracestate
	}
	return headers
}

// transit is how long the request was under way by the two machines' clocks, or 0 when the frontend did not say when it sent it or the clocks disagree.
func transit(del *ingress.Delivery) time.Duration {
	if del.SentNanos == 0 {
		return 0
	}
	return max(del.Received.Sub(time.Unix(0, int64(del.SentNanos))), 0)
}

// settle ends the stream as the outcome demands, and counts and logs it once.
func (d *dispatcher) settle(stream *respstream.Stream, count *metrics.Request, log zerolog.Logger, outcome error) {
	var failure *protocol.Error
	switch {
	case outcome == nil:
	case errors.Is(outcome, handlers.ErrClientGone):
		count.Cancelled(cancelKind(outcome))
		log.Debug().AnErr("cause", outcome).Msg("the caller is gone")
		stream.Abort()
		return
	case errors.As(outcome, &failure):
		if errors.Is(context.Cause(d.work), handlers.ErrShutdown) && failure.Reason == protocol.ReasonBackendEngineShutdown {
			count.Cancelled(metrics.CancelShutdown)
		}
		if failure.Class != protocol.ClassInvalidRequest {
			count.Failed(metrics.ErrorGenerate)
		}
		log.Info().Str("class", string(failure.Class)).Str("reason", string(failure.Reason)).Str("error", failure.Message).Msg("request ended with an error")
	default:
		failure = protocol.Internal(outcome.Error())
		count.Failed(metrics.ErrorGenerate)
		log.Error().Err(outcome).Msg("request failed")
	}
	if failure != nil {
		if err := stream.Fail(failure); err != nil {
			count.Failed(metrics.ErrorPublishResponse)
			stream.Abort()
			return
		}
	}
	if err := stream.Finish(); err != nil {
		count.Failed(metrics.ErrorPublishFinal)
	}
}

// cancelKind names why a caller went away, for a metric.
func cancelKind(err error) metrics.Cancel {
	for _, c := range []struct {
		cause error
		kind  metrics.Cancel
	}{{respstream.ErrStop, metrics.CancelStop}, {respstream.ErrKill, metrics.CancelKill}, {respstream.ErrReset, metrics.CancelReset}, {respstream.ErrProtocol, metrics.CancelProtocol}} {
		if errors.Is(err, c.cause) {
			return c.kind
		}
	}
	return metrics.CancelWrite
}

// countingSink notes the first frame and the last good one.
type countingSink struct {
	*respstream.Stream
	count      *metrics.Request
	track      *phases.Request
	dispatcher *dispatcher
	started    bool
	decoding   bool
}

func (s *countingSink) Send(c *protocol.Chunk) error {
	if c.Finish != protocol.FinishError {
		s.dispatcher.lastGood.Store(s.dispatcher.now().UnixNano())
	}
	if !s.started {
		s.started = true
		s.count.FirstResponse()
	}
	s.track.Output()
	if !s.decoding && c.Finish == protocol.FinishNone { // an answer of one chunk has nothing that comes after the first output
		s.decoding = true
		s.track.Enter(phases.Decode)
	}
	s.count.Frame(len(c.TokenIDs))
	return s.Stream.Send(c)
}
