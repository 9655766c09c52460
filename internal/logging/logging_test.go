package logging

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func lines(t *testing.T, b *bytes.Buffer) []map[string]any {
	t.Helper()
	var out []map[string]any
	for line := range strings.Lines(b.String()) {
		var m map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &m), line)
		out = append(out, m)
	}
	return out
}

func TestNewWritesOneJSONObjectALine(t *testing.T) {
	var b bytes.Buffer
	l, err := New(Options{Writer: &b})
	require.NoError(t, err)
	l.Info().Err(errors.New("no route")).Uint64("instance", 9041999001292625271).Msg("request refused")
	l.Debug().Msg("below the default level")

	got := lines(t, &b)
	require.Len(t, got, 1)
	require.Equal(t, "info", got[0]["level"])
	require.Equal(t, "request refused", got[0]["message"])
	require.Equal(t, "no route", got[0]["err"])
	require.Contains(t, b.String(), `"instance":9041999001292625271`, "ids keep all digits")
	at, err := time.Parse(time.RFC3339Nano, got[0]["time"].(string))
	require.NoError(t, err)
	require.Equal(t, time.UTC, at.Location())
}

func TestLevels(t *testing.T) {
	written := map[string]int{"trace": 5, "debug": 4, "info": 3, "": 3, "warn": 2, "error": 1, "off": 0}
	for name, want := range written {
		var b bytes.Buffer
		l, err := New(Options{Writer: &b, Level: name})
		require.NoError(t, err)
		l.Trace().Msg("t")
		l.Debug().Msg("d")
		l.Info().Msg("i")
		l.Warn().Msg("w")
		l.Error().Msg("e")
		require.Len(t, lines(t, &b), want, "level %q", name)
	}
	for _, name := range Levels {
		_, err := ParseLevel(name)
		require.NoError(t, err)
	}
}

func TestNewRefuses(t *testing.T) {
	_, err := New(Options{Writer: &bytes.Buffer{}, Level: "loud"})
	var le *LevelError
	require.ErrorAs(t, err, &le)
	require.Equal(t, "loud", le.Level)
	require.ErrorContains(t, err, "warn")

	_, err = New(Options{Writer: &bytes.Buffer{}, Format: "xml"})
	var fe *FormatError
	require.ErrorAs(t, err, &fe)
	require.Equal(t, Format("xml"), fe.Format)

	_, err = New(Options{})
	require.Error(t, err)
}

func TestConsole(t *testing.T) {
	var b bytes.Buffer
	l, err := New(Options{Writer: &b, Format: Console})
	require.NoError(t, err)
	l.Warn().Str("address", "nats://host").Msg("connection lost")
	require.Regexp(t, `^\d\d:\d\d:\d\d\.\d{3} WRN connection lost address=nats://host\n$`, b.String())

	b.Reset()
	l, err = New(Options{Writer: &b, Format: Console, Color: true})
	require.NoError(t, err)
	l.Warn().Msg("x")
	require.Contains(t, b.String(), "\x1b[")
}

// syncWriter checks what the package comment promises: one Write a line.
type syncWriter struct {
	mu    sync.Mutex
	whole bool
	n     int
}

func (w *syncWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.n++
	w.whole = w.whole && bytes.Count(p, []byte("\n")) == 1 && p[len(p)-1] == '\n'
	return len(p), nil
}

func TestConcurrentUse(t *testing.T) {
	w := &syncWriter{whole: true}
	l, err := New(Options{Writer: w})
	require.NoError(t, err)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 100 {
				l.Info().Str("k", "v").Msg("ours")
			}
		})
	}
	wg.Wait()
	require.Equal(t, 800, w.n)
	require.True(t, w.whole)
}
