package engineargs

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// fuzzed checks what holds for every tree that a reader lets through: it can be
// sent, it arrives as it was, and a merge with it either fails or can be sent.
func fuzzed(t *testing.T, tree *Tree, asFile bool) {
	text, err := json.Marshal(tree)
	require.NoError(t, err)
	back, _, err := ReadJSON(text, override)
	if err != nil { // the limits count differently for the two forms
		require.Regexp(t, "levels deep|more than 50000", err.Error())
		return
	}
	again, err := json.Marshal(back)
	require.NoError(t, err)
	require.Equal(t, string(text), string(again))

	in := asStarted()
	in.PublishKVEvents = true
	if asFile {
		in.Files = []*Tree{tree, back}
	} else {
		in.Override = tree
	}
	r, err := Resolve(in)
	if err != nil {
		var errs Errors
		require.ErrorAs(t, err, &errs)
		return
	}
	out, err := json.Marshal(r.Engine())
	require.NoError(t, err)
	require.True(t, json.Valid(out))
	r.Facts()
	require.NotNil(t, r.Args.Get("backend"))
	after, err := json.Marshal(tree)
	require.NoError(t, err)
	require.Equal(t, string(text), string(after), "a merge leaves its inputs alone")
}

func FuzzReadYAML(f *testing.F) {
	files, err := filepath.Glob("../../internal/cli/testdata/launches/*/*.yaml")
	require.NoError(f, err)
	require.NotEmpty(f, files)
	for _, name := range files {
		b, err := os.ReadFile(name)
		require.NoError(f, err)
		f.Add(b)
	}
	f.Add([]byte("a: &x {b: *x}\n<<: [*x, {c: 1}]\n"))
	f.Add([]byte("kv_cache_config: {event_buffer_max_size: 0o7, kv_events_config: {publisher: [1]}}\n? a\n: b\n"))
	f.Add([]byte("a: 1:30\nb: -0x_1\nc: !!int '09'\nd: 1e999\ne: .5_\nf: \"\\0\"\n--- x\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		tree, _, err := ReadYAML("f.yaml", text)
		switch {
		case err != nil:
			var e *Error
			require.ErrorAs(t, err, &e)
			require.NotContains(t, err.Error(), "\n")
		case tree != nil:
			fuzzed(t, tree, true)
		}
	})
}

func FuzzReadJSON(f *testing.F) {
	f.Add([]byte(`{"enable_attention_dp": false, "kv_cache_config": {"dtype": "fp8"}}`))
	f.Add([]byte(`{"a": {"a": 1}, "a": [1e5, -0, 1.0, {"x": {}}], "kv_cache_config": null}`))
	f.Add([]byte(`{"\ud800": "\u0000", "scheduler_config": {"dynamic_batch_config": {}}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		tree, _, err := ReadJSON(text, override)
		if !json.Valid(text) {
			require.Error(t, err)
		}
		if err != nil {
			var e *Error
			require.ErrorAs(t, err, &e)
			return
		}
		require.True(t, bytes.HasPrefix(bytes.TrimLeft(text, " \t\r\n"), []byte("{")))
		fuzzed(t, tree, false)
	})
}

func FuzzReadFlags(f *testing.F) {
	f.Add("kv_cache_config.dtype=fp8\nkv_cache_config.event_buffer_max_size=1e3")
	f.Add("a=None\na.b=1_0\na.b.c=x\na..b=1\n=\nbackend=pytorch")
	f.Fuzz(func(t *testing.T, text string) {
		var flags []Flag
		for line := range strings.SplitSeq(text, "\n") {
			name, value, _ := strings.Cut(line, "=")
			flags = append(flags, Flag{FlagPrefix + name, value})
		}
		tree, _, err := ReadFlags(flags)
		if err != nil {
			var e *Error
			require.ErrorAs(t, err, &e)
			return
		}
		fuzzed(t, tree, false)
	})
}
