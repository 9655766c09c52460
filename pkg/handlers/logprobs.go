package handlers

import (
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/protocol"
)

// appendLogprobs adds the engine's log probabilities to the pending chunk, one entry per token.
func (c *choice) appendLogprobs(positions []ipc.TokenLogProb) {
	if len(positions) == 0 {
		return
	}
	if c.pending.LogProbs == nil {
		c.logProbs, c.topLogProbs = c.logProbs[:0], c.topLogProbs[:0]
	}
	for i := range positions {
		p := &positions[i]
		c.logProbs = append(c.logProbs, p.LogProb)
		if len(c.topLogProbs) == cap(c.topLogProbs) {
			c.topLogProbs = append(c.topLogProbs, nil)
		} else {
			// The slice that was here for an earlier chunk is used again.
			c.topLogProbs = c.topLogProbs[:len(c.topLogProbs)+1]
		}
		top := &c.topLogProbs[len(c.topLogProbs)-1]
		*top = (*top)[:0]
		for _, t := range p.Top {
			*top = append(*top, protocol.TopLogProb{Rank: t.Rank, TokenID: t.TokenID, LogProb: t.LogProb})
		}
	}
	c.pending.LogProbs, c.pending.TopLogProbs = c.logProbs, c.topLogProbs
}
