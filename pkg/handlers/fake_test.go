package handlers

import (
	"context"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"dynworker/pkg/affinity"
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/protocol"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
)

// scripted is an engine that answers every request with the same batches of outputs.
type scripted struct {
	batches [][]ipc.Output
	// after is what Next returns when the batches are used up; io.EOF if nil. hang makes it wait for the context instead.
	after error
	hang  bool
	// last is given out after Cancel, as an engine's final word.
	last []ipc.Output
	// offer makes it offer tokens to the function that takes them directly.
	offer bool
	calls []ipc.Generate
	// refuse is returned instead of a stream.
	refuse  error
	streams []*scriptedStream
}

func (e *scripted) Generate(_ context.Context, g *ipc.Generate, _ []int32) (Stream, error) {
	if e.refuse != nil {
		return nil, e.refuse
	}
	e.calls = append(e.calls, *g)
	s := &scriptedStream{engine: e, cancelled: make(chan struct{}), arrive: make(chan []ipc.Output)}
	e.streams = append(e.streams, s)
	return s, nil
}

type scriptedStream struct {
	engine    *scripted
	next      int
	cancels   int
	cancelled chan struct{}
	arrive    chan []ipc.Output // more output, while it hangs
	lastGiven bool
	direct    func(*ipc.Output) (taken, whole bool)
	over      bool // io.EOF was returned
}

func (s *scriptedStream) ID() uint64 { return 7 }

func (s *scriptedStream) SetDirect(take func(*ipc.Output) (taken, whole bool)) { s.direct = take }

// passed reports whether a batch was taken directly, and then whether that was all.
func (s *scriptedStream) passed(batch []ipc.Output) (taken, whole bool) {
	if !s.engine.offer || s.direct == nil || len(batch) != 1 || batch[0].Meta != nil || batch[0].Last {
		return false, false
	}
	return s.direct(&batch[0])
}

func (s *scriptedStream) Cancel() {
	// As with the engine's own stream, only the first one counts.
	if s.cancels == 0 {
		close(s.cancelled)
		s.cancels = 1
	}
}

// Close cancels what still runs, as the engine's own stream does.
func (s *scriptedStream) Close() {
	if !s.over {
		s.Cancel()
	}
}

func (s *scriptedStream) Next(ctx context.Context) ([]ipc.Output, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	for s.next < len(s.engine.batches) {
		batch := s.engine.batches[s.next]
		s.next++
		switch taken, whole := s.passed(batch); {
		case !taken:
			return batch, nil
		case !whole:
			return []ipc.Output{}, nil
		}
	}
	if s.engine.hang {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case outs := <-s.arrive:
			return outs, nil
		case <-s.cancelled:
			if s.engine.last != nil && !s.lastGiven {
				s.lastGiven = true
				return s.engine.last, nil
			}
			s.over = true
			return nil, io.EOF
		}
	}
	s.over = true
	if s.engine.after != nil {
		return nil, s.engine.after
	}
	return nil, io.EOF
}

// record is a sink that keeps what it got as decoded values.
type record struct {
	chunks  []protocol.Chunk
	flushes int
	fail    error
	onChunk func()
}

func (r *record) Send(c *protocol.Chunk) error {
	if r.fail != nil {
		return r.fail
	}
	kept := *c
	kept.TokenIDs = append([]uint32{}, c.TokenIDs...)
	kept.LogProbs = append([]float64(nil), c.LogProbs...)
	kept.TopLogProbs = nil
	for _, top := range c.TopLogProbs {
		kept.TopLogProbs = append(kept.TopLogProbs, append([]protocol.TopLogProb{}, top...))
	}
	r.chunks = append(r.chunks, kept)
	if r.onChunk != nil {
		r.onChunk()
	}
	return nil
}

func (r *record) Flush() error {
	r.flushes++
	return r.fail
}

// counts is an observer that remembers.
type counts struct {
	reasons        []affinity.Reason
	prompt, cached int
	generated      int
	overruns       int
	handed         int

	mu     sync.Mutex
	aborts []Outcome
}

func (c *counts) AffinityDecided(r affinity.Reason) { c.reasons = append(c.reasons, r) }
func (c *counts) PromptTokens(prompt, cached int)   { c.prompt, c.cached = prompt, cached }
func (c *counts) GeneratedTokens(n int)             { c.generated += n }
func (c *counts) EngineOverran()                    { c.overruns++ }
func (c *counts) HandedOver()                       { c.handed++ }

func (c *counts) AbortDeferred(how Outcome) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.aborts = append(c.aborts, how)
}

func (c *counts) outcomes() []Outcome {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]Outcome(nil), c.aborts...)
}

// bench is one handler with everything around it.
type bench struct {
	handler  *Handler
	engine   *scripted
	observer *counts
	log      *strings.Builder
	resolved int
}

func newBench(t testing.TB, kind Kind, change func(*Config, *scripted)) *bench {
	b := &bench{engine: &scripted{}, observer: &counts{}, log: &strings.Builder{}}
	cfg := Config{
		Kind: kind, Engine: b.engine, Observer: b.observer, Logger: zerolog.New(zerolog.SyncWriter(b.log)), CancelGrace: time.Minute,
		Bounds: ipc.Bounds{VocabSize: 1000, MaxSeqLen: 100, MaxNumTokens: 80, MaxBeamWidth: 2},
		Random: strings.NewReader(strings.Repeat("0123456789abcdef", 1000)),
	}
	cfg.ResolveGate = func() (*affinity.Gate, error) {
		b.resolved++
		return affinity.Resolve(affinity.Engine{ConfigReadable: true, ConversationParams: true, Ranks: 4}, affinity.Settings{})
	}
	if change != nil {
		change(&cfg, b.engine)
	}
	h, err := New(cfg)
	require.NoError(t, err)
	b.handler = h
	return b
}

// call makes a request out of a JSON body.
func call(t testing.TB, body string) *Call {
	r, err := protocol.ParseRequest(protocol.CodecJSON, []byte(body))
	require.NoError(t, err)
	return &Call{ID: "req-1", Request: r, Body: []byte(body), Codec: protocol.CodecJSON, Trace: map[string]string{}}
}

func meta(reason string) *ipc.Meta { return &ipc.Meta{FinishReason: reason} }

func ptr[T any](v T) *T { return &v }
