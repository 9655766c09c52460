package config

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEngineArguments(t *testing.T) {
	const file = `
engine:
  args: &top
    NCCL_Debug: INFO
    kv_cache_config:
      free_gpu_memory_fraction: 0.8
      host_cache_size: 17179869184
      enable_block_reuse: false
      dtype: null
    big: 18446744073709551615
    tiny: 1e-5
    sizes: [1, 2, {Deep: yes}]
    when: 2024-01-01
    quoted: "08"
    empty: {}
    8: eight
    same: &a [1]
    again: *a
`
	c, r := input{yaml: file, args: []string{"--set", "engine.args.kv_cache_config.free_gpu_memory_fraction=0.5", "--set", "engine.args.new.path=[a, 1]", "--set", "engine.args.empty.x=true"}}.must(t)
	require.Equal(t, map[string]any{
		"NCCL_Debug": "INFO",
		"kv_cache_config": map[string]any{
			"free_gpu_memory_fraction": 0.5, "host_cache_size": int64(17179869184), "enable_block_reuse": false, "dtype": nil,
		},
		"big":    uint64(18446744073709551615),
		"tiny":   1e-5,
		"sizes":  []any{int64(1), int64(2), map[string]any{"Deep": "yes"}},
		"when":   "2024-01-01",
		"quoted": "08",
		"empty":  map[string]any{"x": true},
		"8":      "eight",
		"same":   []any{int64(1)},
		"again":  []any{int64(1)},
		"new":    map[string]any{"path": []any{"a", int64(1)}},
	}, c.Engine.Args)
	for key, want := range map[string]string{
		"engine.args.kv_cache_config.free_gpu_memory_fraction": "--set",
		"engine.args.kv_cache_config.host_cache_size":          "conf/w.yaml:7",
		"engine.args.new.path":                                 "--set",
		"engine.args.NCCL_Debug":                               "conf/w.yaml:4",
	} {
		s, ok := r.Lookup(key)
		require.True(t, ok, key)
		require.Equal(t, want, s.Origin.String(), key)
	}

	c, _ = input{yaml: file, args: []string{"--set", `engine.args={"A": 1}`}}.must(t)
	require.Equal(t, map[string]any{"A": int64(1)}, c.Engine.Args, "a whole mapping replaces, it does not merge")

	for _, text := range []string{"engine:\n  args:\n", "engine:\n", "engine: {args: {}}\n"} {
		c, _ = input{yaml: text}.must(t)
		require.Equal(t, map[string]any{}, c.Engine.Args)
	}
}

func TestAliasesCannotGrowWithoutEnd(t *testing.T) {
	bomb := "engine:\n  args:\n    a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
	for i := 1; i <= 9; i++ {
		bomb += fmt.Sprintf("    a%d: &a%d [%s]\n", i, i, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d, ", i-1), 10), ", "))
	}
	_, _, err := input{yaml: bomb}.load()
	require.ErrorContains(t, err, "more than 50000 values")

	for _, loop := range []string{"engine:\n  args: &x\n    a: {b: *x}\n", "engine: &x\n  sim: *x\n", "engine:\n  args:\n    a: &x [*x]\n"} {
		_, _, err = input{yaml: loop}.load()
		require.Error(t, err, loop)
	}
}
