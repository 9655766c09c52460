package app

import (
	"context"
	"errors"
	"fmt"
	"time"

	"dynworker/pkg/config"
	"dynworker/pkg/engine/vitals"
	"dynworker/pkg/handlers"
	"dynworker/pkg/protocol"
	"dynworker/pkg/status"
)

// canaryID is the request id of the worker's own requests.
const canaryID = "health-check"

// canary sends a request of its own to the handler whenever no answer has gone out for a while, and turns the endpoint's health by the outcome. It never leaves the process and counts as no business.
type canary struct {
	handler  generator
	body     []byte
	request  *protocol.Request
	wait     time.Duration
	timeout  time.Duration
	endpoint *status.Endpoint
	lastGood func() time.Time
	// present is the life of the engine that a request would go to, nil while there is none.
	present func() *life
	// failures in a row after which the engine counts as failed, 0 for never.
	failures int
}

// newCanary makes a canary that asks handler.
func (w *worker) newCanary(handler generator) (*canary, error) {
	c := &w.cfg.HealthCheck
	body, err := canaryBody(c.Payload, w.cfg.Role, w.model.Facts().BOSTokenID)
	if err != nil {
		return nil, fmt.Errorf("health_check.payload: %w", err)
	}
	request, err := protocol.ParseRequest(protocol.CodecJSON, body)
	if err != nil {
		return nil, fmt.Errorf("health_check.payload: %w", err)
	}
	return &canary{handler: handler, body: body, request: request, wait: c.Wait, timeout: c.Timeout}, nil
}

// startCanary makes the endpoint ready, at once or, with health checks, after the first good answer.
func (w *worker) startCanary() error {
	endpoint := w.health.Endpoint(w.cfg.Endpoint)
	// Made also when it is not to run, since an engine that is started again has to answer it.
	k, err := w.newCanary(w.dispatcher.handler)
	if err != nil {
		return err
	}
	if !w.cfg.HealthCheck.Enabled {
		endpoint.Ready()
		return nil
	}
	k.endpoint, k.present, k.failures = endpoint, w.lives.current.Load, w.cfg.Engine.Watch.CanaryFailures
	k.lastGood = func() time.Time { return time.Unix(0, w.dispatcher.lastGood.Load()) }
	endpoint.NotReady("no health check has been answered yet")
	ctx, cancel := context.WithCancel(w.work)
	done := make(chan struct{})
	go func() {
		defer close(done)
		k.run(ctx)
	}()
	w.onStop("canary", stopServer, func(stopCtx context.Context) error {
		cancel()
		select {
		case <-done:
			return nil
		case <-stopCtx.Done():
			return stopCtx.Err()
		}
	})
	return nil
}

// canaryBody is the request that a TensorRT-LLM worker of Dynamo 1.6.1 was recorded to send to itself: one token, greedily, for the beginning-of-sequence token. A payload of the operator's replaces it, but the mark stays, and so does
// what makes a worker of a disaggregated model do both of its halves, so that it needs no peer to answer.
func canaryBody(payload, role string, bos *uint32) ([]byte, error) {
	token := int64(1)
	if bos != nil {
		token = int64(*bos)
	}
	body := protocol.Map{
		"token_ids": []any{token}, "priority": 1.0,
		"stop_conditions":  protocol.Map{"max_tokens": int64(1), "stop": nil, "stop_token_ids": nil, "ignore_eos": false, "min_tokens": int64(0)},
		"sampling_options": protocol.Map{"temperature": 0.0, "top_p": 1.0, "top_k": int64(1), "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": nil},
	}
	if payload != "" {
		v, err := protocol.DecodeValue(protocol.CodecJSON, []byte(payload))
		if err != nil {
			return nil, err
		}
		m, ok := v.(protocol.Map)
		if !ok {
			return nil, errors.New("is not an object")
		}
		if len(m) > 0 {
			body = m
		}
	}
	body["_HEALTH_CHECK"] = true
	if role != config.RoleAggregated {
		body["disaggregated_params"] = protocol.Map{"request_type": "context_and_generation"}
	}
	return protocol.AppendValue(nil, protocol.CodecJSON, body), nil
}

func (k *canary) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var asked *life // the life that failed to answer, and how often in a row
	failed := 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		if idle := time.Since(k.lastGood()); idle >= 0 && idle < k.wait {
			failed = 0
			k.endpoint.Ready()
			timer.Reset(k.wait - idle)
			continue
		}
		timer.Reset(k.wait)
		now := k.present()
		if now == nil {
			continue // health says already that there is no engine
		}
		if now != asked {
			asked, failed = now, 0
		}
		err := k.probe(ctx)
		switch {
		case err == nil:
			failed = 0
			k.endpoint.Ready()
		case ctx.Err() != nil, k.present() != now: // it says nothing about the engine that is there
		default:
			failed++
			k.endpoint.NotReady("health check: " + err.Error())
			if failed == k.failures {
				now.report(vitals.Failed(vitals.Canary, fmt.Errorf("%d health checks in a row got no good answer, the last: %w", failed, err)))
			}
		}
	}
}

// probe sends one request and reads its answer to the end. A good answer is one that ends in time and says no error.
func (k *canary) probe(ctx context.Context) error {
	ctx, cancel := vitals.WithTimeout(ctx, k.timeout, fmt.Errorf("no answer within %v", k.timeout))
	defer cancel()
	out := &verdictSink{}
	err := k.handler.Generate(ctx, &handlers.Call{ID: canaryID, Request: k.request, Body: k.body, Codec: protocol.CodecJSON, Canary: true}, out)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return err
	case out.failed != "":
		return errors.New(out.failed)
	case !out.answered:
		return errors.New("the answer was empty")
	}
	return nil
}

// verdictSink keeps nothing of an answer but whether it was good.
type verdictSink struct {
	answered bool
	failed   string
}

func (s *verdictSink) Send(c *protocol.Chunk) error {
	s.answered = true
	if c.Finish == protocol.FinishError {
		s.failed = c.ErrorText
	}
	return nil
}

func (s *verdictSink) Flush() error { return nil }
