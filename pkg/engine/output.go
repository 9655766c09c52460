package engine

import (
	"bytes"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"
)

const (
	keptLines   = 50      // lines kept for the report of an engine's end
	maxLine     = 2 << 10 // bytes of a line that are kept and logged
	queuedLines = 256     // lines that may wait for a slow log
	cutMark     = " …(cut)"
)

// outputLog turns what the engine prints into log lines. It never blocks the
// engine: a line over the rate, or one for which the log is too slow, is only
// counted and kept for the last words.
type outputLog struct {
	log   zerolog.Logger
	lines chan outputLine
	done  chan struct{}

	mu      sync.Mutex
	last    [keptLines]keptLine
	total   uint64 // lines ever
	bucket  bucket
	dropped uint64 // lines not logged, ever
	unsaid  uint64 // of these, not yet mentioned in the log
	closed  bool
}

type keptLine struct{ text []byte }

type outputLine struct {
	stream, text string
	dropped      uint64
}

func newOutputLog(log zerolog.Logger, rate, burst int) *outputLog {
	o := &outputLog{
		log: log, lines: make(chan outputLine, queuedLines), done: make(chan struct{}),
		bucket: newBucket(rate, burst),
	}
	go o.run()
	return o
}

func (o *outputLog) run() {
	defer close(o.done)
	for l := range o.lines {
		ev := o.log.WithLevel(lineLevel(l.text)).Str("stream", l.stream).Str("line", l.text)
		if l.dropped > 0 {
			ev = ev.Uint64("dropped", l.dropped)
		}
		ev.Msg("engine output")
	}
}

// close ends the log. No writer may be used afterwards.
func (o *outputLog) close() {
	o.mu.Lock()
	if o.closed {
		o.mu.Unlock()
		return
	}
	o.closed = true
	unsaid := o.unsaid
	o.mu.Unlock()
	close(o.lines)
	<-o.done
	if unsaid > 0 {
		o.log.Warn().Uint64("dropped", unsaid).Msg("engine output lines were not logged: over the rate limit")
	}
}

// tail returns the last lines, oldest first, and the number not logged.
func (o *outputLog) tail() (lines []string, dropped uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	first := max(o.total, keptLines) - keptLines
	for i := first; i < o.total; i++ {
		lines = append(lines, string(o.last[i%keptLines].text))
	}
	return lines, o.dropped
}

func (o *outputLog) add(stream string, line []byte, now time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	kept := &o.last[o.total%keptLines]
	kept.text = append(kept.text[:0], line...)
	o.total++
	if o.closed || !o.bucket.take(now) {
		o.drop()
		return
	}
	select {
	case o.lines <- outputLine{stream: stream, text: string(line), dropped: o.unsaid}:
		o.unsaid = 0
	default:
		o.drop()
	}
}

func (o *outputLog) drop() {
	o.dropped++
	o.unsaid++
}

// writer returns the sink for one of the engine's output streams.
func (o *outputLog) writer(stream string) *lineWriter {
	return &lineWriter{out: o, stream: stream}
}

// lineWriter splits a stream into lines and cuts those that are too long. A
// carriage return ends a line too: progress bars write nothing else.
type lineWriter struct {
	out    *outputLog
	stream string
	part   []byte
	cut    bool // the line is over its bound; the rest of it is skipped
}

func (w *lineWriter) Write(p []byte) (int, error) {
	n := len(p)
	now := time.Now()
	for {
		i := bytes.IndexAny(p, "\n\r")
		if i < 0 {
			w.extend(p)
			return n, nil
		}
		w.extend(p[:i])
		p = p[i+1:]
		w.flush(now)
	}
}

func (w *lineWriter) extend(p []byte) {
	if room := maxLine - len(w.part); len(p) > room {
		p, w.cut = p[:room], true
	}
	w.part = append(w.part, p...)
}

func (w *lineWriter) flush(now time.Time) {
	if w.cut {
		w.part = append(w.part, cutMark...)
	}
	if len(bytes.TrimSpace(w.part)) > 0 {
		w.out.add(w.stream, w.part, now)
	}
	w.part, w.cut = w.part[:0], false
}

// finish logs a last line that has no end.
func (w *lineWriter) finish() { w.flush(time.Now()) }

// lineLevel guesses the level of an engine's line from the marks of
// TensorRT-LLM's logger and of Python. What cannot be told is information.
func lineLevel(line string) zerolog.Level {
	for _, m := range levelPrefixes {
		if strings.HasPrefix(line, m.mark) {
			return m.level
		}
	}
	head := line[:min(len(line), markWithin)]
	for _, m := range levelMarks {
		if strings.Contains(head, m.mark) {
			return m.level
		}
	}
	return zerolog.InfoLevel
}

type levelMark struct {
	mark  string
	level zerolog.Level
}

// markWithin is how far into a line TensorRT-LLM's mark is looked for: it comes
// after a timestamp and the logger's name.
const markWithin = 80

var (
	levelPrefixes = []levelMark{
		{"Traceback ", zerolog.ErrorLevel}, {"ERROR", zerolog.ErrorLevel}, {"panic:", zerolog.ErrorLevel},
		{"fatal error:", zerolog.ErrorLevel}, {"WARNING", zerolog.WarnLevel}, {"DEBUG", zerolog.DebugLevel},
	}
	levelMarks = []levelMark{
		{"[E]", zerolog.ErrorLevel}, {"[W]", zerolog.WarnLevel},
		{"[D]", zerolog.DebugLevel}, {"[V]", zerolog.DebugLevel},
	}
)

// bucket allows rate events a second and burst at once.
type bucket struct {
	perSecond, burst float64
	tokens           float64
	at               time.Time
}

func newBucket(rate, burst int) bucket {
	return bucket{perSecond: float64(rate), burst: float64(burst), tokens: float64(burst)}
}

func (b *bucket) take(now time.Time) bool {
	if !b.at.IsZero() {
		b.tokens = min(b.burst, b.tokens+max(0, now.Sub(b.at).Seconds())*b.perSecond)
	}
	b.at = now
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}
