package handlers

import (
	"context"
	"encoding/json"
	"os"
	"testing"

	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/protocol"

	"github.com/stretchr/testify/require"
)

// wireSink is a sink that keeps the JSON text of every item.
type wireSink struct{ items []json.RawMessage }

func (s *wireSink) Send(c *protocol.Chunk) error {
	s.items = append(s.items, protocol.AppendChunk(nil, protocol.CodecJSON, c))
	return nil
}
func (s *wireSink) Flush() error { return nil }

// TestTheSameEngineOutputGivesTheRecordedItems plays the engine output that a recording's frames stand for to both handlers, step by step, and compares what they write with what the real worker wrote.
func TestTheSameEngineOutputGivesTheRecordedItems(t *testing.T) {
	for _, name := range []string{"plain", "n2", "logprobs_5"} {
		raw, err := os.ReadFile("testdata/" + name + ".json")
		require.NoError(t, err)
		var recorded struct {
			Request json.RawMessage `json:"request"`
			Frames  []struct {
				Kind string          `json:"kind"`
				Body json.RawMessage `json:"body"`
			} `json:"frames"`
		}
		require.NoError(t, json.Unmarshal(raw, &recorded))
		var want []json.RawMessage
		var batches [][]ipc.Output
		for _, f := range recorded.Frames {
			if f.Kind != "data" {
				continue
			}
			item, err := protocol.ParseItem(protocol.CodecJSON, f.Body)
			require.NoError(t, err)
			if item.Final {
				continue
			}
			want = append(want, f.Body)
			batches = append(batches, []ipc.Output{output(item.Chunk)})
		}
		require.NotEmpty(t, want)
		batches[len(batches)-1][0].Last = true
		for _, kind := range []Kind{Unified, Legacy} {
			b := newBench(t, kind, func(c *Config, e *scripted) { c.Bounds, e.batches = ipc.Bounds{}, batches })
			request, err := protocol.ParseRequest(protocol.CodecJSON, recorded.Request)
			require.NoError(t, err)
			out := &wireSink{}
			require.NoError(t, b.handler.Generate(context.Background(), &Call{ID: "r", Request: request, Body: recorded.Request, Codec: protocol.CodecJSON}, out))
			require.Len(t, out.items, len(want), "%s: %s", name, kind)
			for i := range want {
				require.JSONEq(t, string(want[i]), string(out.items[i]), "%s: %s: item %d", name, kind, i)
			}
		}
	}
}

// output is what an engine sends for a chunk. Its finish says how many tokens all choices have, as engines with several choices do.
func output(c *protocol.Chunk) ipc.Output {
	o := ipc.Output{Index: uint16(c.Index), Tokens: c.TokenIDs}
	for i, p := range c.LogProbs {
		position := ipc.TokenLogProb{LogProb: p}
		for _, top := range c.TopLogProbs[i] {
			position.Top = append(position.Top, ipc.TopLogProb{TokenID: top.TokenID, Rank: top.Rank, LogProb: top.LogProb})
		}
		o.LogProbs = append(o.LogProbs, position)
	}
	if c.Finish == protocol.FinishLength {
		o.Meta = &ipc.Meta{FinishReason: "length", CachedTokens: ptr(int64(c.Usage.CachedTokens)), CompletionTokens: ptr(int64(c.Usage.CompletionTokens))}
	}
	return o
}
