package protocol

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"math"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	require.NoError(t, err)
	return b
}

func TestDecodeMsgpack(t *testing.T) {
	for in, want := range map[string]any{
		"c0": nil, "c2": false, "c3": true,
		"00": int64(0), "7f": int64(127), "ff": int64(-1), "e0": int64(-32),
		"cc ff": int64(255), "cd ffff": int64(65535), "ce ffffffff": int64(math.MaxUint32),
		"cf 7fffffffffffffff": int64(math.MaxInt64), "cf 8000000000000000": uint64(1 << 63), "cf ffffffffffffffff": uint64(math.MaxUint64),
		// The instance id of a recorded worker: a float would round it.
		"cf 7d7ba22f8fc02e37": int64(9041999002035301943),
		"d0 80":               int64(-128), "d1 8000": int64(-32768), "d2 80000000": int64(math.MinInt32), "d3 8000000000000000": int64(math.MinInt64),
		"d0 7f": int64(127), "d3 0000000000000001": int64(1),
		"ca 3f000000": 0.5, "cb 3fe6666666666666": 0.7, "cb 7ff0000000000000": math.Inf(1),
		"a0": "", "a3 616263": "abc", "d9 01 61": "a", "da 0001 61": "a", "db 00000001 61": "a", "a2 c3a9": "é",
		"c4 00": []byte{}, "c4 02 00ff": []byte{0, 255}, "c5 0001 07": []byte{7}, "c6 00000001 07": []byte{7},
		"90": []any{}, "92 01 c0": []any{int64(1), nil}, "dc 0001 01": []any{int64(1)}, "dd 00000001 01": []any{int64(1)},
		"80": Map{}, "81 a1 61 01": Map{"a": int64(1)}, "de 0001 a1 61 01": Map{"a": int64(1)}, "df 00000001 a0 90": Map{"": []any{}},
		"81 d9 01 61 01": Map{"a": int64(1)},
	} {
		got, err := DecodeValue(CodecMsgpack, unhex(t, in))
		require.NoError(t, err, in)
		require.Equal(t, want, got, in)
	}
}

func TestDecodeJSON(t *testing.T) {
	for in, want := range map[string]any{
		"null": nil, "true": true, "false": false, " \t\r\n1 \n": int64(1),
		"0": int64(0), "-0": int64(0), "-1": int64(-1), "9223372036854775807": int64(math.MaxInt64), "-9223372036854775808": int64(math.MinInt64),
		"9223372036854775808": uint64(1 << 63), "18446744073709551615": uint64(math.MaxUint64), "9041999002035301943": int64(9041999002035301943),
		"1.0": 1.0, "1e2": 100.0, "1E+2": 100.0, "-1.5e-3": -0.0015, "0.5": 0.5, "0e0": 0.0, "1e-400": 0.0,
		`""`: "", `"abc"`: "abc", `"é😀"`: "é😀", `"\"\\\/\b\f\n\r\t"`: "\"\\/\b\f\n\r\t", `"\u00e9\u0000"`: "é\x00", `"\ud83d\uDE00"`: "😀", `"a\u007fb"`: "a\x7fb",
		"[]": []any{}, "[ ]": []any{}, "[1, null ,\"a\"]": []any{int64(1), nil, "a"}, "[[],{}]": []any{[]any{}, Map{}},
		"{}": Map{}, "{ }": Map{}, `{"a" : 1 , "b":[ ]}`: Map{"a": int64(1), "b": []any{}}, `{"":0}`: Map{"": int64(0)}, `{"a":1,"A":2}`: Map{"a": int64(1), "A": int64(2)},
	} {
		got, err := DecodeValue(CodecJSON, []byte(in))
		require.NoError(t, err, in)
		require.Equal(t, want, got, in)
	}
}

func TestMsgpackErrors(t *testing.T) {
	for in, want := range map[string]struct {
		offset int
		reason string
	}{
		"":                                  {0, reasonEnd},
		"cc":                                {1, reasonEnd},
		"cb 00000000":                       {5, reasonEnd},
		"cd 01":                             {2, reasonEnd},
		"d9":                                {1, reasonEnd},
		"92 01":                             {0, reasonLength},
		"a2 61":                             {0, reasonLength},
		"c4 01":                             {0, reasonLength},
		"81 a0":                             {0, reasonLength},
		"01 a2 61":                          {1, reasonTrailing},
		"91 a2 61":                          {1, reasonLength},
		"c1":                                {0, reasonReserved},
		"91 c1":                             {1, reasonReserved},
		"c7 00 01":                          {0, reasonExtension},
		"d4 01 00":                          {0, reasonExtension},
		"d8 01":                             {0, reasonExtension},
		"dd ffffffff 01":                    {0, reasonLength},
		"df 7fffffff 01 01":                 {0, reasonLength},
		"db ffffffff 61":                    {0, reasonLength},
		"c6 ffffffff 61":                    {0, reasonLength},
		"81 01 01":                          {1, reasonKey},
		"81 c4 01 61 01":                    {1, reasonKey},
		"81 c0 01":                          {1, reasonKey},
		"82 a1 61 01 a1 61 02":              {4, reasonDuplicate},
		"82 a1 61 01 d9 01 61 02":           {4, reasonDuplicate},
		"a1 ff":                             {1, reasonUTF8},
		"a3 eda080":                         {1, reasonUTF8},
		"81 a1 ff 01":                       {2, reasonUTF8},
		"c0 c0":                             {1, reasonTrailing},
		strings.Repeat("91", 64) + "c0":     {-1, ""},
		strings.Repeat("91", 65) + "c0":     {64, reasonDepth},
		strings.Repeat("81a161", 65) + "c0": {64 * 3, reasonDepth},
		strings.Repeat("91", 1<<20) + "c0":  {64, reasonDepth},
	} {
		_, err := DecodeValue(CodecMsgpack, unhex(t, in))
		if want.reason == "" {
			require.NoError(t, err)
			continue
		}
		require.Equal(t, &DecodeError{Codec: CodecMsgpack, Offset: want.offset, Reason: want.reason}, err, in[:min(40, len(in))])
	}
}

func TestJSONErrors(t *testing.T) {
	for in, want := range map[string]struct {
		offset int
		reason string
	}{
		"": {0, reasonEnd}, "  ": {2, reasonEnd}, "\ufeff1": {0, reasonSyntax}, "x": {0, reasonSyntax}, "nul": {3, reasonEnd}, "nulx": {0, reasonSyntax},
		"NaN": {0, reasonSyntax}, "Infinity": {0, reasonSyntax}, "-Infinity": {1, reasonSyntax}, "'a'": {0, reasonSyntax},
		"01": {0, reasonSyntax}, "-01": {1, reasonSyntax}, "00": {0, reasonSyntax}, "+1": {0, reasonSyntax}, ".5": {0, reasonSyntax}, "1.": {2, reasonEnd}, "1.x": {2, reasonSyntax},
		"-": {1, reasonEnd}, "1e": {2, reasonEnd}, "1e+": {3, reasonEnd}, "1x": {1, reasonTrailing}, "0x10": {1, reasonTrailing}, "1 1": {2, reasonTrailing}, "1_0": {1, reasonTrailing},
		"18446744073709551616": {0, reasonInteger}, "-9223372036854775809": {0, reasonInteger}, "1e400": {0, reasonFloat}, "-1e400": {0, reasonFloat},
		"[": {1, reasonEnd}, "[1": {2, reasonEnd}, "[1,": {3, reasonEnd}, "[1,]": {3, reasonSyntax}, "[,1]": {1, reasonSyntax}, "[1 2]": {3, reasonSyntax}, "[1}": {2, reasonSyntax}, "]": {0, reasonSyntax},
		"{": {1, reasonEnd}, `{"a"`: {4, reasonEnd}, `{"a":`: {5, reasonEnd}, `{"a":1`: {6, reasonEnd}, `{"a":1,}`: {7, reasonKey}, `{,}`: {1, reasonKey}, `{a:1}`: {1, reasonKey}, `{1:1}`: {1, reasonKey},
		`{"a" 1}`: {5, reasonSyntax}, `{"a":1 "b":2}`: {7, reasonSyntax}, `{"a":1,"a":2}`: {7, reasonDuplicate}, `{"a":1,"\u0061":2}`: {7, reasonDuplicate},
		`"a`: {2, reasonEnd}, `"\`: {2, reasonEnd}, `"\x"`: {1, reasonEscape}, `"\u12"`: {6, reasonEnd}, `"\u12"  `: {1, reasonEscape}, `"\u123g"`: {1, reasonEscape}, "\"a\nb\"": {2, reasonControl}, "\"\\n\x00\"": {3, reasonControl},
		`"\ud800"`: {1, reasonSurrogate}, `"\udc00\ud800"`: {1, reasonSurrogate}, `"\ud800\n"`: {1, reasonSurrogate}, `"\ud800\u0061"`: {1, reasonSurrogate}, `"\ud800`: {7, reasonEnd}, `"\ud800\u00`: {11, reasonEnd},
		"\"\xff\"": {1, reasonUTF8}, "\"\\n\xff\"": {1, reasonUTF8}, "\"\xed\xa0\x80\"": {1, reasonUTF8}, "{\"\xff\":1}": {2, reasonUTF8},
		strings.Repeat("[", 65): {64, reasonDepth}, strings.Repeat(`{"a":`, 65): {64 * 5, reasonDepth}, strings.Repeat("[", 1<<20): {64, reasonDepth},
	} {
		_, err := DecodeValue(CodecJSON, []byte(in))
		require.Equal(t, &DecodeError{Codec: CodecJSON, Offset: want.offset, Reason: want.reason}, err, in[:min(40, len(in))])
	}
	_, err := DecodeValue(CodecJSON, []byte(strings.Repeat("[", 64)+strings.Repeat("]", 64)))
	require.NoError(t, err)
}

// No body, however it lies about itself, takes more memory than the bounds say.
func TestDecodeTakesBoundedMemory(t *testing.T) {
	const body = 3 << 20
	claims := func(head ...byte) []byte { // a head of a large container in front of zeros
		return append(head, make([]byte, body)...)
	}
	var nested []byte
	for range 63 { // every level claims as much as there is left
		nested = binary.BigEndian.AppendUint32(append(nested, 0xdd), MaxValues)
	}
	for name, in := range map[string][]byte{
		"list of small integers": claims(0xdd, 0, 0x7f, 0xff, 0xff),
		"map":                    claims(0xdf, 0, 0x3f, 0xff, 0xff),
		"nested claims":          append(nested, make([]byte, body)...),
		"many empty maps":        append([]byte{0xdd, 0, 0x0f, 0xff, 0xff}, bytes.Repeat([]byte{0x80}, body)...),
		"lists of one":           append([]byte{0xdd, 0, 0x0f, 0xff, 0xff}, bytes.Repeat([]byte{0x91, 0xc0}, body)...),
	} {
		t.Run(name, func(t *testing.T) {
			used := allocated(func() {
				_, err := DecodeValue(CodecMsgpack, in)
				require.Error(t, err)
			})
			require.Less(t, used, uint64(150<<20))
		})
	}
	for name, in := range map[string]string{
		"list": "[" + strings.Repeat("0,", body/2) + "0]",
		"maps": "[" + strings.Repeat("{},", body/3) + "0]",
	} {
		t.Run("JSON "+name, func(t *testing.T) {
			used := allocated(func() {
				_, err := DecodeValue(CodecJSON, []byte(in))
				var de *DecodeError
				require.ErrorAs(t, err, &de)
				require.Equal(t, reasonValues, de.Reason)
			})
			require.Less(t, used, uint64(200<<20))
		})
	}
	t.Run("claim without bytes", func(t *testing.T) {
		for _, in := range []string{"dd ffffffff", "df ffffffff", "db ffffffff", "c6 ffffffff",
			"81 a9 746f6b656e5f696473 dd ffffffff", "81 a9 746f6b656e5f696473 c6 ffffffff"} {
			b := unhex(t, in)
			used := allocated(func() {
				_, err := ParseRequest(CodecMsgpack, b)
				require.Error(t, err)
			})
			require.Less(t, used, uint64(1<<20), in)
		}
	})
}

// allocated returns the bytes that f takes from the heap. Nothing else runs
// meanwhile: tests of this package are not parallel.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// Values of exactly the bound pass.
func TestDecodeMaxValues(t *testing.T) {
	list := func(n uint32) []byte {
		return append(binary.BigEndian.AppendUint32([]byte{0xdd}, n), make([]byte, n)...)
	}
	_, err := DecodeValue(CodecMsgpack, list(MaxValues))
	require.NoError(t, err)
	_, err = DecodeValue(CodecMsgpack, list(MaxValues+1))
	require.Equal(t, &DecodeError{Codec: CodecMsgpack, Reason: reasonValues}, err)
	_, err = DecodeValue(CodecJSON, []byte("["+strings.Repeat("0,", MaxValues-1)+"0]"))
	require.NoError(t, err)
}

// Errors must not carry the body's text into logs and answers.
func TestDecodeErrorsDoNotQuote(t *testing.T) {
	const secret = "attack at dawn"
	for _, in := range []string{
		`{"` + secret + `":1,"` + secret + `":2}`, `{"a":"` + secret + "\x00" + `"}`, `["` + secret + `" x]`, `"` + secret,
		`{"token_ids":["` + secret + `"]}`, `{"token_ids":"` + secret + `"}`, `"` + secret + `"`,
	} {
		_, err := ParseRequest(CodecJSON, []byte(in))
		require.Error(t, err)
		require.NotContains(t, err.Error(), secret)
	}
}

func TestCodecNames(t *testing.T) {
	for name, want := range map[string]Codec{"json": CodecJSON, "": CodecJSON, "msgpack": CodecMsgpack} {
		c, err := ParseCodec(name)
		require.NoError(t, err)
		require.Equal(t, want, c)
	}
	require.Equal(t, "json", CodecJSON.String())
	require.Equal(t, "msgpack", CodecMsgpack.String())
	for _, name := range []string{"JSON", "cbor", " json", strings.Repeat("x", 1000)} {
		_, err := ParseCodec(name)
		var uc *UnknownCodecError
		require.ErrorAs(t, err, &uc)
		require.Less(t, len(err.Error()), 120)
	}
}
