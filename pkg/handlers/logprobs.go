package handlers

import (
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/protocol"
)

// appendLogprobs adds the engine's log probabilities to a chunk, one entry per token.
func appendLogprobs(c *protocol.Chunk, positions []ipc.TokenLogProb) {
	for i := range positions {
		p := &positions[i]
		c.LogProbs = append(c.LogProbs, p.LogProb)
		top := make([]protocol.TopLogProb, len(p.Top))
		for j, t := range p.Top {
			top[j] = protocol.TopLogProb{Rank: t.Rank, TokenID: t.TokenID, LogProb: t.LogProb}
		}
		c.TopLogProbs = append(c.TopLogProbs, top)
	}
}
