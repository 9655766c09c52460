package engine

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
)

func TestLevelsOfEngineLines(t *testing.T) {
	for line, want := range map[string]zerolog.Level{
		"[12/01/2026-04:00:00] [TRT-LLM] [E] out of memory": zerolog.ErrorLevel,
		"[12/01/2026-04:00:00] [TRT-LLM] [RANK 0] [W] slow": zerolog.WarnLevel,
		"[12/01/2026-04:00:00] [TRT-LLM] [I] all well":      zerolog.InfoLevel,
		"[12/01/2026-04:00:00] [TRT-LLM] [D] detail":        zerolog.DebugLevel,
		"[TRT-LLM] [V] much detail":                         zerolog.DebugLevel,
		"Traceback (most recent call last):":                zerolog.ErrorLevel,
		"ERROR: no device":                                  zerolog.ErrorLevel,
		"panic: runtime error":                              zerolog.ErrorLevel,
		"WARNING:root:old option":                           zerolog.WarnLevel,
		"DEBUG:x":                                           zerolog.DebugLevel,
		"Loading weights: 12%":                              zerolog.InfoLevel,
		"":                                                  zerolog.InfoLevel,
		strings.Repeat("a long text ", 20) + "with [E] somewhere in": zerolog.InfoLevel,
	} {
		require.Equal(t, want, lineLevel(line), line)
	}
}

func TestBucket(t *testing.T) {
	now := time.Unix(1000, 0)
	b := newBucket(2, 3)
	take := func(after time.Duration) bool {
		now = now.Add(after)
		return b.take(now)
	}
	for range 3 {
		require.True(t, take(0), "the burst")
	}
	require.False(t, take(0))
	require.True(t, take(500*time.Millisecond), "two a second")
	require.False(t, take(499*time.Millisecond))
	require.False(t, take(-time.Hour), "a clock that goes back gives nothing")
	for range 3 {
		require.True(t, take(time.Hour/3), "no more than the burst is saved up")
	}
	require.True(t, take(0))
	require.True(t, take(0))
	require.False(t, take(0))
}

// gate is a log that is stuck until it is opened.
type gate struct{ open chan struct{} }

func (g gate) Write(p []byte) (int, error) {
	<-g.open
	return len(p), nil
}

// A log that does not take lines costs lines, never the engine's time.
func TestStuckLogDoesNotBlockTheEngine(t *testing.T) {
	g := gate{open: make(chan struct{})}
	o := newOutputLog(zerolog.New(g), 1_000_000, 1_000_000)
	w := o.writer("stdout")
	for i := range 10 * queuedLines {
		_, err := fmt.Fprintf(w, "line %d\n", i)
		require.NoError(t, err)
	}
	lines, dropped := o.tail()
	require.Len(t, lines, keptLines)
	require.Equal(t, fmt.Sprintf("line %d", 10*queuedLines-1), lines[keptLines-1])
	require.GreaterOrEqual(t, dropped, uint64(9*queuedLines-2))
	close(g.open)
	o.close()
	o.close()
}

// Lines come in pieces, several at once, and from programs that rewrite theirs.
func TestLinesAreSplit(t *testing.T) {
	o := newOutputLog(zerolog.Nop(), 1000, 1000)
	defer o.close()
	w := o.writer("stdout")
	for _, piece := range []string{"one", " line\ntwo\n\n \nbar 1%\rbar 2%\r\n", "last"} {
		n, err := w.Write([]byte(piece))
		require.NoError(t, err)
		require.Equal(t, len(piece), n)
	}
	lines, _ := o.tail()
	require.Equal(t, []string{"one line", "two", "bar 1%", "bar 2%"}, lines)
	w.finish()
	lines, _ = o.tail()
	require.Equal(t, "last", lines[4])
}

func TestRateLimitedSpeech(t *testing.T) {
	r := rateLimited{every: time.Hour}
	var said []uint64
	for range 5 {
		r.say(func(n uint64) { said = append(said, n) })
	}
	require.Equal(t, []uint64{1}, said)
	r.last = r.last.Add(-2 * time.Hour)
	r.say(func(n uint64) { said = append(said, n) })
	require.Equal(t, []uint64{1, 5}, said)
}

func BenchmarkFloodOfLines(b *testing.B) {
	o := newOutputLog(zerolog.Nop(), 50, 200)
	defer o.close()
	w := o.writer("stderr")
	lines := []byte(strings.Repeat("[TRT-LLM] [W] something is not as it should be, again\n", 100))
	b.SetBytes(int64(len(lines)))
	for b.Loop() {
		_, _ = w.Write(lines)
	}
}
