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
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
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
	c := Component(l, "ingress")
	c.Info().Err(errors.New("no route")).Uint64("instance", 9041999001292625271).Msg("request refused")
	l.Debug().Msg("below the default level")

	got := lines(t, &b)
	require.Len(t, got, 1)
	require.Equal(t, "info", got[0]["level"])
	require.Equal(t, "request refused", got[0]["message"])
	require.Equal(t, "no route", got[0]["err"])
	require.Equal(t, "ingress", got[0]["component"])
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

func TestZapCore(t *testing.T) {
	var b bytes.Buffer
	l, err := New(Options{Writer: &b, Level: "debug"})
	require.NoError(t, err)
	z := zap.New(ZapCore(Component(l, "etcd"), zapcore.WarnLevel)).Named("client")

	z.Info("retrying")
	z.Warn("lost", zap.Error(errors.New("eof")), zap.Int64("lease", 7587899271399171224), zap.String("message", "theirs"))
	z.With(zap.String("target", "etcd-0")).Error("gone", zap.Duration("after", time.Second), zap.Strings("endpoints", []string{"a", "b"}))

	got := lines(t, &b)
	require.Len(t, got, 2, "info is below the core's own floor")
	require.Equal(t, "lost", got[0]["message"])
	require.Equal(t, "theirs", got[0]["lib_message"])
	require.Equal(t, "eof", got[0]["err"])
	require.Equal(t, "etcd", got[0]["component"])
	require.Equal(t, "client", got[0]["logger"])
	require.Contains(t, b.String(), `"lease":7587899271399171224`)
	require.Equal(t, "error", got[1]["level"])
	require.Equal(t, "etcd-0", got[1]["target"])
	require.Equal(t, []any{"a", "b"}, got[1]["endpoints"])
}

func TestZapCoreFollowsTheLoggersLevel(t *testing.T) {
	var b bytes.Buffer
	for level, want := range map[string]bool{"info": true, "warn": true, "error": false, "off": false} {
		l, err := New(Options{Writer: &b, Level: level})
		require.NoError(t, err)
		require.Equal(t, want, ZapCore(l, zapcore.DebugLevel).Enabled(zapcore.WarnLevel), level)
	}
	require.Empty(t, b.String())
}

func TestZapCoreChildrenDoNotShareFields(t *testing.T) {
	var b bytes.Buffer
	l, err := New(Options{Writer: &b})
	require.NoError(t, err)
	parent := ZapCore(l, zapcore.InfoLevel).With([]zapcore.Field{zap.Int("p", 0)})
	one := parent.With([]zapcore.Field{zap.Int("n", 1)})
	two := parent.With([]zapcore.Field{zap.Int("n", 2)})
	require.NoError(t, one.Write(zapcore.Entry{Level: zapcore.InfoLevel, Message: "one"}, nil))
	require.NoError(t, two.Write(zapcore.Entry{Level: zapcore.InfoLevel, Message: "two"}, nil))
	require.NoError(t, one.Sync())
	got := lines(t, &b)
	require.EqualValues(t, 1, got[0]["n"])
	require.EqualValues(t, 2, got[1]["n"])
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
	z := zap.New(ZapCore(l, zapcore.InfoLevel))
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 100 {
				l.Info().Str("k", "v").Msg("ours")
				z.Info("theirs", zap.Int("i", 1))
			}
		})
	}
	wg.Wait()
	require.Equal(t, 1600, w.n)
	require.True(t, w.whole)
}
