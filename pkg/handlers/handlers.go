// Package handlers turns one decoded request into calls on the engine and the engine's outputs into the chunks that the frontend reads.
//
// There are two handlers on one affinity gate. Unified is the default: it resolves the gate when it is made and checks everything that the engine would stumble over. Legacy behaves as the worker of Dynamo 1.6.1 does, resolves the
// gate at its first request, and departs from the recordings only where that worker harms the engine, another request or itself, or breaks the frontend's stream rules. docs/handlers.md lists every difference; in code they are the
// fields of one rules value.
//
// The package knows neither NATS nor TCP nor processes: it asks an Engine for a Stream and writes to a Sink, both declared here. A Handler is safe for concurrent use; one call of Generate uses its Sink from one goroutine.
package handlers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"dynworker/pkg/affinity"
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/protocol"

	"github.com/rs/zerolog"
)

// Kind names a handler in configuration.
type Kind string

// The handlers there are.
const (
	Unified Kind = "unified"
	Legacy  Kind = "legacy"
)

// Engine is what a handler needs of the engine process.
type Engine interface {
	// Generate hands a request over. tokens is the prompt; it may be kept until the call returns, no longer. An error means that the engine is not there (any more).
	Generate(ctx context.Context, g *ipc.Generate, tokens []int32) (Stream, error)
}

// Stream is the engine's side of one request.
type Stream interface {
	// ID is the number under which the engine knows the request.
	ID() uint64
	// Next waits for output and returns everything that is ready, in the engine's order; that can be nothing, see SetDirect. The outputs are valid until the next call. It returns io.EOF after the terminal output, the
	// context's error, or an error that says that the engine died.
	Next(ctx context.Context) ([]ipc.Output, error)
	// SetDirect lets a function take outputs that are nothing but tokens while Next waits, on another goroutine, for which it must not block. What it does not take, Next returns. After one that it has taken but could not deal with as a
	// whole, Next returns no output.
	SetDirect(take func(o *ipc.Output) (taken, whole bool))
	// Cancel asks the engine to stop the request. It does not wait and may be called more than once and after the end.
	Cancel()
	// Close gives the stream up, cancelling the request if it still runs, and drops what may still come. It does not wait.
	Close()
}

// Sink is the way back to the frontend. Chunks may be buffered until Flush, but encoded: what a chunk points to is used again after Send. An error means that nobody listens any more.
type Sink interface {
	Send(c *protocol.Chunk) error
	Flush() error
}

// DirectSink is a Sink that can be written to without waiting. Tokens then take a shorter way.
type DirectSink interface {
	Sink
	// Idle tells whether nothing waits for a Flush, so that FlushNow has a chance.
	Idle() bool
	// FlushNow is a Flush that does not wait. It reports whether everything went out; if not, Flush has the rest.
	FlushNow() bool
}

// Observer counts. Its methods are called on the token path and must be cheap.
type Observer interface {
	// AffinityDecided is called once for each request that passed validation.
	AffinityDecided(reason affinity.Reason)
	// PromptTokens is called when the engine said how much of a prompt of the given length it had cached.
	PromptTokens(prompt, cached int)
	// GeneratedTokens is called with the number of tokens of each chunk.
	GeneratedTokens(n int)
	// EngineOverran is called when an engine sent more tokens than were asked for.
	EngineOverran()
	// HandedOver is called when a prefill went out for a decode worker to go on from.
	HandedOver()
	// AbortDeferred is called when an abort that waited for a KV transfer has ended.
	AbortDeferred(how Outcome)
}

// Call is one request as a handler gets it.
type Call struct {
	// ID is the frontend's request id.
	ID string
	// Request is the decoded body.
	Request *protocol.Request
	// Body and Codec are the body as it came. Guides are read from it once more, since their key order counts and a decoded map has none.
	Body  []byte
	Codec protocol.Codec
	// Trace holds the trace headers that came with the request; nil for a canary, which sends none.
	Trace map[string]string
	// Submitted, if set, is called when the request is about to go to the engine.
	Submitted func(*ipc.Generate)
	// Canary marks the worker's own health check: it counts no business metrics and is logged at debug level.
	Canary bool
}

// Adapter is a LoRA adapter that requests can name.
type Adapter struct {
	Name, Path string
	// ID is unique among the adapters and at least 1.
	ID int64
}

// Config makes a handler.
type Config struct {
	Kind Kind
	// Role is the worker's part; empty is Aggregated.
	Role   Role
	Engine Engine
	// Machine gives the slot out of which global request ids of prefills are made, -1 while there is none. nil means none.
	Machine func() int
	// DeferLimit is how many aborts may wait for KV transfers, DeferTime how long each may.
	DeferLimit int
	DeferTime  time.Duration
	// ResolveGate makes the affinity gate. Unified calls it once in New, Legacy once at its first request.
	ResolveGate func() (*affinity.Gate, error)
	// Bounds are the engine's limits as it reported them; one that was not reported is not checked.
	Bounds ipc.Bounds
	// ChunkedPrefill says that prompts longer than Bounds.MaxNumTokens are fine.
	ChunkedPrefill bool
	// GuidedDecoding says whether the engine has a guided decoding backend; nil when it did not say.
	GuidedDecoding *bool
	Adapters       []Adapter
	// MergeTokens puts several tokens of a choice into one chunk when they are ready together.
	MergeTokens bool
	// LogConversationIDs writes conversation ids to the log as they are instead of hashed.
	LogConversationIDs bool
	Observer           Observer
	Logger             zerolog.Logger
	// Random makes ids for requests that came without a trace; crypto/rand in a real worker.
	Random io.Reader
	// CancelGrace bounds how long a legacy handler waits, at shutdown, for the engine's last word on a request that it cancelled.
	CancelGrace time.Duration
}

// ErrClientGone means that nobody reads the answer: the frontend stopped or killed the stream, or the connection broke. Nothing more may be written.
var ErrClientGone = errors.New("the caller is gone")

// ErrShutdown is the cause with which a worker that ends cancels what is still running.
var ErrShutdown = errors.New("the worker shuts down")

// Handler serves requests.
type Handler struct {
	cfg      Config
	rules    rules
	gate     *lazyGate
	adapters map[string]Adapter
	deferred *deferred
}

// New makes a handler. A unified handler resolves its gate here and fails when that fails.
func New(cfg Config) (*Handler, error) {
	h := &Handler{cfg: cfg, gate: &lazyGate{resolve: cfg.ResolveGate}, adapters: map[string]Adapter{}}
	for _, a := range cfg.Adapters {
		h.adapters[a.Name] = a
	}
	h.deferred = newDeferred(cfg.DeferLimit, cfg.DeferTime, func(how Outcome) { cfg.Observer.AbortDeferred(how) }, func(id uint64, text string) {
		cfg.Logger.Warn().Uint64("engine_request_id", id).Msg(text)
	})
	switch cfg.Kind {
	case Unified:
		h.rules = unifiedRules
		if _, err := h.gate.get(); err != nil {
			return nil, err
		}
	case Legacy:
		h.rules = legacyRules
	default:
		return nil, fmt.Errorf("handler %q is neither %q nor %q", cfg.Kind, Unified, Legacy)
	}
	return h, nil
}

// Generate serves one call to its end. It returns nil when the answer is complete, ErrClientGone (wrapped) when nobody reads it, and a *protocol.Error that must be sent as the last item otherwise.
func (h *Handler) Generate(ctx context.Context, call *Call, out Sink) error {
	p, err := h.plan(call)
	if err != nil {
		return err
	}
	if !call.Canary {
		h.cfg.Observer.AffinityDecided(p.decision.Reason)
	}
	if p.budget == 0 {
		h.logAccepted(call, p, 0)
		return h.answerNothing(ctx, p, call, out)
	}
	if call.Submitted != nil {
		call.Submitted(&p.generate)
	}
	stream, err := h.cfg.Engine.Generate(ctx, &p.generate, call.Request.TokenIDs)
	if err != nil {
		return engineGone(err)
	}
	h.logAccepted(call, p, stream.ID())
	r := relay{handler: h, plan: p, call: call, stream: stream, out: out, choices: make([]choice, p.choices)}
	return r.run(ctx)
}

// logAccepted writes the one line that joins the ids under which a request is known and says where it was sent and why.
func (h *Handler) logAccepted(call *Call, p *plan, engineID uint64) {
	level := zerolog.InfoLevel
	switch {
	case call.Canary:
		level = zerolog.DebugLevel
	case p.decision.Reason == affinity.ReasonRankOutOfRange:
		level = zerolog.WarnLevel
	}
	line := h.cfg.Logger.WithLevel(level).Str("request_id", call.ID).Uint64("engine_request_id", engineID).Int("prompt_tokens", p.promptTokens).Str("affinity", string(p.decision.Reason))
	if p.decision.ForceRank {
		line = line.Int("attention_dp_rank", p.decision.Rank)
	}
	if id := p.decision.ConversationID; id != "" {
		if !h.cfg.LogConversationIDs {
			id = hashConversation(id)
		}
		line = line.Str("conversation", id)
	}
	if p.decision.Reason == affinity.ReasonRankOutOfRange {
		line = line.Interface("ignored_dp_rank", p.askedRank)
	}
	line.Msg("request accepted")
}

// engineGone tells that a request has lost its engine, which makes the frontend continue it elsewhere. An engine that has its own answer for the caller gives it as a *protocol.Error.
func engineGone(err error) error {
	var answer *protocol.Error
	if errors.As(err, &answer) {
		return answer
	}
	return protocol.EngineShutdown("generation was cut short: " + err.Error())
}
