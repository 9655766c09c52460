package engine

import (
	"context"
	"io"
	"sync"

	"dynworker/pkg/engine/ipc"
)

// Stream is the output of one request. Next belongs to one goroutine; Cancel
// and Close may be called from any. Every stream must be read to its end or
// closed.
type Stream struct {
	id    uint64
	owner *Process
	limit int           // bytes of pending output
	width uint16        // number of choices
	keep  bool          // records are not merged
	ready chan struct{} // holds a token when pending or err went from nothing to something

	mu sync.Mutex
	// parked means that Next waits, so that whatever its caller owns is at rest
	// and may be used by direct for as long as mu is held.
	parked  bool
	direct  Direct
	unsent  bool       // Next has to return although nothing is pending
	passing ipc.Output // what direct is given; its memory is reused

	pending  batch
	size     int   // bytes in pending
	ended    bool  // the LAST record has arrived
	err      error // ends the stream once pending is read
	closed   bool
	canceled bool

	reading batch // what the last Next handed out; belongs to the reader
	done    bool  // LAST has been handed out
}

// recordCost is what a pending record costs besides its tokens, roughly.
const recordCost = 128

// batch is a list of outputs whose memory is reused: two of them change places
// each time the stream is read.
type batch struct {
	outs  []ipc.Output
	metas [][]byte // raw meta of the output at the same place; decoded by the reader
}

// Direct takes one output on the goroutine that reads the engine's channel,
// while the stream's own reader waits in Next. It saves a change of goroutines
// for each token. It must not block and must not call the stream. The output is
// valid during the call only.
//
// An output that is not taken is left to Next, as if nothing had happened. One
// that is taken but not dealt with as a whole makes Next return with no
// output, so that its caller can do what could not be done without waiting.
type Direct = func(o *ipc.Output) (taken, whole bool)

// SetDirect offers plain outputs (tokens, and log probabilities if there are
// any; no meta, not the last one) of a request with a single choice to take
// before they are left to Next. It is for the goroutine that calls Next.
func (s *Stream) SetDirect(take Direct) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.width == 1 {
		s.direct = take
	}
}

// ID is the request's id on the engine's channel.
func (s *Stream) ID() uint64 { return s.id }

// Next waits for output and returns all there is. Records of one choice that
// have arrived meanwhile are merged into one Output; a record with LAST stays
// the last of the batch. The slice and everything in it is valid until the
// next call.
//
// The error is io.EOF after the output with LAST was returned. It wraps
// ErrEngineDead when the engine died, is ErrOverflow when the stream was given
// up, ErrClosed after Close, and the context's cause when ctx ended first; in
// the last case the stream goes on and Next may be called again.
func (s *Stream) Next(ctx context.Context) ([]ipc.Output, error) {
	if s.done {
		return nil, io.EOF
	}
	for {
		if ctx.Err() != nil {
			s.unpark()
			return nil, context.Cause(ctx)
		}
		outs, err := s.take()
		if outs != nil || err != nil {
			return outs, err
		}
		select {
		case <-s.ready:
		case <-ctx.Done():
		}
	}
}

// nothing is what Next returns after a direct that took something in part.
var nothing = []ipc.Output{}

// take returns what is pending, or the error that ends the stream, or neither;
// then the reader counts as waiting.
func (s *Stream) take() ([]ipc.Output, error) {
	s.mu.Lock()
	s.parked = false
	if s.unsent {
		s.unsent = false
		s.mu.Unlock()
		return nothing, nil
	}
	if len(s.pending.outs) == 0 {
		defer s.mu.Unlock()
		s.parked = s.err == nil
		return nil, s.err
	}
	s.reading.reset()
	s.pending, s.reading = s.reading, s.pending
	s.size = 0
	s.mu.Unlock()
	if err := s.reading.decodeMetas(); err != nil {
		s.mu.Lock()
		_ = s.giveUp(err)
		ended := s.ended
		s.mu.Unlock()
		s.owner.streamBroken(s.id, err, !ended)
		return nil, err
	}
	outs := s.reading.outs
	s.done = outs[len(outs)-1].Last
	return outs, nil
}

// unpark takes back what take granted; when it returns no direct is running.
func (s *Stream) unpark() {
	s.mu.Lock()
	s.parked = false
	s.mu.Unlock()
}

// Cancel asks the engine to end the request early. The stream still ends as
// usual, with an output that has LAST. Calling it again, or after the end, does
// nothing.
func (s *Stream) Cancel() {
	s.mu.Lock()
	send := !s.canceled && !s.ended && s.err == nil
	s.canceled = true
	s.mu.Unlock()
	if send {
		s.owner.cancel(s.id)
	}
}

// Close gives the stream up: the request is cancelled if it still runs, and
// what the engine may yet send for it is thrown away. It does not wait.
func (s *Stream) Close() {
	s.Cancel()
	s.fail(ErrClosed)
}

// Fail ends the stream with err and without a word to the engine, for one that
// has failed as a whole. Output that has arrived is still handed out.
func (s *Stream) Fail(err error) { s.fail(err) }

// fail ends the stream with err, unless it has ended already. Output that is
// pending is still delivered, except after Close and on an overflow.
func (s *Stream) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == ErrClosed && !s.closed {
		s.closed = true
		s.pending, s.size = batch{}, 0
	}
	if s.err == nil && (!s.ended || s.closed) {
		s.err = err
		s.signal()
	}
}

// abandoned reports whether the stream was closed.
func (s *Stream) abandoned() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// signal wakes the reader; s.mu is held.
func (s *Stream) signal() {
	select {
	case s.ready <- struct{}{}:
	default:
	}
}

// push adds a record, or lets the direct have it if that is allowed. It never
// waits, and allocates only to grow the pending batch. On an error the stream
// has been ended with it.
func (s *Stream) push(rec *ipc.Record, direct bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = s.ended || rec.Last
	if s.err != nil {
		return nil // closed or failed: what comes now is of no interest
	}
	if rec.Index >= s.width {
		return s.giveUp(&ProtocolError{Reason: "output for a choice that was not asked for"})
	}
	if direct && s.parked && s.direct != nil && len(s.pending.outs) == 0 && !s.unsent && !rec.Last && !rec.HasMeta() && s.handOver(rec) {
		return nil
	}
	slot := -1
	if !s.keep {
		slot = s.pending.find(rec)
	}
	cost := rec.Size()
	if slot < 0 {
		cost += recordCost
	}
	if s.size+cost > s.limit {
		return s.giveUp(ErrOverflow)
	}
	s.size += cost
	if len(s.pending.outs) == 0 {
		s.signal()
	}
	s.pending.add(slot, rec)
	return nil
}

// handOver offers a record to the direct and reports whether it was taken; s.mu
// is held.
func (s *Stream) handOver(rec *ipc.Record) bool {
	o := &s.passing
	*o = ipc.Output{ID: rec.ID, Index: rec.Index, Tokens: rec.AppendTokens(o.Tokens[:0]), LogProbs: o.LogProbs[:0]}
	if rec.HasLogProbs() {
		o.LogProbs, o.TopK = rec.AppendLogProbs(o.LogProbs), rec.TopK()
	} else {
		o.LogProbs = nil
	}
	taken, whole := s.direct(o)
	if taken && !whole {
		s.unsent = true
		s.signal()
	}
	return taken
}

// giveUp ends the stream and drops its pending output; s.mu is held.
func (s *Stream) giveUp(err error) error {
	s.err = err
	s.pending, s.size = batch{}, 0
	s.signal()
	return err
}

// add merges rec into the output at slot, or appends a new one if slot is
// negative.
func (b *batch) add(slot int, rec *ipc.Record) {
	if slot < 0 {
		slot = b.grow(rec)
	}
	o := &b.outs[slot]
	o.Last = rec.Last
	o.Tokens = rec.AppendTokens(o.Tokens)
	if rec.HasLogProbs() {
		o.LogProbs, o.TopK = rec.AppendLogProbs(o.LogProbs), rec.TopK()
	}
	b.metas[slot] = rec.AppendMeta(b.metas[slot])
}

// find returns the output that rec may be merged into, or -1: the newest of
// its choice, if that says nothing beyond tokens and has log probabilities
// exactly if rec has them. A record with LAST must stay at the end.
func (b *batch) find(rec *ipc.Record) int {
	for i := len(b.outs) - 1; i >= 0; i-- {
		o := &b.outs[i]
		if o.Index != rec.Index {
			continue
		}
		if len(b.metas[i]) == 0 && (o.LogProbs != nil) == rec.HasLogProbs() && (!rec.Last || i == len(b.outs)-1) {
			return i
		}
		break
	}
	return -1
}

// grow appends an output for rec, with the memory of one used before if there
// is one.
func (b *batch) grow(rec *ipc.Record) int {
	n := len(b.outs)
	if n < cap(b.outs) {
		b.outs = b.outs[:n+1]
	} else {
		b.outs = append(b.outs, ipc.Output{})
	}
	if n < cap(b.metas) {
		b.metas = b.metas[:n+1]
	} else {
		b.metas = append(b.metas, nil)
	}
	o := &b.outs[n]
	*o = ipc.Output{ID: rec.ID, Index: rec.Index, Tokens: o.Tokens[:0], LogProbs: o.LogProbs[:0]}
	if !rec.HasLogProbs() {
		o.LogProbs = nil
	}
	b.metas[n] = b.metas[n][:0]
	return n
}

// reset empties the batch and keeps its memory.
func (b *batch) reset() {
	b.outs, b.metas = b.outs[:0], b.metas[:0]
}

// decodeMetas fills in the Meta of each output. It runs on the reader's
// goroutine, so that a large meta of one request delays no other.
func (b *batch) decodeMetas() error {
	for i, raw := range b.metas {
		b.outs[i].Meta = nil
		if len(raw) == 0 {
			continue
		}
		meta, err := ipc.ParseMeta(raw)
		if err != nil {
			return &ProtocolError{Reason: "the meta of an output is malformed", Err: err}
		}
		b.outs[i].Meta = meta
	}
	return nil
}

// promptLogProbCost is the room that one alternative at one prompt position
// needs as JSON.
const promptLogProbCost = 64

// pendingLimit is the bound of a stream's pending output: the configured one,
// and room for the one large thing that a request can ask for in one piece.
func pendingLimit(base, prompt int, params *ipc.Generate) int {
	if k := params.Sampling.PromptLogProbs; k != nil && *k >= 0 {
		base += prompt * (int(min(*k, 1000)) + 2) * promptLogProbCost
	}
	return base
}
