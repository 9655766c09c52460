package handlers

import (
	"encoding/json"
	"slices"

	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/handoff"
	"dynworker/pkg/protocol"
)

// Role is a worker's part in serving a model.
type Role string

// The roles there are.
const (
	// Aggregated does both halves of a request. It is what the empty Role means.
	Aggregated Role = "aggregated"
	// Prefill runs prompts and hands the KV blocks over.
	Prefill Role = "prefill"
	// Decode goes on from what a prefill worker has handed over.
	Decode Role = "decode"
)

// bypassAnnotation is with what the frontend sends a request to a decode worker without asking a prefill worker first (Dynamo 1.6.1).
const bypassAnnotation = "x-bypass-remote-prefill"

// half is the part of a request that one call of the engine does. The zero value is all of it, as on an aggregated worker.
type half uint8

const (
	// contextHalf is the prompt and the first token; what it leaves is handed over.
	contextHalf half = iota + 1
	// generationHalf is what follows the first token, from KV blocks that come from elsewhere.
	generationHalf
)

// planRole settles which half of the request the engine does and with what. A health check carries its own order, so that it needs no peer.
func (h *Handler) planRole(body section, marked bool, p *plan) error {
	if marked {
		order, _, err := body.sub("disaggregated_params")
		if err != nil {
			return err
		}
		if order.fields != nil {
			p.generate.Disaggregated = protocol.AppendValue(nil, protocol.CodecJSON, order.fields)
			p.oneAnswer = h.cfg.Role == Prefill
			return nil
		}
	}
	switch h.cfg.Role {
	case Prefill:
		p.half, p.oneAnswer = contextHalf, true
		p.generate.Disaggregated = handoff.Context(h.machine())
	case Decode:
		return h.planDecode(body, p)
	}
	return nil
}

func (h *Handler) machine() int {
	if h.cfg.Machine == nil {
		return -1
	}
	return h.cfg.Machine()
}

func (h *Handler) planDecode(body section, p *plan) error {
	if list, ok := body.fields["annotations"].([]any); ok && slices.Contains(list, any(bypassAnnotation)) {
		p.generate.Disaggregated = handoff.Local()
		return nil
	}
	result, _, err := body.sub("prefill_result")
	if err != nil {
		return err
	}
	params, _, err := result.sub("disaggregated_params")
	if err != nil {
		return err
	}
	if params.fields == nil {
		return invalid("%s is missing: a decode worker goes on from a prefill worker's result", params.name)
	}
	details, _, err := result.sub("prompt_tokens_details")
	if err != nil {
		return err
	}
	order, err := handoff.Generation(params.fields)
	if err != nil {
		return invalid("%s.%s", params.name, err)
	}
	p.half, p.generate.Disaggregated = generationHalf, order
	if details.fields != nil {
		p.details = details.fields
	}
	return nil
}

// limitPrefill makes a prefill worker's answer what can be handed over: one token of one choice, whatever the request says. The frontend asks for just that, and leaves the other limits as the caller set them.
func (p *plan) limitPrefill() error {
	if p.choices > 1 {
		return invalid("sampling_options.n is %d: several choices cannot be handed over from a prefill worker", p.choices)
	}
	one := int64(1)
	p.budget = 1
	p.generate.Sampling.MaxTokens = &one
	p.generate.Streaming = false
	return nil
}

// handOver puts what the engine left onto the last chunk of a prefill. An engine that is done with its half says so in words that the frontend does not know; the word that means "go on elsewhere" is length.
func (r *relay) handOver(c *choice, meta *ipc.Meta) error {
	if meta == nil || len(meta.Disaggregated) == 0 || r.handler.cfg.Role != Prefill {
		return r.handedNothing(c)
	}
	fields, err := handoff.FromEngine(meta.Disaggregated)
	if err != nil {
		return protocol.Internal(err.Error())
	}
	c.pending.Disaggregated = fields
	if r.plan.half != contextHalf {
		return nil
	}
	unfinished := c.pending.Finish == protocol.FinishError && (meta.FinishReason == "" || meta.FinishReason == "not_finished")
	if unfinished && handoff.Complete(fields) {
		c.pending.Finish, c.pending.ErrorText = protocol.FinishLength, ""
	}
	if !handoff.Complete(fields) {
		return r.handedNothing(c)
	}
	if c.pending.Finish == protocol.FinishLength && !r.call.Canary {
		r.handler.cfg.Observer.HandedOver()
	}
	return nil
}

// handedNothing ends a prefill that cannot be continued. One that has reached its natural end needs no continuation.
func (r *relay) handedNothing(c *choice) error {
	if r.plan.half != contextHalf || c.pending.Finish != protocol.FinishLength {
		return nil
	}
	return protocol.Internal("the engine finished the prompt and left nothing to hand over")
}

// cachedDetails is what usage says about the prompt's cached tokens on a decode worker: the prefill worker's own words, if it had any.
func (p *plan) cachedDetails() any {
	if p.details == nil {
		return nil
	}
	return p.details
}

// blocksPerf are the figures out of which the share of a prompt that was not sent over can be told.
type blocksPerf struct {
	Reused *int64 `json:"num_reused_blocks"`
	Missed *int64 `json:"num_missed_blocks"`
}

// reusedTokens tells how much of the prompt a decode worker had itself: in blocks, since most of it came from elsewhere. False when the engine gave no figures. One token of a prompt is always computed.
func reusedTokens(perf json.RawMessage, prompt int) (int, bool) {
	var b blocksPerf
	if len(perf) == 0 || json.Unmarshal(perf, &b) != nil || b.Reused == nil || b.Missed == nil || *b.Reused < 0 || *b.Missed < 0 {
		return 0, false
	}
	sum := *b.Reused + *b.Missed
	if sum <= 0 || *b.Reused > 1<<31 || *b.Missed > 1<<31 {
		return 0, true
	}
	return min(int(*b.Reused*int64(prompt)/sum), max(prompt-1, 0)), true
}
