package handlers

import (
	"context"
	"errors"
	"io"
	"time"

	"dynworker/pkg/protocol"
)

// end turns the end of a stream into the end of an answer. A stream that ended without an end for every choice never looks complete.
func (r *relay) end(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, io.EOF) {
		if !errors.Is(cause, ErrShutdown) {
			return gone(cause)
		}
		if r.handler.rules.lastWordAtShutdown && !r.awaitsBlocks() {
			r.stream.Cancel()
			if err := r.lastWord(ctx); err != nil {
				return err
			}
		}
		return protocol.EngineShutdown("the worker shut down during generation")
	}
	if !errors.Is(err, io.EOF) {
		return engineGone(err)
	}
	for i := range r.choices {
		if !r.choices[i].finished {
			return protocol.StreamIncomplete("the engine ended the request before all of its choices")
		}
	}
	return nil
}

// lastWord sends what the engine still says about a cancelled request, within the grace.
func (r *relay) lastWord(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), max(r.handler.cfg.CancelGrace, time.Millisecond))
	defer cancel()
	for {
		outputs, err := r.stream.Next(ctx)
		if err != nil {
			return nil
		}
		if err := r.relay(outputs); errors.Is(err, errAnswered) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// answerEmpty answers a request for no tokens at all, which engines choke on: each choice ends at its length of zero. A request that moved from another worker may ask for that on purpose.
func answerEmpty(p *plan, out Sink) error {
	for i := range p.choices {
		usage := &protocol.Usage{PromptTokens: p.promptTokens, TotalTokens: p.promptTokens}
		if err := out.Send(&protocol.Chunk{Index: uint32(i), HasIndex: true, Finish: protocol.FinishLength, Usage: usage}); err != nil {
			return gone(err)
		}
	}
	return gone(out.Flush())
}
