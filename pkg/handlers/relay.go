package handlers

import (
	"context"
	"errors"
	"fmt"

	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/protocol"
)

// relay carries one request's outputs from the engine to the sink. It owns the stream.
type relay struct {
	handler *Handler
	plan    *plan
	call    *Call
	stream  Stream
	out     Sink
	choices []choice
	// order lists the choices that have a pending chunk, first touched first.
	order []*choice
	// generated counts the tokens of all choices.
	generated int
	// cached is the number of prompt tokens that the engine had cached, or -1 while it has not said.
	cached int
	// promptLogprobs is the first payload that the engine gave; it rides on the last chunk.
	promptLogprobs any
	started        bool
	// heard means that the engine has said something, so that KV blocks that were on their way have arrived.
	heard  bool
	reused int // tokens of the prompt that a decode worker had itself, -1 while the engine has not said
}

// choice is the state of one of the n sequences of a request.
type choice struct {
	emitted  int
	finished bool
	touched  bool
	// early means that the pending chunk carries usage although it is not the last one. It is counted when the chunk goes out, with every token that was merged into it.
	early   bool
	pending protocol.Chunk
	// logProbs and topLogProbs are memory for the pending chunk's; it has none while it is empty, as nil is what leaves them out.
	logProbs    []float64
	topLogProbs [][]protocol.TopLogProb
}

func (r *relay) run(ctx context.Context) error {
	r.cached, r.reused = -1, -1
	defer r.leave()
	if sink, ok := r.out.(DirectSink); ok {
		r.stream.SetDirect(func(o *ipc.Output) (taken, whole bool) { return r.direct(sink, o) })
	}
	for {
		outputs, err := r.stream.Next(ctx)
		if err != nil {
			return r.end(ctx, err)
		}
		r.heard = true
		switch err := r.relay(outputs); {
		case errors.Is(err, errAnswered):
			return nil
		case err != nil:
			return err
		}
	}
}

// direct sends tokens on the engine's goroutine while run waits in Next. It takes only what cannot fail or end anything; everything else goes the way through run. An error of the sink is no concern here: it ends the context, and run with
// it.
func (r *relay) direct(sink DirectSink, o *ipc.Output) (taken, whole bool) {
	if !r.started || int(o.Index) >= len(r.choices) || !sink.Idle() {
		return false, false
	}
	c := &r.choices[o.Index]
	if c.finished || r.plan.budget != unbounded && len(o.Tokens) > r.plan.budget-c.emitted {
		return false, false
	}
	if r.take(o) != nil || r.send() != nil {
		return true, false
	}
	return true, sink.FlushNow()
}

// relay sends everything that the engine gave at once and flushes it with one write.
func (r *relay) relay(outputs []ipc.Output) error {
	for i := range outputs {
		if err := r.take(&outputs[i]); err != nil {
			return err
		}
		if !r.handler.cfg.MergeTokens {
			if err := r.send(); err != nil {
				return err
			}
		}
	}
	if err := r.send(); err != nil {
		return err
	}
	return gone(r.out.Flush())
}

func gone(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", ErrClientGone, err)
}

// take adds one output to its choice's pending chunk.
func (r *relay) take(o *ipc.Output) error {
	meta := o.Meta
	if int(o.Index) >= len(r.choices) {
		r.stream.Cancel()
		return r.failed(&ipc.RequestError{Message: fmt.Sprintf("the engine answered for choice %d of %d", o.Index, len(r.choices))})
	}
	c := &r.choices[o.Index]
	if failure := failureOf(meta); failure != nil {
		return r.failedWith(c, o, failure)
	}
	if c.finished {
		// Engines that report all choices at each step repeat what is over; the frontend must not see it twice.
		return nil
	}
	r.note(meta)
	if cancelled := meta != nil && meta.FinishReason == "cancelled"; cancelled && !r.handler.rules.lastWordAtShutdown {
		// Nobody asked for this: a request that was cancelled is not read any more. A short answer that looks complete would be worse than none.
		if err := r.send(); err != nil {
			return err
		}
		return protocol.StreamIncomplete("the engine cancelled the request on its own")
	}
	overrun, err := r.addTokens(c, o)
	if err != nil {
		return err
	}
	if overrun {
		return r.finish(c, &ipc.Meta{FinishReason: "length"}, true)
	}
	if known := meta != nil && meta.FinishReason != ""; known || o.Last {
		return r.finish(c, meta, known)
	} else if !r.started && r.cached > 0 && r.handler.rules.earlyUsage && r.plan.half != generationHalf {
		c.early = true
	}
	r.started = true
	return nil
}

// failureOf is the failure of a whole request that an output reports, or nil.
func failureOf(meta *ipc.Meta) *ipc.RequestError {
	switch {
	case meta == nil:
		return nil
	case meta.Error != nil:
		return meta.Error
	case meta.NoOutputs:
		return &ipc.RequestError{Message: "the engine finished a step without any output"}
	}
	return nil
}

// failedWith ends a request with a failure. The output that reports it may hold tokens that were on their way before; they are the caller's all the same.
func (r *relay) failedWith(c *choice, o *ipc.Output, failure *ipc.RequestError) error {
	if o.Meta.NoOutputs {
		r.stream.Cancel()
	}
	if len(o.Tokens) > 0 && !c.finished {
		if _, err := r.addTokens(c, o); err != nil {
			return err
		}
	}
	return r.failed(failure)
}

// addTokens adds an output's tokens to its choice's pending chunk and reports whether the engine sent more than were asked for.
func (r *relay) addTokens(c *choice, o *ipc.Output) (overrun bool, err error) {
	tokens, logprobs := r.withinBudget(c, o)
	r.generated += len(tokens)
	c.emitted += len(tokens)
	if len(c.pending.TokenIDs) > 0 && (len(c.pending.LogProbs) > 0) != (len(logprobs) > 0) {
		// A chunk has log probabilities for all of its tokens or for none.
		if err := r.send(); err != nil {
			return false, err
		}
	}
	r.touch(c, uint32(o.Index))
	c.pending.TokenIDs = append(c.pending.TokenIDs, tokens...)
	c.appendLogprobs(logprobs)
	return len(tokens) < len(o.Tokens), nil
}

// withinBudget cuts off what an engine sent beyond the tokens that were asked for: passing it on would bill a caller for more than the limit.
func (r *relay) withinBudget(c *choice, o *ipc.Output) ([]uint32, []ipc.TokenLogProb) {
	room := r.plan.budget - c.emitted
	if r.plan.budget == unbounded || len(o.Tokens) <= room {
		return o.Tokens, o.LogProbs
	}
	r.handler.cfg.Observer.EngineOverran()
	r.handler.cfg.Logger.Warn().Str("request_id", r.call.ID).Int("max_tokens", r.plan.budget).Msg("the engine sent more tokens than were asked for; the rest was dropped")
	r.stream.Cancel()
	return o.Tokens[:room], o.LogProbs[:min(room, len(o.LogProbs))]
}

// note keeps what the engine says once and the last chunk needs.
func (r *relay) note(meta *ipc.Meta) {
	if meta == nil {
		return
	}
	if meta.CachedTokens != nil && r.cached < 0 {
		r.cached = int(min(max(*meta.CachedTokens, 0), int64(r.plan.promptTokens)))
		if !r.call.Canary {
			r.handler.cfg.Observer.PromptTokens(r.plan.promptTokens, r.cached)
		}
	}
	if r.promptLogprobs == nil && len(meta.PromptLogProbs) > 0 {
		v, err := protocol.DecodeValue(protocol.CodecJSON, meta.PromptLogProbs)
		if err != nil {
			r.handler.cfg.Logger.Warn().Err(err).Str("request_id", r.call.ID).Msg("the engine's prompt logprobs are unreadable and were left out")
			return
		}
		if list, ok := v.([]any); ok && len(list) > 0 {
			r.promptLogprobs = v
		}
	}
}

func (r *relay) touch(c *choice, index uint32) {
	if c.touched {
		return
	}
	c.touched = true
	c.pending.Index, c.pending.HasIndex = index, true
	r.order = append(r.order, c)
}

// finish closes a choice. known says whether the engine gave a reason.
func (r *relay) finish(c *choice, meta *ipc.Meta, known bool) error {
	c.finished = true
	r.started = true
	if known {
		c.pending.Finish, c.pending.ErrorText = finishReason(meta.FinishReason)
		c.pending.StopReason = meta.StopReason
	} else {
		c.pending.Finish, c.pending.ErrorText = protocol.FinishError, "the engine ended the sequence without a reason"
	}
	if meta != nil && r.plan.half == generationHalf {
		if n, ok := reusedTokens(meta.Perf, r.plan.promptTokens); ok {
			r.reused = n
		}
	}
	c.pending.Usage = r.usage(meta)
	c.pending.EngineData = r.engineData()
	if r.handler.cfg.Role == Prefill {
		return r.handOver(c, meta)
	}
	return nil
}

// finishReason maps the engine's word onto the closed set that the frontend can read; one it could not read would poison the whole frame.
func finishReason(word string) (protocol.FinishReason, string) {
	switch word {
	case "stop":
		return protocol.FinishStop, ""
	case "length":
		return protocol.FinishLength, ""
	case "cancelled":
		return protocol.FinishCancelled, ""
	case "timeout":
		return protocol.FinishError, "the engine timed out"
	}
	return protocol.FinishError, fmt.Sprintf("the engine ended the sequence with %q", word)
}

// usage counts over all choices. An engine that reports several choices in one step says how many tokens they had together at that step.
func (r *relay) usage(meta *ipc.Meta) *protocol.Usage {
	done := r.generated
	if meta != nil && meta.CompletionTokens != nil {
		done = int(*meta.CompletionTokens)
	}
	cached := r.cached
	if r.reused >= 0 {
		cached = r.reused
	}
	return &protocol.Usage{PromptTokens: r.plan.promptTokens, CompletionTokens: done, TotalTokens: r.plan.promptTokens + done, CachedTokens: max(cached, 0), Details: r.plan.cachedDetails()}
}

func (r *relay) engineData() any {
	var data protocol.Object
	if r.promptLogprobs != nil {
		data = append(data, protocol.Member{Key: "prompt_logprobs", Value: r.promptLogprobs})
	}
	switch {
	case r.cached < 0:
	case r.plan.half == generationHalf:
		// What came from a prefill worker is no cache hit; the engine's own count is told beside what was made of it.
		if r.reused >= 0 {
			data = append(data, protocol.Member{Key: "cached_tokens_engine_reported", Value: int64(r.cached)})
		}
	default:
		data = append(data, protocol.Member{Key: "kv_cache_hit", Value: protocol.KVCacheHit{PromptTokens: r.plan.promptTokens, ReusedTokens: r.cached}})
	}
	if data == nil {
		return nil
	}
	return data
}

// send hands every pending chunk to the sink, which encodes it at once, so that the chunk's memory can be used again.
func (r *relay) send() error {
	for _, c := range r.order {
		if !r.call.Canary {
			r.handler.cfg.Observer.GeneratedTokens(len(c.pending.TokenIDs))
		}
		if c.early && !c.finished {
			c.pending.Usage = r.usage(nil)
		}
		err := r.out.Send(&c.pending)
		c.touched, c.early = false, false
		c.pending = protocol.Chunk{TokenIDs: c.pending.TokenIDs[:0]}
		if err != nil {
			return gone(err)
		}
	}
	r.order = r.order[:0]
	return nil
}

// errAnswered ends the relay after an error chunk: the answer is complete as far as the frontend is concerned.
var errAnswered = errors.New("answered with an error chunk")

// failed answers an error that is about this request alone, in the form that was recorded: a chunk without an index whose finish reason is the error or, when the engine was not even asked, an error item that says 4xx.
func (r *relay) failed(e *ipc.RequestError) error {
	if err := r.send(); err != nil {
		return err
	}
	if e.Kind == ipc.ErrorParams {
		return protocol.InvalidArgument("%s", e.Error())
	}
	if r.transferFailed(e) {
		return transferError(r.call.Request, e)
	}
	for i := range r.choices {
		r.choices[i].finished = true
	}
	if err := r.out.Send(&protocol.Chunk{Finish: protocol.FinishError, ErrorText: e.Message}); err != nil {
		return gone(err)
	}
	if err := r.out.Flush(); err != nil {
		return gone(err)
	}
	return errAnswered
}
