package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"dynworker/pkg/engine/ipc"
)

// Process is a running engine. It lives from a successful Start until Done is
// closed, and cannot be started again.
type Process struct {
	cfg   Config
	conn  net.Conn
	run   runner
	out   *outputLog
	box   *outbox
	ready *ipc.Ready

	messages   chan any      // hello, progress and ready, while starting
	started    chan struct{} // closed when nobody listens to messages any more
	readerDone chan struct{}
	writerDone chan struct{}
	stopping   chan struct{} // closed by the first Stop
	hurry      chan struct{} // closed when ending must not take longer
	dead       chan struct{} // closed when the cause is known and no stream is open any more
	done       chan struct{}
	stopOnce   sync.Once
	hurryOnce  sync.Once

	noise rateLimited // log lines about what the engine does wrong

	mu      sync.Mutex
	cause   error // set once: why the engine is dead
	writing error // the write error, if there was one
	streams map[uint64]*Stream
	queries map[uint64]chan answer
	nextID  uint64
	nextSeq uint64
	goodbye string
	stats   Stats
	exit    *Exit

	counters counters
}

// Start spawns an engine and waits until it is ready. It returns a *StartError
// when that fails, after everything that was spawned has been ended; ctx ends
// the wait early.
func Start(ctx context.Context, cfg Config) (*Process, error) {
	cfg = cfg.withDefaults()
	out := newOutputLog(*cfg.OutputLogger, cfg.OutputRate, cfg.OutputBurst)
	conn, c, err := spawn(&cfg, out)
	if err != nil {
		out.close()
		return nil, &StartError{Err: err}
	}
	cfg.Logger.Info().Int("pid", c.pid()).Str("program", cfg.Command[0]).Msg("engine spawned")
	return begin(ctx, cfg, conn, func(*Process) runner { return c }, out)
}

// Attach does the handshake with an engine that is reached over conn and has
// no process of its own: one that runs in the worker's process, as in tests.
// The Process owns conn from then on; the engine is dead when conn is.
func Attach(ctx context.Context, conn net.Conn, cfg Config) (*Process, error) {
	cfg = cfg.withDefaults()
	out := newOutputLog(*cfg.OutputLogger, cfg.OutputRate, cfg.OutputBurst)
	return begin(ctx, cfg, conn, func(p *Process) runner { return guest{conn: conn, done: p.readerDone} }, out)
}

func begin(ctx context.Context, cfg Config, conn net.Conn, run func(*Process) runner, out *outputLog) (*Process, error) {
	p := &Process{
		cfg: cfg, conn: conn, out: out, box: newOutbox(cfg.MaxQueued),
		messages: make(chan any), started: make(chan struct{}),
		readerDone: make(chan struct{}), writerDone: make(chan struct{}),
		stopping: make(chan struct{}), hurry: make(chan struct{}),
		dead: make(chan struct{}), done: make(chan struct{}),
		streams: make(map[uint64]*Stream), queries: make(map[uint64]chan answer),
		noise: rateLimited{every: noiseEvery},
	}
	p.run = run(p)
	go p.write()
	go p.read()
	go p.supervise()

	ready, err := p.handshake(ctx)
	if err != nil {
		p.setCause(err)
		close(p.started)
		p.requestStop()
		<-p.done
		return nil, &StartError{Err: err, Exit: p.exit}
	}
	p.ready = ready
	close(p.started)
	p.cfg.Logger.Info().Str("engine", ready.Engine).Str("version", ready.Version).
		Int("attention_dp_size", ready.AttentionDPSize).Msg("engine is ready")
	return p, nil
}

func (p *Process) handshake(ctx context.Context) (*ipc.Ready, error) {
	h := handshake{
		cfg: &p.cfg, messages: p.messages, ended: p.dead, cause: p.whyDead,
		configure: func() error { return p.box.message(p.cfg.Configure) },
	}
	return h.run(ctx)
}

// Ready is what the engine said about itself. It must not be changed.
func (p *Process) Ready() *ipc.Ready { return p.ready }

// PID is the engine's process id, 0 for an attached one.
func (p *Process) PID() int { return p.run.pid() }

// Done is closed when the engine has ended and nothing of it is left in this
// process: its streams have their error, its goroutines are gone.
func (p *Process) Done() <-chan struct{} { return p.done }

// Dead is closed as soon as it is known that the engine can take no more
// requests: its streams have their errors, but parts of it may still be there
// until Done is closed.
func (p *Process) Dead() <-chan struct{} { return p.dead }

// Cause is why the engine is dead, as in the record of its end; nil before Dead
// is closed.
func (p *Process) Cause() error {
	if !closed(p.dead) {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cause
}

// Exit is the record of the engine's end; nil before Done is closed.
func (p *Process) Exit() *Exit {
	select {
	case <-p.done:
		return p.exit
	default:
		return nil
	}
}

// Generate starts a request. It waits only while the queue to the engine is
// full, and ctx bounds that wait; the request itself is ended by Cancel or
// Close of the stream. Neither tokens nor params are kept.
func (p *Process) Generate(ctx context.Context, params *ipc.Generate, tokens []int32) (*Stream, error) {
	s, err := p.register(params, len(tokens))
	if err != nil {
		return nil, err
	}
	err = p.box.append(ctx, requestCost+4*len(tokens), func(dst []byte) ([]byte, error) {
		return ipc.AppendGenerate(dst, s.id, tokens, params)
	})
	if err != nil {
		p.forget(s.id)
		return nil, fmt.Errorf("send the request to the engine: %w", err)
	}
	p.counters.requests.Add(1)
	return s, nil
}

// requestCost is what a request is taken to need in the queue besides its
// prompt.
const requestCost = 512

func (p *Process) register(params *ipc.Generate, prompt int) (*Stream, error) {
	width := int64(1)
	for _, n := range []*int64{params.Sampling.N, params.Sampling.BestOf} {
		if n != nil {
			width = min(max(width, *n), 1<<16-1)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cause != nil {
		return nil, p.deadError()
	}
	select {
	case <-p.stopping:
		return nil, ErrStopped
	default:
	}
	p.nextID++
	s := &Stream{
		id: p.nextID, owner: p, limit: pendingLimit(p.cfg.MaxPending, prompt, params),
		width: uint16(width), keep: p.cfg.KeepSteps, ready: make(chan struct{}, 1),
	}
	p.streams[s.id] = s
	return s, nil
}

func (p *Process) forget(id uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.streams, id)
}

func (p *Process) cancel(id uint64) {
	p.counters.cancels.Add(1)
	p.box.cancel(id)
}

// write is the goroutine that writes to the engine.
func (p *Process) write() {
	defer close(p.writerDone)
	err := p.box.run(p.conn)
	if err == nil {
		return
	}
	p.mu.Lock()
	p.writing = fmt.Errorf("write to the engine channel: %w", err)
	p.mu.Unlock()
	p.box.close(fmt.Errorf("%w: %w", ErrEngineDead, p.writing))
	// An engine that takes nothing more is dead, but it may have left a last
	// word: the reader gets a moment to find it.
	_ = p.conn.SetReadDeadline(time.Now().Add(p.cfg.settle))
}

// setCause records why the engine is dead; the first cause stays.
func (p *Process) setCause(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cause == nil {
		p.cause = err
	}
}

// whyDead is the cause of death; it must have happened.
func (p *Process) whyDead() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cause != nil {
		return p.cause
	}
	if closed(p.run.exited()) && p.run.status() != nil {
		return p.run.status()
	}
	if p.writing != nil {
		return p.writing
	}
	return ErrChannelClosed
}

// hasCause reports whether the cause of death is known already.
func (p *Process) hasCause() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cause != nil
}

// deadError is what streams and callers are told; p.mu is held.
func (p *Process) deadError() error {
	return fmt.Errorf("%w: %w", ErrEngineDead, p.cause)
}

// settle waits for a moment until what is closed: the two signs of an engine's
// death, exit and end of channel, come close together, and only both tell the
// whole cause.
func (p *Process) settle(what <-chan struct{}) {
	t := time.NewTimer(p.cfg.settle)
	defer t.Stop()
	select {
	case <-what:
	case <-t.C:
	}
}

// read is the goroutine that reads from the engine.
func (p *Process) read() {
	defer close(p.readerDone)
	r := ipc.NewReader(p.conn, ipc.MaxPayload)
	var d demux
	d.p = p
	for {
		kind, payload, err := r.Next()
		if err != nil {
			p.readFailed(err)
			return
		}
		d.behind = r.Buffered()
		if err := d.handle(kind, payload); err != nil {
			p.setCause(err)
			return
		}
	}
}

// readFailed turns a reader's error into a cause, unless it only means that
// the channel has ended, which supervise explains better.
func (p *Process) readFailed(err error) {
	var size *ipc.SizeError
	var kind *ipc.KindError
	switch {
	case errors.As(err, &size), errors.As(err, &kind):
		p.setCause(&ProtocolError{Reason: "what it wrote is not a frame", Err: err})
	case errors.Is(err, io.ErrUnexpectedEOF):
		p.noise.say(func(n uint64) {
			p.cfg.Logger.Warn().Uint64("times", n).Msg("engine channel ended inside a message")
		})
	}
}

// counters count over the life of a process.
type counters struct {
	requests, cancels, tokens        atomic.Uint64
	unknownID, afterLast, badStreams atomic.Uint64
	unexpected                       atomic.Uint64
}

// Counters is a snapshot of what an engine has done, right and wrong.
type Counters struct {
	Requests uint64 // generate messages sent
	Cancels  uint64 // cancel messages sent
	Tokens   uint64 // tokens received, those of streams given up included
	InFlight int    // requests without their last record
	Orphans  int    // of these, streams that were closed: the engine has yet to end them

	UnknownID       uint64 // output records for ids never given out
	AfterLast       uint64 // output records for requests that had ended
	BrokenStreams   uint64 // streams ended because of what the engine sent for them
	UnexpectedWords uint64 // other messages that made no sense and did no harm
}

// Counters returns the figures so far.
func (p *Process) Counters() Counters {
	c := Counters{
		Requests: p.counters.requests.Load(), Cancels: p.counters.cancels.Load(), Tokens: p.counters.tokens.Load(),
		UnknownID: p.counters.unknownID.Load(), AfterLast: p.counters.afterLast.Load(),
		BrokenStreams: p.counters.badStreams.Load(), UnexpectedWords: p.counters.unexpected.Load(),
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	c.InFlight = len(p.streams)
	for _, s := range p.streams {
		if s.abandoned() {
			c.Orphans++
		}
	}
	return c
}
