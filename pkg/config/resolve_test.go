package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// resolve is Load and Resolve with files that are named in the input.
func (in input) resolve(s Surroundings) (*Resolved, error) {
	c, _, err := in.load()
	if err != nil {
		return nil, err
	}
	s.ReadFile = func(name string) ([]byte, error) {
		if text, ok := in.files[name]; ok {
			return []byte(text), nil
		}
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return c.Resolve(s)
}

func (r *Resolved) fact(t *testing.T, name string) any {
	t.Helper()
	for _, f := range r.Summary {
		if f.Name == name {
			return f.Value
		}
	}
	t.Fatalf("no fact %s", name)
	return nil
}

// TestOriginsOfArguments follows a value of each layer into the arguments.
func TestOriginsOfArguments(t *testing.T) {
	in := input{
		yaml:  "engine:\n  args:\n    stream_interval: 10\n    kv_cache_config: {dtype: fp8}\n  trtllm:\n    max_num_tokens: 4096\n    extra_engine_args: e.yaml\n",
		files: map[string]string{"conf/e.yaml": "max_batch_size: 16\ncuda_graph_config:\n  enable_padding: on\n"},
		env:   []string{"DYN_TRTLLM_TENSOR_PARALLEL_SIZE=4", "DYN_TRTLLM_MAX_SEQ_LEN=1000"},
		args:  []string{"--enable-attention-dp", "--free-gpu-memory-fraction", "0.8", "--trtllm.cuda_graph_config.max_batch_size", "8", "--set", "engine.args.x.y=1", "--publish-kv-events"},
	}
	r, err := in.resolve(Surroundings{VisibleGPUs: 4})
	require.NoError(t, err)
	require.Empty(t, r.Warnings)
	for path, want := range map[string]string{
		"model": `"/models/m" env DYN_TRTLLM_MODEL`, "tensor_parallel_size": "4 env DYN_TRTLLM_TENSOR_PARALLEL_SIZE", "pipeline_parallel_size": "1 default", "moe_expert_parallel_size": "null default",
		"enable_attention_dp": "true flag --enable-attention-dp", "gpus_per_node": "4 default", "max_seq_len": "1000 env DYN_TRTLLM_MAX_SEQ_LEN", "max_num_tokens": "4096 conf/w.yaml:6", "max_batch_size": "16 conf/e.yaml:1",
		"stream_interval": "10 conf/w.yaml:3",
	} {
		a := r.Engine.Args.Get(path)
		text, err := json.Marshal(a)
		require.NoError(t, err)
		require.Equal(t, want, fmt.Sprintf("%s %s", text, a.Origin), path)
	}
	for want, path := range map[string][]string{
		"conf/w.yaml:4":                   {"kv_cache_config", "dtype"},
		"flag --free-gpu-memory-fraction": {"kv_cache_config", "free_gpu_memory_fraction"},
		"worker":                          {"kv_cache_config", "event_buffer_max_size"},
		"conf/e.yaml:3":                   {"cuda_graph_config", "enable_padding"},
		"flag --trtllm.cuda_graph_config.max_batch_size": {"cuda_graph_config", "max_batch_size"},
		"--set": {"x", "y"},
	} {
		require.Equal(t, want, r.Engine.Args.Get(path...).Origin.String())
	}
	require.Equal(t, int64(4), r.fact(t, "attention_dp_size"))
	require.Equal(t, "polling", r.fact(t, "kv_event_mode"))

	// The override is part of the configuration, so a dump of it leads back.
	c, report, err := in.load()
	require.NoError(t, err)
	require.Equal(t, map[string]any{"cuda_graph_config": map[string]any{"max_batch_size": int64(8)}}, c.Engine.TRTLLM.OverrideEngineArgs)
	s, ok := report.Lookup("engine.trtllm.override_engine_args.cuda_graph_config.max_batch_size")
	require.True(t, ok)
	require.Equal(t, "flag --trtllm.cuda_graph_config.max_batch_size", s.Origin.String())
}

func TestOverridesReplaceEachOther(t *testing.T) {
	for _, tc := range []struct {
		in   input
		want map[string]any
	}{
		{input{yaml: "engine: {trtllm: {override_engine_args: {a: 1, b: 2}}}\n", env: []string{`DYN_TRTLLM_OVERRIDE_ENGINE_ARGS={"a": 3}`}}, map[string]any{"a": int64(3)}},
		{input{env: []string{`DYN_TRTLLM_OVERRIDE_ENGINE_ARGS={"a": 3}`}, args: []string{"--override-engine-args", `{"b": 4}`}}, map[string]any{"b": int64(4)}},
		{input{env: []string{`DYN_TRTLLM_OVERRIDE_ENGINE_ARGS={"a": 3}`}, args: []string{"--override-engine-args="}}, map[string]any{}},
		{input{env: []string{`DYN_TRTLLM_OVERRIDE_ENGINE_ARGS=`}}, map[string]any{}},
		{input{args: []string{"--override-engine-args", `{"a": {"b": 1}}`, "--set", "engine.trtllm.override_engine_args.a.c=2"}}, map[string]any{"a": map[string]any{"b": int64(1), "c": int64(2)}}},
		{input{yaml: "engine: {trtllm: {override_engine_args: }}\n"}, map[string]any{}},
	} {
		c, r := tc.in.must(t)
		require.Equal(t, tc.want, c.Engine.TRTLLM.OverrideEngineArgs)
		require.Empty(t, r.Warnings)
	}
	_, r := input{args: []string{"--override-engine-args", `{"a": 1, "a": 2}`}}.must(t)
	require.Contains(t, r.Warnings[0].String(), "engine.trtllm.override_engine_args.a: stands twice")
	_, r = input{args: []string{"--trtllm.a.b", "1", "--trtllm.a", "2"}}.must(t)
	require.Contains(t, r.Warnings[0].String(), "engine.trtllm.override_engine_args.a: ")
}

func TestResolveFails(t *testing.T) {
	for name, tc := range map[string]struct {
		in   input
		key  string
		kind error
		says []string
	}{
		"no engine file":       {input{args: []string{"--extra-engine-args", "missing.yaml"}}, "engine.trtllm.extra_engine_args", ErrFile, []string{"missing.yaml", "file does not exist", "flag --extra-engine-args"}},
		"engine file, no YAML": {input{args: []string{"--extra-engine-args", "e.yaml"}, files: map[string]string{"e.yaml": "a: [1"}}, "engine.trtllm.extra_engine_args", ErrValue, []string{"YAML", "e.yaml"}},
		"engine file, no map":  {input{args: []string{"--extra-engine-args", "e.yaml"}, files: map[string]string{"e.yaml": "[1]"}}, "engine.trtllm.extra_engine_args", ErrValue, []string{"mapping", "e.yaml:1"}},
		"a null section":       {input{args: []string{"--extra-engine-args", "e.yaml"}, files: map[string]string{"e.yaml": "a: 1\nmoe_config:\n"}}, "moe_config", ErrValue, []string{"e.yaml:2"}},
		"infinity":             {input{args: []string{"--extra-engine-args", "e.yaml"}, files: map[string]string{"e.yaml": "a: {b: .inf}\n"}}, "a.b", ErrValue, []string{"e.yaml:1"}},
		"another backend":      {input{args: []string{"--trtllm.backend", "_autodeploy"}}, "backend", ErrValue, []string{"_autodeploy", "pytorch"}},
	} {
		_, err := tc.in.resolve(Surroundings{})
		var errs Errors
		require.ErrorAs(t, err, &errs, name)
		require.Equal(t, []string{tc.key}, errs.Keys(), name)
		require.ErrorIs(t, err, tc.kind)
		for _, part := range tc.says {
			require.ErrorContains(t, err, part, name)
		}
	}
	c, _ := input{args: []string{"--extra-engine-args", t.TempDir()}}.must(t)
	_, err := c.Resolve(Surroundings{})
	var pe *os.PathError
	require.ErrorAs(t, err, &pe, "the real disk, where nothing else is given")
	require.True(t, errors.Is(err, ErrFile))
}

func TestResolveWarnings(t *testing.T) {
	r, err := input{}.resolve(Surroundings{})
	require.NoError(t, err)
	require.Len(t, r.Warnings, 1)
	require.Equal(t, "gpus_per_node: no GPU is to be seen here, so it is left to the engine", r.Warnings[0].String())

	r, err = input{args: []string{"--extra-engine-args", "e.yaml", "--gpus-per-node", "2", "--conversation-affinity"}, files: map[string]string{"e.yaml": "a: 1\na: 2\nnum_postprocess_workers: 4\n"}}.resolve(Surroundings{VisibleGPUs: 8})
	require.NoError(t, err)
	require.Len(t, r.Warnings, 3)
	require.Contains(t, r.Warnings[0].String(), "a: stands twice")
	require.Contains(t, r.Warnings[1].String(), "num_postprocess_workers: 4 (e.yaml:3)")
	require.Equal(t, "affinity.override: the engine's arguments do not turn conversation affinity on; a worker with affinity.on_disagreement: fail ends at start (flag --conversation-affinity)", r.Warnings[2].String())
	require.Equal(t, int64(2), r.fact(t, "gpus_per_node"))

	r, err = input{yaml: "affinity: {override: true, on_disagreement: warn}\n"}.resolve(Surroundings{VisibleGPUs: 1})
	require.NoError(t, err)
	require.Contains(t, r.Warnings[0].String(), "no rank is forced")

	const streaming = `{"kv_cache_config": {"kv_events_config": {"enable_kv_cache_events": true}, "free_gpu_memory_fraction": 0.9}}`
	in := input{args: []string{"--publish-kv-events", "--override-engine-args", streaming}}
	_, err = in.resolve(Surroundings{VisibleGPUs: 1})
	require.ErrorContains(t, err, "TLLM_KV_CACHE_MANAGER_V2_BACKEND")
	r, err = in.resolve(Surroundings{VisibleGPUs: 1, Environ: []string{"TLLM_KV_CACHE_MANAGER_V2_BACKEND=python"}})
	require.NoError(t, err)
	require.Equal(t, "streaming", r.fact(t, "kv_event_mode"))
}

func TestSimulatedEnginesHaveNoArguments(t *testing.T) {
	r, err := input{yaml: "engine: {kind: sim}\n", args: []string{"--engine-request-limit", "5", "--event-plane", "nats"}}.resolve(Surroundings{})
	require.NoError(t, err)
	require.Nil(t, r.Engine)
	require.Empty(t, r.Warnings)
	require.Equal(t, "dyn://dynamo.backend.generate", r.fact(t, "endpoint"))
	require.Equal(t, int64(5), r.fact(t, "engine_request_limit"))
	require.Equal(t, "nats", r.fact(t, "event_plane"))

	_, report := input{yaml: "engine: {kind: sim}\n", args: []string{"--max-batch-size", "5", "--trtllm.a", "1", "--max-num-tokens", "8192"}}.must(t)
	require.Len(t, report.Warnings, 2, "the default says nothing: %v", report.Warnings)
	require.Contains(t, report.Warnings[0].String(), "engine.trtllm.max_batch_size: has no effect with engine.kind sim")
}

func TestRoles(t *testing.T) {
	for _, tc := range []struct {
		args                 []string
		component, modelType string
	}{
		{nil, "backend", "chat,completions"},
		{[]string{"--disaggregation-mode", "pd", "--endpoint-types", "chat"}, "backend", "chat"},
		{[]string{"--disaggregation-mode", "prefill"}, "prefill", "prefill"},
		{[]string{"--disaggregation-mode", "decode"}, "backend", "chat,completions"},
		{[]string{"--disaggregation-mode", "prefill", "--endpoint", "dyn://a.b.c"}, "b", "prefill"},
		{[]string{"--disaggregation-mode", "prefill", "--set", "component=backend"}, "backend", "prefill"},
	} {
		in := input{args: tc.args}
		c, _ := in.must(t)
		require.Equal(t, tc.component, c.Component, "%v", tc.args)
		r, err := in.resolve(Surroundings{})
		require.NoError(t, err)
		require.Equal(t, tc.modelType, r.fact(t, "model_type"))
		require.NoError(t, c.CheckServing(), "%v", tc.args)
	}
}

func TestNoModel(t *testing.T) {
	in := input{noModel: true}
	c, _ := in.must(t)
	err := c.CheckServing()
	require.ErrorContains(t, err, "model.path: is required")
	require.NoError(t, c.CheckFiles(nil))
	r, err := in.resolve(Surroundings{})
	require.NoError(t, err)
	require.Equal(t, "TinyLlama/TinyLlama-1.1B-Chat-v1.0", r.fact(t, "model"))
	require.Equal(t, "default", r.Engine.Args.Get("model").Origin.String())
}

func TestHubNames(t *testing.T) {
	for path, hub := range map[string]bool{"Qwen/Qwen3-0.6B": true, "./Qwen/Qwen3-0.6B": false, "/Qwen/Qwen3": false, "models": false, "../a/b": false, "a/b/c": false} {
		c, _ := input{noModel: true, args: []string{"--model", path}}.must(t)
		err := c.CheckFiles(nil)
		require.ErrorIs(t, err, ErrFile)
		require.Equal(t, hub, c.isHubName(), path)
		if hub {
			require.ErrorContains(t, err, "nothing is downloaded")
		}
		c, _ = input{noModel: true, yaml: "model: {path: '" + path + "'}\n"}.must(t)
		require.Equal(t, hub, c.isHubName() && path[0] != '.', "%s in a file", path)
	}
}

func TestAdapters(t *testing.T) {
	c, r := input{yaml: "lora:\n  - name: sql\n    path: adapters/sql\n  - {path: /abs, name: 'a b'}\n"}.must(t)
	require.Equal(t, []Adapter{{"sql", "conf/adapters/sql"}, {"a b", "/abs"}}, c.LoRA)
	s, _ := r.Lookup("lora")
	require.Equal(t, `[{name: sql, path: conf/adapters/sql}, {name: "a b", path: /abs}]`, s.Value)
	require.Equal(t, "conf/w.yaml:1", s.Origin.String())

	c, _ = input{args: []string{"--set", "lora=[{name: a, path: b}]"}}.must(t)
	require.Equal(t, []Adapter{{"a", "b"}}, c.LoRA)
	c, _ = input{yaml: "lora: [{name: a, path: b}]\n", args: []string{"--set", "lora="}}.must(t)
	require.Empty(t, c.LoRA)

	c = Default()
	c.LoRA = []Adapter{{"here", t.TempDir()}, {"gone", "no/such/adapter"}}
	err := c.CheckFiles(nil)
	require.ErrorIs(t, err, ErrFile)
	require.ErrorContains(t, err, `lora: adapter "gone": "no/such/adapter"`)
}

func TestAbbreviatedFlags(t *testing.T) {
	c, r := input{args: []string{"--max-batch", "7", "--served=x", "--publish-kv", "--conversation-affinity-dp", "dynamo", "--no-enable-att"}}.must(t)
	require.Equal(t, 7, c.Engine.TRTLLM.MaxBatchSize)
	require.Equal(t, "x", c.Model.Name)
	require.True(t, c.Publish.KVEvents)
	require.Equal(t, "dynamo", c.Affinity.RankSource)
	s, _ := r.Lookup("engine.trtllm.max_batch_size")
	require.Equal(t, "flag --max-batch-size", s.Origin.String(), "in full")
}

// TestFlagsThatSetNothing: what today's worker has flags for is understood,
// with the same answers as for its variables.
func TestFlagsThatSetNothing(t *testing.T) {
	for _, v := range others {
		if v.Flag == "" {
			continue
		}
		args := []string{v.Flag}
		if v.arg != "" {
			args = append(args, "something")
		}
		_, r, err := input{args: args}.load()
		asks := v.arg != "" || !slices.Contains(v.Harmless, "true")
		switch {
		case v.Status == Refused && asks:
			var errs Errors
			require.ErrorAs(t, err, &errs, v.Flag)
			require.Equal(t, []string{v.Flag}, errs.Keys())
			require.ErrorContains(t, err, v.Note)
		default:
			require.NoError(t, err, v.Flag)
			require.Equal(t, v.Warn, len(r.Warnings) == 1, "%s: %v", v.Flag, r.Warnings)
		}
		if v.arg == "" && v.Status == Refused {
			_, _, err := input{args: []string{"--no-" + v.Flag[2:]}}.load()
			require.Equal(t, slices.Contains(v.Harmless, "false"), err == nil, v.Flag)
		}
		for _, word := range v.Harmless {
			if v.arg != "" {
				_, r, err := input{args: []string{v.Flag, word}}.load()
				require.NoError(t, err)
				require.Empty(t, r.Warnings)
			}
		}
	}
}

func TestDeprecatedPair(t *testing.T) {
	for _, tc := range []struct {
		env, args       []string
		events, metrics bool
		warns           string
	}{
		{args: []string{"--publish-events-and-metrics"}, events: true, metrics: true, warns: "--publish-events-and-metrics: is deprecated; use both --publish-kv-events and --publish-metrics"},
		{args: []string{"--publish-events-and-metrics", "--no-publish-metrics"}, events: true, warns: "--publish-events-and-metrics: "},
		{args: []string{"--no-publish-metrics", "--publish-events-and-metrics"}, events: true, metrics: true, warns: "--publish-events-and-metrics: "},
		{env: []string{"DYN_TRTLLM_PUBLISH_KV_EVENTS=1"}, args: []string{"--no-publish-events-and-metrics"}, warns: "--no-publish-events-and-metrics: is deprecated"},
		{env: []string{"DYN_TRTLLM_PUBLISH_METRICS=false", "DYN_TRTLLM_PUBLISH_EVENTS_AND_METRICS=true"}, events: true, warns: "DYN_TRTLLM_PUBLISH_EVENTS_AND_METRICS: is deprecated; use DYN_TRTLLM_PUBLISH_KV_EVENTS and DYN_TRTLLM_PUBLISH_METRICS"},
	} {
		c, r := input{env: tc.env, args: tc.args}.must(t)
		require.Equal(t, [2]bool{tc.events, tc.metrics}, [2]bool{c.Publish.KVEvents, c.Publish.Metrics}, "%v", tc.args)
		require.Contains(t, r.Warnings[0].String(), tc.warns)
	}
}
