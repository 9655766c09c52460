package wire

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// controlJSON builds a control header as the frontend does, with the changes of
// a test: in the header, in its connection_info and in the text inside that. A
// nil value takes a member away.
func controlJSON(t testing.TB, header, connection, info map[string]any) []byte {
	t.Helper()
	merge := func(base, change map[string]any) map[string]any {
		maps.Copy(base, change)
		maps.DeleteFunc(base, func(_ string, v any) bool { return v == nil })
		return base
	}
	text, err := json.Marshal(merge(map[string]any{
		"address": "127.0.0.1:4000", "subject": "s-1", "context": "id-1", "stream_type": "response",
	}, info))
	require.NoError(t, err)
	b, err := json.Marshal(merge(map[string]any{
		"id": "id-1", "request_type": "single_in", "response_type": "many_out", "payload_codec": "msgpack",
		"connection_info": merge(map[string]any{"transport": "tcp_server", "info": string(text)}, connection),
	}, header))
	require.NoError(t, err)
	return b
}

type m = map[string]any

func TestParseRequestControl(t *testing.T) {
	base := RequestControl{
		ID: "id-1", RequestType: "single_in", ResponseType: "many_out", PayloadCodec: "msgpack",
		Connection: ConnectionInfo{"tcp_server", "127.0.0.1:4000", "s-1", "id-1", "response"},
	}
	with := func(change func(*RequestControl)) RequestControl {
		c := base
		change(&c)
		return c
	}
	for name, c := range map[string]struct {
		header, connection, info m
		want                     RequestControl
	}{
		"plain":         {want: base},
		"no codec":      {header: m{"payload_codec": nil}, want: with(func(c *RequestControl) { c.PayloadCodec = "json" })},
		"null codec":    {header: m{"payload_codec": json.RawMessage("null")}, want: with(func(c *RequestControl) { c.PayloadCodec = "json" })},
		"unknown codec": {header: m{"payload_codec": "cbor"}, want: with(func(c *RequestControl) { c.PayloadCodec = "cbor" })},
		"metadata": {header: m{"metadata": m{"dynamo.lifecycle.root": "v1"}},
			want: with(func(c *RequestControl) { c.Metadata = map[string]string{"dynamo.lifecycle.root": "v1"} })},
		"largest send time": {header: m{"frontend_send_ts_ns": uint64(1<<64 - 1)},
			want: with(func(c *RequestControl) { c.FrontendSendNanos = 1<<64 - 1 })},
		"request stream": {header: m{"request_type": "many_in", "request_stream_connection_info": m{"transport": "tcp_server"}},
			want: with(func(c *RequestControl) { c.RequestType, c.HasRequestStream = "many_in", true })},
		"IPv6":                 {info: m{"address": "[::1]:4000"}, want: with(func(c *RequestControl) { c.Connection.Address = "[::1]:4000" })},
		"unknown members":      {header: m{"new": 1}, connection: m{"new": 2}, info: m{"new": 3}, want: base},
		"member of other case": {header: m{"ID": "other"}, want: base},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ParseRequestControl(controlJSON(t, c.header, c.connection, c.info))
			require.NoError(t, err)
			require.Empty(t, cmp.Diff(c.want, got))
		})
	}
}

func TestParseRequestControlErrors(t *testing.T) {
	for name, c := range map[string]struct {
		header, connection, info m
		field                    string
	}{
		"no id":               {header: m{"id": nil}, field: "id"},
		"id is a number":      {header: m{"id": 1}, field: "id"},
		"no request type":     {header: m{"request_type": nil}, field: "request_type"},
		"no response type":    {header: m{"response_type": nil}, field: "response_type"},
		"codec is a number":   {header: m{"payload_codec": 1}, field: "payload_codec"},
		"metadata is a list":  {header: m{"metadata": []int{1}}, field: "metadata"},
		"metadata of numbers": {header: m{"metadata": m{"a": 1}}, field: "metadata"},
		"negative time":       {header: m{"frontend_send_ts_ns": -1}, field: "frontend_send_ts_ns"},
		"time is a float":     {header: m{"frontend_send_ts_ns": 1.5}, field: "frontend_send_ts_ns"},
		"time is too large":   {header: m{"frontend_send_ts_ns": json.Number("18446744073709551616")}, field: "frontend_send_ts_ns"},
		"no connection":       {header: m{"connection_info": nil}, field: "connection_info"},
		"connection is text":  {header: m{"connection_info": "x"}, field: "connection_info"},
		"no transport":        {connection: m{"transport": nil}, field: "connection_info.transport"},
		"other transport":     {connection: m{"transport": "quic"}, field: "connection_info.transport"},
		"no info":             {connection: m{"info": nil}, field: "connection_info.info"},
		"info is an object":   {connection: m{"info": m{}}, field: "connection_info.info"},
		"info is not JSON":    {connection: m{"info": "{"}, field: "connection_info.info"},
		"info is null":        {connection: m{"info": "null"}, field: "connection_info.info"},
		"no address":          {info: m{"address": nil}, field: "connection_info.info.address"},
		"host name":           {info: m{"address": "localhost:1"}, field: "connection_info.info.address"},
		"no port":             {info: m{"address": "127.0.0.1"}, field: "connection_info.info.address"},
		"port 0":              {info: m{"address": "127.0.0.1:0"}, field: "connection_info.info.address"},
		"large port":          {info: m{"address": "127.0.0.1:65536"}, field: "connection_info.info.address"},
		"no subject":          {info: m{"subject": nil}, field: "connection_info.info.subject"},
		"other context":       {info: m{"context": "id-2"}, field: "connection_info.info.context"},
		"request stream":      {info: m{"stream_type": "request"}, field: "connection_info.info.stream_type"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ParseRequestControl(controlJSON(t, c.header, c.connection, c.info))
			var ce *ControlError
			require.ErrorAs(t, err, &ce)
			require.Equal(t, c.field, ce.Field)
			require.Contains(t, err.Error(), c.field)
		})
	}
	for name, in := range map[string]string{
		"empty": "", "null": "null", "list": "[]", "text": `"x"`, "cut": `{"id":"a"`, "trailing": `{} {}`,
		"not UTF-8": "{\"id\":\"\xff\"}", "nested": strings.Repeat(`{"a":`, 20000),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ParseRequestControl([]byte(in))
			var ce *ControlError
			require.ErrorAs(t, err, &ce)
			require.Empty(t, ce.Field)
		})
	}
	t.Run("too large", func(t *testing.T) {
		_, err := ParseRequestControl(make([]byte, MaxControl+1))
		require.Equal(t, &SizeError{Part: PartHeader, Size: MaxControl + 1, Limit: MaxControl}, err)
	})
}

// A failed parse still names the request, for the log.
func TestParseRequestControlKeepsID(t *testing.T) {
	c, err := ParseRequestControl(controlJSON(t, m{"connection_info": nil}, nil, nil))
	require.Error(t, err)
	require.Equal(t, "id-1", c.ID)
}

func TestRequestControlRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		id := rapid.String().Draw(t, "id")
		want := RequestControl{
			ID: id, RequestType: rapid.String().Draw(t, "request type"), ResponseType: rapid.String().Draw(t, "response type"),
			PayloadCodec: rapid.StringMatching(".+").Draw(t, "codec"),
			Connection: ConnectionInfo{TransportTCP, fmt.Sprintf("10.0.0.1:%d", rapid.IntRange(1, 65535).Draw(t, "port")),
				rapid.String().Draw(t, "subject"), id, StreamTypeResponse},
			FrontendSendNanos: rapid.Uint64().Draw(t, "time"),
		}
		if meta := rapid.MapOf(rapid.String(), rapid.String()).Draw(t, "metadata"); len(meta) > 0 {
			want.Metadata = meta
		}
		b := AppendRequestControl(nil, &want)
		require.True(t, json.Valid(b))
		got, err := ParseRequestControl(b)
		require.NoError(t, err)
		require.Empty(t, cmp.Diff(want, got))
	})
}

func TestHandshake(t *testing.T) {
	b := AppendHandshake([]byte("x"), "a\"b")
	f, rest, err := ParseFrame(b[1:], wide)
	require.NoError(t, err)
	require.Empty(t, rest)
	require.Equal(t, `{"subject":"a\"b","stream_type":"response"}`, string(f.Header))
	h, err := ParseHandshake(f.Header)
	require.NoError(t, err)
	require.Equal(t, Handshake{Subject: "a\"b", StreamType: "response"}, h)

	for _, in := range []string{"", "[]", `{"subject":"a"}`, `{"stream_type":"response"}`, `{"subject":1,"stream_type":"response"}`} {
		_, err := ParseHandshake([]byte(in))
		var ce *ControlError
		require.ErrorAs(t, err, &ce, in)
	}
}

func TestPrologue(t *testing.T) {
	parse := func(frame []byte) Prologue {
		f, rest, err := ParseFrame(frame, wide)
		require.NoError(t, err)
		require.Empty(t, rest)
		p, err := ParsePrologue(f.Header)
		require.NoError(t, err)
		return p
	}
	require.Equal(t, Prologue{}, parse(AppendPrologueOK(nil)))

	text := "no room\n<here>"
	require.Equal(t, Prologue{Error: &text}, parse(AppendPrologueError(nil, text, nil)))
	typed := `{"class":"Internal"}`
	require.Equal(t, Prologue{Error: &text, TypedError: []byte(typed)}, parse(AppendPrologueError(nil, text, []byte(typed))))

	// The frontend looks at error alone.
	p, err := ParsePrologue([]byte(`{"typed_error":{}}`))
	require.NoError(t, err)
	require.Equal(t, Prologue{}, p)

	for _, in := range []string{"", "null", `"x"`, `{"error":1}`, `{"error":{}}`} {
		_, err := ParsePrologue([]byte(in))
		var ce *ControlError
		require.ErrorAs(t, err, &ce, in)
	}
}

func TestControlWords(t *testing.T) {
	for c, word := range map[Control]string{ControlStop: "stop", ControlKill: "kill", ControlSentinel: "sentinel"} {
		require.Equal(t, word, c.String())
		require.Equal(t, AppendFrame(nil, []byte(`"`+word+`"`), nil), AppendControl(nil, c))
		for _, in := range []string{`"` + word + `"`, ` "` + word + `" `, `"\u00` + fmt.Sprintf("%x", word[0]) + word[1:] + `"`} {
			got, err := ParseControl([]byte(in))
			require.NoError(t, err)
			require.Equal(t, c, got)
		}
	}
	for _, in := range []string{"", "stop", `"Stop"`, `"stop`, `"stop" "stop"`, "null", " null", `["stop"]`, `{"stop":null}`, `""`, "1"} {
		_, err := ParseControl([]byte(in))
		require.ErrorIs(t, err, ErrUnknownControl, in)
	}
	require.Equal(t, "Control(0)", Control(0).String())
	require.Panics(t, func() { AppendControl(nil, 0) })
	require.Panics(t, func() { AppendControl(nil, 9) })
}

func TestReplies(t *testing.T) {
	require.Equal(t, "Server overloaded: 64 requests", string(OverloadedReply("64 requests")))
	require.Equal(t, "Server unavailable: draining", string(UnavailableReply("draining")))
	for in, want := range map[string]struct {
		kind   ReplyKind
		reason string
	}{
		"":                           {ReplyAccepted, ""},
		"Server overloaded: full":    {ReplyOverloaded, "full"},
		"Server overloaded:":         {ReplyOverloaded, ""},
		"Server unavailable:gone":    {ReplyUnavailable, "gone"},
		"Server overloaded":          {ReplyAccepted, "Server overloaded"},
		" Server unavailable: x":     {ReplyAccepted, " Server unavailable: x"},
		"server unavailable: x":      {ReplyAccepted, "server unavailable: x"},
		"something else altogether.": {ReplyAccepted, "something else altogether."},
	} {
		kind, reason := ParseReply([]byte(in))
		require.Equal(t, want.kind, kind, in)
		require.Equal(t, want.reason, reason, in)
	}
	require.Equal(t, []string{"accepted", "overloaded", "unavailable"},
		[]string{ReplyAccepted.String(), ReplyOverloaded.String(), ReplyUnavailable.String()})
}

func TestAppendString(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := string(rapid.SliceOf(rapid.Byte()).Draw(t, "bytes"))
		var got string
		require.NoError(t, json.Unmarshal(AppendJSONString(nil, s), &got))
		require.Equal(t, strings.ToValidUTF8(s, "\uFFFD") == s, got == s)
		require.Equal(t, []rune(s), []rune(got))
	})
	require.Equal(t, `"\b\f\n\r\t\u0000\u001f\"\\/<>&é`+"\u2028\"", string(AppendJSONString(nil, "\b\f\n\r\t\x00\x1f\"\\/<>&é\u2028")))
}
