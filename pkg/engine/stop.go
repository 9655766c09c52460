package engine

import (
	"context"
	"errors"
	"time"

	"dynworker/pkg/engine/ipc"
)

// Stop ends the engine and waits until it is gone: a shutdown message, then
// SIGTERM to the process group, then SIGKILL, each with its bound. When ctx
// ends first the rest is cut short to SIGKILL, and its cause is returned once
// the engine is gone. Calling it again waits for the same end.
//
// Streams that are still open get what the engine sends while it ends, then
// ErrEngineDead wrapping ErrStopped.
func (p *Process) Stop(ctx context.Context) error {
	p.requestStop()
	select {
	case <-p.done:
		return p.unkillable()
	case <-ctx.Done():
	}
	p.hurryOnce.Do(func() { close(p.hurry) })
	<-p.done
	return errors.Join(context.Cause(ctx), p.unkillable())
}

func (p *Process) requestStop() {
	p.mu.Lock() // no request may slip in behind the shutdown message
	defer p.mu.Unlock()
	p.stopOnce.Do(func() { close(p.stopping) })
}

// ErrUnkillable means that the engine's process was still there KillTimeout
// after SIGKILL; it is stuck in the kernel.
var ErrUnkillable = errors.New("engine process did not end after SIGKILL")

func (p *Process) unkillable() error {
	if p.run.pid() != 0 && p.exit.Status == nil {
		return ErrUnkillable
	}
	return nil
}

// supervise is the goroutine that decides about the engine's end. It alone
// signals the process, so no two orders of ending can mix.
func (p *Process) supervise() {
	defer close(p.done)
	asked, forced := false, false
	select {
	case <-p.stopping:
		asked = p.askToStop()
	case <-p.readerDone:
		if !p.hasCause() {
			p.settle(p.run.exited())
		}
	case <-p.run.exited():
	}
	p.channelOver()
	if !p.leavesByItself(asked) {
		forced = true
		p.force()
	}
	p.finish(forced)
}

// leavesByItself waits for an engine that has announced its end, unless it was
// asked to stop and has had its time for that.
func (p *Process) leavesByItself(asked bool) bool {
	p.mu.Lock()
	var fatal ipc.Fatal
	announced := p.goodbye != "" || errors.As(p.cause, &fatal)
	p.mu.Unlock()
	if !announced || asked {
		return closed(p.run.exited())
	}
	return p.await(p.run.exited(), p.cfg.TermTimeout)
}

// askToStop sends the shutdown message and waits for the engine to obey. An
// engine whose start failed is not asked: it may not even speak the protocol.
func (p *Process) askToStop() (asked bool) {
	if p.ready == nil {
		return false
	}
	deadline := ipc.Shutdown{DeadlineMillis: p.cfg.StopTimeout.Milliseconds()}
	if p.box.message(deadline) != nil {
		return false
	}
	p.await(p.run.exited(), p.cfg.StopTimeout)
	return true
}

// channelOver gives the reader a moment to read what a dead engine has left in
// the channel, and then tells everyone who waits. An engine that is still
// alive, or a descendant that keeps the channel open, cannot delay this.
func (p *Process) channelOver() {
	if closed(p.run.exited()) {
		p.settle(p.readerDone)
	}
	if closed(p.stopping) {
		p.setCause(ErrStopped)
	}
	p.setCause(p.whyDead())
	p.failAll()
}

// force ends a process that did not end by itself.
func (p *Process) force() {
	p.run.terminate()
	if p.await(p.run.exited(), p.cfg.TermTimeout) {
		return
	}
	p.run.kill()
	t := time.NewTimer(p.cfg.KillTimeout)
	defer t.Stop()
	select {
	case <-p.run.exited():
	case <-t.C:
	}
}

// await waits until what is closed or the time is over, less if there is hurry.
func (p *Process) await(what <-chan struct{}, bound time.Duration) bool {
	t := time.NewTimer(bound)
	defer t.Stop()
	select {
	case <-what:
		return true
	case <-p.hurry:
	case <-t.C:
	}
	return closed(what)
}

// failAll ends every stream and query with the cause of death.
func (p *Process) failAll() {
	p.mu.Lock()
	err := p.deadError()
	streams, queries := p.streams, p.queries
	p.streams, p.queries = make(map[uint64]*Stream), make(map[uint64]chan answer)
	p.mu.Unlock()
	p.box.close(err)
	for _, s := range streams {
		s.fail(err)
	}
	for _, reply := range queries {
		reply <- answer{err: err}
	}
	close(p.dead)
}

// finish ends the goroutines and writes the record of the engine's end.
func (p *Process) finish(forced bool) {
	_ = p.conn.Close() // also ends a reader or writer that is stuck in it
	<-p.readerDone
	<-p.writerDone
	p.run.release()
	p.out.close()
	lines, dropped := p.out.tail()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.exit = &Exit{
		Cause: p.cause, PID: p.run.pid(), Goodbye: p.goodbye, Forced: forced,
		Lines: lines, DroppedLines: dropped,
	}
	if closed(p.run.exited()) {
		p.exit.Status = p.run.status()
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
