package wire

import (
	"bytes"
	"errors"
	"io"
	"math"
	"os"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
)

// readAll collects copies of all frames.
func readAll(r *Reader) ([]Frame, error) {
	var frames []Frame
	for {
		f, err := r.Next()
		if err != nil {
			return frames, err
		}
		frames = append(frames, Frame{Header: bytes.Clone(f.Header), Data: bytes.Clone(f.Data)})
	}
}

// requireFrames compares byte by byte; cmp would be too slow for the thousands
// of comparisons that the tests at every position make.
func requireFrames(t testing.TB, want, got []Frame) {
	t.Helper()
	require.Len(t, got, len(want))
	for i := range want {
		if !bytes.Equal(want[i].Header, got[i].Header) || !bytes.Equal(want[i].Data, got[i].Data) {
			require.Equal(t, want[i], got[i], "frame %d", i)
		}
	}
}

// twoPieces gives a stream in two reads.
type twoPieces struct{ a, b []byte }

func (p *twoPieces) Read(b []byte) (int, error) {
	if len(p.a) == 0 {
		p.a, p.b = p.b, nil
	}
	if len(p.a) == 0 {
		return 0, io.EOF
	}
	n := copy(b, p.a)
	p.a = p.a[n:]
	return n, nil
}

func frameBytes(frames []Frame) int {
	n := 0
	for _, f := range frames {
		n += FrameHeaderLen + len(f.Header) + len(f.Data)
	}
	return n
}

func TestReaderOnRecordings(t *testing.T) {
	for name, b := range recordings(t, "response-*.bin") {
		b = b[:min(len(b), 20000)] // the killed stream is long
		if frames, err := naiveFrames(b, wide); err != nil {
			b = b[:frameBytes(frames)]
		}
		want, err := naiveFrames(b, wide)
		require.NoError(t, err)
		for how, r := range map[string]io.Reader{
			"whole":           bytes.NewReader(b),
			"byte by byte":    iotest.OneByteReader(bytes.NewReader(b)),
			"halves":          iotest.HalfReader(bytes.NewReader(b)),
			"error with data": iotest.DataErrReader(bytes.NewReader(b)),
		} {
			t.Run(name+" "+how, func(t *testing.T) {
				got, err := readAll(NewReader(r, wide))
				require.Equal(t, io.EOF, err)
				requireFrames(t, want, got)
			})
		}
	}
}

// Every place where a stream can be cut in two gives the same frames, and every
// place where it can end gives the frames before it and the right error.
func TestReaderAtEveryPosition(t *testing.T) {
	b := recordings(t, "response-01.bin")["response-01.bin"]
	want, err := naiveFrames(b, wide)
	require.NoError(t, err)
	for i := range len(b) + 1 {
		got, err := readAll(NewReader(&twoPieces{b[:i], b[i:]}, wide))
		require.Equal(t, io.EOF, err)
		requireFrames(t, want, got)

		short, naiveErr := naiveFrames(b[:i], wide)
		got, err = readAll(NewReader(bytes.NewReader(b[:i]), wide))
		requireFrames(t, short, got)
		if naiveErr == nil {
			require.Equal(t, io.EOF, err)
		} else {
			require.Equal(t, io.ErrUnexpectedEOF, err)
		}
	}
}

func TestReaderLimits(t *testing.T) {
	first := AppendControl(nil, ControlStop)
	for name, c := range map[string]struct {
		second []byte
		want   *SizeError
	}{
		"header": {AppendFrame(nil, make([]byte, 65), nil), &SizeError{Part: PartHeader, Size: 65, Limit: 64}},
		"data":   {AppendFrame(nil, nil, make([]byte, 11)), &SizeError{Part: PartData, Size: 11, Limit: 10}},
	} {
		t.Run(name, func(t *testing.T) {
			r := NewReader(bytes.NewReader(append(first[:len(first):len(first)], c.second...)), Limits{64, 10})
			_, err := r.Next()
			require.NoError(t, err)
			for range 2 { // the stream stays unusable
				_, err = r.Next()
				require.Equal(t, c.want, err)
			}
		})
	}
}

// A head that announces 32 MiB gets no memory for them until they come.
func TestReaderTakesMemoryAsBytesCome(t *testing.T) {
	head := AppendFrameHead(nil, 0, MaxMessage)
	r := NewReader(io.MultiReader(bytes.NewReader(head), bytes.NewReader(make([]byte, 1000))), wide)
	_, err := r.Next()
	require.Equal(t, io.ErrUnexpectedEOF, err)
	require.Less(t, cap(r.buf), 4096)

	huge := AppendFrameHead(nil, math.MaxInt, math.MaxInt)
	r = NewReader(bytes.NewReader(huge), Limits{^uint64(0), ^uint64(0)})
	_, err = r.Next()
	var size *SizeError
	require.ErrorAs(t, err, &size)
}

// A long frame may not leave its buffer behind for the life of the stream.
func TestReaderGivesLargeBufferBack(t *testing.T) {
	b := AppendFrame(nil, nil, make([]byte, 1<<20))
	b = AppendControl(b, ControlStop)
	r := NewReader(iotest.HalfReader(bytes.NewReader(b)), wide)
	f, err := r.Next()
	require.NoError(t, err)
	require.Len(t, f.Data, 1<<20)
	require.Zero(t, r.Buffered())
	_, err = r.Next()
	require.NoError(t, err)
	require.LessOrEqual(t, cap(r.buf), keepReadBuffer)
}

func TestReaderPassesErrorsOn(t *testing.T) {
	frame := AppendControl(nil, ControlKill)
	boom := errors.New("boom")
	r := NewReader(io.MultiReader(bytes.NewReader(frame[:9]), iotest.ErrReader(boom)), wide)
	_, err := r.Next()
	require.Equal(t, boom, err)

	// A deadline is no end: the frame is completed by a later call.
	r = NewReader(&flaky{parts: [][]byte{frame[:9], nil, frame[9:]}}, wide)
	_, err = r.Next()
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	f, err := r.Next()
	require.NoError(t, err)
	require.Equal(t, `"kill"`, string(f.Header))

	_, err = NewReader(idle{}, wide).Next()
	require.Equal(t, io.ErrNoProgress, err)
	_, err = NewReader(liar{}, wide).Next()
	require.Error(t, err)
}

// flaky times out where a part is nil.
type flaky struct{ parts [][]byte }

func (f *flaky) Read(b []byte) (int, error) {
	if len(f.parts) == 0 {
		return 0, io.EOF
	}
	p := f.parts[0]
	f.parts = f.parts[1:]
	if p == nil {
		return 0, os.ErrDeadlineExceeded
	}
	return copy(b, p), nil
}

type idle struct{}

func (idle) Read([]byte) (int, error) { return 0, nil }

type liar struct{}

func (liar) Read(b []byte) (int, error) { return len(b) + 1, nil }

func TestReaderDoesNotAllocatePerFrame(t *testing.T) {
	frame := AppendFrame(nil, nil, make([]byte, 160))
	src := &endless{frame: frame}
	r := NewReaderSize(src, wide, 4096)
	_, err := r.Next()
	require.NoError(t, err)
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		if _, err := r.Next(); err != nil {
			t.Fatal(err)
		}
	}))
}

// endless repeats a frame.
type endless struct {
	frame []byte
	at    int
}

func (e *endless) Read(b []byte) (int, error) {
	n := 0
	for n < len(b) {
		k := copy(b[n:], e.frame[e.at:])
		n += k
		e.at = (e.at + k) % len(e.frame)
	}
	return n, nil
}

func BenchmarkReader(b *testing.B) {
	frame := AppendFrame(nil, nil, make([]byte, 160))
	r := NewReaderSize(&endless{frame: frame}, wide, 32<<10)
	b.SetBytes(int64(len(frame)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := r.Next(); err != nil {
			b.Fatal(err)
		}
	}
}
