package engineargs

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/config/origin"
)

// asStarted is the worker's input when nothing but the model is given.
func asStarted() Input {
	def := func(v any) Setting { return Setting{Value: v} }
	return Input{
		Model: Setting{"/models/m", flag("--model")}, TensorParallelSize: def(int64(1)), PipelineParallelSize: def(int64(1)), EnableAttentionDP: def(false), GPUsPerNode: def(int64(8)),
		MaxBatchSize: def(int64(2048)), MaxNumTokens: def(int64(8192)), MaxBeamWidth: def(int64(1)), FreeGPUMemoryFraction: def(0.9), LoadFormat: def("auto"), PublishMetrics: def(false),
	}
}

func flag(name string) origin.Origin { return origin.Origin{Kind: origin.Flag, Name: name} }

func file(t *testing.T, text string) *Tree {
	t.Helper()
	tree, _, err := ReadYAML("e.yaml", []byte(text))
	require.NoError(t, err)
	return tree
}

func jsonTree(t *testing.T, text string) *Tree {
	t.Helper()
	tree, _, err := ReadJSON([]byte(text), override)
	require.NoError(t, err)
	return tree
}

// TestDefaultArguments compares with what LLM() of Dynamo 1.6.1 got, on a
// machine with eight GPUs (golden/registration/aggregated.json).
func TestDefaultArguments(t *testing.T) {
	in := asStarted()
	in.MaxSeqLen = Setting{int64(8192), flag("--max-seq-len")}
	r, err := Resolve(in)
	require.NoError(t, err)
	require.Empty(t, r.Warnings)
	text, err := json.Marshal(r.Engine())
	require.NoError(t, err)
	require.JSONEq(t, `{
		"model": "/models/m", "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "moe_expert_parallel_size": null, "enable_attention_dp": false, "gpus_per_node": 8,
		"scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT", "dynamic_batch_config": {
			"enable_batch_size_tuning": true, "enable_max_num_tokens_tuning": false, "dynamic_batch_moving_average_window": 128}},
		"kv_cache_config": {"free_gpu_memory_fraction": 0.9}, "max_num_tokens": 8192, "max_seq_len": 8192, "max_beam_width": 1, "max_batch_size": 2048,
		"return_perf_metrics": false, "enable_iter_perf_stats": false, "kv_connector_config": null, "load_format": "auto"}`, string(text))
	require.Equal(t, "pytorch", r.Args.Get("backend").Value, "shown, but not handed on")
	require.Equal(t, EventsOff, r.EventMode)

	in.GPUsPerNode, in.GuidedDecodingBackend = Setting{}, Setting{"xgrammar", flag("--guided-decoding-backend")}
	r, err = Resolve(in)
	require.NoError(t, err)
	require.Nil(t, r.Args.Get("gpus_per_node"), "unknown: the engine counts by itself")
	require.Equal(t, "xgrammar", r.Args.Get("guided_decoding_backend").Value)
}

// TestMerge has a row for each rule. Arguments that are not named in want are
// as they were; gone are those that must not be there.
func TestMerge(t *testing.T) {
	fromFlag := func(in *Input) {
		in.FreeGPUMemoryFraction = Setting{0.8, flag("--free-gpu-memory-fraction")}
		in.MaxBatchSize = Setting{int64(8), flag("--max-batch-size")}
	}
	for _, tc := range []struct {
		name     string
		change   func(*Input)
		file     string
		inline   string
		override string
		flags    []Flag
		want     map[string]any // dotted argument to value
		gone     []string
		origins  map[string]string
		warns    []string // one part for each warning
		fails    string
	}{
		{
			name: "a file replaces defaults without a word", file: "max_batch_size: 16\ntensor_parallel_size: 4\n",
			want:    map[string]any{"max_batch_size": int64(16), "tensor_parallel_size": int64(4)},
			origins: map[string]string{"max_batch_size": "e.yaml:1", "tensor_parallel_size": "e.yaml:2", "max_num_tokens": "default"},
		},
		{
			name: "a file beats the command line, and says so", change: fromFlag, file: "max_batch_size: 16\n",
			want:  map[string]any{"max_batch_size": int64(16)},
			warns: []string{"max_batch_size: 8 (flag --max-batch-size) is replaced by 16 (e.yaml:1)"},
		},
		{name: "the same value twice is nothing to warn of", change: fromFlag, file: "max_batch_size: 8\n", want: map[string]any{"max_batch_size": int64(8)}},
		{
			name: "the KV section of a file is merged key by key", change: fromFlag, file: "kv_cache_config:\n  dtype: fp8\n",
			want:    map[string]any{"kv_cache_config": map[string]any{"free_gpu_memory_fraction": 0.8, "dtype": "fp8"}},
			origins: map[string]string{"kv_cache_config.free_gpu_memory_fraction": "flag --free-gpu-memory-fraction", "kv_cache_config.dtype": "e.yaml:2"},
		},
		{
			name: "one level of it only", file: "kv_cache_config: {deep: {a: 1, b: 2}}\n", inline: "kv_cache_config: {deep: {a: 3}}\n",
			want:  map[string]any{"kv_cache_config": map[string]any{"free_gpu_memory_fraction": 0.9, "deep": map[string]any{"a": int64(3)}}},
			warns: []string{"kv_cache_config.deep.a: 1", "kv_cache_config.deep: {\"a\":1,\"b\":2} is replaced as a whole by {\"a\":3}"},
		},
		{
			name: "other sections of a file replace whole", file: "scheduler_config: {capacity_scheduler_policy: MAX_UTILIZATION}\n",
			want:  map[string]any{"scheduler_config": map[string]any{"capacity_scheduler_policy": "MAX_UTILIZATION"}},
			warns: []string{"lost: dynamic_batch_config.dynamic_batch_moving_average_window 128 (default)"},
		},
		{name: "typed section that is null", file: "moe_config:\n", fails: "moe_config: is null, but must be a mapping; leave it out to keep what it is (e.yaml:1)"},
		{name: "KV section that is null", file: "kv_cache_config: null\n", fails: "kv_cache_config: is null"},
		{name: "typed section that is a word", file: "attention_dp_config: fast\n", fails: `attention_dp_config: is "fast", but must be a mapping`},
		{name: "typed section that is a list", file: "lora_config: []\n", fails: "lora_config: is []"},
		{name: "two typed sections that may be null", file: "multimodal_config:\ntelemetry_config:\n", want: map[string]any{"multimodal_config": nil, "telemetry_config": nil}},
		{name: "a plain section may be null", file: "cuda_graph_config:\n", want: map[string]any{"cuda_graph_config": nil}},
		{
			name: "an override descends into plain sections", file: "cuda_graph_config: {enable_padding: true, max_batch_size: 16}\n", override: `{"cuda_graph_config": {"max_batch_size": 8}}`,
			want:    map[string]any{"cuda_graph_config": map[string]any{"enable_padding": true, "max_batch_size": int64(8)}},
			origins: map[string]string{"cuda_graph_config.enable_padding": "e.yaml:1", "cuda_graph_config.max_batch_size": "flag --override-engine-args"},
			warns:   []string{"cuda_graph_config.max_batch_size: 16 (e.yaml:1) is replaced by 8 (flag --override-engine-args)"},
		},
		{
			name: "at any depth", file: "speculative_config: {a: {b: {c: 1, d: 2}}}\n", override: `{"speculative_config": {"a": {"b": {"e": 3}}}}`,
			want: map[string]any{"speculative_config": map[string]any{"a": map[string]any{"b": map[string]any{"c": int64(1), "d": int64(2), "e": int64(3)}}}},
		},
		{
			name: "an override replaces typed sections whole", file: "attention_dp_config: {enable_balance: true, timeout_iters: 60}\n", override: `{"attention_dp_config": {"timeout_iters": 60, "x": 1}}`,
			want:  map[string]any{"attention_dp_config": map[string]any{"timeout_iters": int64(60), "x": int64(1)}},
			warns: []string{"attention_dp_config: {\"enable_balance\":true,\"timeout_iters\":60} is replaced as a whole by {\"timeout_iters\":60,\"x\":1} (flag --override-engine-args), not merged; lost: enable_balance true (e.yaml:1)"},
		},
		{
			name: "the KV section also without a file", change: fromFlag, flags: []Flag{{"--trtllm.kv_cache_config.dtype", "fp8"}},
			want:  map[string]any{"kv_cache_config": map[string]any{"dtype": "fp8"}},
			warns: []string{"kv_cache_config: {\"free_gpu_memory_fraction\":0.8} is replaced as a whole by {\"dtype\":\"fp8\"} (flag --trtllm.kv_cache_config.dtype), not merged; lost: free_gpu_memory_fraction 0.8 (flag --free-gpu-memory-fraction)"},
		},
		{
			name: "the scheduler section while no file touched it", override: `{"scheduler_config": {"x": 1}}`,
			want:  map[string]any{"scheduler_config": map[string]any{"x": int64(1)}},
			warns: []string{"scheduler_config: "},
		},
		{
			name: "but merges it once a file has", file: "scheduler_config: {a: 1}\n", override: `{"scheduler_config": {"b": 2}}`,
			want:  map[string]any{"scheduler_config": map[string]any{"a": int64(1), "b": int64(2)}},
			warns: []string{"scheduler_config: "}, // by the file
		},
		{
			name: "a value over a section", file: "cuda_graph_config: {enable_padding: true, empty: {}}\n", override: `{"cuda_graph_config": null}`,
			want:  map[string]any{"cuda_graph_config": nil},
			warns: []string{"lost: enable_padding true (e.yaml:1)"},
		},
		{
			name: "a section over a value", file: "cuda_graph_config: null\n", override: `{"cuda_graph_config": {"a": 1}}`,
			want:  map[string]any{"cuda_graph_config": map[string]any{"a": int64(1)}},
			warns: []string{"cuda_graph_config: null (e.yaml:1) is replaced by"},
		},
		{
			name: "arguments of the worker's own file come after the engine file", file: "max_batch_size: 16\nx: {a: 1}\n", inline: "max_batch_size: 32\nx: {b: 1}\n",
			want:  map[string]any{"max_batch_size": int64(32), "x": map[string]any{"b": int64(1)}},
			warns: []string{"max_batch_size: 16 (e.yaml:1)", "x: "},
		},
		{name: "an override of the model", override: `{"model": "/other"}`, want: map[string]any{"model": "/other"}, warns: []string{"model: \"/models/m\" (flag --model) is replaced by \"/other\""}},

		{name: "postprocess workers", file: "num_postprocess_workers: 4\n", gone: []string{"num_postprocess_workers"}, warns: []string{"num_postprocess_workers: 4 (e.yaml:1) is left out"}},
		{name: "no postprocess workers", file: "num_postprocess_workers: 0\n", gone: []string{"num_postprocess_workers"}},
		{name: "postprocess workers of null", file: "num_postprocess_workers:\n", gone: []string{"num_postprocess_workers"}},
		{name: "postprocess workers in text", file: "num_postprocess_workers: ' 2 '\n", gone: []string{"num_postprocess_workers"}, warns: []string{`" 2 "`}},
		{name: "postprocess workers of nonsense", file: "num_postprocess_workers: many\n", gone: []string{"num_postprocess_workers"}, warns: []string{`"many"`}},
		{name: "postprocess workers as a section", file: "num_postprocess_workers: {a: 1}\n", gone: []string{"num_postprocess_workers"}, warns: []string{`{"a":1}`}},
		{name: "postprocess workers below one", file: "num_postprocess_workers: 0.9\n", gone: []string{"num_postprocess_workers"}},
		{name: "postprocess workers of true", file: "num_postprocess_workers: yes\n", gone: []string{"num_postprocess_workers"}, warns: []string{"true"}},
		{name: "postprocess workers of false", file: "num_postprocess_workers: no\n", gone: []string{"num_postprocess_workers"}},
		{name: "postprocess workers without end", file: "num_postprocess_workers: 18446744073709551615\n", gone: []string{"num_postprocess_workers"}, warns: []string{"18446744073709551615"}},

		{name: "the one backend", file: "backend: pytorch\n", want: map[string]any{"backend": "pytorch"}},
		{name: "another backend", file: "backend: tensorrt\n", fails: `backend: "tensorrt" is not supported, only pytorch is (e.yaml:1)`},
		{name: "another backend by flag", flags: []Flag{{"--trtllm.backend", "_autodeploy"}}, fails: `"_autodeploy" is not supported, only pytorch is (flag --trtllm.backend)`},
		{name: "a backend of no kind", override: `{"backend": {"a": [1]}}`, fails: "backend: "},
	} {
		t.Run(tc.name, func(t *testing.T) {
			in := asStarted()
			if tc.change != nil {
				tc.change(&in)
			}
			for _, text := range []string{tc.file, tc.inline} {
				if text != "" {
					in.Files = append(in.Files, file(t, text))
				}
			}
			in.Files = append(in.Files, nil)
			if tc.override != "" {
				in.Override = jsonTree(t, tc.override)
			}
			if tc.flags != nil {
				var err error
				in.Override, _, err = ReadFlags(tc.flags)
				require.NoError(t, err)
			}
			before, err := Resolve(asStarted())
			require.NoError(t, err)
			r, err := Resolve(in)
			if tc.fails != "" {
				require.ErrorContains(t, err, tc.fails)
				return
			}
			require.NoError(t, err)
			want := before.Args
			want.put("max_batch_size", &Tree{Value: in.MaxBatchSize.Value})
			want.Get(kvCache).put("free_gpu_memory_fraction", &Tree{Value: in.FreeGPUMemoryFraction.Value})
			for name, v := range tc.want {
				require.NoError(t, want.Set(strings.Split(name, "."), &Tree{Value: v}))
			}
			require.Equal(t, want.Plain(), r.Args.Plain())
			for _, name := range tc.gone {
				require.Nil(t, r.Args.Get(name))
			}
			for name, place := range tc.origins {
				require.Equal(t, place, r.Args.Get(strings.Split(name, ".")...).Origin.String(), name)
			}
			require.Len(t, r.Warnings, len(tc.warns), "%v", r.Warnings)
			for i, part := range tc.warns {
				require.Contains(t, r.Warnings[i].String(), part)
			}
		})
	}
}

func TestEvents(t *testing.T) {
	const streaming = "kv_cache_config:\n  kv_events_config: {enable_kv_cache_events: true}\n"
	for _, tc := range []struct {
		name, file, override string
		off, streamingEnv    bool
		mode                 EventMode
		buffer               int64
		kv                   map[string]any
		warns, fails         string
	}{
		{name: "off", off: true, mode: EventsOff, kv: map[string]any{"free_gpu_memory_fraction": 0.9}},
		{name: "on", mode: EventsPolling, buffer: 100_000, kv: map[string]any{"free_gpu_memory_fraction": 0.9, "event_buffer_max_size": int64(100_000)}},
		{name: "a buffer of one's own", file: "kv_cache_config: {event_buffer_max_size: 7}\n", mode: EventsPolling, buffer: 7, kv: map[string]any{"free_gpu_memory_fraction": 0.9, "event_buffer_max_size": int64(7)}},
		{name: "a buffer of nothing", file: "kv_cache_config: {event_buffer_max_size: 0}\n", mode: EventsPolling, buffer: 100_000, kv: map[string]any{"free_gpu_memory_fraction": 0.9, "event_buffer_max_size": int64(100_000)}},
		{name: "nulls of a file go", file: "kv_cache_config: {dtype: null}\n", mode: EventsPolling, buffer: 100_000, kv: map[string]any{"free_gpu_memory_fraction": 0.9, "event_buffer_max_size": int64(100_000)}},
		{name: "nulls of an override stay", override: `{"kv_cache_config": {"dtype": null}}`, mode: EventsPolling, buffer: 100_000, kv: map[string]any{"dtype": nil, "event_buffer_max_size": int64(100_000)}, warns: "lost"},
		{name: "a buffer of words", file: "kv_cache_config: {event_buffer_max_size: big}\n", fails: `kv_cache_config.event_buffer_max_size: "big" is not a number`},
		{name: "no section at all", override: `{"kv_cache_config": null}`, fails: "kv_cache_config: is null, but must be a mapping"},
		{name: "no section, no events", override: `{"kv_cache_config": null}`, off: true, mode: EventsOff, warns: "lost"},
		{name: "a word for a section", override: `{"kv_cache_config": 5}`, off: true, fails: "kv_cache_config: is 5, but must be a mapping"},
		{name: "without reuse", file: "kv_cache_config: {enable_block_reuse: false}\n", mode: EventsPolling, buffer: 100_000, kv: map[string]any{"free_gpu_memory_fraction": 0.9, "enable_block_reuse": false, "event_buffer_max_size": int64(100_000)}, warns: "no KV events that a router could use"},
		{name: "streaming", file: streaming, streamingEnv: true, mode: EventsStreaming},
		{name: "streaming with zmq", file: streaming + "  x: 1\n", override: `{"kv_cache_config": {"kv_events_config": {"enable_kv_cache_events": true, "publisher": "zmq"}}}`, streamingEnv: true, mode: EventsStreaming, warns: "lost"},
		{name: "streaming without its manager", file: streaming, fails: "needs TLLM_KV_CACHE_MANAGER_V2_BACKEND=python"},
		{name: "streaming without events", file: streaming, off: true, mode: EventsOff, warns: "has no effect"},
		{name: "streaming to nobody", file: "kv_cache_config: {kv_events_config: {enable_kv_cache_events: true, publisher: 'null'}}\n", mode: EventsPolling, buffer: 100_000},
		{name: "streaming turned off", file: "kv_cache_config: {kv_events_config: {enable_kv_cache_events: false}}\n", mode: EventsPolling, buffer: 100_000},
		{name: "streaming to a stranger", file: "kv_cache_config: {kv_events_config: {enable_kv_cache_events: true, publisher: kafka}}\n", fails: `kv_cache_config.kv_events_config.publisher: "kafka" is neither zmq nor null`},
		{name: "streaming of no kind", file: "kv_cache_config: {kv_events_config: 1}\n", fails: "kv_cache_config.kv_events_config: is 1, but must be a mapping"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			in := asStarted()
			in.PublishKVEvents, in.StreamingEvents = !tc.off, tc.streamingEnv
			if tc.file != "" {
				in.Files = []*Tree{file(t, tc.file)}
			}
			if tc.override != "" {
				in.Override = jsonTree(t, tc.override)
			}
			r, err := Resolve(in)
			if tc.fails != "" {
				require.ErrorContains(t, err, tc.fails)
				return
			}
			require.NoError(t, err)
			require.Equal(t, tc.mode, r.EventMode)
			require.Equal(t, tc.buffer, r.EventBuffer)
			if tc.kv != nil {
				require.Equal(t, tc.kv, r.Args.Get(kvCache).Plain())
			}
			if added := r.Args.Get(kvCache, "event_buffer_max_size"); added != nil && tc.buffer == 100_000 {
				require.Equal(t, "worker", added.Origin.String())
			}
			if tc.warns == "" {
				require.Empty(t, r.Warnings)
				return
			}
			require.Contains(t, r.Warnings[len(r.Warnings)-1].String(), tc.warns)
		})
	}
}

func TestFacts(t *testing.T) {
	r, err := Resolve(asStarted())
	require.NoError(t, err)
	f := r.Facts()
	require.Equal(t, int64(1), f.AttentionDPSize)
	require.Nil(t, f.MaxSeqLen)
	require.Equal(t, [2]any{int64(32), 0.9}, [2]any{f.KVBlockSize, f.FreeGPUMemoryFraction})
	require.True(t, f.BlockReuse)

	for text, check := range map[string]func(Facts) bool{
		"{enable_attention_dp: true, tensor_parallel_size: 4}":                    func(f Facts) bool { return f.AttentionDP && f.AttentionDPSize == 4 },
		"{enable_attention_dp: 'true', tensor_parallel_size: 4}":                  func(f Facts) bool { return !f.AttentionDP && f.AttentionDPSize == 1 },
		"{enable_attention_dp: true, tensor_parallel_size: four}":                 func(f Facts) bool { return f.AttentionDPSize == 1 && f.TensorParallelSize == nil },
		"{attention_dp_config: {kv_cache_routing_conversation_affinity: true}}":   func(f Facts) bool { return f.ConversationAffinity },
		"{attention_dp_config: {kv_cache_routing_conversation_affinity: 'true'}}": func(f Facts) bool { return !f.ConversationAffinity },
		"{attention_dp_config: {kv_cache_routing_conversation_affinity: 1}}":      func(f Facts) bool { return !f.ConversationAffinity },
		"{kv_cache_config: {free_gpu_memory_fraction: 1, tokens_per_block: 64, dtype: fp8}}": func(f Facts) bool {
			return f.FreeGPUMemoryFraction == 1 && f.KVBlockSize == 64 && f.KVCacheDtype == "fp8"
		},
		"{max_batch_size: null, guided_decoding_backend: xgrammar, enable_iter_perf_stats: on}": func(f Facts) bool {
			return f.MaxBatchSize == nil && *f.GuidedDecodingBackend == "xgrammar" && f.IterationStats
		},
	} {
		in := asStarted()
		in.Files = []*Tree{file(t, text)}
		r, err := Resolve(in)
		require.NoError(t, err)
		require.True(t, check(r.Facts()), text)
	}
}

// TestSecretsAreNotQuoted: values behind secret names appear in no message.
func TestSecretsAreNotQuoted(t *testing.T) {
	in := asStarted()
	in.Files = []*Tree{file(t, "hub: {api_key: hush, url: 'http://u:hush@h', list: [{password: hush}]}\nhf_token: hush\nmoe_config: 'http://u:hush@h'\n")}
	in.Override = jsonTree(t, `{"hub": 1, "hf_token": "hush2", "backend": "http://u:hush@h"}`)
	_, err := Resolve(in)
	require.Error(t, err)
	require.NotContains(t, err.Error(), "hush")
	in.Files[0].drop("moe_config")
	in.Override.drop("backend")
	r, err := Resolve(in)
	require.NoError(t, err)
	require.Len(t, r.Warnings, 2)
	for _, w := range r.Warnings {
		require.NotContains(t, w.String(), "hush")
	}
	require.Equal(t, "hush2", r.Args.Get("hf_token").Value)
}
