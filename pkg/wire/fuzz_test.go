package wire

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"testing"
	"unicode/utf8"
)

// fuzzLimits are small, so that the fuzzer reaches them.
var fuzzLimits = Limits{MaxHeader: 1 << 10, MaxData: 1 << 12}

func addRecordings(f *testing.F, pattern string, add func([]byte)) {
	for _, b := range recordings(f, pattern) {
		add(b[:min(len(b), 3000)])
	}
}

// FuzzFrames compares the parser and the stream reader, fed whole and cut in two,
// with the naive decoder.
func FuzzFrames(f *testing.F) {
	addRecordings(f, "*.bin", func(b []byte) { f.Add(b, uint16(len(b)/2)) })
	f.Add([]byte{}, uint16(0))
	f.Add(AppendFrameHead(nil, 1<<62, 1<<62), uint16(3))
	f.Fuzz(func(t *testing.T, b []byte, cut uint16) {
		want, naiveErr := naiveFrames(b, fuzzLimits)

		var parsed []Frame
		rest := b
		for len(rest) > 0 {
			frame, after, err := ParseFrame(rest, fuzzLimits)
			if err != nil {
				if naiveErr == nil {
					t.Fatalf("ParseFrame refuses what the naive decoder takes: %v", err)
				}
				break
			}
			parsed, rest = append(parsed, frame), after
		}
		requireFrames(t, want, parsed)

		at := min(int(cut), len(b))
		for _, src := range []io.Reader{bytes.NewReader(b), &twoPieces{b[:at:at], b[at:]}} {
			r := NewReader(src, fuzzLimits)
			got, err := readAll(r)
			requireFrames(t, want, got)
			if (err == io.EOF) != (naiveErr == nil) {
				t.Fatalf("reader ends with %v, naive decoder with %v", err, naiveErr)
			}
			if limit := int(fuzzLimits.MaxHeader+fuzzLimits.MaxData) + 2*defaultReadBuffer; cap(r.buf) > limit {
				t.Fatalf("buffer of %d bytes", cap(r.buf))
			}
		}
	})
}

func FuzzParseRequestControl(f *testing.F) {
	addRecordings(f, "request-*.bin", func(b []byte) {
		frame, _, err := ParseFrame(b, wide)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(frame.Header)
	})
	f.Add(controlJSON(f, m{"metadata": m{"a": "b"}, "frontend_send_ts_ns": 5}, nil, m{"address": "[::1]:1"}))
	f.Add([]byte(`{"id":null}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := ParseRequestControl(b)
		if err != nil {
			requireTyped(t, err)
			return
		}
		out := AppendRequestControl(nil, &c)
		if !json.Valid(out) {
			t.Fatalf("not JSON: %q", out)
		}
		if len(out) > MaxControl {
			return // escapes may have made it longer
		}
		c.HasRequestStream = false // not written
		if len(c.Metadata) == 0 {
			c.Metadata = nil
		}
		if c.PayloadCodec == "" {
			c.PayloadCodec = CodecDefault
		}
		back, err := ParseRequestControl(out)
		if err != nil || !reflect.DeepEqual(c, back) {
			t.Fatalf("%+v came back as %+v, %v", c, back, err)
		}
	})
}

// requireTyped checks that a header was refused with one of our errors.
func requireTyped(t *testing.T, err error) {
	t.Helper()
	if _, ok := errors.AsType[*ControlError](err); ok {
		return
	}
	if _, ok := errors.AsType[*SizeError](err); ok {
		return
	}
	t.Fatalf("untyped error %T: %v", err, err)
}

// FuzzResponseHeaders feeds everything that is parsed on a response connection.
func FuzzResponseHeaders(f *testing.F) {
	for _, s := range []string{
		`{"subject":"s","stream_type":"response"}`, `{"error":null}`, `{"error":"x","typed_error":{"class":"Internal"}}`,
		`"stop"`, `"kill"`, `"sentinel"`, ` "\u0073top"`, `null`, ``, `"`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, err := ParseHandshake(b); err != nil {
			requireTyped(t, err)
		} else if h.StreamType == StreamTypeResponse {
			frame, _, err := ParseFrame(AppendHandshake(nil, h.Subject), Limits{MaxHeader: 1 << 30})
			if err != nil {
				t.Fatal(err)
			}
			if back, err := ParseHandshake(frame.Header); err != nil || back != h {
				t.Fatalf("%+v came back as %+v, %v", h, back, err)
			}
		}
		if p, err := ParsePrologue(b); err != nil {
			requireTyped(t, err)
		} else if p.Error != nil {
			frame, _, err := ParseFrame(AppendPrologueError(nil, *p.Error, p.TypedError), Limits{MaxHeader: 1 << 30})
			if err != nil {
				t.Fatal(err)
			}
			if back, err := ParsePrologue(frame.Header); err != nil || !reflect.DeepEqual(p, back) {
				t.Fatalf("%+v came back as %+v, %v", p, back, err)
			}
		}
		if c, err := ParseControl(b); err != nil {
			if !errors.Is(err, ErrUnknownControl) {
				t.Fatalf("untyped error %T", err)
			}
		} else {
			var word string
			if err := json.Unmarshal(b, &word); err != nil || word != c.String() {
				t.Fatalf("%q was taken for %s", b, c)
			}
		}
	})
}

// naivePlane cuts a whole connection into messages and tells whether it ended
// between two of them. Names are not judged.
func naivePlane(b []byte) (payloads [][]byte, clean bool) {
	take := func(n int) ([]byte, bool) {
		if len(b) < n {
			return nil, false
		}
		piece := b[:n]
		b = b[n:]
		return piece, true
	}
	number := func(width int) (int, bool) {
		piece, ok := take(width)
		n := 0
		for _, c := range piece {
			n = n<<8 | int(c)
		}
		return n, ok
	}
	for len(b) > 0 {
		for _, width := range []int{2, 2, 4} {
			n, ok := number(width)
			if !ok {
				return payloads, false
			}
			piece, ok := take(n)
			if !ok {
				return payloads, false
			}
			if width == 4 {
				payloads = append(payloads, piece)
			}
		}
	}
	return payloads, true
}

// FuzzPlaneRequests reads a connection whole and cut in two, goes on after bad
// names and large messages as the worker does, and compares with the naive
// decoder.
func FuzzPlaneRequests(f *testing.F) {
	addRecordings(f, "tcp-plane-from-frontend.bin", func(b []byte) { f.Add(b, uint16(700)) })
	f.Add([]byte{0, 1, 'p', 0, 2, '{', '}', 0, 0, 0, 2, 'h', 'i', 0, 0, 0, 0, 0, 0, 0, 0}, uint16(5))
	f.Add([]byte{0, 1, 0xff, 0, 1, '{', 0, 0, 0, 1, 'h'}, uint16(5))
	f.Add([]byte{0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff}, uint16(5))
	f.Fuzz(func(t *testing.T, b []byte, cut uint16) {
		const limit = 2000
		want, clean := naivePlane(b)
		at := min(int(cut), len(b))
		for _, src := range []io.Reader{bytes.NewReader(b), &twoPieces{b[:at:at], b[at:]}} {
			r := bufio.NewReader(src)
			var err error
			for i := 0; err == nil; i++ {
				var req PlaneRequest
				req, err = ReadPlaneRequest(r, limit)
				var size *SizeError
				var control *ControlError
				switch {
				case errors.As(err, &size):
					if size.Size <= limit {
						t.Fatalf("refused %d bytes", size.Size)
					}
					if err = Discard(r, size.Skip); err == nil && uint64(len(want[i])) != size.Skip {
						t.Fatalf("message %d: payload of %d bytes, told to skip %d", i, len(want[i]), size.Skip)
					}
				case err == nil, errors.As(err, &control):
					err = nil
					if i >= len(want) || !bytes.Equal(req.Payload, want[i]) {
						t.Fatalf("message %d differs", i)
					}
				case err == io.EOF:
					if !clean || i != len(want) {
						t.Fatalf("clean end after %d of %d messages", i, len(want))
					}
				case err == io.ErrUnexpectedEOF:
					if clean {
						t.Fatalf("cut short after %d of %d messages", i, len(want))
					}
				default:
					t.Fatalf("error %T: %v", err, err)
				}
			}
		}
	})
}

func FuzzPlaneReplies(f *testing.F) {
	addRecordings(f, "tcp-plane-from-worker.bin", func(b []byte) { f.Add(b) })
	f.Add(AppendPlaneReply(nil, OverloadedReply("full")))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bufio.NewReader(bytes.NewReader(b))
		var out []byte
		for {
			body, err := ReadPlaneReply(r, 1<<16)
			if err != nil {
				if err == io.EOF && !bytes.Equal(b, out) {
					t.Fatalf("%x came back as %x", b, out)
				}
				return
			}
			out = AppendPlaneReply(out, body)
			kind, reason := ParseReply(body)
			if kind == ReplyAccepted && reason != string(body) {
				t.Fatalf("accepted, with %q of %q", reason, body)
			}
		}
	})
}

func FuzzSplitPlaneAddress(f *testing.F) {
	f.Add("127.0.0.1:45671/694da22f57316558/dynamo/backend/generate")
	f.Add("[::1]:1/x")
	f.Add("/")
	f.Fuzz(func(t *testing.T, s string) {
		addr, path, err := SplitPlaneAddress(s)
		if err != nil {
			return
		}
		again, samePath, err := SplitPlaneAddress(PlaneAddress(addr, path))
		if err != nil || again != addr || samePath != path {
			t.Fatalf("%q: %v %q %v", s, again, samePath, err)
		}
	})
}

// FuzzObject compares the members of an object with what the library finds.
func FuzzObject(f *testing.F) {
	for _, s := range []string{`{}`, ` { "a" : 1 , "b":[{"c":"}"}],"a":null}`, `{"A":"\"\\\/é\ud800","":{}}`, `{"a":tru}`, `[]`, ``, `{"a":1}x`, `{"a":-1.5e3,"\n":"\n"}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var o object
		err := o.read("", b)
		var want map[string]json.RawMessage
		if wrong := json.Unmarshal(b, &want); wrong != nil || want == nil || !utf8.Valid(b) {
			if err == nil {
				t.Fatalf("took %q", b)
			}
			requireTyped(t, err)
			return
		}
		if err != nil {
			t.Fatalf("refused %q: %v", b, err)
		}
		for k, v := range want {
			if got := o.value(k); !bytes.Equal(got, v) {
				t.Fatalf("%q: %q, want %q", k, got, v)
			}
			var text string
			isText := json.Unmarshal(v, &text) == nil && len(v) > 0 && v[0] == '"'
			if got, err := o.text(k); (err == nil) != isText || got != text {
				t.Fatalf("%q: text %q, %v, want %q", k, got, err, text)
			}
		}
	})
}
