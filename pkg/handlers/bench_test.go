package handlers

import (
	"context"
	"io"
	"testing"

	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/protocol"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
)

// void is a sink that encodes what it gets and can be written to at any time.
type void struct{ buf []byte }

func (v *void) Send(c *protocol.Chunk) error {
	v.buf = protocol.AppendChunk(v.buf[:0], protocol.CodecMsgpack, c)
	return nil
}
func (v *void) Flush() error   { return nil }
func (v *void) Idle() bool     { return true }
func (v *void) FlushNow() bool { return true }

// BenchmarkPlan turns a decoded request into the engine's arguments.
func BenchmarkPlan(b *testing.B) {
	handler := newBench(b, Unified, func(cfg *Config, _ *scripted) { cfg.Random = endless{} }).handler
	for name, body := range map[string]string{
		"plain": base,
		"full":  `{"token_ids":[5,6,7],"stop_conditions":{"max_tokens":4,"stop_token_ids_hidden":[2]},"sampling_options":{"temperature":0.7,"top_p":0.9,"top_k":40,"seed":7,"n":2},"output_options":{"logprobs":2},"eos_token_ids":[2],"routing":{"priority":1}}`,
	} {
		c := call(b, body)
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := handler.plan(c); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkRelay takes one token of the engine to the sink's buffer: on the engine's goroutine, and on the request's own.
func BenchmarkRelay(b *testing.B) {
	output := token(0, 42)
	for _, way := range []string{"direct", "queued"} {
		b.Run(way, func(b *testing.B) {
			r, sink := relaying(b)
			outputs := []ipc.Output{output}
			require.NoError(b, r.relay(outputs))
			b.ReportAllocs()
			for b.Loop() {
				if way == "direct" {
					if taken, whole := r.direct(sink, &outputs[0]); !taken || !whole {
						b.Fatal("not taken")
					}
				} else if err := r.relay(outputs); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func relaying(tb testing.TB) (*relay, *void) {
	handler := newBench(tb, Unified, nil).handler
	c := call(tb, base)
	p, err := handler.plan(c)
	require.NoError(tb, err)
	p.budget = unbounded
	sink := &void{}
	return &relay{handler: handler, plan: p, call: c, stream: &scriptedStream{}, out: sink, choices: make([]choice, 1), cached: -1}, sink
}

// A token costs no allocation in the handler, whichever way it goes; nor do its log probabilities.
func TestTokensDoNotAllocate(t *testing.T) {
	r, sink := relaying(t)
	plain := []ipc.Output{token(0, 42)}
	probs := []ipc.Output{{Tokens: []uint32{42}, LogProbs: []ipc.TokenLogProb{{LogProb: -0.5, Top: []ipc.TopLogProb{{TokenID: 42, Rank: 1, LogProb: -0.5}, {TokenID: 7, Rank: 2, LogProb: -1}}}}}}
	queued := func(outputs []ipc.Output) func() {
		return func() { require.NoError(t, r.relay(outputs)) }
	}
	direct := func() {
		taken, whole := r.direct(sink, &plain[0])
		if !taken || !whole {
			t.Fatal("not taken")
		}
	}
	for name, step := range map[string]func(){"queued": queued(plain), "direct": direct, "log probabilities": queued(probs)} {
		queued(plain)()
		require.Zero(t, testing.AllocsPerRun(200, step), name)
	}
}

// BenchmarkRequest is a whole request of one token between a decoded body and the sink's buffer.
func BenchmarkRequest(b *testing.B) {
	engine := &scripted{}
	bench := newBench(b, Unified, func(cfg *Config, _ *scripted) {
		cfg.Engine, cfg.Logger, cfg.Random = engine, zerolog.Nop(), endless{}
	})
	engine.batches = [][]ipc.Output{{last(token(0, 42), meta("length"))}}
	c, sink, ctx := call(b, base), &void{}, context.Background()
	b.ReportAllocs()
	for b.Loop() {
		engine.calls, engine.streams = engine.calls[:0], engine.streams[:0]
		if err := bench.handler.Generate(ctx, c, sink); err != nil {
			b.Fatal(err)
		}
	}
}

// endless is a source of random bytes that has no end.
type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

var _ io.Reader = endless{}
