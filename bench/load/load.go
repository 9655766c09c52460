// Package load is the frontend's side of a measurement: a number of streams that send requests to one worker, one after another, and read every answer to its end.
package load

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"dynworker/internal/caller"
	"dynworker/pkg/protocol"
)

// Plan is what a run asks of a worker.
type Plan struct {
	Target protocol.Instance
	// Streams are open at once; Requests in all are shared by them.
	Streams, Requests int
	// Prompt and Tokens are the lengths of prompt and answer of each request in tokens; Choices are the answers to each, 0 being one.
	Prompt, Tokens, Choices int
}

// Result is what the streams of a run saw.
type Result struct {
	Tokens, Frames int
	Took           time.Duration
	// First are the times from sending a request to its first chunk, Gap those between the chunks of an answer, both sorted.
	First, Gap []time.Duration
}

// Quantile of sorted times; 0 when there are none.
func Quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// Run carries out a plan. Any answer that is not complete is an error.
func Run(ctx context.Context, c *caller.Caller, p Plan) (*Result, error) {
	codec, err := protocol.ParseCodec(p.Target.Codec)
	if err != nil {
		return nil, err
	}
	r := runner{caller: c, plan: p, codec: codec}
	queue := make(chan struct{}, p.Requests)
	for range p.Requests {
		queue <- struct{}{}
	}
	close(queue)
	var streams sync.WaitGroup
	begin := time.Now()
	for range p.Streams {
		streams.Go(func() {
			var own Result
			var err error
			for range queue {
				if err = r.one(ctx, &own); err != nil {
					break
				}
			}
			r.merge(&own, err)
		})
	}
	streams.Wait()
	r.total.Took = time.Since(begin)
	slices.Sort(r.total.First)
	slices.Sort(r.total.Gap)
	return &r.total, r.err
}

type runner struct {
	caller *caller.Caller
	plan   Plan
	codec  protocol.Codec

	mu    sync.Mutex
	total Result
	err   error
}

func (r *runner) merge(own *Result, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.total.Tokens += own.Tokens
	r.total.Frames += own.Frames
	r.total.First = append(r.total.First, own.First...)
	r.total.Gap = append(r.total.Gap, own.Gap...)
	if r.err == nil {
		r.err = err
	}
}

// request is a prompt of ordinary tokens for an answer of exactly the wanted length.
func (p *Plan) request() *protocol.Request {
	prompt := make([]int32, p.Prompt)
	for i := range prompt {
		prompt[i] = int32(10 + i%300)
	}
	sampling := protocol.Map{}
	if p.Choices > 1 {
		sampling["n"] = int64(p.Choices)
		sampling["temperature"] = 1.0
	}
	return &protocol.Request{TokenIDs: prompt, TokensState: protocol.TokensList, Fields: protocol.Map{
		"model": "tiny", "stop_conditions": protocol.Map{"max_tokens": int64(p.Tokens), "ignore_eos": true}, "sampling_options": sampling, "output_options": protocol.Map{}, "eos_token_ids": []any{}, "annotations": []any{},
	}}
}

// one sends a request and reads its answer.
func (r *runner) one(ctx context.Context, own *Result) error {
	begin := time.Now()
	s, err := r.caller.Do(ctx, caller.Call{Transport: r.plan.Target.Transport, Codec: r.codec, Request: r.plan.request()})
	if err != nil {
		return err
	}
	defer func() { _ = s.Close() }()
	tokens, last := 0, time.Time{}
	for {
		item, err := s.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil && item.Err != nil {
			err = item.Err
		}
		if err != nil {
			return err
		}
		if item.Chunk == nil {
			continue
		}
		if item.Chunk.Finish == protocol.FinishError {
			return fmt.Errorf("the worker answered with an error: %s", item.Chunk.ErrorText)
		}
		now := time.Now()
		if last.IsZero() {
			own.First = append(own.First, now.Sub(begin))
		} else {
			own.Gap = append(own.Gap, now.Sub(last))
		}
		last = now
		tokens += len(item.Chunk.TokenIDs)
		own.Frames++
	}
	own.Tokens += tokens
	if want := r.plan.Tokens * max(r.plan.Choices, 1); tokens != want {
		return fmt.Errorf("%d tokens, want %d", tokens, want)
	}
	return nil
}
