package protocol

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestExtractJSONKeepsTheOrderOfKeys(t *testing.T) {
	body := Object{
		{Key: "token_ids", Value: []any{int64(1), int64(300)}},
		{Key: "skipped", Value: Object{{Key: "a", Value: []byte{1, 2}}, {Key: "b", Value: "text"}, {Key: "c", Value: []any{nil, true}}}},
		{Key: "options", Value: Object{{Key: "schema", Value: Object{
			{Key: "z", Value: int64(1)}, {Key: "a", Value: Object{{Key: "y", Value: 0.5}, {Key: "b", Value: []any{"<é>", nil, false}}}}, {Key: "m", Value: Object{}},
		}}, {Key: "text", Value: "x"}}},
	}
	for _, c := range []Codec{CodecJSON, CodecMsgpack} {
		raw := AppendValue(nil, c, body)
		got, ok, err := ExtractJSON(c, raw, "options", "schema")
		require.NoError(t, err, c)
		require.True(t, ok, c)
		require.Equal(t, `{"z":1,"a":{"y":0.5,"b":["<é>",null,false]},"m":{}}`, string(got), c)
		got, ok, err = ExtractJSON(c, raw, "options", "text")
		require.NoError(t, err, c)
		require.True(t, ok, c)
		require.Equal(t, `"x"`, string(got), c)
		for _, path := range [][]string{{"none"}, {"options", "none"}} {
			_, ok, err = ExtractJSON(c, raw, path...)
			require.NoError(t, err, c)
			require.False(t, ok, c)
		}
	}
}

func FuzzExtractJSON(f *testing.F) {
	f.Add(AppendValue(nil, CodecMsgpack, Object{{Key: "a", Value: Object{{Key: "b", Value: int64(1)}}}}), true)
	f.Add([]byte(`{"a":{"b":[1,{"c":null}]}}`), false)
	f.Add([]byte{0x81, 0xa1, 'a', 0xdf, 0xff, 0xff, 0xff, 0xff}, true)
	f.Fuzz(func(t *testing.T, body []byte, msgpack bool) {
		c := CodecJSON
		if msgpack {
			c = CodecMsgpack
		}
		whole, decodeErr := DecodeValue(c, body)
		raw, ok, err := ExtractJSON(c, body, "a")
		if decodeErr != nil || err != nil || !ok {
			return
		}
		_, isMap := whole.(Map)
		require.True(t, isMap)
		_, err = DecodeValue(CodecJSON, raw)
		require.NoError(t, err, "what was extracted must be JSON: %q", raw)
	})
}
