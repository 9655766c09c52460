package sim

import (
	"encoding/json"
	"time"

	"dynworker/pkg/engine/ipc"
)

// statsState remembers what the worker has been told.
type statsState struct {
	changed bool
	last    time.Time
}

// statsRow is the part of TensorRT-LLM's iteration statistics that this engine
// has something to say about, one row a rank, under the same names.
type statsRow struct {
	Iter      uint64  `json:"iter"`
	Rank      int     `json:"attentionDpRank"`
	Active    int     `json:"numActiveRequests"`
	Queued    int     `json:"numQueuedRequests"` // on rank 0 only: the queue is the engine's, not a rank's
	MaxActive int     `json:"maxNumActiveRequests"`
	KV        kvStats `json:"kvCacheStats"`
	Handoff   *heldKV `json:"handoff,omitempty"` // not TensorRT-LLM's: KV held for other engines
}

type kvStats struct {
	Max            int     `json:"maxNumBlocks"`
	Free           int     `json:"freeNumBlocks"`
	Used           int     `json:"usedNumBlocks"`
	TokensPerBlock int     `json:"tokensPerBlock"`
	Reused         int     `json:"reusedBlocks"`
	Missed         int     `json:"missedBlocks"`
	HitRate        float64 `json:"cacheHitRate"`
}

// heldKV is what a rank or an engine holds for other engines.
type heldKV struct {
	Requests int `json:"requests"`
	Blocks   int `json:"blocks"`
}

func (e *engine) statsRows() []statsRow {
	rows := make([]statsRow, len(e.caches))
	for rank, c := range e.caches {
		rows[rank] = statsRow{
			Iter: e.steps, Rank: rank, Active: e.load.active[rank] + e.holding.requests[rank], MaxActive: e.args.MaxBatchSize,
			KV: kvStats{
				Max: c.limit, Free: c.limit - len(c.blocks), Used: len(c.blocks), TokensPerBlock: c.blockSize,
				Reused: c.reused, Missed: c.missed,
			},
		}
		if e.links.sender != nil {
			rows[rank].Handoff = &heldKV{Requests: e.holding.requests[rank], Blocks: e.holding.blocks[rank]}
		}
		if looked := c.reused + c.missed; looked > 0 {
			rows[rank].KV.HitRate = float64(c.reused) / float64(looked)
		}
	}
	rows[0].Queued = len(e.waiting)
	return rows
}

// reportDue is when the next stats message may be sent, if there is news.
func (e *engine) reportDue() (at time.Time, pending bool) {
	return e.stats.last.Add(time.Duration(e.args.StatsInterval)), e.stats.changed
}

// report sends load figures that have changed, not too often, and KV events.
func (e *engine) report(now time.Time, first bool) error {
	if at, pending := e.reportDue(); first || (pending && !at.After(now)) {
		e.stats = statsState{last: now}
		if err := e.sendJSON(ipc.KindStats, e.statsRows()); err != nil {
			return err
		}
	}
	var events []any
	for _, c := range e.caches {
		events = append(events, c.events.take()...)
	}
	if len(events) == 0 {
		return nil
	}
	return e.sendJSON(ipc.KindEvents, events)
}

func (e *engine) sendJSON(k ipc.Kind, v any) error {
	frame, err := ipc.AppendJSON(nil, k, v)
	if err == nil {
		_, err = e.out.Write(frame)
	}
	return workerGone(err)
}

// answer replies to a query.
func (e *engine) answer(q ipc.Query) error {
	reply := map[string]any{"seq": q.Seq, "ok": true}
	switch q.What {
	case ipc.QueryStats:
		reply["stats"] = e.statsRows()
	case ipc.QueryHealth:
		reply["healthy"] = !e.unhealthy
		if e.unhealthy {
			reply["detail"] = "a request asked for it"
		}
	case ipc.QueryHeldKV:
		h := &e.holding
		reply["requests"], reply["blocks"] = sum(h.requests), sum(h.blocks)
		reply["receiving"], reply["dangling"], reply["expired"] = h.receiving, h.dangling, h.expired
	case ipc.QueryDescendants:
		reply["descendants"] = []any{} // it has none
	default:
		reply["ok"], reply["error"] = false, "unknown query"
	}
	if err := e.flush(); err != nil {
		return err
	}
	return e.sendJSON(ipc.KindAnswer, reply)
}

func sum(numbers []int) (total int) {
	for _, n := range numbers {
		total += n
	}
	return total
}

// rawJSON is v as JSON; v has come as JSON, so it cannot fail.
func rawJSON(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}
