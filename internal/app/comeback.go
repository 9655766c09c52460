package app

import (
	"context"
	"errors"
	"fmt"

	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/engine/vitals"
)

// errMismatch means that an engine that was started again is not what the worker registered as. Trying again will not change that, and a new process reads everything anew.
var errMismatch = errors.New("the engine came back other than it was")

// leave implements service: new requests are refused, and frontends are told to send none. The model's card stays where it is, so that callers hear "unavailable" and not "no such model" from a frontend that knows no other worker.
func (w *worker) leave(f *vitals.Failure) {
	w.dispatcher.refuse("the engine failed")
	w.engineFailure.Store(f)
	w.health.Condition("engine").Fail(f.Error())
	if err := w.withdraw(); err != nil {
		w.log.Warn().Err(err).Msg("the record could not be withdrawn yet; it is removed as soon as etcd answers")
	}
}

// down implements service.
func (w *worker) down(reason string) {
	w.health.ClearProgress() // of a start that came to nothing
	w.health.Condition("engine").Fail(reason)
}

// approve implements service.
func (w *worker) approve(ctx context.Context, p engineProcess) error {
	if err := sameEngine(w.ready, p.Ready()); err != nil {
		return fmt.Errorf("%w: %w", errMismatch, err)
	}
	before, err := w.affinityGate(w.ready)
	if err != nil {
		return fmt.Errorf("%w: %w", errMismatch, err)
	}
	now, err := w.affinityGate(p.Ready())
	if err != nil {
		return fmt.Errorf("%w: %w", errMismatch, err)
	}
	if before.On() != now.On() || before.Origin() != now.Origin() || before.Source() != now.Source() || before.Ranks() != now.Ranks() {
		return fmt.Errorf("%w: conversation affinity was %v (%s, rank source %s) and is %v (%s, rank source %s)", errMismatch, before.On(), before.Origin(), before.Source(), now.On(), now.Origin(), now.Source())
	}
	return w.prove(ctx, p)
}

// prove sends the canary's request to an engine that nothing else uses yet, and reads the answer to its end.
func (w *worker) prove(ctx context.Context, p engineProcess) error {
	handler, err := w.newHandler(unwatched{p}, p.Ready())
	if err != nil {
		return fmt.Errorf("%w: %w", errMismatch, err)
	}
	w.engineDown("proving that it answers")
	k, err := w.newCanary(handler)
	if err != nil {
		return err
	}
	k.timeout = w.cfg.Engine.Restart.ProofTimeout
	if err := k.probe(ctx); err != nil {
		return vitals.Failed(vitals.Canary, fmt.Errorf("the first request to the new engine: %w", err))
	}
	return nil
}

// enter implements service: the same records go back under the same keys. Requests are taken before that, since the first may follow the record at once.
func (w *worker) enter(ctx context.Context) error {
	ready := w.lives.current.Load().Ready()
	w.engineFailure.Store(nil)
	w.cacheIsNew(ready)
	w.engineUp(ready)
	w.dispatcher.refuse("")
	if err := w.session.Register(ctx, w.records...); err != nil {
		return fmt.Errorf("register again: %w", err)
	}
	w.settled.Store(true)
	return nil
}

// cacheIsNew is told that an engine has begun with an empty KV cache: it may have another size, and nothing that was published about blocks holds any more. It is called before the records are back, which is when a publisher of KV events has
// to say that all blocks are cleared.
func (w *worker) cacheIsNew(r *ipc.Ready) {
	w.metrics.SetKVCapacity(r.AttentionDPSize, uint64(r.KV.TotalBlocks))
}

// sameEngine compares what a new life says of itself with what the card, the handler and the affinity policy were made from. The number of KV blocks may differ: engines measure it anew at each start, and the card's number is no promise.
func sameEngine(before, now *ipc.Ready) error {
	for _, c := range []struct {
		what        string
		before, now any
	}{
		{"engine", before.Engine, now.Engine}, {"version", before.Version, now.Version},
		{"vocabulary", before.Bounds.VocabSize, now.Bounds.VocabSize}, {"max_seq_len", before.Bounds.MaxSeqLen, now.Bounds.MaxSeqLen},
		{"max_num_tokens", before.Bounds.MaxNumTokens, now.Bounds.MaxNumTokens}, {"max_batch_size", before.Bounds.MaxBatchSize, now.Bounds.MaxBatchSize},
		{"max_beam_width", before.Bounds.MaxBeamWidth, now.Bounds.MaxBeamWidth}, {"attention_dp_size", before.AttentionDPSize, now.AttentionDPSize},
		{"KV block size", before.KV.BlockSize, now.KV.BlockSize}, {"capabilities", before.Capabilities, now.Capabilities},
		{"chunked prefill", resolvedBool(before, "enable_chunked_prefill"), resolvedBool(now, "enable_chunked_prefill")},
	} {
		if c.before != c.now {
			return fmt.Errorf("its %s was %v and is %v", c.what, c.before, c.now)
		}
	}
	return nil
}
