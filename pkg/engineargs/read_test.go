package engineargs

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/config/origin"
)

// TestPlainScalars: values as PyYAML's safe loader was seen to read them.
func TestPlainScalars(t *testing.T) {
	for text, want := range map[string]any{
		"yes": true, "Yes": true, "YES": true, "yEs": "yEs", "on": true, "Off": false, "no": false, "n": "n", "true": true, "tRue": "tRue",
		"~": nil, "null": nil, "NULL": nil, "nULL": "nULL", "None": "None",
		"0": int64(0), "010": int64(8), "-010": int64(-8), "08": "08", "0o10": "0o10", "0x1F": int64(31), "-0x1f": int64(-31), "0b101": int64(5), "1_000": int64(1000), "1_": int64(1), "+5": int64(5),
		"1:30": int64(90), "-1:30": int64(-90), "190:20:30.15": 685230.15, "18446744073709551615": uint64(18446744073709551615),
		"1e3": "1e3", "1e-5": "1e-5", "1.5e3": "1.5e3", "1.5e+3": 1500.0, "1.0e-5": 1e-5, ".5": 0.5, "-.5": "-.5", "5.": 5.0, "2.0": 2.0, "-0.0": 0.0, "1_0.5": 10.5,
		"'yes'": "yes", `"010"`: "010", "!!str 010": "010", "!!int '7'": int64(7), "!!float 3": 3.0, "!!bool off": false, "[1, [x, {a: on}], {}]": []any{int64(1), []any{"x", map[string]any{"a": true}}, map[string]any{}},
		"fp8": "fp8", "dyn://a.b.c": "dyn://a.b.c", "2024-1-1": "2024-1-1", "{}": map[string]any{}, "[]": []any{},
	} {
		tree, warnings, err := ReadYAML("f.yaml", []byte("a: "+text+"\n"))
		require.NoError(t, err, text)
		require.Empty(t, warnings)
		require.Equal(t, map[string]any{"a": want}, tree.Plain(), text)
	}
}

func TestWhatYAMLCannotPassOn(t *testing.T) {
	for text, says := range map[string]string{
		"- a\n":                           "is not a mapping",
		"just words\n":                    "is not a mapping",
		"a: [1\n":                         "cannot be read as YAML",
		"a: 1\n---\nb: 2\n":               "second document",
		"a: 1\n---\n[\n":                  "cannot be read as YAML",
		"x:\n  a: .inf\n":                 "x.a: \".inf\" is not a number that can be passed on (f.yaml:2)",
		"a: .nan\n":                       "not a number",
		"a: 0b_\n":                        "not a number",
		"a: 99999999999999999999\n":       "not a number",
		"a: 2024-01-01\n":                 "is a date",
		"a: !!binary aGk=\n":              "!!binary",
		"a: !python/object:os.system x\n": "cannot be passed on",
		"a: !!set {x, y}\n":               "!!set",
		"a: !!omap [x: 1]\n":              "!!omap",
		"on: 1\n":                         "takes for true or false",
		"? [a]\n: 1\n":                    "not plain text",
		"~: 1\n":                          "not plain text",
		"2024-01-01: 1\n":                 "is a date",
		"<<: [1]\n":                       "merges something",
		"<<: x\n":                         "merges something",
		"a: &a [*a]\n":                    "levels deep",
		"a: &a {b: *a}\n":                 "levels deep",
		"a: &a\n  <<: *a\n":               "levels deep",
		"a: " + strings.Repeat("[", 100) + strings.Repeat("]", 100) + "\n": "levels deep",
		strings.Repeat("# padding\n", 200_000):                             "bytes, more than",
	} {
		_, _, err := ReadYAML("f.yaml", []byte(text))
		require.ErrorContains(t, err, says, "%.60s", text)
		require.ErrorContains(t, err, "f.yaml")
		var e *Error
		require.ErrorAs(t, err, &e)
	}
}

func TestEmptyFiles(t *testing.T) {
	for _, text := range []string{"", "# nothing\n", "---\n", "null\n", "~\n"} {
		tree, warnings, err := ReadYAML("f.yaml", []byte(text))
		require.NoError(t, err, text)
		require.Nil(t, tree)
		require.Empty(t, warnings)
	}
}

func TestMergeKeysAndAliases(t *testing.T) {
	tree, warnings, err := ReadYAML("f.yaml", []byte(`
base: &base {a: 1, b: 1, c: 1}
other: &other {b: 2, c: 2, d: 2}
one: {<<: *base, b: 9}
list: {<<: [*base, *other]}
twice:
  <<: *base
  <<: *other
key: &k name
*k : x
again: *base
4: four
0.5: half
`))
	require.NoError(t, err)
	require.Empty(t, warnings)
	one, two := int64(1), int64(2)
	require.Equal(t, map[string]any{
		"base": map[string]any{"a": one, "b": one, "c": one}, "other": map[string]any{"b": two, "c": two, "d": two},
		"one": map[string]any{"a": one, "b": int64(9), "c": one}, "list": map[string]any{"a": one, "b": one, "c": one, "d": two},
		"twice": map[string]any{"a": one, "b": two, "c": two, "d": two}, "key": "name", "name": "x", "again": map[string]any{"a": one, "b": one, "c": one},
		"4": "four", "0.5": "half",
	}, tree.Plain())
	require.Equal(t, "f.yaml:2", tree.Get("one", "a").Origin.String(), "where the value is written")
	require.Equal(t, "f.yaml:4", tree.Get("one", "b").Origin.String())
}

func TestDoubledKeys(t *testing.T) {
	tree, warnings, err := ReadYAML("f.yaml", []byte("kv:\n  a: 1\n  b: 2\n  a: 3\n"))
	require.NoError(t, err)
	require.Equal(t, map[string]any{"kv": map[string]any{"a": int64(3), "b": int64(2)}}, tree.Plain())
	require.Len(t, warnings, 1)
	require.Equal(t, "kv.a: stands twice, first on line 2; the value on line 4 counts (f.yaml)", warnings[0].String())
}

func TestAliasesCannotGrowWithoutEnd(t *testing.T) {
	for _, form := range []string{"[%s]", "{<<: [%s]}"} {
		bomb := "a0: &a0 {x: 1}\n"
		for i := 1; i <= 9; i++ {
			bomb += fmt.Sprintf("a%d: &a%d %s\n", i, i, fmt.Sprintf(form, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d, ", i-1), 10), ", ")))
		}
		_, _, err := ReadYAML("f.yaml", []byte(bomb))
		require.ErrorContains(t, err, "more than 50000 values")
	}
}

var override = origin.Origin{Kind: origin.Flag, Name: "--override-engine-args"}

func TestReadJSON(t *testing.T) {
	tree, warnings, err := ReadJSON([]byte(` {"a": {"b": [1, 1.0, 1e3, "x", null, true, {"c": {}}], "n": -0}, "big": 18446744073709551615, "a": {"k": 2}} `), override)
	require.NoError(t, err)
	require.Equal(t, map[string]any{"a": map[string]any{"k": int64(2)}, "big": uint64(18446744073709551615)}, tree.Plain())
	require.Len(t, warnings, 1)
	require.Contains(t, warnings[0].String(), "a: stands twice")
	require.Equal(t, override, tree.Get("a", "k").Origin)

	tree, _, err = ReadJSON([]byte(`{"a": {"b": [1, 1.0, 1e3, "x", null, true, {"c": {}}, []], "n": -0}, "e": {}}`), override)
	require.NoError(t, err)
	text, err := json.Marshal(tree)
	require.NoError(t, err)
	require.Equal(t, `{"a":{"b":[1,1.0,1000.0,"x",null,true,{"c":{}},[]],"n":0},"e":{}}`, string(text), "a float stays a float")

	for text, says := range map[string]string{
		"":                            "JSON",
		"[1]":                         "is not a JSON object",
		"null":                        "is not a JSON object",
		"{'a': 1}":                    "cannot be read as JSON",
		`{"a": NaN}`:                  "cannot be read as JSON",
		`{"a": 1} x`:                  "goes on",
		`{"a": 1`:                     "unexpected EOF",
		`{"a": {"b": 1e999}}`:         `a.b: "1e999" is not a number`,
		`{"a": 99999999999999999999}`: "is not a number",
		"{\"a\": \"\xff\"}":           "UTF-8",
		strings.Repeat(`{"a":`, 100):  "levels deep",
		`{"a": [` + strings.Repeat("0,", 60_000) + `0]}`: "more than 50000",
	} {
		_, _, err := ReadJSON([]byte(text), override)
		require.ErrorContains(t, err, says, "%.40s", text)
		require.ErrorContains(t, err, "--override-engine-args")
	}
}

// TestFlagTypes: types as dynamo/trtllm/dynamic_flags.py was seen to find them.
func TestFlagTypes(t *testing.T) {
	for text, want := range map[string]any{
		"None": nil, "null": nil, "7": int64(7), "+7": int64(7), "-1": int64(-1), "1_000": int64(1000), "1__0": "1__0", "_1": "_1", "007": int64(7), " 7 ": int64(7), "0x10": "0x10",
		"1e3": 1000.0, "0.5": 0.5, ".5": 0.5, "5.": 5.0, "1._5": "1._5", "True": true, "FALSE": false, "true ": "true ", "yes": "yes", "fp8": "fp8", "[1,2]": "[1,2]", "": "",
	} {
		tree, _, err := ReadFlags([]Flag{{"--trtllm.a", text}})
		require.NoError(t, err)
		require.Equal(t, map[string]any{"a": want}, tree.Plain(), text)
	}
	for _, text := range []string{"inf", "-Infinity", "NaN", "1e999", "99999999999999999999"} {
		_, _, err := ReadFlags([]Flag{{"--trtllm.a.b", text}})
		require.ErrorContains(t, err, "is not a number that can be passed on (flag --trtllm.a.b)")
	}
}

func TestReadFlags(t *testing.T) {
	tree, warnings, err := ReadFlags([]Flag{
		{"--trtllm.kv.dtype", "fp8"}, {"--trtllm.kv.size", "1"}, {"--trtllm.kv.size", "2"}, {"--trtllm.x", "none"}, {"--trtllm.x.y", "1"}, {"--trtllm.s.a", "1"}, {"--trtllm.s", "2"},
	})
	require.NoError(t, err)
	require.Equal(t, map[string]any{"kv": map[string]any{"dtype": "fp8", "size": int64(2)}, "x": map[string]any{"y": int64(1)}, "s": int64(2)}, tree.Plain())
	require.Equal(t, "flag --trtllm.kv.dtype", tree.Get("kv", "dtype").Origin.String())
	require.Len(t, warnings, 1)
	require.Equal(t, `s: {"a":1} is replaced as a whole by 2 (flag --trtllm.s)`, warnings[0].String())

	for name, flags := range map[string][]Flag{
		"a..b: has an empty part":       {{"--trtllm.a..b", "1"}},
		"has an empty part":             {{"--trtllm.", "1"}},
		"already has the value 5":       {{"--trtllm.kv", "5"}, {"--trtllm.kv.dtype", "fp8"}},
		"already has the value \"\"":    {{"--trtllm.kv", ""}, {"--trtllm.kv.dtype", "fp8"}},
		"nested more than 64":           {{"--trtllm." + strings.Repeat("a.", 70) + "b", "1"}},
		"holds bytes that are not text": {{"--trtllm.a", "x\x00"}},
	} {
		_, _, err := ReadFlags(flags)
		require.ErrorContains(t, err, name)
	}
}

func TestTrees(t *testing.T) {
	root := NewTree(origin.Origin{})
	require.True(t, root.IsMap())
	require.NoError(t, root.Set([]string{"a", "b"}, &Tree{Value: int64(1)}))
	require.ErrorContains(t, root.Set([]string{"a", "b", "c"}, &Tree{}), "a.b has a value")
	require.Equal(t, map[string]any{"a": map[string]any{"b": int64(1)}}, root.Map())
	require.Equal(t, map[string]any{}, (&Tree{Value: "x"}).Map())
	require.Nil(t, root.Get("a", "x", "y"))
	copied := root.clone()
	copied.Get("a").drop("b")
	require.Equal(t, map[string]any{}, copied.Get("a").Plain())
	require.NotNil(t, root.Get("a", "b"))
	var paths []string
	root.Walk(func(path []string, _ *Tree) { paths = append(paths, Dotted(path)) })
	require.Equal(t, []string{"a.b"}, paths)
}

func TestNumbersStayWhatTheyAre(t *testing.T) {
	for want, v := range map[string]any{
		"1": int64(1), "1.0": 1.0, "1e+16": 1e16, "1e-07": 1e-7, "0.9": 0.9, "17179869184": int64(17179869184), "9007199254740992.0": 9007199254740992.0, `"<&>"`: "<&>", "3": 3,
	} {
		require.Equal(t, want, string(appendJSON(nil, v)))
	}
	require.Panics(t, func() { appendJSON(nil, struct{}{}) })
}

func TestErrorText(t *testing.T) {
	e := &Error{Path: []string{"a", "b"}, Origin: origin.Origin{Kind: origin.File, Name: "f", Line: 3}, Reason: "is wrong"}
	require.Equal(t, "a.b: is wrong (f:3)", e.Error())
	require.Equal(t, "is wrong", (&Error{Reason: "is wrong"}).Error())
	all := Errors{e, {Reason: "too"}}
	require.Equal(t, "a.b: is wrong (f:3)\ntoo", all.Error())
	var found *Error
	require.ErrorAs(t, all, &found)
	require.Same(t, e, found)
}
