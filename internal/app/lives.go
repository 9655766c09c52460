package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"dynworker/pkg/engine"
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/engine/vitals"
	"dynworker/pkg/handlers"

	"github.com/rs/zerolog"
)

// ErrEngineDied ends a worker whose engine failed and is not started again.
var ErrEngineDied = errors.New("the engine died")

// errNoEngine answers requests that come while there is no engine.
var errNoEngine = errors.New("the engine is being started again")

// engineProcess is one life of an engine, from ready to its end.
type engineProcess interface {
	// Open starts a request. An error means that the engine is not there any more.
	Open(ctx context.Context, g *ipc.Generate, tokens []int32) (engineStream, error)
	Ready() *ipc.Ready
	Query(ctx context.Context, what string) (json.RawMessage, error)
	// Dead is closed when no request can be served any more, and Cause then says why. Done is closed when nothing of the engine is left, and Exit is then the record of its end.
	Dead() <-chan struct{}
	Cause() error
	Done() <-chan struct{}
	Exit() *engine.Exit
	Stop(ctx context.Context) error
}

// engineStream is one request in one life of an engine.
type engineStream interface {
	handlers.Stream
	// Fail ends the stream with err and without a word to the engine.
	Fail(err error)
}

// service is the rest of the worker, as the owner of the engine uses it. The methods are called one at a time.
type service interface {
	// leave takes the worker out of service because its engine failed. When it returns, no frontend is told to send requests here.
	leave(f *vitals.Failure)
	// down says why there is no engine and what is being done about it.
	down(reason string)
	// approve says whether a life that was started after a failure may serve: it has to be what the worker registered as, and has to answer. An error that wraps errMismatch will not go away by trying again.
	approve(ctx context.Context, p engineProcess) error
	// enter puts the worker back into service. It tries until ctx ends or the failure is one that lasts.
	enter(ctx context.Context) error
}

// lifeCounter counts for the owner of the engine.
type lifeCounter interface {
	EngineFailed(detector string)
	EngineGone()
	EngineServing()
	EngineRestarted(detector string)
	StreamStalled()
	RequestSuspected()
}

// lives owns the engine over all its lives: it starts it, is the engine that handlers see whichever life is the present one, finds out when it has failed, and starts it again within its budget. Requests that come while there is none
// are refused at once, as an engine shutdown, which frontends continue elsewhere.
type lives struct {
	start     func(ctx context.Context) (engineProcess, error)
	service   service
	counter   lifeCounter
	log       zerolog.Logger
	restart   bool
	budget    restartBudget
	suspects  *suspects
	limits    vitals.Limits
	tolerance vitals.Tolerance
	questions vitals.Questions

	current atomic.Pointer[life]

	// restarting is the parent of everything that brings an engine back; noMore ends it for good.
	restarting context.Context
	noMore     context.CancelFunc
	// busy is held while an engine is brought back, and by the goroutine that enters service with it.
	busy sync.WaitGroup
	mu   sync.Mutex
}

// life is one life of the engine and what is known of it.
type life struct {
	engineProcess
	owner    *lives
	flights  *vitals.Flights
	outcomes *vitals.Outcomes
	since    time.Time
	// failed is set when the engine was found to have failed, before anything is done about it.
	failed atomic.Pointer[vitals.Failure]
	// lost counts the requests that ended because of that.
	lost atomic.Uint64
	// found takes what others find out about this life.
	found chan *vitals.Failure
	// entered takes what kept the worker from going back into service with this life.
	entered chan error
	// leave ends the attempt to go into service with this life, and left is closed when that is over.
	leave context.CancelFunc
	left  chan struct{}
}

// begin starts the first life. It serves nothing until others make use of it, and nobody looks after it before supervise.
func (l *lives) begin(ctx context.Context) (engineProcess, error) {
	l.restarting, l.noMore = context.WithCancel(context.Background())
	p, err := l.start(ctx)
	switch {
	case err == nil:
	case ctx.Err() != nil:
		return nil, err // it was called off
	default:
		f := failureOf(err)
		l.counter.EngineFailed(string(f.Detector))
		return nil, f
	}
	close(l.adopt(p).left)
	return p, nil
}

// adopt makes p the engine that handlers see.
func (l *lives) adopt(p engineProcess) *life {
	c := &life{
		engineProcess: p, owner: l, flights: vitals.NewFlights(l.limits), outcomes: vitals.NewOutcomes(l.tolerance), since: time.Now(),
		found: make(chan *vitals.Failure, 1), entered: make(chan error, 1), leave: func() {}, left: make(chan struct{}),
	}
	l.counter.EngineServing()
	l.current.Store(c)
	return c
}

// Generate implements handlers.Engine with the present life.
func (l *lives) Generate(ctx context.Context, g *ipc.Generate, tokens []int32) (handlers.Stream, error) {
	c := l.current.Load()
	if c == nil {
		return nil, errNoEngine
	}
	if err := l.suspects.refusal(g.RequestID); err != nil {
		l.counter.RequestSuspected()
		return nil, err
	}
	return c.generate(ctx, g, tokens)
}

// supervise looks after the engine until ctx ends, and returns nil then; or it returns why there is no engine and will be none.
func (l *lives) supervise(ctx context.Context) error {
	for {
		c := l.current.Load()
		f, err := l.watch(ctx, c)
		if f == nil {
			return err
		}
		if err := l.end(c, f); err != nil {
			return fmt.Errorf("%w: %w, and cannot be ended: %w", ErrEngineDied, f, err)
		}
		if err := l.again(f); err != nil {
			return err
		}
	}
}

// watch waits until the life has failed and says how. Both results are nil when ctx has ended; an error alone is none of the engine's.
func (l *lives) watch(ctx context.Context, c *life) (*vitals.Failure, error) {
	looking, stop := context.WithCancel(ctx)
	var lookers sync.WaitGroup
	defer lookers.Wait()
	defer stop()
	lookers.Go(func() { c.report(vitals.Look(looking, c.flights, c.outcomes)) })
	lookers.Go(func() {
		c.report(vitals.Ask(looking, l.questions, func(ctx context.Context) (json.RawMessage, error) { return c.Query(ctx, ipc.QueryHealth) }))
	})
	for {
		select {
		case <-ctx.Done():
			return nil, nil
		case <-c.Dead():
			return failureOf(c.Cause()), nil
		case f := <-c.found:
			return f, nil
		case err := <-c.entered:
			if err != nil {
				return nil, err
			}
		}
	}
}

// report notes that the life was found to have failed; the first finding counts. What a dead engine cannot answer is no finding: its death is one.
func (c *life) report(f *vitals.Failure) {
	if f == nil || errors.Is(f, engine.ErrEngineDead) {
		return
	}
	select {
	case c.found <- f:
	default:
	}
}

// end takes a failed life out of service, moves its requests on, and ends what is left of it.
func (l *lives) end(c *life, f *vitals.Failure) error {
	c.failed.Store(f)
	l.current.Store(nil)
	c.leave()
	<-c.left
	l.budget.served(time.Since(c.since))
	l.counter.EngineFailed(string(f.Detector))
	l.log.Error().Str("detector", string(f.Detector)).Str("reason", f.Reason).Dur("served", time.Since(c.since)).Msg("the engine failed")
	l.service.leave(f)
	c.flights.Drop(f)
	err := bounded(failedStop, c.Stop)
	if exit := c.Exit(); exit != nil {
		l.log.Error().EmbedObject(exit).Uint64("requests_lost", c.lost.Load()).Msg("engine died")
	}
	if errors.Is(err, engine.ErrUnkillable) {
		return err
	}
	return nil
}

// failedStop is how long an engine that failed may take to end by itself before it is killed. It has nothing left to finish.
const failedStop = 2 * time.Second

// again starts engines until one serves. It returns an error when there will be none.
func (l *lives) again(f *vitals.Failure) error {
	if !l.restart {
		return fmt.Errorf("%w: %w", ErrEngineDied, f)
	}
	if !l.enterBusy() {
		return fmt.Errorf("%w while the worker ends: %w", ErrEngineDied, f)
	}
	defer l.busy.Done()
	for first, since := f, time.Now(); ; {
		pause, ok := l.budget.next()
		if !ok {
			return fmt.Errorf("%w and was started again %d times (engine.restart.max): %w", ErrEngineDied, l.budget.max, f)
		}
		l.service.down(fmt.Sprintf("%s; started again in %v", f, pause.Round(time.Millisecond)))
		l.log.Warn().Str("detector", string(f.Detector)).Dur("after", pause).Msg("the engine is started again")
		p, err := l.next(pause)
		switch {
		case err == nil:
			l.resume(p, first, since)
			return nil
		case l.restarting.Err() != nil:
			return fmt.Errorf("%w while the worker ends: %w", ErrEngineDied, f)
		case errors.Is(err, errMismatch):
			l.counter.EngineFailed(string(vitals.Mismatch))
			return fmt.Errorf("%w: %w", ErrEngineDied, vitals.Failed(vitals.Mismatch, err))
		}
		f = failureOf(err)
		l.counter.EngineFailed(string(f.Detector))
		l.log.Error().Str("detector", string(f.Detector)).Err(err).Msg("the engine could not be started again")
	}
}

// next starts one life after a pause and has it approved.
func (l *lives) next(pause time.Duration) (engineProcess, error) {
	wait := time.NewTimer(pause)
	defer wait.Stop()
	select {
	case <-wait.C:
	case <-l.restarting.Done():
		return nil, l.restarting.Err()
	}
	p, err := l.start(l.restarting)
	if err != nil {
		return nil, err
	}
	if err := l.service.approve(l.restarting, p); err != nil {
		return nil, errors.Join(err, bounded(failedStop, p.Stop))
	}
	return p, nil
}

// resume makes p the engine and puts the worker back into service, which may take as long as etcd is away; meanwhile the engine is looked after already.
func (l *lives) resume(p engineProcess, after *vitals.Failure, since time.Time) {
	c := l.adopt(p)
	ctx, leave := context.WithCancel(l.restarting)
	c.leave = leave
	l.busy.Add(1) // again holds it too, so it cannot be waited for in between
	go func() {
		defer l.busy.Done()
		defer close(c.left)
		defer leave()
		err := l.service.enter(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			l.counter.EngineRestarted(string(after.Detector))
			l.log.Info().Str("detector", string(after.Detector)).Dur("after", time.Since(since)).Msg("serving again")
		}
		c.entered <- err
	}()
}

// enterBusy begins to bring an engine back, unless that is over.
func (l *lives) enterBusy() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.restarting.Err() != nil {
		return false
	}
	l.busy.Add(1)
	return true
}

// settle ends for good that engines are brought back, one that is being started included, and reports whether there is an engine. What serves goes on, and is still looked after.
func (l *lives) settle() (alive bool) {
	l.mu.Lock()
	l.noMore()
	l.mu.Unlock()
	l.busy.Wait()
	return l.current.Load() != nil
}

// stop ends the present life, if there is one.
func (l *lives) stop(ctx context.Context) error {
	l.settle()
	c := l.current.Swap(nil)
	if c == nil {
		return nil
	}
	l.counter.EngineGone()
	return c.Stop(ctx)
}

// failureOf gives an engine's end, or what kept it from starting, the name of what found it out.
func failureOf(err error) *vitals.Failure {
	var found *vitals.Failure
	if errors.As(err, &found) {
		return found
	}
	return vitals.Failed(detectorOf(err), err)
}

// detectorOf names what found out that an engine ended, or did not start, by what it ended of.
func detectorOf(err error) vitals.Detector {
	var (
		found    *vitals.Failure
		timeout  *engine.TimeoutError
		fatal    ipc.Fatal
		protocol *engine.ProtocolError
		version  *engine.VersionError
	)
	switch {
	case errors.As(err, &found):
		return found.Detector
	case errors.As(err, &timeout):
		return vitals.Load
	case errors.As(err, &fatal):
		return vitals.Fatal
	case errors.As(err, &protocol), errors.As(err, &version):
		return vitals.Protocol
	}
	return vitals.Exit
}
