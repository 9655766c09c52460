package sim

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"dynworker/pkg/engine/ipc"
)

// Clock is what paces an engine. The zero Options use the system's.
type Clock interface {
	Now() time.Time
	// Timer returns a channel that receives at a time, at once if that has
	// passed, and a function that gives the timer up. The time is a point and
	// not a distance, so that a clock may be moved between looking at it and
	// asking for a timer.
	Timer(at time.Time) (fires <-chan time.Time, stop func() bool)
}

type systemClock struct{}

func (systemClock) Now() time.Time { return time.Now() }
func (systemClock) Timer(at time.Time) (<-chan time.Time, func() bool) {
	t := time.NewTimer(time.Until(at))
	return t.C, t.Stop
}

// engine is the simulated engine's state. Only the loop's goroutine touches it.
type engine struct {
	args  Args
	build Build
	text  Text
	clock Clock
	out   io.Writer
	mail  *mailbox
	calls *callLog

	requests map[uint64]*request
	waiting  []*request
	running  []*request // in the order in which they were admitted
	finished bool       // some of running have ended
	room     bool       // slots or requests have come since the last admission
	load     rankLoad
	caches   []*cache
	router   router
	nextStep time.Time
	holding  holding
	links    *links
	named    uint64 // prompts that got a global id

	frame     []byte     // the outputs message that is being built
	scratch   ipc.Output // reused for records that are not plain tokens
	unhealthy bool
	steps     uint64
	stats     statsState
}

func newEngine(args Args, build Build, clock Clock, out io.Writer, mail *mailbox, calls *callLog) *engine {
	e := &engine{
		args: args, build: build, text: args.Text(), clock: clock, out: out, mail: mail, calls: calls,
		requests: make(map[uint64]*request),
		load:     rankLoad{active: make([]int, args.AttentionDPSize), tokens: make([]int, args.AttentionDPSize)},
		router:   balancer{},
		holding:  newHolding(args.AttentionDPSize),
		links:    newLinks(mail),
		frame:    ipc.BeginFrame(nil, ipc.KindOutputs),
	}
	for rank := range args.AttentionDPSize {
		e.caches = append(e.caches, newCache(rank, &e.args))
	}
	if args.ConversationAffinity {
		e.router = newConversations(&e.args, build)
	}
	return e
}

// How an engine can end other than by a shutdown message.
var (
	// ErrWorkerGone means that the channel ended: the worker has died.
	ErrWorkerGone = errors.New("simulated engine: the worker is gone")
	// ErrCrashed means that a request asked the engine to crash.
	ErrCrashed = errors.New("simulated engine: crashed on request")
	// ErrLeft means that a request asked the engine to end as if all was well.
	ErrLeft = errors.New("simulated engine: left on request")
)

// FatalError is a failure that the engine has reported in a fatal message.
type FatalError struct{ Message ipc.Fatal }

func (e *FatalError) Error() string { return "simulated engine: " + e.Message.Error() }

// errShutdown ends the loop in good order.
var errShutdown = errors.New("shutdown")

// run serves requests until the engine ends. A nil error is an orderly end.
func (e *engine) run() error {
	for {
		for _, m := range e.mail.take() {
			if err := e.receive(m); err != nil {
				return e.end(err)
			}
		}
		now := e.clock.Now()
		e.expire(now)
		e.sweep()
		e.admit(now)
		if due, any := e.due(); any && !due.After(now) {
			if err := e.step(now); err != nil {
				return e.end(err)
			}
		}
		e.sweep()
		if err := e.flush(); err != nil {
			return err
		}
		if err := e.report(now, false); err != nil {
			return err
		}
		e.wait()
	}
}

// end sends what is left to say and returns why the engine ended.
func (e *engine) end(cause error) error {
	flushed := e.flush()
	var fatal *FatalError
	switch {
	case errors.Is(cause, errShutdown):
		if flushed != nil {
			return flushed
		}
		return e.send(ipc.Goodbye{Reason: "shutdown"})
	case errors.As(cause, &fatal):
		_ = e.send(fatal.Message) // the cause is returned whether or not anybody hears it
	}
	return cause
}

// wait blocks until there is mail or something is due.
func (e *engine) wait() {
	due, scheduled := e.due()
	for _, next := range []func() (time.Time, bool){e.reportDue, e.holding.due} {
		if at, pending := next(); pending && (!scheduled || at.Before(due)) {
			due, scheduled = at, true
		}
	}
	if !scheduled {
		<-e.mail.wake
		return
	}
	if !due.After(e.clock.Now()) {
		return
	}
	fires, stop := e.clock.Timer(due)
	defer stop()
	select {
	case <-e.mail.wake:
	case <-fires:
	}
}

// due is when the next step can give somebody a token; false if nobody waits
// for one.
func (e *engine) due() (at time.Time, any bool) {
	for _, r := range e.running {
		if !r.stalled && (!any || r.notBefore.Before(at)) {
			at, any = r.notBefore, true
		}
	}
	if at.Before(e.nextStep) {
		at = e.nextStep
	}
	return at, any
}

// receive handles one piece of mail.
func (e *engine) receive(m any) error {
	switch m := m.(type) {
	case ipc.Request:
		return e.generate(m)
	case badGenerate:
		e.refuse(m.id, "", callError(ipc.ErrorRequest, "RequestError", m.err.Error()))
		return nil
	case cancelID:
		e.cancel(uint64(m))
		return nil
	case ipc.Query:
		return e.answer(m)
	case kvAsked:
		return e.asked(m.ask)
	case kvTaken:
		e.taken(m)
		return nil
	case kvReceived:
		e.received(m)
		return nil
	case ipc.Shutdown:
		e.shutdown()
		return errShutdown
	case error:
		return m
	default:
		return fatal("RuntimeError", fmt.Sprintf("%T is not expected here", m))
	}
}

func fatal(class, message string) error {
	return &FatalError{Message: ipc.Fatal{ErrorType: class, Message: message}}
}

// generate takes a request into the queue, or answers it at once.
func (e *engine) generate(m ipc.Request) error {
	e.logGenerate(m)
	if _, twice := e.requests[m.ID]; twice {
		return fatal("RuntimeError", fmt.Sprintf("request id %d is in use", m.ID))
	}
	if s := m.Params.Scheduling; s != nil && e.args.AttentionDPSize > 1 && (s.AttentionDPRank < 0 || s.AttentionDPRank >= e.args.AttentionDPSize) {
		// TensorRT-LLM does not check the rank; its scheduler's loop dies of it.
		return fatal("IndexError", fmt.Sprintf("attention_dp_rank %d with %d ranks", s.AttentionDPRank, e.args.AttentionDPSize))
	}
	r, err := e.newRequest(m)
	if err != nil {
		e.refuse(m.ID, m.Params.RequestID, err)
		return nil
	}
	e.requests[r.id] = r
	e.waiting = append(e.waiting, r)
	e.room = true
	e.stats.changed = true
	return nil
}

// refuse answers a request that never ran.
func (e *engine) refuse(id uint64, requestID string, err *ipc.RequestError) {
	e.record(&ipc.Output{ID: id, Last: true, Meta: &ipc.Meta{Error: err}})
	e.calls.add(e.clock.Now(), call{Event: "finish", ID: id, RequestID: requestID, Reason: "error: " + err.Type})
}

// cancel ends a request early. One that nobody knows has ended already.
func (e *engine) cancel(id uint64) {
	r, known := e.requests[id]
	c := call{Event: "cancel", ID: id, Known: &known}
	if known {
		c.RequestID, c.Tokens = r.params.RequestID, r.made()
	}
	e.calls.add(e.clock.Now(), c)
	if known && r.trigger.what != ignoreCancel {
		e.cancelled(r)
	}
}

// cancelled answers for a request that was cancelled, whether it ran or waited.
func (e *engine) cancelled(r *request) {
	e.leave(r)
	for i := range r.choices {
		if q := &r.choices[i]; q.finish == "" {
			q.finish, q.changed = "cancelled", true
		}
	}
	e.emit(r)
	e.finish(r, "cancelled")
}

// shutdown ends everything that runs or waits.
func (e *engine) shutdown() {
	e.calls.add(e.clock.Now(), call{Event: "shutdown"})
	for _, r := range slices.Concat(e.running, e.waiting) {
		if !r.ended { // one cancelled since the last step is still on the list
			e.cancelled(r)
		}
	}
}

// admit moves requests from the queue onto ranks.
func (e *engine) admit(now time.Time) {
	for e.room && len(e.waiting) > 0 {
		e.admitOnce(now)
	}
}

// admitOnce is one round of admission, as an engine makes before each step.
func (e *engine) admitOnce(now time.Time) {
	e.room = false
	queue := make([]candidate, len(e.waiting))
	for i, r := range e.waiting {
		queue[i] = r.candidate
	}
	chosen := admit(e.load.active, e.args.MaxBatchSize, queue)
	if len(chosen) == 0 {
		return
	}
	batch := make([]candidate, len(chosen))
	for i, at := range chosen {
		batch[i] = queue[at]
	}
	for rank, placed := range e.router.route(e.load, e.args.MaxBatchSize, batch) {
		for _, i := range placed {
			if r := e.waiting[chosen[i]]; e.fits(r, rank) {
				e.start(r, rank, now)
			}
		}
	}
	before := len(e.waiting)
	e.waiting = slices.DeleteFunc(e.waiting, func(r *request) bool { return r.onRank != noRank })
	// A router may leave some out because every rank has had its fair share, which is larger after each round.
	placed := before - len(e.waiting)
	e.room = placed > 0 && placed < len(chosen)
}

// start lets a request run on a rank.
func (e *engine) start(r *request, rank int, now time.Time) {
	if r.phase == generationOnly {
		r.onRank = rank
		e.fetch(r)
	} else {
		r.begin(rank, e.caches[rank])
		r.notBefore = now.Add(time.Duration(e.args.FirstTokenDelay))
	}
	e.load.active[rank] += r.cost
	e.load.tokens[rank] += r.tokens
	e.running = append(e.running, r)
	e.stats.changed = true
	e.calls.add(now, call{Event: "placed", ID: r.id, RequestID: r.params.RequestID, Rank: &rank, CachedTokens: &r.cached})
}

// step gives every running request its next tokens.
func (e *engine) step(now time.Time) error {
	e.steps++
	delay := time.Duration(e.args.TokenDelay)
	if e.nextStep = e.nextStep.Add(delay); e.nextStep.Before(now) {
		e.nextStep = now.Add(delay) // idle or late: the pace begins anew
	}
	for _, r := range e.running {
		if r.ended || r.stalled || r.notBefore.After(now) {
			continue
		}
		if r.trigger.what != behave && r.choices[0].made >= r.trigger.after {
			handled, err := e.misbehave(r)
			if err != nil {
				return err
			}
			if handled {
				continue
			}
		}
		for i := range r.choices {
			if r.choices[i].finish == "" {
				r.advance(i)
			}
		}
		if r.phase == contextOnly && !e.prefilled(r, now) {
			continue
		}
		e.emit(r)
		if r.done() {
			e.finish(r, r.choices[0].finish)
		}
		if len(e.frame) > flushAt {
			if err := e.flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

// sweep drops the requests that have ended from the running ones.
func (e *engine) sweep() {
	if e.finished {
		e.finished = false
		e.running = slices.DeleteFunc(e.running, func(r *request) bool { return r.ended })
	}
}

// flushAt is the size from which an outputs message is sent before its step is
// over.
const flushAt = 1 << 20

// misbehave does what a request's trigger asks for. handled false means that
// the request goes on as usual.
func (e *engine) misbehave(r *request) (handled bool, err error) {
	last := func(m *ipc.Meta) {
		e.record(&ipc.Output{ID: r.id, Last: true, Meta: m})
	}
	switch r.trigger.what {
	case requestError:
		last(&ipc.Meta{Error: callError(ipc.ErrorRequest, "RequestError", fmt.Sprintf("simulated request error after %d tokens", r.choices[0].made))})
		e.finish(r, "error")
	case fatalError:
		last(&ipc.Meta{Error: callError(ipc.ErrorFatal, "RuntimeError", "simulated engine failure")})
		e.finish(r, "error")
		return true, fatal("RuntimeError", "simulated engine failure")
	case crash:
		return true, ErrCrashed
	case leave:
		return true, ErrLeft
	case noOutputs:
		last(&ipc.Meta{NoOutputs: true})
		e.finish(r, "no outputs")
	case noFinish:
		last(nil)
		e.finish(r, "")
	case timeout:
		last(&ipc.Meta{FinishReason: "timeout"})
		e.finish(r, "timeout")
	case unhealthy:
		e.unhealthy, r.stalled = true, true
	case stall:
		r.stalled = true
	default:
		return false, nil
	}
	return true, nil
}

// finish forgets a request whose last record has been written.
func (e *engine) finish(r *request, reason string) {
	r.ended = true
	delete(e.requests, r.id)
	c := call{Event: "finish", ID: r.id, RequestID: r.params.RequestID, Reason: reason, Tokens: r.made()}
	if r.onRank != noRank {
		e.load.active[r.onRank] -= r.cost
		e.load.tokens[r.onRank] -= r.tokens
		c.Rank = &r.onRank
	}
	if r.onRank == noRank {
		e.waiting = slices.DeleteFunc(e.waiting, func(w *request) bool { return w == r })
	} else {
		e.finished = true
	}
	e.room = true
	e.stats.changed = true
	e.calls.add(e.clock.Now(), c)
}

// emit writes the records of a request's choices that have something to say.
func (e *engine) emit(r *request) {
	done, last := r.done(), 0
	for i := range r.choices {
		if r.choices[i].changed {
			last = i
		}
	}
	for i := range r.choices {
		q := &r.choices[i]
		if !q.changed || (!r.params.Streaming && q.finish == "") {
			continue
		}
		q.changed = false
		final := done && i == last
		if r.told && q.finish == "" && r.logProbs == 0 {
			e.plain(r.id, i, q.step)
		} else {
			o := &e.scratch
			*o = ipc.Output{ID: r.id, Index: uint16(i), Last: final, Tokens: q.step, Meta: e.meta(r, q)}
			if r.logProbs > 0 {
				o.LogProbs, o.TopK = q.probs, uint16(r.logProbs)
			}
			e.record(o)
		}
		r.told = true
		q.step, q.probs = q.step[:0], q.probs[:0]
	}
}

// meta is what a choice's record says besides its tokens.
func (e *engine) meta(r *request, q *sequence) *ipc.Meta {
	m := &ipc.Meta{FinishReason: q.finish, StopReason: q.stop, Disaggregated: r.given}
	if q.finish != "" && len(r.choices) > 1 {
		total := r.total()
		m.CompletionTokens = &total
	}
	if !r.told && r.onRank != noRank {
		cached := int64(r.cached)
		m.CachedTokens, m.Rank, m.EngineRequestID = &cached, &r.onRank, &r.id
		m.PromptLogProbs = r.promptLogProbs()
	}
	if m.FinishReason == "" && m.CachedTokens == nil {
		return nil
	}
	return m
}

// plain writes a record of nothing but tokens.
func (e *engine) plain(id uint64, index int, tokens []uint32) {
	e.frame = ipc.AppendRecordHead(e.frame, id, uint16(index), 0, len(tokens))
	for _, t := range tokens {
		e.frame = binary.LittleEndian.AppendUint32(e.frame, t)
	}
}

func (e *engine) record(o *ipc.Output) {
	frame, err := ipc.AppendOutput(e.frame, o)
	if err != nil {
		panic(err) // the engine makes only what can be encoded
	}
	e.frame = frame
}

// flush sends the outputs message, if anything is in it.
func (e *engine) flush() error {
	if len(e.frame) == ipc.HeaderLen {
		return nil
	}
	frame, err := ipc.EndFrame(e.frame, 0)
	if err == nil {
		_, err = e.out.Write(frame)
	}
	e.frame = ipc.BeginFrame(e.frame[:0], ipc.KindOutputs)
	return workerGone(err)
}

func (e *engine) send(m ipc.Message) error {
	frame, err := ipc.AppendMessage(nil, m)
	if err == nil {
		_, err = e.out.Write(frame)
	}
	return workerGone(err)
}

// workerGone says what an error in writing to the worker means.
func workerGone(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", ErrWorkerGone, err)
}

func (e *engine) logGenerate(m ipc.Request) {
	if e.calls == nil {
		return
	}
	c := call{
		Event: "generate", ID: m.ID, RequestID: m.Params.RequestID,
		PromptTokens: len(m.Tokens), PromptHead: m.Tokens[:min(promptHead, len(m.Tokens))], Params: rawJSON(m.Params),
	}
	for _, t := range m.Tokens {
		c.PromptSum += int64(t)
	}
	e.calls.add(e.clock.Now(), c)
}
