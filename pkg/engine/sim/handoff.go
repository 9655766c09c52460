package sim

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/engine/sim/kvtransfer"
)

// phase is the part of a request that an engine does.
type phase uint8

const (
	wholeRequest   phase = iota
	contextOnly          // the prompt and the first token; another engine goes on
	generationOnly       // from another engine's KV
)

// disaggregated are TensorRT-LLM's DisaggregatedParams as far as a simulated
// engine reads and writes them, in their JSON form.
type disaggregated struct {
	RequestType      string             `json:"request_type"`
	FirstGenTokens   []int64            `json:"first_gen_tokens"`
	FirstGenLogProbs [][]firstGenChance `json:"first_gen_log_probs"`
	CtxRequestID     *uint64            `json:"ctx_request_id"`
	OpaqueState      []byte             `json:"opaque_state"`
	DisaggRequestID  *uint64            `json:"disagg_request_id"`
	CtxDPRank        *int               `json:"ctx_dp_rank"`
	CtxInfoEndpoint  string             `json:"ctx_info_endpoint,omitempty"`
	DraftTokens      []int64            `json:"draft_tokens"`
}

type firstGenChance struct {
	TokenID uint32  `json:"token_id"`
	LogProb float64 `json:"logprob"`
	Rank    uint32  `json:"rank"`
}

// handoff is what a request has to do with another engine.
type handoff struct {
	phase phase
	terms disaggregated

	// of generationOnly
	ticket    kvtransfer.Ticket
	first     *int32 // the first token, until it has been emitted
	probs     *ipc.TokenLogProb
	receiving context.CancelCauseFunc // ends the transfer; nil when there is none
}

// transferError is the refusal of a request whose KV cannot be had.
func transferError(format string, args ...any) *ipc.RequestError {
	return callError(ipc.ErrorRequest, "RequestError", "KV transfer: "+fmt.Sprintf(format, args...))
}

// parseHandoff reads the disaggregation parameters of a call.
func (e *engine) parseHandoff(m *ipc.Request) (handoff, *ipc.RequestError) {
	var h handoff
	if len(m.Params.Disaggregated) == 0 {
		return h, nil
	}
	if err := json.Unmarshal(m.Params.Disaggregated, &h.terms); err != nil {
		var wrong base64.CorruptInputError
		if errors.As(err, &wrong) {
			return h, callError(ipc.ErrorParams, "Error", "opaque_state is not base64: "+wrong.Error())
		}
		return h, callError(ipc.ErrorType, "TypeError", "disaggregated parameters: "+err.Error())
	}
	switch strings.ToLower(h.terms.RequestType) {
	case "context_and_generation":
		return h, nil
	case "context_only":
		h.phase = contextOnly
	case "generation_only":
		h.phase = generationOnly
	default:
		return h, callError(ipc.ErrorValue, "ValueError", fmt.Sprintf("request_type %q is none of context_only, generation_only, context_and_generation", h.terms.RequestType))
	}
	if intOr(m.Params.Sampling.N, 1) != 1 {
		return h, callError(ipc.ErrorValue, "ValueError", "n is not 1, but a request in two phases has one choice")
	}
	if h.phase == contextOnly {
		if n := e.blocksOf(len(m.Tokens)); n > e.args.TotalBlocks {
			return h, callError(ipc.ErrorRequest, "RequestError", fmt.Sprintf("the prompt fills %d blocks, a rank has %d", n, e.args.TotalBlocks))
		}
		if err := e.links.listen(e.args.KVTransferHost, time.Duration(e.args.KVTransferTimeout)); err != nil {
			return h, callError(ipc.ErrorRequest, "RequestError", err.Error())
		}
		return h, e.nameContext(&h, m.Params.Disaggregated)
	}
	return h, h.parseGeneration(int(intOr(m.Params.Sampling.LogProbs, 0)), e.args.VocabSize)
}

// parseGeneration checks what a request needs to go on from.
func (h *handoff) parseGeneration(logProbs, vocab int) *ipc.RequestError {
	p := &h.terms
	if p.CtxRequestID == nil && p.DisaggRequestID == nil {
		return callError(ipc.ErrorRequest, "RequestError", "ctx_request_id is missing")
	}
	var err error
	if h.ticket, err = kvtransfer.ParseTicket(p.OpaqueState); err != nil {
		return transferError("%v", err)
	}
	if id := h.contextID(0); id != h.ticket.Context {
		return transferError("the request is about context %d, its opaque state about context %d", id, h.ticket.Context)
	}
	if len(p.FirstGenTokens) != 1 || p.FirstGenTokens[0] < 0 || p.FirstGenTokens[0] >= int64(vocab) {
		return callError(ipc.ErrorRequest, "RequestError", "first_gen_tokens is not one token of the vocabulary")
	}
	first := int32(p.FirstGenTokens[0])
	h.first = &first
	if logProbs == 0 {
		return nil
	}
	if len(p.FirstGenLogProbs) != 1 {
		return callError(ipc.ErrorRequest, "RequestError", "first_gen_log_probs is not one position, but logprobs are asked for")
	}
	h.probs = &ipc.TokenLogProb{}
	for i, c := range p.FirstGenLogProbs[0] {
		if i == 0 || c.TokenID == uint32(first) {
			h.probs.LogProb = c.LogProb
		}
		h.probs.Top = append(h.probs.Top, ipc.TopLogProb{TokenID: c.TokenID, Rank: c.Rank, LogProb: c.LogProb})
	}
	h.probs.Top = h.probs.Top[:min(len(h.probs.Top), logProbs)]
	return nil
}

// contextID is the id of the prompt's KV on both sides: the one that both were
// given, else the prefill engine's own.
func (h *handoff) contextID(own uint64) uint64 {
	return *cmp.Or(h.terms.DisaggRequestID, h.terms.CtxRequestID, &own)
}

// held is the KV of a prompt that waits for the engine that goes on from it.
type held struct {
	context uint64
	nonce   string
	rank    int
	blocks  int
	bytes   []byte
	fault   misdeed
	until   time.Time
}

// holding is the KV that an engine holds for others, and what became of it. Only
// the loop touches it.
type holding struct {
	byContext map[uint64]*held
	requests  []int // by rank
	blocks    []int // by rank
	receiving int   // transfers that are under way to this engine
	dangling  int   // requests that were cancelled before they had taken their KV, ever
	asked     int   // transfers that were asked for, ever
	expired   int   // contexts that nobody took in time, ever
}

func newHolding(ranks int) holding {
	return holding{byContext: make(map[uint64]*held), requests: make([]int, ranks), blocks: make([]int, ranks)}
}

func (h *holding) add(k *held) {
	h.byContext[k.context] = k
	h.requests[k.rank]++
	h.blocks[k.rank] += k.blocks
}

func (h *holding) drop(k *held) {
	delete(h.byContext, k.context)
	h.requests[k.rank]--
	h.blocks[k.rank] -= k.blocks
}

// due is when the first context's time is over.
func (h *holding) due() (at time.Time, any bool) {
	for _, k := range h.byContext {
		if !any || k.until.Before(at) {
			at, any = k.until, true
		}
	}
	return at, any
}

// blocksOf is the number of blocks that a prompt fills, the last one in part.
func (e *engine) blocksOf(tokens int) int {
	return (tokens + e.args.BlockSize - 1) / e.args.BlockSize
}

// fits says whether a rank has room for the KV that a request leaves behind.
// Other requests share what there is; see the package comment.
func (e *engine) fits(r *request, rank int) bool {
	return r.phase != contextOnly || e.holding.blocks[rank]+e.blocksOf(len(r.prompt)) <= e.args.TotalBlocks
}

// prefilled ends a prefill whose first token has been drawn: unless that was
// its last one, the KV stays for the engine that goes on. false means that the
// request has failed and has been answered.
func (e *engine) prefilled(r *request, now time.Time) bool {
	if r.choices[0].finish == "stop" {
		return true
	}
	var err *ipc.RequestError
	if r.given, err = e.hold(r, now); err != nil {
		e.record(&ipc.Output{ID: r.id, Last: true, Meta: &ipc.Meta{Error: err}})
		e.finish(r, "error")
	}
	return err == nil
}

// hold keeps the KV of a prefilled prompt and returns what the other engine
// needs to come for it.
func (e *engine) hold(r *request, now time.Time) (json.RawMessage, *ipc.RequestError) {
	k := &held{
		context: r.contextID(r.id), nonce: newNonce(), rank: r.onRank, blocks: e.blocksOf(len(r.prompt)),
		fault: r.trigger.what, until: now.Add(time.Duration(e.args.KVTransferTimeout)),
	}
	if _, twice := e.holding.byContext[k.context]; twice {
		return nil, transferError("context %d is held already", k.context)
	}
	var blocks []kvtransfer.Block
	state := NewState
	for tokens := range slices.Chunk(r.prompt, e.args.BlockSize) {
		state = state.AddAll(tokens)
		blocks = append(blocks, kvtransfer.Block{Tokens: tokens, State: uint64(state)})
	}
	k.bytes = kvtransfer.AppendBlocks(nil, blocks)
	e.holding.add(k)
	q := &r.choices[0]
	p := disaggregated{
		RequestType: "context_only", CtxRequestID: &r.id, DisaggRequestID: r.terms.DisaggRequestID,
		OpaqueState: kvtransfer.Ticket{
			Address: e.links.address(), Context: k.context, Nonce: k.nonce,
			Blocks: k.blocks, Bytes: len(k.bytes), Checksum: kvtransfer.Checksum(k.bytes),
		}.Encode(),
		CtxDPRank: &r.onRank, CtxInfoEndpoint: "tcp://" + e.links.address(),
	}
	for _, t := range q.step {
		p.FirstGenTokens = append(p.FirstGenTokens, int64(t))
	}
	for _, at := range q.probs {
		var position []firstGenChance
		for _, c := range at.Top {
			position = append(position, firstGenChance{TokenID: c.TokenID, LogProb: c.LogProb, Rank: c.Rank})
		}
		p.FirstGenLogProbs = append(p.FirstGenLogProbs, position)
	}
	e.calls.add(now, call{Event: "held", ID: r.id, RequestID: r.params.RequestID, Context: k.context, Blocks: k.blocks, Rank: &k.rank})
	return rawJSON(p), nil
}

func newNonce() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails, says its documentation
	return hex.EncodeToString(b[:])
}

// Mail from transfers.
type (
	kvAsked struct{ ask *kvtransfer.Ask }
	kvTaken struct {
		context uint64
		nonce   string
	}
	kvReceived struct {
		id    uint64
		state State
		err   error // nil: acknowledged, and the state is that of the prompt
	}
)

// asked answers an engine that comes for a context.
func (e *engine) asked(a *kvtransfer.Ask) error {
	k := e.holding.byContext[a.Context]
	if k == nil || k.nonce != a.Nonce {
		a.Answer(kvtransfer.Reply{Err: fmt.Sprintf("context %d is not here", a.Context)})
		return nil
	}
	if k.fault == transferCrash {
		return ErrCrashed
	}
	fault := faults[k.fault]
	e.holding.asked++
	if every := e.args.KVTransferLoseEvery; every > 0 && e.holding.asked%every == 0 {
		fault = kvtransfer.Lost
	}
	a.Answer(kvtransfer.Reply{Bytes: k.bytes, Fault: fault})
	return nil
}

var faults = map[misdeed]kvtransfer.Fault{
	transferLost: kvtransfer.Lost, transferCorrupt: kvtransfer.Corrupt,
	transferMismatch: kvtransfer.Mismatch, transferStall: kvtransfer.Silent,
}

// taken frees the blocks of a context that its receiver has acknowledged.
func (e *engine) taken(m kvTaken) {
	if k := e.holding.byContext[m.context]; k != nil && k.nonce == m.nonce {
		e.release(k, "taken")
	}
}

func (e *engine) release(k *held, why string) {
	e.holding.drop(k)
	e.room, e.stats.changed = true, true
	e.calls.add(e.clock.Now(), call{Event: "released", Context: k.context, Blocks: k.blocks, Rank: &k.rank, Reason: why})
}

// expire frees the blocks that nobody came for.
func (e *engine) expire(now time.Time) {
	for _, k := range e.holding.byContext {
		if !k.until.After(now) {
			e.holding.expired++
			e.release(k, "expired")
		}
	}
}

// fetch starts the transfer of a request's KV. Until it is here the request
// holds its slot and gets no token.
func (e *engine) fetch(r *request) {
	r.stalled = true
	e.holding.receiving++
	ctx, cancel := context.WithCancelCause(e.links.ctx)
	r.receiving = cancel
	id, prompt, ticket, crash := r.id, r.prompt, r.ticket, r.trigger.what == receiveCrash
	patience, delay := time.Duration(e.args.KVTransferTimeout), time.Duration(e.args.KVTransferDelay)
	e.links.running.Go(func() {
		defer cancel(nil)
		ctx, stop := context.WithTimeoutCause(ctx, patience, fmt.Errorf("not complete within %v", patience))
		defer stop()
		got := kvReceived{id: id}
		got.err = kvtransfer.Fetch(ctx, ticket, func(ctx context.Context) error {
			if crash {
				e.mail.put(ErrCrashed)
				<-ctx.Done() // which the end of the engine brings
			}
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(delay):
				return nil
			}
		}, func(b []byte) (err error) {
			got.state, err = checkPrompt(b, prompt)
			return err
		})
		e.mail.put(got)
	})
}

// checkPrompt makes sure that a cache is that of a prompt, and returns the
// state in it. It does not compute the state: that is what the transfer is for.
func checkPrompt(content []byte, prompt []int32) (State, error) {
	blocks, err := kvtransfer.ParseBlocks(content)
	if err != nil {
		return 0, err
	}
	var state State
	for _, b := range blocks {
		if len(b.Tokens) > len(prompt) || !slices.Equal(b.Tokens, prompt[:len(b.Tokens)]) {
			return 0, errors.New("the KV is that of another prompt")
		}
		prompt, state = prompt[len(b.Tokens):], State(b.State)
	}
	if len(blocks) == 0 || len(prompt) > 0 {
		return 0, errors.New("the KV is that of a shorter prompt")
	}
	return state, nil
}

// received lets a request go on from its KV, or ends it.
func (e *engine) received(m kvReceived) {
	e.holding.receiving--
	e.stats.changed = true
	r, known := e.requests[m.id]
	c := call{Event: "received", ID: m.id, Context: 0}
	if known {
		r.receiving = nil
		c.RequestID, c.Context, c.Blocks = r.params.RequestID, r.ticket.Context, r.ticket.Blocks
	}
	switch {
	case !known && m.err != nil:
		e.holding.dangling++
		c.Reason = "cancelled"
	case !known:
		c.Reason = "too late"
	case m.err != nil:
		c.Reason = "error: " + m.err.Error()
		e.record(&ipc.Output{ID: r.id, Last: true, Meta: &ipc.Meta{
			Error: transferError("context %d from %s: %v", r.ticket.Context, r.ticket.Address, m.err),
		}})
		e.finish(r, "error")
	default:
		r.resume(m.state, e.caches[r.onRank])
	}
	e.calls.add(e.clock.Now(), c)
}

// resume makes the state of another engine's prompt this request's own.
func (r *request) resume(state State, c *cache) {
	written := newChain(c, r.root, r.salt)
	for _, t := range r.prompt {
		written.write(t)
	}
	r.choices[0] = sequence{state: state, chain: written, last: noToken}
	r.stalled = false
}

// leave gives up a request's KV when it is cancelled. The other engine is not
// told, and keeps its blocks until their time is over.
func (e *engine) leave(r *request) {
	switch {
	case r.phase != generationOnly || r.first == nil:
	case r.receiving != nil:
		r.receiving(errors.New("the request was cancelled"))
	case r.onRank == noRank:
		e.holding.dangling++
	}
}

// links are an engine's connections with other engines. It is the Owner of its
// sender: what comes in goes into the loop's mail.
type links struct {
	mail    *mailbox
	ctx     context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup // transfers to this engine
	sender  *kvtransfer.Sender
}

func newLinks(mail *mailbox) *links {
	l := &links{mail: mail}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	return l
}

// listen opens the sender, unless it is open.
func (l *links) listen(host string, patience time.Duration) (err error) {
	if l.sender == nil {
		l.sender, err = kvtransfer.Listen(host, patience, l)
	}
	return err
}

func (l *links) address() string { return l.sender.Address() }

func (l *links) Asked(a *kvtransfer.Ask) { l.mail.put(kvAsked{a}) }

func (l *links) Taken(id uint64, nonce string) { l.mail.put(kvTaken{id, nonce}) }

// close ends all transfers and waits for them.
func (l *links) close() {
	l.cancel()
	l.sender.Close()
	l.running.Wait()
}
