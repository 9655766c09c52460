package wire

import (
	"encoding/hex"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	require.NoError(t, err)
	return b
}

// The bytes of "kill" are recorded (response-05-from-frontend.bin), the others
// follow the same layout.
func TestFrameBytes(t *testing.T) {
	for name, c := range map[string]struct {
		frame Frame
		bytes string
	}{
		"empty": {Frame{}, "0000000000000000 0000000000000000 0000000000000000"},
		"header": {Frame{Header: []byte(`"kill"`)},
			"0000000000000006 0000000000000000 0000000000000000 226b696c6c22"},
		"data": {Frame{Data: []byte{0x81, 0x01}},
			"0000000000000000 0000000000000002 0000000000000000 8101"},
		"both": {Frame{Header: []byte("ab"), Data: []byte("cde")},
			"0000000000000002 0000000000000003 0000000000000000 6162 636465"},
	} {
		t.Run(name, func(t *testing.T) {
			want := unhex(t, c.bytes)
			require.Equal(t, want, AppendFrame(nil, c.frame.Header, c.frame.Data))
			got, rest, err := ParseFrame(append(want[:len(want):len(want)], 7), wide)
			require.NoError(t, err)
			require.Equal(t, []byte{7}, rest)
			require.Empty(t, cmp.Diff(c.frame, got, cmpopts.EquateEmpty()))
		})
	}
}

// A debug build of the frontend writes a checksum; nobody has to check it.
func TestParseFrameIgnoresChecksum(t *testing.T) {
	b := AppendFrame(nil, []byte("h"), nil)
	b[17] = 0xff
	f, _, err := ParseFrame(b, wide)
	require.NoError(t, err)
	require.Equal(t, "h", string(f.Header))
}

func TestParseFrameErrors(t *testing.T) {
	whole := AppendFrame(nil, []byte("abc"), []byte("defg"))
	for name, c := range map[string]struct {
		in     []byte
		lim    Limits
		want   error
		header string // still there
	}{
		"nothing":   {nil, wide, &TruncatedError{PartHead, 0, 24}, ""},
		"half head": {whole[:23], wide, &TruncatedError{PartHead, 23, 24}, ""},
		"no header": {whole[:24], wide, &TruncatedError{PartHeader, 0, 3}, ""},
		"no data":   {whole[:27], wide, &TruncatedError{PartData, 0, 4}, "abc"},
		"half data": {whole[:29], wide, &TruncatedError{PartData, 2, 4}, "abc"},
		"large header": {whole, Limits{MaxHeader: 2, MaxData: 9},
			&SizeError{Part: PartHeader, Size: 3, Limit: 2}, ""},
		"large data": {whole, Limits{MaxHeader: 3, MaxData: 3},
			&SizeError{Part: PartData, Size: 4, Limit: 3}, "abc"},
		"large data, not there": {whole[:27], Limits{MaxHeader: 3, MaxData: 3},
			&SizeError{Part: PartData, Size: 4, Limit: 3}, "abc"},
		"largest lengths": {unhex(t, strings.Repeat("ff", 24)), Limits{^uint64(0), ^uint64(0)},
			&TruncatedError{PartHeader, 0, ^uint64(0)}, ""},
		"sum of lengths overflows": {unhex(t, "0000000000000001 ffffffffffffffff 0000000000000000 61"),
			Limits{^uint64(0), ^uint64(0)}, &TruncatedError{PartData, 0, ^uint64(0)}, "a"},
	} {
		t.Run(name, func(t *testing.T) {
			f, rest, err := ParseFrame(c.in, c.lim)
			require.Equal(t, c.want, err)
			require.Equal(t, c.header, string(f.Header))
			require.Empty(t, f.Data)
			require.Equal(t, c.in, rest, "nothing may be consumed")
			if _, ok := c.want.(*TruncatedError); ok {
				require.ErrorIs(t, err, ErrTruncated)
			}
		})
	}
}

// Appending to a frame's parts must not run into what follows them.
func TestFramePartsAreCapped(t *testing.T) {
	b := AppendFrame(nil, []byte("ab"), []byte("cd"))
	b = append(b, "next"...)
	f, _, err := ParseFrame(b, wide)
	require.NoError(t, err)
	_ = append(f.Header, 'X')
	_ = append(f.Data, 'Y')
	require.Equal(t, "abcdnext", string(b[FrameHeaderLen:]))
}

func TestSetFrameHead(t *testing.T) {
	b := AppendFrameHead(nil, 0, 0)
	b = append(b, "abcde"...)
	SetFrameHead(b, 2, 3)
	require.Equal(t, AppendFrame(nil, []byte("ab"), []byte("cde")), b)
	require.Panics(t, func() { SetFrameHead(b[:23], 0, 0) })
}

func TestFrameRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		header := rapid.SliceOfN(rapid.Byte(), 0, 300).Draw(t, "header")
		data := rapid.SliceOfN(rapid.Byte(), 0, 300).Draw(t, "data")
		tail := rapid.SliceOfN(rapid.Byte(), 0, 30).Draw(t, "tail")
		b := append(AppendFrame([]byte("before"), header, data), tail...)
		f, rest, err := ParseFrame(b[len("before"):], Limits{300, 300})
		require.NoError(t, err)
		require.Equal(t, tail, append([]byte{}, rest...))
		require.Empty(t, cmp.Diff(Frame{header, data}, f, cmpopts.EquateEmpty()))
	})
}

func TestFramesDoNotAllocate(t *testing.T) {
	buf := make([]byte, 0, 4096)
	header, data := []byte(`"stop"`), make([]byte, 160)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		buf = AppendFrame(buf[:0], header, data)
		if _, _, err := ParseFrame(buf, wide); err != nil {
			t.Fatal(err)
		}
	}), "data frame")
	require.Zero(t, testing.AllocsPerRun(100, func() {
		buf = AppendHandshake(buf[:0], "c98da554-586e-4cc4-a6a3-2e2352de4c3e")
		buf = AppendPrologueOK(buf)
		buf = AppendPrologueError(buf, "no room", nil)
		buf = AppendControl(buf, ControlSentinel)
	}), "control frames")
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if c, err := ParseControl(header); err != nil || c != ControlStop {
			t.Fatal(c, err)
		}
	}), "control words")
}

func BenchmarkAppendFrame(b *testing.B) {
	buf, data := make([]byte, 0, 4096), make([]byte, 160)
	b.ReportAllocs()
	for b.Loop() {
		buf = AppendFrame(buf[:0], nil, data)
	}
}
