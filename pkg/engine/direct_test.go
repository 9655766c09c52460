package engine

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/engine/ipc"
)

// parked waits until a stream's reader waits.
func parked(t testing.TB, s *Stream) {
	t.Helper()
	require.Eventually(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.parked
	}, time.Minute, 100*time.Microsecond)
}

// reading calls Next until the stream ends and hands over what it returned.
func reading(ctx context.Context, s *Stream) (outs <-chan []ipc.Output, end <-chan error) {
	got, ended := make(chan []ipc.Output, 100), make(chan error, 1)
	go func() {
		for {
			o, err := s.Next(ctx)
			if err != nil {
				ended <- err
				return
			}
			kept := make([]ipc.Output, len(o))
			for i := range o {
				kept[i] = ipc.Output{Tokens: append([]uint32{}, o[i].Tokens...), Last: o[i].Last}
			}
			got <- kept
		}
	}()
	return got, ended
}

func TestTokensGoByAReaderThatWaits(t *testing.T) {
	p, other := attach(t, Config{})
	s := generate(t, p, other, ipc.Generate{})
	var direct []uint32
	taken, whole := true, true
	s.SetDirect(func(o *ipc.Output) (bool, bool) {
		if taken {
			direct = append(direct, o.Tokens...)
		}
		return taken, whole
	})
	outs, end := reading(t.Context(), s)
	say := func(tokens ...uint32) {
		parked(t, s)
		other.outputs(ipc.Output{ID: s.ID(), Tokens: tokens})
		flush(t, p, other)
	}
	say(1)
	say(2, 3)
	require.Equal(t, []uint32{1, 2, 3}, direct)
	require.Empty(t, outs, "the reader has slept through it")

	taken = false
	say(4)
	require.Equal(t, []uint32{4}, (<-outs)[0].Tokens, "what is not taken is left to the reader")

	taken, whole = true, false
	say(5)
	require.Empty(t, <-outs, "the reader has to see to the rest")
	require.Equal(t, []uint32{1, 2, 3, 5}, direct)

	whole = true
	parked(t, s)
	other.outputs(ipc.Output{ID: s.ID(), Tokens: []uint32{6}, Meta: &ipc.Meta{FinishReason: "stop"}})
	require.Equal(t, []uint32{6}, (<-outs)[0].Tokens, "what says more than tokens is the reader's")
	parked(t, s)
	other.outputs(ipc.Output{ID: s.ID(), Tokens: []uint32{7}, Last: true})
	require.Equal(t, []uint32{7}, (<-outs)[0].Tokens)
	require.Equal(t, io.EOF, <-end)
	require.Equal(t, []uint32{1, 2, 3, 5}, direct)
}

func TestNothingOvertakesWhatIsPending(t *testing.T) {
	p, other := attach(t, Config{})
	s := generate(t, p, other, ipc.Generate{})
	s.SetDirect(func(*ipc.Output) (bool, bool) {
		t.Error("taken although the reader does not wait")
		return true, true
	})
	for i := range uint32(3) {
		other.outputs(ipc.Output{ID: s.ID(), Tokens: []uint32{i}})
	}
	other.outputs(ipc.Output{ID: s.ID(), Last: true})
	flush(t, p, other)
	require.Equal(t, map[uint16][]uint32{0: {0, 1, 2}}, collect(t, s))
}

func TestOnlySmallStepsInTimeAreDirect(t *testing.T) {
	for name, c := range map[string]struct {
		records int
		behind  bool
		n       int64
		direct  bool
	}{
		"small":           {records: directLimit, n: 1, direct: true},
		"large":           {records: directLimit + 1, n: 1},
		"behind":          {records: 1, behind: true, n: 1},
		"several choices": {records: 1, n: 2},
	} {
		t.Run(name, func(t *testing.T) {
			p, other := attach(t, Config{})
			s := generate(t, p, other, ipc.Generate{Sampling: ipc.Sampling{N: &c.n}})
			direct := 0
			s.SetDirect(func(*ipc.Output) (bool, bool) { direct++; return true, true })
			outs, end := reading(t.Context(), s)
			parked(t, s)
			var frame []byte
			for range c.records {
				frame = append(ipc.AppendRecordHead(frame, s.ID(), 0, 0, 1), 42, 0, 0, 0)
			}
			d := demux{p: p, behind: c.behind}
			require.NoError(t, d.handle(ipc.KindOutputs, frame))
			if c.direct {
				require.Equal(t, c.records, direct)
			} else {
				require.NotEmpty(t, <-outs)
				require.Zero(t, direct)
			}
			s.Close()
			require.ErrorIs(t, <-end, ErrClosed)
		})
	}
}

// What a direct uses belongs to the reader as soon as Next has returned, however it returns. The race detector is the judge.
func TestADirectNeverRunsBesideItsReader(t *testing.T) {
	p, other := attach(t, Config{})
	s := generate(t, p, other, ipc.Generate{})
	shared := 0
	s.SetDirect(func(*ipc.Output) (bool, bool) { shared++; return true, shared%7 != 0 })
	const rounds = 300
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range rounds {
			other.outputs(ipc.Output{ID: s.ID(), Tokens: []uint32{1}})
		}
	}()
	why := errors.New("enough")
	for over := false; !over; {
		ctx, cancel := context.WithCancelCause(bounded(t))
		go cancel(why)
		_, err := s.Next(ctx)
		shared++
		if err != nil {
			require.Equal(t, why, err)
		}
		select {
		case <-done:
			over = true
		default:
		}
	}
	s.Close()
}

// A token that goes directly costs no allocation either.
func TestDirectDoesNotAllocate(t *testing.T) {
	p, other := attach(t, Config{})
	s := generate(t, p, other, ipc.Generate{})
	s.SetDirect(func(*ipc.Output) (bool, bool) { return true, true })
	_, end := reading(t.Context(), s)
	parked(t, s)
	frame := append(ipc.AppendRecordHead(nil, s.ID(), 0, 0, 1), 42, 0, 0, 0)
	d := demux{p: p}
	step := func() {
		if err := d.handle(ipc.KindOutputs, frame); err != nil {
			panic(err)
		}
	}
	step()
	require.Zero(t, testing.AllocsPerRun(200, step))
	s.Close()
	require.ErrorIs(t, <-end, ErrClosed)
}
