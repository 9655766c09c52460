package modelcard

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
)

func TestDecodeLenient(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{`{"a":NaN,"b":[-Infinity,Infinity,1]}`, `{"a":null,"b":[null,null,1]}`},
		{`{"a":1,}`, `{"a":1}`},
		{`{"a":[1,2, ], }`, `{"a":[1,2]}`},
		{"{ // note, with } and \"quotes\n\"a\":1}", `{"a":1}`},
		{`{"a":/* one, */1/**/,"b":2}`, `{"a":1,"b":2}`},
		{`{"a":"NaN // no, /* \" ,} comment","b":NaN}`, `{"a":"NaN // no, /* \" ,} comment","b":null}`},
		{`{"a":1} // end`, `{"a":1}`},
	} {
		var got, want any
		require.NoError(t, decodeLenient([]byte(c.in), &got), c.in)
		require.NoError(t, json.Unmarshal([]byte(c.want), &want))
		require.Empty(t, cmp.Diff(want, got), c.in)
	}
	for _, bad := range []string{``, `{`, `{"a":1,,}`, `{"a":NaNcy}`, `{"a":1NaN}`, `{a:1}`, `{'a':1}`, `{"a":1 /* `, `{"a":1} x`, `[,]`, `/`, `"`, `"\`} {
		var v any
		require.Error(t, decodeLenient([]byte(bad), &v), bad)
	}
}

func FuzzLenient(f *testing.F) {
	recorded, err := os.ReadFile(filepath.Join(recordedModel, nameConfig))
	require.NoError(f, err)
	f.Add(recorded)
	for _, s := range []string{`{"a":[NaN,],}//x`, `/**/{}`, `"\"`, `[1,/*,*/]`, `{"a":-Infinity}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var lenient, strict any
		errLenient := decodeLenient(b, &lenient)
		if json.Unmarshal(b, &strict) == nil {
			require.NoError(t, errLenient, "what is valid JSON is understood")
			require.Empty(t, cmp.Diff(strict, lenient), "and means the same")
			// Rewriting it must not change it either.
			var rewritten any
			require.NoError(t, json.Unmarshal(toStrict(b), &rewritten))
			require.Empty(t, cmp.Diff(strict, rewritten))
		}
		if out := toStrict(b); len(out) > 2*len(b)+4 {
			t.Fatalf("%d bytes became %d", len(b), len(out))
		}
	})
}

// FuzzConfig: no config.json may do worse than an error.
func FuzzConfig(f *testing.F) {
	recorded, err := os.ReadFile(filepath.Join(recordedModel, nameConfig))
	require.NoError(f, err)
	f.Add(recorded, []byte(`{"eos_token":{"content":"</s>"},"added_tokens_decoder":{"2":{"content":"</s>"}}}`))
	f.Add([]byte(`{"architectures":["A"],"model_type":"m","text_config":{"eos_token_id":[1,-1,"x",null]}}`), []byte(`{"eos_token":7}`))
	f.Fuzz(func(t *testing.T, config, tokenizer []byte) {
		m := &Model{dir: "dir", config: &file{name: nameConfig, data: config}, tokenizerConfig: &file{name: nameTokenizerConfig, data: tokenizer}}
		if err := m.gather(nil); err == nil {
			require.NotEmpty(t, m.facts.EOSTokenIDs)
		} else {
			require.ErrorAs(t, err, ptr(&Error{}))
		}
	})
}
