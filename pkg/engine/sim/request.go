package sim

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"time"

	"dynworker/pkg/engine/ipc"
)

// request is one request from its generate message to its last record.
type request struct {
	id     uint64
	params ipc.Generate
	prompt []int32
	text   Text
	vocab  int
	salt   string

	maxTokens, minTokens int
	logProbs             int // alternatives at each position; 0: none
	ignoreEOS            bool
	trigger              trigger

	candidate
	handoff
	onRank    int // noRank while it waits
	root      blockHash
	cached    int
	notBefore time.Time // of the first token
	choices   []sequence
	given     json.RawMessage // of contextOnly: what the other engine needs; nil until there is something
	told      bool            // the first record has been written
	stalled   bool            // nothing more comes by itself
	ended     bool
}

// sequence is one of the n texts of a request.
type sequence struct {
	state  State
	chain  chain
	last   int32 // token whose KV entries are written when the next one is drawn
	made   int
	finish string // finish reason; empty while it runs
	stop   any

	step    []uint32 // tokens of the current step, or all of them when not streaming
	probs   []ipc.TokenLogProb
	changed bool // there is something to write
}

// newRequest checks a request as TensorRT-LLM does when it is called. The error
// is the one that the call would raise.
func (e *engine) newRequest(m ipc.Request) (*request, *ipc.RequestError) {
	s := &m.Params.Sampling
	r := &request{id: m.ID, params: m.Params, prompt: m.Tokens, onRank: noRank, text: e.text, vocab: e.args.VocabSize}
	r.trigger = triggerOf(m.Tokens, m.Params.CacheSalt)
	if err := r.trigger.what.callError(); err != nil {
		return r, err
	}
	var refused *ipc.RequestError
	if r.handoff, refused = e.parseHandoff(&m); refused == nil {
		refused = e.checkCall(&m, r.phase)
	}
	if refused != nil {
		return r, refused
	}
	setFrom(&r.text.Seed, s.Seed)
	if s.EndID != nil {
		r.text.EOS = int32(*s.EndID)
	}
	r.ignoreEOS = s.IgnoreEOS != nil && *s.IgnoreEOS
	r.maxTokens = min(int(intOr(s.MaxTokens, defaultMaxTokens)), e.args.MaxSeqLen-len(m.Tokens))
	r.minTokens = int(intOr(s.MinTokens, 0))
	r.logProbs = int(intOr(s.LogProbs, 0))
	if m.Params.CacheSalt != nil {
		r.salt = *m.Params.CacheSalt
	}
	lora := ""
	if m.Params.LoRA != nil {
		lora = m.Params.LoRA.Name
	}
	r.root = rootHash(r.salt, lora)
	r.choices = make([]sequence, intOr(s.N, 1))
	r.candidate = candidate{cost: len(r.choices), tokens: len(m.Tokens), rank: noRank, relax: true}
	if sch := m.Params.Scheduling; sch != nil && e.args.AttentionDPSize > 1 {
		r.rank, r.relax = sch.AttentionDPRank, sch.AttentionDPRelax
	}
	if c := m.Params.Conversation; c != nil && c.ID != nil {
		r.conv = *c.ID
	}
	return r, nil
}

// defaultMaxTokens is TensorRT-LLM's own default for an output's length.
const defaultMaxTokens = 32

// maxChoices bounds n, as a request with more could never be admitted anyway.
const maxChoices = 1024

// maxLogProbs bounds the alternatives at one position.
const maxLogProbs = 1024

// maxPromptLogProbs bounds the log probabilities of a prompt, which go into one
// record.
const maxPromptLogProbs = 500_000

// checkCall refuses arguments that the engine cannot work with.
func (e *engine) checkCall(m *ipc.Request, p phase) *ipc.RequestError {
	s := &m.Params.Sampling
	switch {
	case m.Params.Conversation != nil && !e.build.ConversationParams:
		return callError(ipc.ErrorType, "TypeError", "generate_async() got an unexpected keyword argument 'conversation_params'")
	case m.Params.Guided != nil:
		return callError(ipc.ErrorNotImplemented, "NotImplementedError", "no guided decoding backend is configured")
	case s.UseBeamSearch != nil && *s.UseBeamSearch:
		return callError(ipc.ErrorNotImplemented, "NotImplementedError", "no beam search")
	case len(m.Tokens) == 0:
		return callError(ipc.ErrorRequest, "RequestError", "the prompt is empty")
	case len(m.Tokens) > e.args.MaxNumTokens && p != generationOnly: // which computes no prompt
		return callError(ipc.ErrorRequest, "RequestError", fmt.Sprintf("the prompt has %d tokens, max_num_tokens is %d", len(m.Tokens), e.args.MaxNumTokens))
	case len(m.Tokens) >= e.args.MaxSeqLen:
		return callError(ipc.ErrorRequest, "RequestError", fmt.Sprintf("the prompt has %d tokens, max_seq_len is %d", len(m.Tokens), e.args.MaxSeqLen))
	case intOr(s.MaxTokens, 1) < 1:
		return callError(ipc.ErrorValue, "ValueError", "max_tokens is not positive")
	case intOr(s.N, 1) < 1 || intOr(s.N, 1) > int64(min(maxChoices, e.args.MaxBatchSize*e.args.AttentionDPSize)):
		return callError(ipc.ErrorValue, "ValueError", "n is out of range")
	case intOr(s.LogProbs, 0) < 0 || intOr(s.LogProbs, 0) > int64(min(maxLogProbs, e.args.VocabSize)):
		return callError(ipc.ErrorValue, "ValueError", "logprobs is out of range")
	case intOr(s.PromptLogProbs, 0) < 0 || intOr(s.PromptLogProbs, 0) > int64(min(maxLogProbs, e.args.VocabSize)):
		return callError(ipc.ErrorValue, "ValueError", "prompt_logprobs is out of range")
	case s.PromptLogProbs != nil && len(m.Tokens)*int(*s.PromptLogProbs) > maxPromptLogProbs:
		return callError(ipc.ErrorRequest, "RequestError", "too many prompt log probabilities")
	case m.Params.Priority != nil && !(*m.Params.Priority >= 0 && *m.Params.Priority <= 1):
		return callError(ipc.ErrorValue, "ValueError", "priority is not between 0 and 1")
	}
	for _, t := range m.Tokens {
		if t < 0 || int(t) >= e.args.VocabSize {
			return callError(ipc.ErrorRequest, "RequestError", "a prompt token is outside of the vocabulary")
		}
	}
	return nil
}

func callError(kind ipc.ErrorKind, class, message string) *ipc.RequestError {
	return &ipc.RequestError{Kind: kind, Type: class, Message: message}
}

func intOr(v *int64, d int64) int64 {
	if v == nil {
		return d
	}
	return *v
}

func setFrom[T any](dst, v *T) {
	if v != nil {
		*dst = *v
	}
}

// begin computes the prompt: it looks up what is cached and writes the rest.
func (r *request) begin(rank int, c *cache) {
	r.onRank = rank
	r.cached = min(c.match(r.root, r.prompt), len(r.prompt)-1)
	state, written := NewState.AddAll(r.prompt), newChain(c, r.root, r.salt)
	for _, t := range r.prompt {
		written.write(t)
	}
	for i := range r.choices {
		r.choices[i] = sequence{state: state, chain: written.clone(), last: noToken}
	}
}

// noToken means that there is no token that remains to be written.
const noToken = -1

// advance draws the next token of a choice.
func (r *request) advance(index int) {
	q := &r.choices[index]
	if q.last != noToken {
		q.chain.write(q.last)
	}
	mayEnd := !r.ignoreEOS && q.made+1 >= r.minTokens
	token, probs := r.draw(q.state, index, mayEnd)
	q.made++
	q.changed = true
	switch {
	case mayEnd && token == r.text.EOS:
		q.finish = "stop"
	case mayEnd && slices.Contains(r.params.Sampling.StopTokenIDs, int64(token)):
		q.finish, q.stop = "stop", int64(token)
		q.made-- // a stop word is not part of the output
		return
	case q.made >= r.maxTokens:
		q.finish = "length"
	}
	q.step = append(q.step, uint32(token))
	if r.logProbs > 0 {
		q.probs = append(q.probs, probs)
	}
	q.state, q.last = q.state.Add(token), token
	if r.phase == contextOnly && q.finish == "" {
		q.finish = "not_finished" // the other engine goes on
	}
}

// draw returns a choice's next token and, if they are wanted, its log
// probabilities. Where another engine has drawn the token, it is that one.
func (r *request) draw(h State, index int, mayEnd bool) (int32, ipc.TokenLogProb) {
	if first := r.first; first != nil {
		r.first = nil
		if r.probs == nil {
			return *first, ipc.TokenLogProb{}
		}
		return *first, *r.probs
	}
	token := r.text.Next(h, index, mayEnd)
	if r.logProbs == 0 {
		return token, ipc.TokenLogProb{}
	}
	return token, r.probsOf(h, token)
}

// probsOf makes up log probabilities that depend on nothing but the sequence:
// the chosen token is the likeliest, its neighbours follow.
func (r *request) probsOf(h State, token int32) ipc.TokenLogProb {
	p := ipc.TokenLogProb{LogProb: madeUpLogProb(h)}
	for i := range r.logProbs {
		p.Top = append(p.Top, ipc.TopLogProb{
			TokenID: uint32((int(token) + i) % r.vocab), Rank: uint32(i + 1), LogProb: p.LogProb - float64(i),
		})
	}
	return p
}

// madeUpLogProb is -1/8 to -2 in steps of an eighth: exact in binary and in
// decimal.
func madeUpLogProb(h State) float64 { return -0.125 * float64(1+uint64(h)>>60) }

// promptLogProbs makes up the log probabilities of the prompt's own tokens.
func (r *request) promptLogProbs() json.RawMessage {
	k := r.params.Sampling.PromptLogProbs
	if k == nil {
		return nil
	}
	type entry struct {
		LogProb float64 `json:"logprob"`
		Rank    int     `json:"rank"`
	}
	positions := []map[string]entry{nil} // nothing comes before the first token
	h := NewState.Add(r.prompt[0])
	for _, t := range r.prompt[1:] {
		at := make(map[string]entry)
		for i := range max(1, int(*k)) {
			at[strconv.Itoa((int(t)+i)%r.vocab)] = entry{LogProb: madeUpLogProb(h) - float64(i), Rank: i + 1}
		}
		positions = append(positions, at)
		h = h.Add(t)
	}
	b, err := json.Marshal(positions)
	if err != nil {
		panic(err) // maps of numbers cannot fail to encode
	}
	return b
}

// done reports whether every choice has finished.
func (r *request) done() bool {
	return !slices.ContainsFunc(r.choices, func(q sequence) bool { return q.finish == "" })
}

// made is the number of tokens of each choice.
func (r *request) made() []int {
	n := make([]int, len(r.choices))
	for i := range r.choices {
		n[i] = r.choices[i].made
	}
	return n
}

// total is the number of tokens of all choices.
func (r *request) total() int64 {
	var n int64
	for i := range r.choices {
		n += int64(r.choices[i].made)
	}
	return n
}
