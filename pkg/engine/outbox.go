package engine

import (
	"context"
	"io"
	"sync"

	"dynworker/pkg/engine/ipc"
)

// outbox is the queue of frames to the engine. Whoever sends only appends to
// it; one goroutine writes. An engine that does not read therefore delays new
// requests (they wait for room) but never a cancel, and never the goroutine
// that reads from the engine.
type outbox struct {
	limit int
	wake  chan struct{}

	mu    sync.Mutex
	buf   []byte
	spare []byte        // the buffer of the last write, for reuse
	room  chan struct{} // closed when the queue has been taken; nil when nobody waits
	err   error         // set when nothing can be sent any more
}

// keepSpare is the largest buffer kept for reuse.
const keepSpare = 1 << 20

func newOutbox(limit int) *outbox {
	return &outbox{limit: limit, wake: make(chan struct{}, 1)}
}

// append queues one frame, which fn appends to the slice it is given (on an
// error fn returns the slice as it was). It waits while the queue is full.
func (o *outbox) append(ctx context.Context, size int, fn func([]byte) ([]byte, error)) error {
	for {
		wait, err := o.tryAppend(size, fn)
		if wait == nil {
			return err
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// tryAppend returns a channel to wait for when there is no room.
func (o *outbox) tryAppend(size int, fn func([]byte) ([]byte, error)) (wait <-chan struct{}, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.err != nil:
		return nil, o.err
	case len(o.buf) > 0 && len(o.buf)+size > o.limit:
		if o.room == nil {
			o.room = make(chan struct{})
		}
		return o.room, nil
	}
	if o.buf, err = fn(o.buf); err != nil {
		return nil, err
	}
	o.signal()
	return nil, nil
}

// cancel queues a cancel whatever the size of the queue: there is at most one
// for each request in flight.
func (o *outbox) cancel(id uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err == nil {
		o.buf = ipc.AppendCancel(o.buf, id)
		o.signal()
	}
}

// message queues a control message whatever the size of the queue.
func (o *outbox) message(m ipc.Message) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err != nil {
		return o.err
	}
	buf, err := ipc.AppendMessage(o.buf, m)
	if err != nil {
		return err
	}
	o.buf = buf
	o.signal()
	return nil
}

func (o *outbox) signal() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// close makes every send fail with err, releases those that wait and ends run.
func (o *outbox) close(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err == nil {
		o.err = err
	}
	o.buf = nil
	o.release()
	o.signal()
}

func (o *outbox) release() {
	if o.room != nil {
		close(o.room)
		o.room = nil
	}
}

// take returns what is to be written next, all of it.
func (o *outbox) take() (b []byte, open bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err != nil {
		return nil, false
	}
	b = o.buf
	o.buf, o.spare = o.spare[:0], nil
	o.release()
	return b, true
}

func (o *outbox) giveBack(b []byte) {
	if cap(b) > keepSpare {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.spare = b
}

// run writes until the outbox is closed or a write fails, and returns the
// write's error.
func (o *outbox) run(w io.Writer) error {
	for range o.wake {
		b, open := o.take()
		if !open {
			return nil
		}
		if len(b) > 0 {
			if _, err := w.Write(b); err != nil {
				return err
			}
		}
		o.giveBack(b)
	}
	return nil
}
