package protocol

import (
	"encoding/binary"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// withTokens is a msgpack body whose only member is token_ids.
func withTokens(t testing.TB, value string) []byte {
	t.Helper()
	return append([]byte("\x81\xa9token_ids"), unhex(t, value)...)
}

func TestParseTokens(t *testing.T) {
	for name, c := range map[string]struct {
		json, msgpack string
		want          []int32
		state         TokensState
		packed        bool
	}{
		"null":   {json: "null", msgpack: "c0", state: TokensNull},
		"empty":  {json: "[ ]", msgpack: "90", want: []int32{}, state: TokensList},
		"some":   {json: "[5, 6,\n7]", msgpack: "93 05 06 07", want: []int32{5, 6, 7}, state: TokensList},
		"widths": {json: "[0,127,128,255,256,65535,65536,2147483647]", msgpack: "98 00 7f cc80 ccff cd0100 cdffff ce00010000 ce7fffffff", want: []int32{0, 127, 128, 255, 256, 65535, 65536, math.MaxInt32}, state: TokensList},
		"wide forms": {msgpack: "dc 0005 cf0000000000000007 d007 d10007 d200000007 d30000000000000007",
			want: []int32{7, 7, 7, 7, 7}, state: TokensList},
		"minus zero":   {json: "[-0]", want: []int32{0}, state: TokensList},
		"packed":       {msgpack: "c4 0c 05000000 00010000 ffffff7f", want: []int32{5, 256, math.MaxInt32}, state: TokensList, packed: true},
		"packed empty": {msgpack: "c4 00", want: []int32{}, state: TokensList, packed: true},
		"packed, wide": {msgpack: "c6 00000004 07000000", want: []int32{7}, state: TokensList, packed: true},
	} {
		t.Run(name, func(t *testing.T) {
			check := func(codec Codec, body []byte) {
				req, err := ParseRequest(codec, body)
				require.NoError(t, err)
				require.Empty(t, cmp.Diff(&Request{TokenIDs: c.want, TokensState: c.state, Packed: c.packed, Fields: Map{}}, req))
				again, err := ParseRequest(codec, req.Append(nil, codec))
				require.NoError(t, err)
				require.Empty(t, cmp.Diff(req, again))
			}
			if c.json != "" {
				check(CodecJSON, []byte(`{"token_ids":`+c.json+`}`))
			}
			if c.msgpack != "" {
				check(CodecMsgpack, withTokens(t, c.msgpack))
			}
		})
	}
}

func TestTokenErrors(t *testing.T) {
	for name, c := range map[string]struct {
		json, msgpack, field, reason string
	}{
		"too large":           {"[1,2147483648]", "92 01 ce80000000", "token_ids[1]", reasonTokenSize},
		"far too large":       {"[18446744073709551615]", "91 cfffffffffffffffff", "token_ids[0]", reasonTokenSize},
		"larger than 64 bits": {"[99999999999999999999999]", "", "token_ids[0]", reasonTokenSize},
		"negative":            {"[1,2,3,-1]", "94 01 02 03 ff", "token_ids[3]", reasonNegative},
		"very negative":       {"[-99999999999999999999999]", "91 d38000000000000000", "token_ids[0]", reasonNegative},
		"float":               {"[1.0]", "91 ca3f800000", "token_ids[0]", reasonNotToken},
		"exponent":            {"[1e2]", "91 cb3ff0000000000000", "token_ids[0]", reasonNotToken},
		"null":                {"[null]", "91 c0", "token_ids[0]", reasonNotToken},
		"boolean":             {"[true]", "91 c3", "token_ids[0]", reasonNotToken},
		"text":                {`["5"]`, "91 a135", "token_ids[0]", reasonNotToken},
		"list in list":        {"[[5]]", "91 9105", "token_ids[0]", reasonNotToken},
		"bytes in list":       {"", "91 c40105", "token_ids[0]", reasonNotToken},
		"map":                 {"{}", "80", "token_ids", "is a map, not a list of token ids"},
		"string":              {`"abc"`, "a3616263", "token_ids", "is a string, not a list of token ids"},
		"number":              {"5", "05", "token_ids", "is an integer, not a list of token ids"},
		"packed, 3 bytes":     {"", "c4 03 050000", "token_ids", reasonPacked},
		"packed, negative":    {"", "c4 08 05000000 000000ff", "token_ids[1]", reasonNegative},
	} {
		t.Run(name, func(t *testing.T) {
			want := &FieldError{Field: c.field, Reason: c.reason}
			if c.json != "" {
				_, err := ParseRequest(CodecJSON, []byte(`{"model":"m","token_ids":`+c.json+`}`))
				require.Equal(t, want, err)
			}
			if c.msgpack != "" {
				_, err := ParseRequest(CodecMsgpack, withTokens(t, c.msgpack))
				require.Equal(t, want, err)
			}
		})
	}
}

func TestParseRequestErrors(t *testing.T) {
	notMap := func(kind string) error { return &NotMapError{Kind: kind} }
	for name, c := range map[string]struct {
		codec Codec
		body  string
		want  error
	}{
		"JSON null":               {CodecJSON, " null ", notMap("null")},
		"JSON list":               {CodecJSON, "[1,2]", notMap("list")},
		"JSON text":               {CodecJSON, `"x"`, notMap("string")},
		"JSON number":             {CodecJSON, "18446744073709551615", notMap("integer")},
		"JSON float":              {CodecJSON, "1.5", notMap("number")},
		"JSON broken list":        {CodecJSON, "[1,2", &DecodeError{CodecJSON, 4, reasonEnd}},
		"JSON empty":              {CodecJSON, "", &DecodeError{CodecJSON, 0, reasonEnd}},
		"msgpack in JSON":         {CodecJSON, "\x81\xa1a\x01", &DecodeError{CodecJSON, 0, reasonSyntax}},
		"JSON trailing":           {CodecJSON, "{} {}", &DecodeError{CodecJSON, 3, reasonTrailing}},
		"JSON no comma":           {CodecJSON, `{"a":1 "b":2}`, &DecodeError{CodecJSON, 7, reasonSyntax}},
		"JSON ends":               {CodecJSON, `{"a":1,`, &DecodeError{CodecJSON, 7, reasonEnd}},
		"JSON duplicate":          {CodecJSON, `{"a":1,"a":1}`, &DecodeError{CodecJSON, 7, reasonDuplicate}},
		"JSON tokens twice":       {CodecJSON, `{"token_ids":null,"token_ids":[]}`, &DecodeError{CodecJSON, 18, reasonDuplicate}},
		"JSON tokens end":         {CodecJSON, `{"token_ids":[1,`, &DecodeError{CodecJSON, 16, reasonEnd}},
		"JSON tokens broken":      {CodecJSON, `{"token_ids":[1,x]}`, &DecodeError{CodecJSON, 16, reasonSyntax}},
		"JSON tokens zero first":  {CodecJSON, `{"token_ids":[01]}`, &DecodeError{CodecJSON, 14, reasonSyntax}},
		"msgpack nil":             {CodecMsgpack, "\xc0", notMap("null")},
		"msgpack list":            {CodecMsgpack, "\x91\x01", notMap("list")},
		"msgpack bytes":           {CodecMsgpack, "\xc4\x01x", notMap("byte string")},
		"msgpack boolean":         {CodecMsgpack, "\xc3", notMap("boolean")},
		"msgpack list and more":   {CodecMsgpack, "\x91\x01\x01", &DecodeError{CodecMsgpack, 2, reasonTrailing}},
		"msgpack list with a map": {CodecMsgpack, "\x91\x81\x01\x01", &DecodeError{CodecMsgpack, 2, reasonKey}},
		"msgpack empty":           {CodecMsgpack, "", &DecodeError{CodecMsgpack, 0, reasonEnd}},
		"JSON in msgpack":         {CodecMsgpack, `{"a":1}`, &DecodeError{CodecMsgpack, 1, reasonTrailing}},
		"msgpack trailing":        {CodecMsgpack, "\x80\x80", &DecodeError{CodecMsgpack, 1, reasonTrailing}},
		"msgpack number as key":   {CodecMsgpack, "\x81\x01\x01", &DecodeError{CodecMsgpack, 1, reasonKey}},
		"msgpack duplicate":       {CodecMsgpack, "\x82\xa1a\x01\xa1a\x01", &DecodeError{CodecMsgpack, 4, reasonDuplicate}},
		"msgpack tokens twice":    {CodecMsgpack, "\x82\xa9token_ids\xc0\xa9token_ids\xc0", &DecodeError{CodecMsgpack, 12, reasonDuplicate}},
		"msgpack tokens lie":      {CodecMsgpack, "\x81\xa9token_ids\x93\x01\x01", &DecodeError{CodecMsgpack, 11, reasonLength}},
		"msgpack tokens end":      {CodecMsgpack, "\x81\xa9token_ids\x92\x01\xcd\x01", &DecodeError{CodecMsgpack, 15, reasonEnd}},
		"msgpack deep": {CodecMsgpack, "\x81\xa1a" + strings.Repeat("\x91", 64) + "\x01",
			&DecodeError{CodecMsgpack, 3 + 63, reasonDepth}},
		"JSON deep": {CodecJSON, `{"a":` + strings.Repeat("[", 64), &DecodeError{CodecJSON, 5 + 63, reasonDepth}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ParseRequest(c.codec, []byte(c.body))
			require.Equal(t, c.want, err)
			require.NotEmpty(t, err.Error())
		})
	}
}

// Token ids do not count against MaxValues: prompts may be long.
func TestLongPrompt(t *testing.T) {
	ids := make([]int32, MaxValues+5)
	for i := range ids {
		ids[i] = int32(i)
	}
	req := &Request{TokenIDs: ids, TokensState: TokensList, Fields: Map{"model": "m"}}
	for _, c := range bothCodecs {
		for _, packed := range []bool{false, true} {
			if packed && c == CodecJSON {
				continue
			}
			req.Packed = packed
			again, err := ParseRequest(c, req.Append(nil, c))
			require.NoError(t, err)
			require.Equal(t, packed, again.Packed)
			require.True(t, slices.Equal(ids, again.TokenIDs))
		}
	}
}

func TestRequestAppendIgnoresTokensInFields(t *testing.T) {
	req := &Request{Fields: Map{"token_ids": []any{int64(1)}, "z": nil, "a": true}}
	require.Equal(t, `{"a":true,"z":null}`, string(req.Append(nil, CodecJSON)))
	req.TokensState, req.TokenIDs = TokensList, []int32{7}
	require.Equal(t, `{"a":true,"token_ids":[7],"z":null}`, string(req.Append(nil, CodecJSON)))
}

// values draws decoded trees.
func values(depth int) *rapid.Generator[any] {
	leaves := []*rapid.Generator[any]{
		rapid.Just[any](nil),
		rapid.Map(rapid.Bool(), func(v bool) any { return v }),
		rapid.Map(rapid.Int64(), func(v int64) any { return v }),
		rapid.Map(rapid.Uint64Min(1<<63), func(v uint64) any { return v }),
		rapid.Map(rapid.Float64().Filter(func(v float64) bool { return !math.IsInf(v, 0) && !math.IsNaN(v) }), func(v float64) any { return v }),
		rapid.Map(rapid.String(), func(v string) any { return v }),
	}
	if depth == 0 {
		return rapid.OneOf(leaves...)
	}
	inner := rapid.Deferred(func() *rapid.Generator[any] { return values(depth - 1) })
	return rapid.OneOf(append(leaves,
		rapid.Map(rapid.SliceOfN(inner, 0, 20), func(v []any) any { return v }),
		rapid.Map(rapid.MapOfN(rapid.String(), inner, 0, 20), func(v map[string]any) any { return v }),
	)...)
}

func TestValueRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := values(3).Draw(t, "value")
		for _, c := range bothCodecs {
			b := AppendValue(nil, c, want)
			got, err := DecodeValue(c, b)
			require.NoError(t, err)
			require.Empty(t, cmp.Diff(want, got), "%s", c)
			require.Equal(t, b, AppendValue(nil, c, got), "not the same bytes again")
		}
	})
}

func TestRequestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := &Request{
			TokensState: TokensState(rapid.IntRange(0, 2).Draw(t, "state")),
			Fields:      rapid.MapOfN(rapid.String().Filter(func(s string) bool { return s != "token_ids" }), values(2), 0, 20).Draw(t, "fields"),
		}
		if want.TokensState == TokensList {
			want.TokenIDs = rapid.SliceOf(rapid.Int32Min(0)).Draw(t, "ids")
		}
		for _, c := range bothCodecs {
			want.Packed = c == CodecMsgpack && want.TokensState == TokensList && rapid.Bool().Draw(t, "packed")
			got, err := ParseRequest(c, want.Append(nil, c))
			require.NoError(t, err)
			require.Empty(t, cmp.Diff(want, got))
		}
	})
}

// benchmarkBody is a body as the frontend sends it, with a prompt of n tokens.
func benchmarkBody(b testing.TB, c Codec, n int, packed bool) []byte {
	req, err := ParseRequest(CodecMsgpack, requestBodies(b)["request-00.bin"])
	require.NoError(b, err)
	req.TokenIDs = make([]int32, n)
	for i := range req.TokenIDs {
		req.TokenIDs[i] = int32(i*7919) % 128000
	}
	req.Packed = packed
	return req.Append(nil, c)
}

func BenchmarkParseRequest(b *testing.B) {
	for _, c := range bothCodecs {
		for _, size := range []struct {
			name string
			n    int
		}{{"32", 32}, {"8k", 8 << 10}, {"128k", 128 << 10}} {
			body := benchmarkBody(b, c, size.n, false)
			b.Run(c.String()+"/"+size.name, func(b *testing.B) {
				b.SetBytes(int64(len(body)))
				b.ReportAllocs()
				for b.Loop() {
					if _, err := ParseRequest(c, body); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
	body := benchmarkBody(b, CodecMsgpack, 128<<10, true)
	b.Run("packed/128k", func(b *testing.B) {
		b.SetBytes(int64(len(body)))
		b.ReportAllocs()
		for b.Loop() {
			if _, err := ParseRequest(CodecMsgpack, body); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// A prompt costs one slice, not one value a token.
func TestParseRequestDoesNotBoxTokens(t *testing.T) {
	for _, packed := range []bool{false, true} {
		few := testing.AllocsPerRun(10, func() { mustParse(t, CodecMsgpack, benchmarkBody2(few32, packed)) })
		many := testing.AllocsPerRun(10, func() { mustParse(t, CodecMsgpack, benchmarkBody2(many64k, packed)) })
		require.Equal(t, few, many)
	}
}

var few32, many64k = make([]int32, 32), make([]int32, 64<<10)

func benchmarkBody2(ids []int32, packed bool) []byte {
	dst := append(make([]byte, 0, 1<<19), "\x81\xa9token_ids"...)
	if !packed {
		return appendTokenList(dst, CodecMsgpack, ids)
	}
	dst = appendMsgpackBinHead(dst, 4*len(ids))
	for _, id := range ids {
		dst = binary.LittleEndian.AppendUint32(dst, uint32(id))
	}
	return dst
}

func mustParse(t testing.TB, c Codec, body []byte) {
	if _, err := ParseRequest(c, body); err != nil {
		t.Fatal(err)
	}
}

func TestPromptLengthIsFoundWithoutDecoding(t *testing.T) {
	ids := []int32{1, 500, 70000, 3}
	for _, packed := range []bool{false, true} {
		r := Request{Fields: Map{"a": Map{"token_ids": []any{int64(1)}, "b": []any{"x", Map{}}}, "z": "token_ids"}, TokensState: TokensList, TokenIDs: ids, Packed: packed}
		for _, c := range []Codec{CodecJSON, CodecMsgpack} {
			if got := PromptLength(c, r.Append(nil, c)); got != len(ids) {
				t.Errorf("%v packed %v: %d", c, packed, got)
			}
		}
	}
	for body, want := range map[string]int{
		`{"token_ids":[]}`: 0, `{"token_ids":[ ]}`: 0, `{"token_ids" : [ 7 ]}`: 1, `{"a":"token_ids","token_ids":[1,2]}`: 2, `{"token_ids":null}`: 0,
		`{"a":{"token_ids":[1]}}`: 0, `["token_ids",[1]]`: 0, `{"x":"\"token_ids","token_ids":[1,2,3]}`: 3, `{"token_ids":[1,`: 0, `{"token_ids"`: 0, `"`: 0, ``: 0,
	} {
		if got := PromptLength(CodecJSON, []byte(body)); got != want {
			t.Errorf("%s: %d, want %d", body, got, want)
		}
	}
}
