package logging

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stuck is a stream whose every write waits for a word: the number of bytes that it takes, and an error when that is not all.
type stuck struct {
	entered chan []byte
	let     chan int
	got     bytes.Buffer
}

func newStuck() *stuck { return &stuck{entered: make(chan []byte), let: make(chan int)} }

var errFull = errors.New("no space left on device")

func (s *stuck) Write(p []byte) (int, error) {
	s.entered <- bytes.Clone(p)
	n := <-s.let
	if n < 0 || n >= len(p) {
		s.got.Write(p)
		return len(p), nil
	}
	s.got.Write(p[:n])
	return n, errFull
}

const all = -1

func TestNobodyWaitsForALogThatIsNotRead(t *testing.T) {
	out := newStuck()
	d := Detach(out)
	d.held = 100
	line := []byte(strings.Repeat("x", 39) + "\n")
	_, _ = d.Write(line)
	require.Len(t, <-out.entered, 40)
	for range 5 { // two find room, three do not
		n, err := d.Write(line)
		require.NoError(t, err)
		require.Equal(t, 40, n)
	}
	require.EqualValues(t, 3, d.Lost())
	out.let <- all
	require.Contains(t, string(<-out.entered), `"lines":3,`, "the loss is told first")
	out.let <- all
	require.Len(t, <-out.entered, 80, "what was held goes out at once")
	out.let <- all
	require.NoError(t, d.Close(t.Context()))
	require.EqualValues(t, 3, d.Lost())
}

func TestAFullDiskCostsLinesAndNothingElse(t *testing.T) {
	out := newStuck()
	d := Detach(out)
	_, _ = d.Write([]byte("first\n"))
	<-out.entered
	out.let <- 2 // torn
	_, _ = d.Write([]byte("second\n"))
	require.Contains(t, string(<-out.entered), "\n{", "a torn line is ended")
	out.let <- 0
	_, _ = d.Write([]byte("third\n"))
	head := string(<-out.entered)
	require.Contains(t, head, `"lines":2,`)
	out.let <- all
	require.Equal(t, "third\n", string(<-out.entered))
	out.let <- all
	require.NoError(t, d.Close(t.Context()))
	require.Equal(t, "fi"+head+"third\n", out.got.String())
	require.EqualValues(t, 2, d.Lost())
}

func TestCloseIsBoundedAndWritesWhatIsHeld(t *testing.T) {
	out := newStuck()
	d := Detach(out)
	_, _ = d.Write([]byte("a\n"))
	<-out.entered
	_, _ = d.Write([]byte("b\n"))
	over, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, d.Close(over), context.Canceled)
	_, _ = d.Write([]byte("too late\n"))
	out.let <- all
	require.Contains(t, string(<-out.entered), `"lines":1,`)
	out.let <- all
	require.Equal(t, "b\n", string(<-out.entered))
	out.let <- all
	require.NoError(t, d.Close(t.Context()))
}

func TestLinesOfManyStayWholeAndInOrder(t *testing.T) {
	var out bytes.Buffer
	d := Detach(&out)
	log, err := New(Options{Writer: d})
	require.NoError(t, err)
	done := make(chan struct{})
	for g := range 8 {
		go func() {
			defer func() { done <- struct{}{} }()
			for i := range 200 {
				log.Info().Int("g", g).Int("i", i).Msg("line")
			}
		}()
	}
	for range 8 {
		<-done
	}
	require.NoError(t, d.Close(t.Context()))
	next := map[string]float64{}
	got := lines(t, &out)
	require.Len(t, got, 1600)
	for _, l := range got {
		g := fmt.Sprint(l["g"])
		require.Equal(t, next[g], l["i"])
		next[g]++
	}
}
