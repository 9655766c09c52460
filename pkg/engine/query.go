package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"dynworker/pkg/engine/ipc"
)

// Stats are the engine's latest load figures.
type Stats struct {
	Rows []json.RawMessage // as the engine made them, one a rank
	At   time.Time         // when they arrived; zero when none have
}

// Stats returns the figures that the engine sent last.
func (p *Process) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stats
}

func (d *demux) stats(payload []byte) error {
	rows, err := ipc.ParseRows(ipc.KindStats, payload)
	if err != nil {
		return &ProtocolError{Reason: "malformed message", Err: err}
	}
	s := Stats{Rows: rows, At: time.Now()}
	d.p.mu.Lock()
	d.p.stats = s
	d.p.mu.Unlock()
	if d.p.cfg.OnStats != nil {
		d.p.cfg.OnStats(s)
	}
	return nil
}

type answer struct {
	body json.RawMessage
	err  error
}

// QueryError means that the engine understood a query and could not answer it.
type QueryError struct {
	What   string
	Reason string
}

func (e *QueryError) Error() string {
	return fmt.Sprintf("engine cannot answer query %q: %s", e.What, e.Reason)
}

// Query asks the engine one of the ipc.Query… questions and returns the whole
// answer object. It waits for as long as ctx allows: an engine that is stuck
// does not answer.
func (p *Process) Query(ctx context.Context, what string) (json.RawMessage, error) {
	seq, reply, err := p.registerQuery()
	if err != nil {
		return nil, err
	}
	defer p.forgetQuery(seq)
	if err := p.box.message(ipc.Query{Seq: seq, What: what}); err != nil {
		return nil, fmt.Errorf("ask the engine: %w", err)
	}
	select {
	case a := <-reply:
		if q, ok := a.err.(*QueryError); ok {
			q.What = what
		}
		return a.body, a.err
	case <-ctx.Done():
		return nil, fmt.Errorf("ask the engine for %s: %w", what, context.Cause(ctx))
	}
}

func (p *Process) registerQuery() (uint64, <-chan answer, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cause != nil {
		return 0, nil, p.deadError()
	}
	p.nextSeq++
	reply := make(chan answer, 1)
	p.queries[p.nextSeq] = reply
	return p.nextSeq, reply, nil
}

func (p *Process) forgetQuery(seq uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.queries, seq)
}

func (d *demux) answer(payload []byte) error {
	m, err := ipc.ParseAnswer(payload)
	if err != nil {
		return &ProtocolError{Reason: "malformed message", Err: err}
	}
	a := answer{body: m.Body}
	if !m.OK {
		a = answer{err: &QueryError{Reason: m.Error}}
	}
	d.p.mu.Lock()
	reply := d.p.queries[m.Seq]
	delete(d.p.queries, m.Seq)
	d.p.mu.Unlock()
	if reply == nil {
		// Asked and given up, or never asked; there is nobody to tell.
		d.p.counters.unexpected.Add(1)
		return nil
	}
	reply <- a
	return nil
}
