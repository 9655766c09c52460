package wire

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"io"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

const recordedInstance = 0x694da22f57316558

// planeStream reads a whole connection.
func planeStream(r io.Reader, limit int) ([]PlaneRequest, error) {
	br := bufio.NewReader(r)
	var list []PlaneRequest
	for {
		req, err := ReadPlaneRequest(br, limit)
		if err != nil {
			return list, err
		}
		list = append(list, req)
	}
}

func TestRecordedPlane(t *testing.T) {
	b := recordings(t, "tcp-plane-from-frontend.bin")["tcp-plane-from-frontend.bin"]
	list, err := planeStream(bytes.NewReader(b), MaxMessage)
	require.Equal(t, io.EOF, err)
	require.Len(t, list, 3)
	size := 0
	for _, req := range list {
		require.Equal(t, PlanePath(recordedInstance, "dynamo", "backend", "generate"), req.Path)
		require.Equal(t, req.Path, req.Headers["x-endpoint-path"])
		require.NotEmpty(t, req.Headers["x-frontend-send-ts-ns"])
		f, rest, err := ParseFrame(req.Payload, wide)
		require.NoError(t, err)
		require.Empty(t, rest)
		c, err := ParseRequestControl(f.Header)
		require.NoError(t, err)
		require.Equal(t, c.ID, req.Headers["request-id"])
		// Members of the headers come in any order from the frontend, so ours
		// are compared by what is read back and by length.
		ours, err := AppendPlaneRequest(nil, &req)
		require.NoError(t, err)
		back, err := ReadPlaneRequest(bufio.NewReader(bytes.NewReader(ours)), len(ours))
		require.NoError(t, err)
		require.Empty(t, cmp.Diff(req, back))
		size += len(ours)
	}
	require.Equal(t, len(b), size)

	replies := recordings(t, "tcp-plane-from-worker.bin")["tcp-plane-from-worker.bin"]
	var ours []byte
	br := bufio.NewReader(bytes.NewReader(replies))
	for range list {
		reply, err := ReadPlaneReply(br, 100)
		require.NoError(t, err)
		require.Empty(t, reply)
		ours = AppendPlaneReply(ours, nil)
	}
	_, err = ReadPlaneReply(br, 100)
	require.Equal(t, io.EOF, err)
	require.Equal(t, replies, ours)
}

func TestPlaneAtEveryPosition(t *testing.T) {
	b := recordings(t, "tcp-plane-from-frontend.bin")["tcp-plane-from-frontend.bin"]
	want, err := planeStream(bytes.NewReader(b), MaxMessage)
	require.Equal(t, io.EOF, err)
	ends := map[int]bool{0: true}
	end := 0
	for _, req := range want {
		one, err := AppendPlaneRequest(nil, &req)
		require.NoError(t, err)
		end += len(one)
		ends[end] = true
	}
	for i := range len(b) + 1 {
		got, err := planeStream(&twoPieces{b[:i], b[i:]}, MaxMessage)
		require.Equal(t, io.EOF, err)
		require.True(t, reflect.DeepEqual(want, got), "cut at %d", i)

		_, err = planeStream(bytes.NewReader(b[:i]), MaxMessage)
		if ends[i] {
			require.Equal(t, io.EOF, err)
		} else {
			require.Equal(t, io.ErrUnexpectedEOF, err)
		}
	}
	got, err := planeStream(iotest.OneByteReader(bytes.NewReader(b)), MaxMessage)
	require.Equal(t, io.EOF, err)
	require.Empty(t, cmp.Diff(want, got))
}

func appendPlane(t testing.TB, dst []byte, req PlaneRequest) []byte {
	t.Helper()
	dst, err := AppendPlaneRequest(dst, &req)
	require.NoError(t, err)
	return dst
}

// The connection survives a message that is too large.
func TestPlaneSkipsLargeMessage(t *testing.T) {
	large := PlaneRequest{Path: "p", Headers: map[string]string{"request-id": "r"}, Payload: make([]byte, 100)}
	small := PlaneRequest{Path: "p", Headers: map[string]string{}, Payload: []byte("ok")}
	first := appendPlane(t, nil, large)
	b := appendPlane(t, first, small)
	r := bufio.NewReaderSize(bytes.NewReader(b), 16)

	req, err := ReadPlaneRequest(r, len(first)-1)
	require.Equal(t, &SizeError{Part: PartMessage, Size: uint64(len(first)), Limit: uint64(len(first) - 1), Skip: 100}, err)
	require.Equal(t, "p", req.Path)
	require.Equal(t, "r", req.Headers["request-id"])
	require.Nil(t, req.Payload)
	require.NoError(t, Discard(r, err.(*SizeError).Skip))

	req, err = ReadPlaneRequest(r, len(first)-1)
	require.NoError(t, err)
	require.Empty(t, cmp.Diff(small, req))

	_, err = ReadPlaneRequest(bufio.NewReader(bytes.NewReader(first)), len(first))
	require.NoError(t, err, "exactly the limit")
	_, err = ReadPlaneRequest(bufio.NewReader(bytes.NewReader(first)), -1)
	require.Error(t, err)
	require.Equal(t, io.ErrUnexpectedEOF, Discard(bufio.NewReader(strings.NewReader("abc")), 4))
	require.NoError(t, Discard(bufio.NewReader(strings.NewReader("abc")), 3))
}

// Bad names cost one message, not the connection.
func TestPlaneBadNames(t *testing.T) {
	raw := func(path, headers, payload string) []byte {
		b := binary.BigEndian.AppendUint16(nil, uint16(len(path)))
		b = append(b, path...)
		b = binary.BigEndian.AppendUint16(b, uint16(len(headers)))
		b = append(b, headers...)
		b = binary.BigEndian.AppendUint32(b, uint32(len(payload)))
		return append(b, payload...)
	}
	for name, c := range map[string]struct{ path, headers, field string }{
		"path":                {"\xff", "{}", "path"},
		"headers not UTF-8":   {"p", "{\"\xff\":\"\"}", "headers"},
		"headers not JSON":    {"p", "{", "headers"},
		"headers are a list":  {"p", "[]", "headers"},
		"headers not strings": {"p", `{"a":1}`, "headers"},
	} {
		t.Run(name, func(t *testing.T) {
			r := bufio.NewReader(bytes.NewReader(append(raw(c.path, c.headers, "one"), raw("p", "", "two")...)))
			_, err := ReadPlaneRequest(r, 1000)
			var ce *ControlError
			require.ErrorAs(t, err, &ce)
			require.Equal(t, c.field, ce.Field)
			req, err := ReadPlaneRequest(r, 1000)
			require.NoError(t, err)
			require.Empty(t, cmp.Diff(PlaneRequest{Path: "p", Payload: []byte("two")}, req))
		})
	}
}

// 4 GiB announced and nothing sent takes no memory.
func TestPlaneTakesMemoryAsBytesCome(t *testing.T) {
	head := []byte{0, 1, 'p', 0, 0, 0xff, 0xff, 0xff, 0xff}
	allocs := testing.Benchmark(func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_, err := ReadPlaneRequest(bufio.NewReader(bytes.NewReader(head)), 1<<33)
			if err != io.ErrUnexpectedEOF {
				b.Fatal(err)
			}
		}
	})
	require.Less(t, allocs.AllocedBytesPerOp(), int64(4*readChunk))

	_, err := ReadPlaneReply(bufio.NewReader(bytes.NewReader([]byte{0xff, 0xff, 0xff, 0xff})), 100)
	require.Equal(t, &SizeError{Part: PartReply, Size: 1<<32 - 1, Limit: 100, Skip: 1<<32 - 1}, err)
}

func TestPlaneLargePayload(t *testing.T) {
	for _, n := range []int{readChunk - 1, readChunk, readChunk + 1, 5*readChunk + 3} {
		want := PlaneRequest{Path: "p", Headers: map[string]string{}, Payload: bytes.Repeat([]byte("abc"), n)[:n]}
		got, err := ReadPlaneRequest(bufio.NewReader(bytes.NewReader(appendPlane(t, nil, want))), MaxMessage)
		require.NoError(t, err)
		require.True(t, bytes.Equal(want.Payload, got.Payload))
		require.Equal(t, n, cap(got.Payload))
	}
}

func TestAppendPlaneRequestLimits(t *testing.T) {
	dst := []byte("x")
	for name, c := range map[string]struct {
		req  PlaneRequest
		part Part
	}{
		"path":    {PlaneRequest{Path: strings.Repeat("p", 65536)}, PartPath},
		"headers": {PlaneRequest{Headers: map[string]string{"a": strings.Repeat("h", 65536)}}, PartHeaders},
	} {
		got, err := AppendPlaneRequest(dst, &c.req)
		var size *SizeError
		require.ErrorAs(t, err, &size, name)
		require.Equal(t, c.part, size.Part)
		require.Equal(t, dst, got)
	}
}

func TestPlaneRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := PlaneRequest{
			Path:    rapid.String().Draw(t, "path"),
			Headers: rapid.MapOf(rapid.String(), rapid.String()).Draw(t, "headers"),
			Payload: rapid.SliceOf(rapid.Byte()).Draw(t, "payload"),
		}
		b, err := AppendPlaneRequest(nil, &want)
		require.NoError(t, err)
		got, err := ReadPlaneRequest(bufio.NewReader(bytes.NewReader(b)), len(b))
		require.NoError(t, err)
		require.Empty(t, cmp.Diff(want, got, cmpopts.EquateEmpty()))

		reply := rapid.SliceOf(rapid.Byte()).Draw(t, "reply")
		body, err := ReadPlaneReply(bufio.NewReader(bytes.NewReader(AppendPlaneReply(nil, reply))), len(reply))
		require.NoError(t, err)
		require.Equal(t, reply, append([]byte{}, body...))
	})
}

func TestNames(t *testing.T) {
	// Both recorded: request-00.txt and the instance record of the TCP plane.
	require.Equal(t, "dynamo_backend.generate-694da22f57316498", Subject(0x694da22f57316498, "dynamo", "backend", "generate"))
	require.Equal(t, "694da22f57316558/dynamo/backend/generate", PlanePath(recordedInstance, "dynamo", "backend", "generate"))
	addr := netip.MustParseAddrPort("127.0.0.1:45671")
	full := PlaneAddress(addr, PlanePath(recordedInstance, "dynamo", "backend", "generate"))
	require.Equal(t, "127.0.0.1:45671/694da22f57316558/dynamo/backend/generate", full)

	require.Equal(t, "1/a%2Fb/c%25d/e.f", PlanePath(1, "a/b", "c%d", "e.f"))
	require.Equal(t, "A.b_c.d-ffffffffffffffff", Subject(1<<64-1, "A.b", "c", "d"))

	gotAddr, path, err := SplitPlaneAddress(full)
	require.NoError(t, err)
	require.Equal(t, addr, gotAddr)
	require.Equal(t, "694da22f57316558/dynamo/backend/generate", path)
	gotAddr, _, err = SplitPlaneAddress("[::1]:7/x")
	require.NoError(t, err)
	require.Equal(t, "[::1]:7", gotAddr.String())
	for _, in := range []string{"", "127.0.0.1:1", "127.0.0.1:1/", "host:1/x", "127.0.0.1/x"} {
		_, _, err := SplitPlaneAddress(in)
		require.Error(t, err, in)
	}
}

func BenchmarkReadPlaneRequest(b *testing.B) {
	one := recordings(b, "tcp-plane-from-frontend.bin")["tcp-plane-from-frontend.bin"]
	r := bufio.NewReaderSize(&endless{frame: one}, 32<<10)
	b.SetBytes(int64(len(one) / 3))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := ReadPlaneRequest(r, MaxMessage); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkParseRequestControl(b *testing.B) {
	f, _, err := ParseFrame(recordings(b, "request-00.bin")["request-00.bin"], wide)
	require.NoError(b, err)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := ParseRequestControl(f.Header); err != nil {
			b.Fatal(err)
		}
	}
}
