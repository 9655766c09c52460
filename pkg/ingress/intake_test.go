package ingress

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dynworker/pkg/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func recorded(tb testing.TB, name string) []byte {
	tb.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	require.NoError(tb, err)
	return b
}

// control is a sound control header for the tests that bend one thing.
func control(edit func(*wire.RequestControl)) []byte {
	c := wire.RequestControl{
		ID: "7d2f", RequestType: wire.RequestSingleIn, ResponseType: wire.ResponseManyOut, PayloadCodec: "msgpack",
		Connection: wire.ConnectionInfo{
			Transport: wire.TransportTCP, Address: "127.0.0.1:4000", Subject: "s", Context: "7d2f", StreamType: wire.StreamTypeResponse,
		},
		FrontendSendNanos: 7,
	}
	if edit != nil {
		edit(&c)
	}
	return wire.AppendRequestControl(nil, &c)
}

func TestDecodeRecordedRequest(t *testing.T) {
	raw := recorded(t, "request-00.bin")
	received := time.Unix(1_800_000_000, 0)
	headers := map[string]string{
		HeaderRequestID: "2e105465-862a-49a7-8725-d0f8a0fbe47c", HeaderSentNanos: "1796094359178155060",
		HeaderTraceparent: "00-1-2-01", HeaderTracestate: "a=b",
	}
	d, err := Decode(Message{Data: raw, Headers: headers}, received)
	require.NoError(t, err)
	require.NoError(t, d.BodyErr)
	require.Equal(t, "2e105465-862a-49a7-8725-d0f8a0fbe47c", d.RequestID)
	require.Equal(t, d.RequestID, d.Control.ID)
	require.Equal(t, "msgpack", d.Control.PayloadCodec)
	require.Equal(t, uint64(1796094359178155060), d.SentNanos)
	require.Equal(t, "00-1-2-01", d.Traceparent)
	require.Equal(t, "a=b", d.Tracestate)
	require.Equal(t, headers, d.Headers)
	require.Equal(t, received, d.Received)
	require.Equal(t, len(raw), d.Size)
	frame, _, err := wire.ParseFrame(raw, wire.Limits{MaxHeader: 1 << 20, MaxData: 1 << 20})
	require.NoError(t, err)
	require.Equal(t, frame.Data, d.Body)
}

func TestDecodeFallsBackForNamesAndTimes(t *testing.T) {
	frame := wire.AppendFrame(nil, control(nil), []byte{0x80})
	d, err := Decode(Message{Data: frame}, time.Time{})
	require.NoError(t, err)
	require.Equal(t, "7d2f", d.RequestID, "the control header's id when no header has one")
	require.Equal(t, uint64(7), d.SentNanos, "the control header's time when no header has one")

	d, err = Decode(Message{Data: frame, Headers: map[string]string{HeaderAltRequestID: "alt", HeaderSentNanos: "yesterday"}}, time.Time{})
	require.NoError(t, err)
	require.Equal(t, "alt", d.RequestID)
	require.Equal(t, uint64(7), d.SentNanos)
}

func TestDecodeKeepsRequestsWhoseBodyIsOfNoUse(t *testing.T) {
	body := []byte("a body of some length")
	whole := wire.AppendFrame(nil, control(nil), body)
	var truncated *wire.TruncatedError
	var size *wire.SizeError

	d, err := Decode(Message{Data: whole[:len(whole)-5]}, time.Time{})
	require.NoError(t, err)
	require.ErrorAs(t, d.BodyErr, &truncated)
	require.Nil(t, d.Body)

	// A length field far beyond what came.
	claims := wire.AppendFrameHead(nil, len(control(nil)), 1<<62)
	claims = append(claims, control(nil)...)
	d, err = Decode(Message{Data: append(claims, body...)}, time.Time{})
	require.NoError(t, err)
	require.ErrorAs(t, d.BodyErr, &truncated)

	d, err = Decode(Message{Data: append(whole[:len(whole):len(whole)], 'x')}, time.Time{})
	require.NoError(t, err)
	require.ErrorIs(t, d.BodyErr, ErrTrailingBytes)

	d, err = Decode(Message{Data: whole[:len(whole)-5], Oversize: &wire.SizeError{Part: wire.PartMessage, Size: 40 << 20, Limit: 32 << 20}}, time.Time{})
	require.NoError(t, err)
	require.ErrorAs(t, d.BodyErr, &size)
	require.Equal(t, 40<<20, d.Size)

	streamed := []byte(`{"id":"7d2f","request_type":"many_in","response_type":"many_out","connection_info":{"transport":"tcp_server",` +
		`"info":"{\"address\":\"127.0.0.1:1\",\"subject\":\"s\",\"context\":\"7d2f\",\"stream_type\":\"response\"}"},"request_stream_connection_info":{}}`)
	d, err = Decode(Message{Data: wire.AppendFrame(nil, streamed, nil)}, time.Time{})
	require.NoError(t, err)
	require.ErrorIs(t, d.BodyErr, ErrRequestStream)
	require.Equal(t, "json", d.Control.PayloadCodec)
}

func TestTakeRefusesWhatCannotBeAnswered(t *testing.T) {
	for name, raw := range map[string][]byte{
		"empty":                nil,
		"head cut":             make([]byte, 23),
		"header cut":           wire.AppendFrame(nil, control(nil), nil)[:60],
		"no header":            wire.AppendFrame(nil, nil, []byte("{}")),
		"header no json":       wire.AppendFrame(nil, []byte("hello"), []byte("{}")),
		"header a list":        wire.AppendFrame(nil, []byte("[]"), nil),
		"header too long":      wire.AppendFrameHead(nil, wire.MaxControl+1, 0),
		"other stream's id":    wire.AppendFrame(nil, control(func(c *wire.RequestControl) { c.Connection.Context = "other" }), nil),
		"request stream type":  wire.AppendFrame(nil, control(func(c *wire.RequestControl) { c.Connection.StreamType = "request" }), nil),
		"host name as address": wire.AppendFrame(nil, control(func(c *wire.RequestControl) { c.Connection.Address = "frontend:80" }), nil),
		"quic":                 wire.AppendFrame(nil, control(func(c *wire.RequestControl) { c.Connection.Transport = "quic_server" }), nil),
	} {
		t.Run(name, func(t *testing.T) {
			var events []Event
			in := &Intake{
				Plane: NATS, Logger: zerolog.Nop(), Observer: func(e Event) { events = append(events, e) },
				Admitter: AdmitFunc(func(*Delivery) (func(), *Refusal) {
					t.Error("admitted")
					return nil, nil
				}),
			}
			reply, start := in.Take(Message{Data: raw})
			require.Nil(t, start)
			kind, reason := wire.ParseReply(reply)
			require.Equal(t, wire.ReplyUnavailable, kind)
			require.Contains(t, reason, "malformed request: ")
			require.Len(t, events, 1)
			require.Equal(t, Malformed, events[0].Kind)
			require.Equal(t, NATS, events[0].Plane)
			require.Error(t, events[0].Err)
		})
	}
}

func TestTakeRepliesAsTheAdmitterSays(t *testing.T) {
	started := 0
	for _, c := range []struct {
		refusal *Refusal
		kind    wire.ReplyKind
		reason  string
	}{
		{nil, wire.ReplyAccepted, ""},
		{&Refusal{Overloaded, "16 requests wait"}, wire.ReplyOverloaded, "16 requests wait"},
		{&Refusal{Unavailable, "shutting down"}, wire.ReplyUnavailable, "shutting down"},
	} {
		in := &Intake{Plane: TCP, Logger: zerolog.Nop(), Admitter: AdmitFunc(func(*Delivery) (func(), *Refusal) {
			if c.refusal != nil {
				return nil, c.refusal
			}
			return func() { started++ }, nil
		})}
		reply, start := in.Take(Message{Data: wire.AppendFrame(nil, control(nil), []byte{0x80})})
		kind, reason := wire.ParseReply(reply)
		require.Equal(t, c.kind, kind)
		require.Equal(t, c.reason, reason)
		require.Equal(t, c.refusal == nil, start != nil)
		if start != nil {
			require.Empty(t, reply, "the frontend's own worker accepts with an empty reply")
			require.Zero(t, started, "work begins after the reply")
			start()
		}
	}
	require.Equal(t, 1, started)
}

func TestNamesOfKinds(t *testing.T) {
	kinds := map[string]bool{}
	for k := Malformed; k <= ConnectionBroken; k++ {
		kinds[k.String()] = true
	}
	require.Len(t, kinds, 6)
	require.NotContains(t, kinds, "unknown")
	require.Equal(t, "unknown", EventKind(0).String())
	require.Equal(t, "overloaded", Overloaded.String())
	require.Equal(t, "unavailable", Unavailable.String())
	require.Equal(t, "unknown", RefusalKind(0).String())
}

func FuzzDecode(f *testing.F) {
	f.Add(recorded(f, "request-00.bin"))
	f.Add(recorded(f, "request-04.bin"))
	f.Add(wire.AppendFrame(nil, control(nil), []byte{0x80}))
	f.Add(wire.AppendFrameHead(nil, 1<<40, 1<<62))
	f.Fuzz(func(t *testing.T, raw []byte) {
		d, err := Decode(Message{Data: raw}, time.Time{})
		if err != nil {
			require.Nil(t, d)
			return
		}
		require.Equal(t, d.Control.ID, d.Control.Connection.Context)
		require.Equal(t, len(raw), d.Size)
		if d.BodyErr != nil {
			require.Nil(t, d.Body)
		} else {
			require.LessOrEqual(t, len(d.Body), len(raw)-wire.FrameHeaderLen)
		}
	})
}
