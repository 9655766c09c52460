package handlers

import (
	"errors"

	"dynworker/pkg/affinity"
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/protocol"
)

// DefaultPriority is the engine's own default on its scale from 0 to 1, larger first.
const DefaultPriority = 0.5

// CanarySalt keeps health checks out of everybody's prefix cache: an engine's dummy requests under attention DP use an unsalted one-token prompt, and sharing a block with them has crashed engines.
const CanarySalt = "dynamo-health-check"

// unbounded is a plan's budget when neither the request nor the engine's reported limits give one.
const unbounded = -1

// plan is a request that passed every check.
type plan struct {
	generate     ipc.Generate
	decision     affinity.Decision
	askedRank    any
	promptTokens int
	choices      int
	// half is the part of the request that is done here.
	half half
	// oneAnswer means that the engine gives one answer of one token, as on a prefill worker.
	oneAnswer bool
	// details is what the prefill worker said about the prompt's cached tokens, nil when it said nothing.
	details protocol.Map
	// budget is the number of tokens that each choice may have, or unbounded.
	budget int
}

// plan checks a request and maps it onto a call of the engine. Its errors are *protocol.Error.
func (h *Handler) plan(call *Call) (*plan, error) {
	body := section{fields: call.Request.Fields}
	if err := h.refuseUnserved(body); err != nil {
		return nil, err
	}
	p := &plan{promptTokens: len(call.Request.TokenIDs)}
	if err := h.checkPrompt(call.Request); err != nil {
		return nil, err
	}
	stops, sampling, err := h.sections(body)
	if err != nil {
		return nil, err
	}
	wish, err := h.planSampling(sampling, call)
	if err != nil {
		return nil, err
	}
	p.choices = wish.choices
	p.generate = ipc.Generate{RequestID: call.ID, Streaming: true, Sampling: wish.params, Guided: wish.guided}
	output, _, err := body.sub("output_options")
	if err != nil {
		return nil, err
	}
	marked, _, err := body.boolean("_HEALTH_CHECK")
	if err != nil {
		return nil, err
	}
	for _, step := range []func() error{
		func() error { return h.planRole(body, marked, p) },
		func() error { return h.planOutput(output, p) },
		func() error {
			if p.oneAnswer {
				return p.limitPrefill()
			}
			return h.planBudget(stops, p)
		},
		func() error { return h.planStops(stops, output, p) },
		func() error { return h.planAffinity(body, p) },
		func() error { return h.planExtras(body, call, marked, p) },
	} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// checkPrompt keeps away from the engine what would end it for everybody: an empty prompt, ids that are not in its vocabulary, a prompt that leaves no room for an answer.
func (h *Handler) checkPrompt(r *protocol.Request) error {
	ids, bounds := r.TokenIDs, h.cfg.Bounds
	switch {
	case r.TokensState == protocol.TokensAbsent:
		return invalid("token_ids is missing")
	case r.TokensState == protocol.TokensNull:
		return invalid("token_ids is null")
	case len(ids) == 0:
		return invalid("token_ids is empty: a prompt needs at least one token")
	}
	if limit := bounds.VocabSize; limit > 0 {
		for i, id := range ids {
			if int(id) >= limit {
				return invalid("token_ids[%d] is %d, outside the vocabulary of %d tokens", i, id, limit)
			}
		}
	}
	if limit := bounds.MaxSeqLen; limit > 0 && len(ids) >= limit {
		return protocol.ContextLength(limit, len(ids))
	}
	if limit := bounds.MaxNumTokens; limit > 0 && len(ids) > limit && !h.cfg.ChunkedPrefill {
		return invalid("the prompt has %d tokens, above the engine's limit of %d in one step (max_num_tokens without chunked prefill)", len(ids), limit)
	}
	return nil
}

// sections reads stop_conditions and sampling_options, and moves the four keys that old clients write at top level to where they belong; a value that is already there wins.
func (h *Handler) sections(body section) (stops, sampling section, err error) {
	stops, null, err := body.sub("stop_conditions")
	if err != nil {
		return stops, sampling, err
	}
	if null && !h.rules.nullSections {
		return stops, sampling, protocol.Internal("stop_conditions is null")
	}
	sampling, null, err = body.sub("sampling_options")
	if err != nil {
		return stops, sampling, err
	}
	if null && !h.rules.nullSections {
		return stops, sampling, protocol.Internal("sampling_options is null")
	}
	stops = adopt(stops, body, "max_tokens", "min_tokens", "ignore_eos")
	sampling = adopt(sampling, body, "temperature")
	return stops, sampling, nil
}

func adopt(s, body section, keys ...string) section {
	for _, key := range keys {
		v, outside := body.fields[key]
		if !outside || s.has(key) {
			continue
		}
		fields := make(protocol.Map, len(s.fields)+1)
		for k, old := range s.fields {
			fields[k] = old
		}
		fields[key] = v
		s.fields = fields
	}
	return s
}

func (h *Handler) planOutput(output section, p *plan) error {
	v, ok, err := output.integer("logprobs")
	if err != nil {
		return err
	}
	if ok {
		if v < 0 && h.rules.strictRanges {
			return invalid("%s must not be negative, got %d", output.path("logprobs"), v)
		}
		// The chosen token's own logprob is wanted even for 0, and the engine gives none for 0.
		v = max(v, 1)
		p.generate.Sampling.LogProbs = &v
	}
	prompt, ok, err := output.integer("prompt_logprobs")
	if err != nil {
		return err
	}
	if ok {
		if prompt < 0 && h.rules.strictRanges {
			return invalid("%s must not be negative, got %d", output.path("prompt_logprobs"), prompt)
		}
		p.generate.Sampling.PromptLogProbs = &prompt
	}
	return nil
}

// planBudget settles max_tokens: what was asked for, else what the context leaves, else the engine's own default.
func (h *Handler) planBudget(stops section, p *plan) error {
	if _, present := stops.fields["max_tokens"]; !present && !h.rules.derivedMaxTokens {
		return protocol.Internal("stop_conditions has no max_tokens")
	}
	asked, ok, err := stops.integer("max_tokens")
	if err != nil {
		return err
	}
	limit := h.cfg.Bounds.MaxSeqLen
	switch {
	case ok && asked < 0:
		return invalid("%s must not be negative, got %d", stops.path("max_tokens"), asked)
	case ok && asked > 1<<31-1:
		return invalid("%s is too large: %d", stops.path("max_tokens"), asked)
	case ok:
		p.budget = int(asked)
	case limit > 0:
		p.budget = max(1, limit-p.promptTokens)
	default:
		p.budget = unbounded
		return nil
	}
	budget := int64(p.budget)
	p.generate.Sampling.MaxTokens = &budget
	return nil
}

// planStops maps the stop conditions. Stop strings and plain stop ids are the frontend's business: it detokenizes, matches and then stops the stream. What the engine must know is which ids end a sequence (the hidden ones, usually
// the model's EOS) and when it has to go on past them because the frontend decides by itself.
func (h *Handler) planStops(stops, output section, p *plan) error {
	ignore, _, err := stops.boolean("ignore_eos")
	if err != nil {
		return err
	}
	keep, _, err := output.boolean("no_stop_trim")
	if err != nil {
		return err
	}
	visible, _, err := stops.tokenIDs("stop_token_ids_visible")
	if err != nil {
		return err
	}
	hidden, _, err := stops.tokenIDs("stop_token_ids_hidden")
	if err != nil {
		return err
	}
	if ignore || keep || len(visible) > 0 {
		on := true
		p.generate.Sampling.IgnoreEOS = &on
	}
	least, _, err := stops.integer("min_tokens")
	if err != nil {
		return err
	}
	if p.oneAnswer {
		least = min(least, 1)
	}
	if least < 0 || p.budget != unbounded && least > int64(p.budget) && h.rules.strictRanges {
		return invalid("%s must be between 0 and max_tokens (%d), got %d", stops.path("min_tokens"), p.budget, least)
	}
	if least > 0 {
		p.generate.Sampling.MinTokens = &least
	}
	if ids := without(hidden, visible); len(ids) > 0 {
		p.generate.Sampling.StopTokenIDs = ids
	}
	return nil
}

// without is the set of ids that are not among the excluded ones, in their first order.
func without(ids, excluded []int64) []int64 {
	drop := make(map[int64]bool, len(ids)+len(excluded))
	for _, id := range excluded {
		drop[id] = true
	}
	var out []int64
	for _, id := range ids {
		if !drop[id] {
			drop[id] = true
			out = append(out, id)
		}
	}
	return out
}

func (h *Handler) planAffinity(body section, p *plan) error {
	routing, _, err := body.sub("routing")
	if err != nil {
		return err
	}
	gate, err := h.gate.get()
	if err != nil {
		return protocol.Internal(err.Error())
	}
	p.askedRank = routing.fields["dp_rank"]
	d, err := gate.Decide(body.fields["agent_context"], p.askedRank)
	if err != nil {
		var badType *affinity.RankTypeError
		var badRange *affinity.RankRangeError
		if errors.As(err, &badType) || errors.As(err, &badRange) {
			return invalid("%s", err.Error())
		}
		return protocol.Internal(err.Error())
	}
	p.decision = d
	if d.PassConversation {
		p.generate.Conversation = &ipc.Conversation{}
		if id := d.ConversationID; id != "" {
			p.generate.Conversation.ID = &id
		}
	}
	if d.ForceRank {
		p.generate.Scheduling = &ipc.Scheduling{AttentionDPRank: d.Rank}
	}
	return nil
}
