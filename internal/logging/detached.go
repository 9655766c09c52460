package logging

import (
	"bytes"
	"context"
	"io"
	"strconv"
	"sync"
	"time"
)

// defaultHeld is how many bytes of lines a Detached keeps for a slow reader.
const defaultHeld = 1 << 20

// keptBuffer is the largest buffer that is kept for later lines.
const keptBuffer = 64 << 10

// Detached stands between the loggers and a stream that can be full, slow or
// broken: a pipe that nobody reads, a disk without room, a log collector that
// died. Write takes a line and returns; one goroutine passes lines on, several
// at once when they came quickly. Lines for which there is no room, or which
// the stream refuses, are lost and counted, and the stream is told how many as
// soon as it takes something again. What serves requests never waits for a log.
type Detached struct {
	out  io.Writer
	held int
	wake chan struct{} // one slot: there is something to write
	done chan struct{}

	mu      sync.Mutex
	pending []byte
	spare   []byte
	lost    uint64 // lines, in all
	told    uint64 // of these, reported in the stream
	closed  bool
}

// Detach starts the goroutine that writes to out; Close ends it.
func Detach(out io.Writer) *Detached {
	d := &Detached{out: out, held: defaultHeld, wake: make(chan struct{}, 1), done: make(chan struct{})}
	go d.run()
	return d
}

// Write takes over one or more whole lines. It never blocks and never fails.
func (d *Detached) Write(line []byte) (int, error) {
	d.mu.Lock()
	switch {
	case d.closed, len(d.pending)+len(line) > d.held:
		d.lost += countLines(line)
	default:
		d.pending = append(d.pending, line...)
		select {
		case d.wake <- struct{}{}:
		default:
		}
	}
	d.mu.Unlock()
	return len(line), nil
}

// Lost is how many lines did not reach the stream so far.
func (d *Detached) Lost() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lost
}

// Close writes what is held and ends the goroutine. When ctx ends first, its
// error is returned and the goroutine ends with the write that it is stuck in.
func (d *Detached) Close(ctx context.Context) error {
	d.mu.Lock()
	if !d.closed {
		d.closed = true
		close(d.wake)
	}
	d.mu.Unlock()
	select {
	case <-d.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (d *Detached) run() {
	defer close(d.done)
	torn := false // the stream ends in the middle of a line
	for range d.wake {
		torn = d.pass(torn)
	}
	d.pass(torn)
}

// pass writes all that is pending.
func (d *Detached) pass(torn bool) bool {
	d.mu.Lock()
	batch, report := d.pending, d.lost-d.told
	d.pending, d.spare = d.spare[:0], nil
	d.mu.Unlock()
	if len(batch) == 0 && report == 0 {
		return torn
	}
	var head []byte
	if torn {
		head = append(head, '\n')
	}
	if report > 0 {
		head = appendLoss(head, report)
	}
	if len(head) > 0 {
		n, err := d.out.Write(head)
		if err != nil {
			d.refused(batch)
			return torn || n > 0
		}
	}
	n, err := d.out.Write(batch)
	if err != nil {
		d.refused(batch[min(n, len(batch)):])
	}
	d.settle(batch, report)
	return err != nil && n > 0 && n < len(batch) && batch[n-1] != '\n'
}

// refused counts lines that the stream did not take.
func (d *Detached) refused(lines []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lost += countLines(lines)
}

// settle notes what the stream was told, and keeps the buffer for later unless a burst has made it large.
func (d *Detached) settle(batch []byte, reported uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.told += reported
	if cap(batch) <= keptBuffer {
		d.spare = batch
	}
}

func countLines(b []byte) uint64 { return uint64(bytes.Count(b, []byte{'\n'})) }

// appendLoss writes the line about lost lines by hand: it goes around the loggers, which would put it in the queue.
func appendLoss(dst []byte, lines uint64) []byte {
	dst = append(dst, `{"level":"warn","lines":`...)
	dst = strconv.AppendUint(dst, lines, 10)
	dst = append(dst, `,"time":"`...)
	dst = time.Now().UTC().AppendFormat(dst, time.RFC3339Nano)
	return append(dst, `","message":"log lines were lost: the stream was full or broken"}`+"\n"...)
}
