package engine

import (
	"sync"
	"time"

	"dynworker/pkg/engine/ipc"
)

// demux handles the engine's messages, on the reading goroutine only. An error
// it returns means that the channel is of no further use.
type demux struct {
	p *Process
	// step and bad are kept here so that a step does not allocate.
	step []delivery
	bad  []broken
	// behind means that more messages have arrived than the one at hand.
	behind bool
}

// delivery is a record and the stream that it is for.
type delivery struct {
	stream *Stream
	rec    ipc.Record
}

// directLimit is the number of records in a step up to which this goroutine
// writes them out itself, where that needs no waiting. Of larger steps, and
// when the next one is here already, the streams' own goroutines can write
// several at once on several processors, and merge what has become late.
const directLimit = 128

// broken is a stream that could not take what the engine sent for it.
type broken struct {
	id   uint64
	err  error
	live bool // the engine still works on the request
}

func (d *demux) handle(kind ipc.Kind, payload []byte) error {
	switch kind {
	case ipc.KindOutputs:
		return d.outputs(payload)
	case ipc.KindHello:
		m, err := ipc.ParseHello(payload)
		return d.startup(m, err)
	case ipc.KindProgress:
		m, err := ipc.ParseProgress(payload)
		if err == nil && d.p.cfg.OnProgress != nil {
			d.p.cfg.OnProgress(m)
		}
		return d.startup(m, err)
	case ipc.KindReady:
		m, err := ipc.ParseReady(payload)
		return d.startup(m, err)
	case ipc.KindStats:
		return d.stats(payload)
	case ipc.KindEvents:
		if d.p.cfg.OnEvents != nil {
			d.p.cfg.OnEvents(payload)
		}
		return nil
	case ipc.KindAnswer:
		return d.answer(payload)
	case ipc.KindGoodbye:
		return d.goodbye(payload)
	case ipc.KindFatal:
		m, err := ipc.ParseFatal(payload)
		if err != nil {
			return &ProtocolError{Reason: "malformed message", Err: err}
		}
		return m
	default:
		return &ProtocolError{Reason: "a " + kind.String() + " message flows to the engine, not from it"}
	}
}

// startup hands a message to the handshake. Afterwards progress is harmless,
// and another hello or ready means that the other side is not who it was.
func (d *demux) startup(m any, err error) error {
	if err != nil {
		return &ProtocolError{Reason: "malformed message", Err: err}
	}
	select {
	case d.p.messages <- m:
		return nil
	case <-d.p.started:
	}
	if _, ok := m.(ipc.Progress); ok {
		return nil
	}
	return &ProtocolError{Reason: "hello or ready out of turn"}
}

// outputs hands the records of one engine step to their streams.
func (d *demux) outputs(payload []byte) error {
	err := d.deliver(payload)
	for _, b := range d.bad {
		d.p.streamBroken(b.id, b.err, b.live)
	}
	d.bad = d.bad[:0]
	if err != nil {
		return &ProtocolError{Reason: "malformed message", Err: err}
	}
	return nil
}

func (d *demux) deliver(payload []byte) error {
	err := d.sort(payload)
	direct := !d.behind && len(d.step) <= directLimit
	for i := range d.step {
		to := &d.step[i]
		if err := to.stream.push(&to.rec, direct); err != nil {
			d.bad = append(d.bad, broken{id: to.rec.ID, err: err, live: !to.rec.Last})
		}
	}
	clear(d.step) // the streams and the payload are not kept alive
	d.step = d.step[:0]
	return err
}

// sort finds the streams of a step's records.
func (d *demux) sort(payload []byte) error {
	p := d.p
	var tokens uint64
	var rec ipc.Record
	records := ipc.ParseRecords(payload)
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		more, err := records.Next(&rec)
		if err != nil || !more {
			p.counters.tokens.Add(tokens)
			return err
		}
		tokens += uint64(rec.TokenCount())
		s := p.streams[rec.ID]
		if s == nil {
			p.strayRecord(rec.ID)
			continue
		}
		if rec.Last {
			delete(p.streams, rec.ID)
		}
		d.step = append(d.step, delivery{s, rec})
	}
}

// strayRecord counts a record that belongs to no request; p.mu is held. Once
// the streams have been ended, that is true of all records.
func (p *Process) strayRecord(id uint64) {
	if p.cause != nil {
		return
	}
	what := "engine sent output for an id it was never given"
	if id != 0 && id <= p.nextID {
		p.counters.afterLast.Add(1)
		what = "engine sent output for a request that had ended"
	} else {
		p.counters.unknownID.Add(1)
	}
	p.noise.say(func(n uint64) {
		p.cfg.Logger.Warn().Uint64("id", id).Uint64("times", n).Msg(what)
	})
}

// streamBroken deals with a stream that was ended because of what the engine
// sent for it. The engine itself goes on.
func (p *Process) streamBroken(id uint64, err error, cancel bool) {
	p.counters.badStreams.Add(1)
	if cancel {
		p.cancel(id)
	}
	p.noise.say(func(n uint64) {
		p.cfg.Logger.Warn().Uint64("id", id).Err(err).Uint64("times", n).Msg("engine stream given up")
	})
}

func (d *demux) goodbye(payload []byte) error {
	m, err := ipc.ParseGoodbye(payload)
	if err != nil {
		return &ProtocolError{Reason: "malformed message", Err: err}
	}
	d.p.mu.Lock()
	defer d.p.mu.Unlock()
	d.p.goodbye = m.Reason
	return nil
}

// noiseEvery is the least time between two log lines about an engine's
// misbehaviour.
const noiseEvery = 5 * time.Second

// rateLimited lets something be said at most once in a while and counts the
// rest.
type rateLimited struct {
	every time.Duration

	mu     sync.Mutex
	last   time.Time
	unsaid uint64
}

// say calls fn, with the number of occasions since it was last called, unless
// it was called a short while ago.
func (r *rateLimited) say(fn func(times uint64)) {
	r.mu.Lock()
	r.unsaid++
	now := time.Now()
	if !r.last.IsZero() && now.Sub(r.last) < r.every {
		r.mu.Unlock()
		return
	}
	n := r.unsaid
	r.unsaid, r.last = 0, now
	r.mu.Unlock()
	fn(n)
}
