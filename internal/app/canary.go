package app

import (
	"context"
	"errors"
	"fmt"
	"time"

	"dynworker/pkg/handlers"
	"dynworker/pkg/modelcard"
	"dynworker/pkg/protocol"
	"dynworker/pkg/status"
)

// canary sends a request of its own to the handler whenever no answer has gone out for a while, and turns the endpoint's health by the outcome. It never leaves the process and counts as no business.
type canary struct {
	handler  generator
	body     []byte
	request  *protocol.Request
	wait     time.Duration
	timeout  time.Duration
	endpoint *status.Endpoint
	lastGood func() time.Time
}

// startCanary makes the endpoint ready, at once or, with health checks, after the first good answer.
func (w *worker) startCanary(model *modelcard.Model) error {
	endpoint := w.health.Endpoint(w.cfg.Endpoint)
	c := &w.cfg.HealthCheck
	if !c.Enabled {
		endpoint.Ready()
		return nil
	}
	body, err := canaryBody(c.Payload, model.Facts().BOSTokenID)
	if err != nil {
		return fmt.Errorf("health_check.payload: %w", err)
	}
	request, err := protocol.ParseRequest(protocol.CodecJSON, body)
	if err != nil {
		return fmt.Errorf("health_check.payload: %w", err)
	}
	k := canary{
		handler: w.dispatcher.handler, body: body, request: request, wait: c.Wait, timeout: c.Timeout, endpoint: endpoint,
		lastGood: func() time.Time { return time.Unix(0, w.dispatcher.lastGood.Load()) },
	}
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

// canaryBody is the request that a TensorRT-LLM worker of Dynamo 1.6.1 was recorded to send to itself: one token, greedily, for the beginning-of-sequence token. A payload of the operator's replaces it, but the mark stays.
func canaryBody(payload string, bos *uint32) ([]byte, error) {
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
	return protocol.AppendValue(nil, protocol.CodecJSON, body), nil
}

func (k *canary) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		if idle := time.Since(k.lastGood()); idle < k.wait {
			k.endpoint.Ready()
			timer.Reset(k.wait - idle)
			continue
		}
		if err := k.probe(ctx); err == nil {
			k.endpoint.Ready()
		} else if ctx.Err() == nil {
			k.endpoint.NotReady("health check: " + err.Error())
		}
		timer.Reset(k.wait)
	}
}

// probe sends one request and reads its answer to the end. A good answer is one that ends in time and says no error.
func (k *canary) probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, k.timeout, fmt.Errorf("no answer within %v", k.timeout))
	defer cancel()
	out := &verdictSink{}
	err := k.handler.Generate(ctx, &handlers.Call{ID: "health-check", Request: k.request, Body: k.body, Codec: protocol.CodecJSON, Canary: true}, out)
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
