package ipc

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
)

func frame(t *testing.T, k Kind, payload []byte) []byte {
	t.Helper()
	b, err := AppendFrame(nil, k, payload)
	require.NoError(t, err)
	return b
}

func TestAppendFrameLeavesThePrefixAlone(t *testing.T) {
	got, err := AppendFrame([]byte{9, 9}, KindQuery, []byte("ab"))
	require.NoError(t, err)
	require.Equal(t, []byte{9, 9, 2, 0, 0, 0, 10, 'a', 'b'}, got)
}

func TestEndFrameRefusesWhatNoReaderWouldTake(t *testing.T) {
	start := 1
	dst := BeginFrame([]byte{7}, KindOutputs)
	dst = append(dst, make([]byte, MaxPayload+1)...)
	dst, err := EndFrame(dst, start)
	var size *SizeError
	require.ErrorAs(t, err, &size)
	require.Equal(t, []byte{7}, dst)
}

func TestReaderFrames(t *testing.T) {
	big := bytes.Repeat([]byte("x"), 3*readBuffer)
	var stream []byte
	stream = append(stream, frame(t, KindHello, []byte("{}"))...)
	stream = append(stream, frame(t, KindOutputs, nil)...)
	stream = append(stream, frame(t, KindStats, big)...)
	stream = append(stream, frame(t, KindGoodbye, []byte("bye"))...)
	for name, src := range map[string]io.Reader{
		"whole":    bytes.NewReader(stream),
		"one byte": iotest.OneByteReader(bytes.NewReader(stream)),
		"half":     iotest.HalfReader(bytes.NewReader(stream)),
		"data+err": iotest.DataErrReader(bytes.NewReader(stream)),
	} {
		t.Run(name, func(t *testing.T) {
			r := NewReader(src, 0)
			for _, want := range []struct {
				kind    Kind
				payload []byte
			}{{KindHello, []byte("{}")}, {KindOutputs, []byte{}}, {KindStats, big}, {KindGoodbye, []byte("bye")}} {
				kind, payload, err := r.Next()
				require.NoError(t, err)
				require.Equal(t, want.kind, kind)
				require.True(t, bytes.Equal(want.payload, payload))
			}
			_, _, err := r.Next()
			require.Equal(t, io.EOF, err)
			_, _, err = r.Next()
			require.Equal(t, io.EOF, err, "the end is final")
		})
	}
}

func TestReaderEndsInsideAFrame(t *testing.T) {
	whole := frame(t, KindHello, []byte("{}"))
	for cut := 1; cut < len(whole); cut++ {
		_, _, err := NewReader(bytes.NewReader(whole[:cut]), 0).Next()
		require.ErrorIs(t, err, io.ErrUnexpectedEOF, "cut at %d", cut)
	}
}

func TestReaderRefusesBeforeAllocating(t *testing.T) {
	for name, tc := range map[string]struct {
		stream []byte
		limit  int
		want   any
	}{
		"over the protocol's limit": {[]byte{1, 0, 0, 4, 7}, 0, new(*SizeError)},
		"over the reader's limit":   {[]byte{101, 0, 0, 0, 7}, 100, new(*SizeError)},
		"kind 0":                    {[]byte{0, 0, 0, 0, 0}, 0, new(*KindError)},
		"kind 15":                   {[]byte{0, 0, 0, 0, 15}, 0, new(*KindError)},
		"a line of text":            {[]byte("Loading weights: 12%\n"), 0, new(*SizeError)},
	} {
		t.Run(name, func(t *testing.T) {
			r := NewReader(bytes.NewReader(tc.stream), tc.limit)
			_, _, err := r.Next()
			require.ErrorAs(t, err, tc.want)
			_, _, again := r.Next()
			require.Equal(t, err, again)
		})
	}
}

// A header may claim 64 MiB and then send nothing; memory must follow what
// arrives.
func TestReaderMemoryFollowsArrivedBytes(t *testing.T) {
	r := NewReader(io.MultiReader(bytes.NewReader([]byte{0, 0, 0, 4, 7}), iotest.ErrReader(io.ErrClosedPipe)), 0)
	_, _, err := r.Next()
	require.ErrorIs(t, err, io.ErrClosedPipe)

	r = NewReader(io.MultiReader(bytes.NewReader([]byte{0, 0, 0, 4, 7}), bytes.NewReader(make([]byte, 100)), blockOnce{}), 0)
	require.Panics(t, func() { r.Next() })
	require.LessOrEqual(t, len(r.buf), readBuffer)
}

// blockOnce stands for a peer that sends nothing more: reaching it ends the test's read.
type blockOnce struct{}

func (blockOnce) Read([]byte) (int, error) { panic("would block") }

func TestReaderGivesLargeBuffersBack(t *testing.T) {
	stream := frame(t, KindStats, make([]byte, 2*keepBuffer))
	stream = append(stream, frame(t, KindHello, []byte("{}"))...)
	r := NewReader(iotest.HalfReader(bytes.NewReader(stream)), 0)
	_, _, err := r.Next()
	require.NoError(t, err)
	_, _, err = r.Next()
	require.NoError(t, err)
	_, _, err = r.Next()
	require.Equal(t, io.EOF, err)
	require.LessOrEqual(t, cap(r.buf), keepBuffer)
}

func TestReaderBuffered(t *testing.T) {
	one := frame(t, KindHello, []byte("{}"))
	r := NewReader(bytes.NewReader(append(append([]byte{}, one...), one[:6]...)), 0)
	require.False(t, r.Buffered())
	_, _, err := r.Next()
	require.NoError(t, err)
	require.False(t, r.Buffered(), "only part of a frame follows")

	r = NewReader(bytes.NewReader(append(append([]byte{}, one...), one...)), 0)
	_, _, err = r.Next()
	require.NoError(t, err)
	require.True(t, r.Buffered())
}

func TestReaderSurvivesAnImpossibleCount(t *testing.T) {
	_, _, err := NewReader(liar{}, 0).Next()
	require.Error(t, err)
}

type liar struct{}

func (liar) Read(p []byte) (int, error) { return len(p) + 1, nil }

func TestKindNames(t *testing.T) {
	for k := KindHello; k <= KindFatal; k++ {
		require.NotEmpty(t, k.String())
	}
	require.Equal(t, "kind 99", Kind(99).String())
	require.False(t, Kind(0).Valid())
	require.False(t, KindGenerate.FromEngine())
	require.True(t, KindFatal.FromEngine())
}

// FuzzReader feeds the same bytes whole and in two halves, and compares with
// splitting by hand.
func FuzzReader(f *testing.F) {
	f.Add([]byte{}, 0)
	f.Add([]byte{2, 0, 0, 0, 1, '{', '}', 0, 0, 0, 0, 7}, 4)
	f.Add([]byte{255, 255, 255, 255, 7}, 2)
	f.Add([]byte("Loading weights"), 3)
	f.Fuzz(func(t *testing.T, stream []byte, cut int) {
		cut = max(0, min(cut, len(stream)))
		const limit = 1 << 16
		whole, wholeErr := drain(NewReader(bytes.NewReader(stream), limit))
		split, splitErr := drain(NewReader(io.MultiReader(bytes.NewReader(stream[:cut]), bytes.NewReader(stream[cut:])), limit))
		require.Equal(t, whole, split)
		require.Equal(t, wholeErr.Error(), splitErr.Error())
		var again []byte
		for _, fr := range whole {
			again = append(again, frame(t, Kind(fr[0]), fr[1:])...)
		}
		require.True(t, bytes.HasPrefix(stream, again))
		if errors.Is(wholeErr, io.EOF) && wholeErr == io.EOF {
			require.Equal(t, len(stream), len(again))
		}
	})
}

// drain returns kind and payload of every frame, and the error that ended it.
func drain(r *Reader) ([][]byte, error) {
	var all [][]byte
	for {
		kind, payload, err := r.Next()
		if err != nil {
			return all, err
		}
		all = append(all, append([]byte{byte(kind)}, payload...))
	}
}
