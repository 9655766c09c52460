package handlers

import (
	"math"

	"dynworker/pkg/engine/ipc"
)

// samplingKeys are the keys that a frontend may write into sampling_options.
var samplingKeys = func() map[string]struct{} {
	keys := map[string]struct{}{}
	for _, k := range []string{"n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "use_beam_search", "length_penalty", "seed", "include_stop_str_in_output", "guided_decoding"} {
		keys[k] = struct{}{}
	}
	return keys
}()

// samplingPlan is what sampling_options asks for, in the engine's names.
type samplingPlan struct {
	params  ipc.Sampling
	guided  *ipc.Guided
	choices int
}

// planSampling maps sampling_options onto the engine's sampling parameters. Rules that were recorded: null is skipped and 0 or false is applied, an unknown key is refused whatever its value, top_k -1 means off and is 0 for the
// engine, best_of is raised to n.
func (h *Handler) planSampling(s section, call *Call) (samplingPlan, error) {
	if key, strange := s.unknown(samplingKeys); strange {
		return samplingPlan{}, invalid("%s is not a sampling option that this worker knows", s.path(key))
	}
	p := samplingPlan{choices: 1}
	for _, step := range []func(section, *samplingPlan) error{h.planChoices, h.planNumbers, h.planSwitches, h.planSeed} {
		if err := step(s, &p); err != nil {
			return samplingPlan{}, err
		}
	}
	if err := h.checkSearch(s, &p); err != nil {
		return samplingPlan{}, err
	}
	guided, err := h.planGuided(s, call)
	p.guided = guided
	return p, err
}

func (h *Handler) planChoices(s section, p *samplingPlan) error {
	n, hasN, err := s.integer("n")
	if err != nil {
		return err
	}
	if hasN && (n < 1 || n > math.MaxUint8) {
		return invalid("%s must be between 1 and 255, got %d", s.path("n"), n)
	}
	best, hasBest, err := s.integer("best_of")
	if err != nil {
		return err
	}
	if hasBest && (best < 1 || best > math.MaxUint8) {
		return invalid("%s must be between 1 and 255, got %d", s.path("best_of"), best)
	}
	if hasN {
		p.choices = int(n)
		p.params.N = &n
		if !hasBest || best < n {
			best, hasBest = n, true
		}
	}
	if hasBest {
		p.params.BestOf = &best
	}
	return nil
}

// numberRange is the range of a sampling number. The engine refuses the first group itself; strict ranges are those that it lets pass and then fails on in its loop.
type numberRange struct {
	key      string
	low      float64
	lowOpen  bool
	high     float64
	strict   bool
	sentence string
	into     func(*ipc.Sampling) **float64
}

var numberRanges = []numberRange{
	{key: "temperature", high: math.Inf(1), sentence: "must not be negative", into: func(p *ipc.Sampling) **float64 { return &p.Temperature }},
	{key: "top_p", high: 1, sentence: "must be within 0 and 1", into: func(p *ipc.Sampling) **float64 { return &p.TopP }},
	{key: "min_p", high: 1, strict: true, sentence: "must be within 0 and 1", into: func(p *ipc.Sampling) **float64 { return &p.MinP }},
	{key: "repetition_penalty", lowOpen: true, high: math.Inf(1), strict: true, sentence: "must be above 0", into: func(p *ipc.Sampling) **float64 { return &p.RepetitionPenalty }},
	{key: "presence_penalty", low: math.Inf(-1), high: math.Inf(1), into: func(p *ipc.Sampling) **float64 { return &p.PresencePenalty }},
	{key: "frequency_penalty", low: math.Inf(-1), high: math.Inf(1), into: func(p *ipc.Sampling) **float64 { return &p.FrequencyPenalty }},
	{key: "length_penalty", low: math.Inf(-1), high: math.Inf(1), into: func(p *ipc.Sampling) **float64 { return &p.LengthPenalty }},
}

func (h *Handler) planNumbers(s section, p *samplingPlan) error {
	for _, r := range numberRanges {
		v, ok, err := s.number(r.key)
		if err != nil {
			return err
		}
		if !ok {
			continue
		}
		outside := v < r.low || v > r.high || r.lowOpen && v == r.low
		if outside && (!r.strict || h.rules.strictRanges) {
			return invalid("%s %s, got %v", s.path(r.key), r.sentence, v)
		}
		*r.into(&p.params) = &v
	}
	k, ok, err := s.integer("top_k")
	switch {
	case err != nil:
		return err
	case ok && k < -1:
		return invalid("%s must not be below -1, got %d", s.path("top_k"), k)
	case ok && k > math.MaxInt32:
		return invalid("%s is too large: %d", s.path("top_k"), k)
	case ok:
		k = max(k, 0)
		p.params.TopK = &k
	}
	return nil
}

func (h *Handler) planSwitches(s section, p *samplingPlan) error {
	for key, into := range map[string]**bool{"use_beam_search": &p.params.UseBeamSearch, "include_stop_str_in_output": &p.params.IncludeStopStrInOutput} {
		v, ok, err := s.boolean(key)
		if err != nil {
			return err
		}
		if ok {
			*into = &v
		}
	}
	return nil
}

func (h *Handler) planSeed(s section, p *samplingPlan) error {
	seed, ok, err := s.integer("seed")
	switch {
	case err != nil:
		return err
	case ok && seed < 0 && h.rules.strictRanges:
		return invalid("%s must not be negative, got %d", s.path("seed"), seed)
	case ok:
		p.params.Seed = &seed
	}
	return nil
}

// checkSearch refuses what the engine's sampling parameters cannot be made of: several sequences without randomness, and a beam wider than the engine was built for.
func (h *Handler) checkSearch(s section, p *samplingPlan) error {
	best := int64(1)
	if p.params.BestOf != nil {
		best = *p.params.BestOf
	}
	if beam := p.params.UseBeamSearch; beam != nil && *beam {
		if limit := h.cfg.Bounds.MaxBeamWidth; limit > 0 && best > int64(limit) {
			return invalid("beam search over %d sequences is above the engine's beam width of %d (%s, %s)", best, limit, s.path("n"), s.path("best_of"))
		}
		return nil
	}
	if best > 1 && greedy(&p.params) {
		key := "best_of"
		if s.has("n") {
			key = "n"
		}
		return invalid("%s asks for %d sequences but the sampling is greedy, which gives only one: set temperature, top_p or top_k", s.path(key), best)
	}
	return nil
}

// greedy reports whether the engine would decode greedily with these parameters.
func greedy(p *ipc.Sampling) bool {
	if p.Temperature == nil && p.TopP == nil && p.TopK == nil {
		return true
	}
	return p.TopK != nil && *p.TopK == 1 || p.TopP != nil && *p.TopP == 0 || p.Temperature != nil && *p.Temperature == 0
}
