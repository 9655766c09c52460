package vitals

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// Questions says how an engine is asked for its health.
type Questions struct {
	// Interval between an answer and the next question; 0 turns the check off.
	Interval time.Duration
	// Timeout of an answer; 0 waits for ever.
	Timeout time.Duration
}

// Ask asks the engine for its health until it says that it is ill or does not answer in time, and returns that finding. query asks once; its answer is an object with a truth value "healthy" and a text "detail". Ask returns nil when
// ctx ends.
func Ask(ctx context.Context, q Questions, query func(context.Context) (json.RawMessage, error)) *Failure {
	if q.Interval <= 0 {
		<-ctx.Done()
		return nil
	}
	tick := time.NewTicker(q.Interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		err := ask(ctx, q.Timeout, query)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return Failed(Health, err)
		}
	}
}

func ask(ctx context.Context, timeout time.Duration, query func(context.Context) (json.RawMessage, error)) error {
	ctx, cancel := WithTimeout(ctx, timeout, fmt.Errorf("no answer to a health check within %v", timeout))
	defer cancel()
	raw, err := query(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return fmt.Errorf("health check: %w", err)
	}
	var answer struct {
		Healthy *bool  `json:"healthy"`
		Detail  string `json:"detail"`
	}
	switch err := json.Unmarshal(raw, &answer); {
	case err != nil:
		return fmt.Errorf("health check: %w", err)
	case answer.Healthy == nil:
		return errors.New("health check: the answer does not say whether the engine is healthy")
	case !*answer.Healthy:
		return fmt.Errorf("the engine says that it is not healthy: %s", answer.Detail)
	}
	return nil
}
