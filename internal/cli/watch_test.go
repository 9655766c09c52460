package cli

import (
	"bufio"
	"io"
	"strings"
	"testing"
	"time"
)

const (
	patience = 90 * time.Second
	poll     = 20 * time.Millisecond
)

// watcher reads a log as it is written.
type watcher struct {
	lines chan string
	seen  strings.Builder
}

func newWatcher(r io.Reader) *watcher {
	w := &watcher{lines: make(chan string, 1000)}
	go func() {
		defer close(w.lines)
		for s := bufio.NewScanner(r); s.Scan(); {
			w.lines <- s.Text()
		}
	}()
	return w
}

// until waits for a line that contains a text.
func (w *watcher) until(t *testing.T, text string) {
	t.Helper()
	for deadline := time.After(patience); ; {
		select {
		case line, open := <-w.lines:
			w.seen.WriteString(line + "\n")
			if !open {
				t.Fatalf("the log ended without %q:\n%s", text, w.seen.String())
			}
			if strings.Contains(line, text) {
				return
			}
		case <-deadline:
			t.Fatalf("no line with %q in the log:\n%s", text, w.seen.String())
		}
	}
}

// end reads the log to its end.
func (w *watcher) end() {
	for range w.lines {
	}
}
