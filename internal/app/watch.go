package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"dynworker/pkg/engine/ipc"
)

// Bounds of the engine's health check; they are those of the Dynamo 1.6.1 worker.
const (
	engineCheckInterval = 2 * time.Second
	engineCheckTimeout  = 30 * time.Second
)

// engineQuery is what the watch needs of the engine process.
type engineQuery interface {
	Query(ctx context.Context, what string) (json.RawMessage, error)
	Done() <-chan struct{}
}

// watchEngine asks the engine for its health until it says that it is ill or does not answer in time, and returns why. It returns nil when the engine has ended or ctx does. An engine can be alive as a process, keep all its streams
// open and never produce a token again; this is how that shows.
func watchEngine(ctx context.Context, engine engineQuery, interval, timeout time.Duration) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-engine.Done():
			return nil
		case <-tick.C:
		}
		if err := checkEngine(ctx, engine, timeout); err != nil {
			select {
			case <-engine.Done():
				return nil
			default:
			}
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
	}
}

func checkEngine(ctx context.Context, engine engineQuery, timeout time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("no answer to a health check within %v", timeout))
	defer cancel()
	raw, err := engine.Query(ctx, ipc.QueryHealth)
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
