package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"dynworker/pkg/engine"
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/engine/vitals"
	"dynworker/pkg/handlers"
	"dynworker/pkg/protocol"
)

// generate starts a request in this life and keeps track of it.
func (c *life) generate(ctx context.Context, g *ipc.Generate, tokens []int32) (handlers.Stream, error) {
	s, err := c.Open(ctx, g, tokens)
	if err != nil {
		return nil, err
	}
	w := &flight{engineStream: s, life: c, request: g.RequestID, fetches: fromPeer(g)}
	w.track = c.flights.Begin(vitals.Request{Prompt: len(tokens), FromPeer: w.fetches}, w.giveUp)
	return w, nil
}

// fromPeer tells whether a request continues what a prefill worker has begun.
func fromPeer(g *ipc.Generate) bool {
	if g.Disaggregated == nil {
		return false
	}
	var d struct {
		RequestType string `json:"request_type"`
	}
	return json.Unmarshal(g.Disaggregated, &d) == nil && d.RequestType == "generation_only"
}

// flight is a request in one life of the engine. It tells the detectors what the engine does for it, and its reader what became of the engine.
type flight struct {
	engineStream
	life    *life
	track   *vitals.Flight
	request string
	// verdict is why the worker gave the request up, nil while it has not.
	verdict atomic.Pointer[error]
	// failure is what the engine said of the request.
	failure string
	// fetches is true until the first output of a request that needs the KV blocks of another engine. What fails until then says nothing about this one.
	fetches bool
}

// Next implements handlers.Stream.
func (f *flight) Next(ctx context.Context) ([]ipc.Output, error) {
	f.track.Wait()
	outs, err := f.engineStream.Next(ctx)
	if err != nil {
		f.track.Rest()
		return nil, f.ended(ctx, err)
	}
	f.track.Got()
	for i := range outs {
		f.note(&outs[i])
	}
	return outs, nil
}

// SetDirect implements handlers.Stream.
func (f *flight) SetDirect(take engine.Direct) {
	f.engineStream.SetDirect(func(o *ipc.Output) (taken, whole bool) {
		if taken, whole = take(o); taken {
			f.track.Passed()
		}
		return taken, whole
	})
}

// note takes an output into account.
func (f *flight) note(o *ipc.Output) {
	f.fetches = f.fetches && len(o.Tokens) == 0
	if o.Meta != nil {
		if why := failedInEngine(o.Meta); why != "" && !f.fetches {
			f.failure = why
		}
	}
	if o.Last {
		f.track.End(true)
		f.life.outcomes.Ended(f.failure)
		f.life.owner.suspects.clear(f.request)
	}
}

// failedInEngine says why a request failed although nothing was wrong with it, or nothing.
func failedInEngine(m *ipc.Meta) string {
	switch {
	case m.NoOutputs:
		return "no outputs"
	case m.Error == nil:
		return ""
	case m.Error.Kind == ipc.ErrorRequest, m.Error.Kind == ipc.ErrorFatal, m.Error.Kind == "":
		return m.Error.Error()
	}
	return "" // what the caller asked for was wrong
}

// ended says what the end of the engine's stream means for the request.
func (f *flight) ended(ctx context.Context, err error) error {
	if errors.Is(err, io.EOF) {
		return err
	}
	verdict := f.verdict.Load()
	switch {
	case verdict != nil:
		err = *verdict
	case ctx.Err() != nil:
		return err
	case !errors.Is(err, engine.ErrEngineDead) || errors.Is(err, engine.ErrStopped) && f.life.failed.Load() == nil:
		return err // the stream broke, or the engine was stopped with the worker
	}
	f.track.End(false)
	var silent *vitals.StallError
	if errors.As(err, &silent) {
		f.life.owner.counter.StreamStalled()
		return protocol.NewError(protocol.ReasonBackendResponseTimeout, silent.Error())
	}
	f.life.lost.Add(1)
	if final := f.life.owner.suspects.saw(f.request); final != nil {
		f.life.owner.counter.RequestSuspected()
		return final
	}
	return err
}

// giveUp takes the request from the engine. It may be called from any goroutine.
func (f *flight) giveUp(why error) {
	f.verdict.Store(&why)
	var silent *vitals.StallError
	if errors.As(why, &silent) {
		f.engineStream.Close()
		return
	}
	f.Fail(why) // the engine has failed; there is nothing to tell it
}

// Close implements handlers.Stream.
func (f *flight) Close() {
	f.track.End(false)
	f.engineStream.Close()
}

// suspects remembers which requests were in flight when an engine failed. A request that kills engines is moved from worker to worker by frontends, under the same id; one that comes back, or that two lives here have failed with, is
// answered with an error that does not move. This bounds what one request can do to one worker; how many workers it can reach is bounded by the frontend's migration limit.
type suspects struct {
	// after is at how many failures a request is not served any more, 0 for never.
	after int

	mu    sync.Mutex
	seen  map[string]int
	order []string // of arrival, for the bound
}

// maxSuspects bounds what is remembered.
const maxSuspects = 1 << 14

func newSuspects(after int) *suspects { return &suspects{after: after, seen: map[string]int{}} }

// saw notes that an engine failed with the request in flight. It returns the answer for the caller if that has happened too often, else nil.
func (s *suspects) saw(id string) error {
	if s.after == 0 || id == "" || id == canaryID {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	n, known := s.seen[id]
	if !known {
		if len(s.order) == maxSuspects {
			delete(s.seen, s.order[0])
			s.order = s.order[1:]
		}
		s.order = append(s.order, id)
	}
	s.seen[id] = n + 1
	return s.answer(n + 1)
}

// refusal is the answer for a request that is not to be tried again, else nil.
func (s *suspects) refusal(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.answer(s.seen[id])
}

func (s *suspects) answer(n int) error {
	if s.after == 0 || n < s.after {
		return nil
	}
	return protocol.Internal(fmt.Sprintf("the engine failed %d times with this request in flight; it is not tried again", n))
}

// clear forgets a request that an engine has survived.
func (s *suspects) clear(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.seen[id]; known {
		s.seen[id] = 0 // its place in the order stays
	}
}
