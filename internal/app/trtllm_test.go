package app

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"dynworker/pkg/config"
	"dynworker/pkg/engine/bridge/bridgetest"
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/handlers"
	"dynworker/pkg/modelcard"
	"dynworker/testdata"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
)

// TestTheEngineGetsTheResolvedArguments starts TensorRT-LLM's stand-in by settings alone, and compares the call of LLM() with the one of Dynamo 1.6.1 for the same flags (golden/registration/aggregated_kv_events_metrics.json).
func TestTheEngineGetsTheResolvedArguments(t *testing.T) {
	launch := bridgetest.New(t, bridgetest.Setup{})
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	w := newWorld(t)
	r := w.start("engine.kind=trtllm", "engine.command=["+launch.Command[0]+", -B]", "engine.env=["+strings.Join(launch.Env, ", ")+", TMPDIR="+tmp+"]",
		"engine.trtllm.tensor_parallel_size=4", "engine.trtllm.enable_attention_dp=true", "engine.trtllm.max_seq_len=8192", "engine.trtllm.gpus_per_node=8",
		"publish.kv_events=true", "publish.metrics=true")
	programs, err := filepath.Glob(filepath.Join(tmp, "engine-program-*"))
	require.NoError(t, err)
	require.Len(t, programs, 1)
	require.NoError(t, r.stop())
	_, err = os.Stat(programs[0])
	require.ErrorIs(t, err, os.ErrNotExist, "the program goes when the engine is gone")

	calls := launch.Log.Calls(t, "llm_init")
	require.Len(t, calls, 1)
	var want map[string]any
	require.NoError(t, json.Unmarshal([]byte(`{
		"scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT", "dynamic_batch_config": {
			"enable_batch_size_tuning": true, "enable_max_num_tokens_tuning": false, "dynamic_batch_moving_average_window": 128}},
		"tensor_parallel_size": 4, "pipeline_parallel_size": 1, "moe_expert_parallel_size": null, "enable_attention_dp": true,
		"kv_cache_config": {"free_gpu_memory_fraction": 0.9, "event_buffer_max_size": 100000}, "gpus_per_node": 8, "max_num_tokens": 8192, "max_seq_len": 8192,
		"max_beam_width": 1, "max_batch_size": 2048, "return_perf_metrics": false, "enable_iter_perf_stats": true, "kv_connector_config": null, "load_format": "auto"}`), &want))
	want["model"] = w.model
	require.Empty(t, cmp.Diff(want, calls[0]["args"]))
}

func TestWrongEngineArgumentsEndTheStart(t *testing.T) {
	w := newWorld(t)
	r := w.launch("engine.kind=trtllm", "engine.args={backend: tensorrt}")
	require.ErrorContains(t, r.peek(), `backend: "tensorrt" is not supported`)
	require.Empty(t, w.records())
}

func TestEngineEnviron(t *testing.T) {
	got := EngineEnviron([]string{
		"PATH=/bin", "TLLM_SPAWN_PROXY_PROCESS=1", "tllm_mpi_size=8", "NCCL_DEBUG=INFO", "UCX_CUDA_IPC_ENABLE_MNNVL=1", "OMPI_MCA_coll_ucc_enable=0", "OMPI_MCA_pml=ob1", "PMIX_MCA_gds=hash", "not a variable",
		"OMPI_COMM_WORLD_RANK=0", "OMPI_UNIVERSE_SIZE=8", "OMPI_MCA_orte_hnp_uri=x", "OMPI_MCA_ess_base_jobid=1", "OMPI_MCA_pmix=^s1", "OMPI_MCA_prte_x=1", "OMPI_MCA_initial_wdir=/", "OMPI_MCA_shmem_RUNTIME_QUERY_hint=mmap",
		"PMIX_RANK=0", "PMIX_SERVER_URI4=x", "PMI_RANK=0", "PMI_FD=3", "SLURM_PROCID=0", "SLURM_JOB_ID=1",
	}, []string{"SLURM_CPU_BIND=none", "A=1"})
	require.Equal(t, []string{
		"PATH=/bin", "TLLM_SPAWN_PROXY_PROCESS=1", "tllm_mpi_size=8", "NCCL_DEBUG=INFO", "UCX_CUDA_IPC_ENABLE_MNNVL=1", "OMPI_MCA_coll_ucc_enable=0", "OMPI_MCA_pml=ob1", "PMIX_MCA_gds=hash", "not a variable",
		"SLURM_CPU_BIND=none", "A=1", "PYTHONHASHSEED=0",
	}, got)
	for _, set := range [][2][]string{{{"PYTHONHASHSEED=7"}, nil}, {nil, {"PYTHONHASHSEED=7"}}} {
		require.Equal(t, []string{"PYTHONHASHSEED=7"}, EngineEnviron(set[0], set[1]))
	}
}

func TestVisibleGPUs(t *testing.T) {
	dev := fstest.MapFS{"nvidia0": {}, "nvidia1": {}, "nvidia10": {}, "nvidiactl": {}, "nvidia-uvm": {}, "null": {}}
	for list, want := range map[string]int{"0": 1, "0,1, 2": 3, "GPU-a,MIG-b": 2, "": 0, "-1": 0, "0,-1,2": 1, "NoDevFiles": 0, "3,,4": 1} {
		require.Equal(t, want, VisibleGPUs([]string{"CUDA_VISIBLE_DEVICES=9,9,9,9", "A=b", "CUDA_VISIBLE_DEVICES=" + list}, dev), list)
	}
	require.Equal(t, 3, VisibleGPUs(nil, dev))
	require.Equal(t, 0, VisibleGPUs(nil, os.DirFS(filepath.Join(t.TempDir(), "none"))))
}

func TestAdaptersAreNumbered(t *testing.T) {
	require.Empty(t, adapters(nil))
	require.Equal(t, []handlers.Adapter{{Name: "b", Path: "/b", ID: 1}, {Name: "a", Path: "/a", ID: 2}}, adapters([]config.Adapter{{Name: "b", Path: "/b"}, {Name: "a", Path: "/a"}}))
}

// TestCardsOfLaunches makes the cards of the recorded launches, with an engine that reports what it was given, and compares them with those of Dynamo 1.6.1. What is published is left out: this worker does not publish yet and says so.
func TestCardsOfLaunches(t *testing.T) {
	w := t.TempDir()
	require.NoError(t, testdata.WriteModel(w))
	model, err := modelcard.Load(w, modelcard.Options{LocalOnly: true})
	require.NoError(t, err)
	folders, err := filepath.Glob("../cli/testdata/launches/*")
	require.NoError(t, err)
	compared := 0
	for _, folder := range folders {
		var l struct {
			Argv   []string
			Env    map[string]string
			Mounts map[string]string
		}
		var expect struct {
			Card map[string]any `json:"model_card"`
		}
		readJSON(t, filepath.Join(folder, "launch.json"), &l)
		readJSON(t, filepath.Join(folder, "expect.json"), &expect)
		if expect.Card == nil {
			continue
		}
		var environ []string
		for name, value := range l.Env {
			environ = append(environ, name+"="+value)
		}
		cfg, _, err := config.Load(l.Argv, environ, nil)
		require.NoError(t, err)
		resolved, err := cfg.Resolve(config.Surroundings{ReadFile: func(name string) ([]byte, error) { return os.ReadFile(filepath.Join(folder, filepath.Base(name))) }})
		require.NoError(t, err)
		spec, err := cardSpec(cfg, reports(resolved))
		require.NoError(t, err)
		card, err := model.Card(spec, nil)
		require.NoError(t, err)
		text, err := json.Marshal(card)
		require.NoError(t, err)
		var got map[string]any
		require.NoError(t, json.Unmarshal(text, &got))
		require.Empty(t, cmp.Diff(sameSpelling(expect.Card), sameSpelling(got)), folder)
		compared++
	}
	require.Equal(t, 9, compared)
}

// reports is the handshake of an engine that does as it is told and whose tokens per block are those of the arguments.
func reports(r *config.Resolved) *ipc.Ready {
	f := r.Engine.Facts()
	n := func(v *int64) int {
		if v == nil {
			return 0
		}
		return int(*v)
	}
	return &ipc.Ready{
		AttentionDPSize: int(f.AttentionDPSize), KV: ipc.KV{BlockSize: int(f.KVBlockSize)},
		Bounds: ipc.Bounds{MaxSeqLen: n(f.MaxSeqLen), MaxBatchSize: n(f.MaxBatchSize), MaxNumTokens: n(f.MaxNumTokens)},
	}
}

// sameSpelling keeps the parts that both spellings of a card have, in one spelling.
func sameSpelling(card map[string]any) map[string]any {
	out := map[string]any{}
	for _, name := range []string{"model_type", "model_input", "worker_type"} {
		out[name] = strings.ReplaceAll(strings.ToLower(card[name].(string)), " | ", ",")
	}
	for _, name := range []string{"needs", "kv_cache_block_size", "router_config"} {
		out[name] = card[name]
	}
	runtime, _ := card["runtime_config"].(map[string]any)
	for _, name := range []string{"context_length", "max_num_seqs", "max_num_batched_tokens", "data_parallel_size", "exclude_tools_when_tool_choice_none"} {
		out[name] = runtime[name]
	}
	data, _ := runtime["runtime_data"].(map[string]any)
	out["token_budget"] = data["token_budget"]
	return out
}

func readJSON(t *testing.T, path string, into any) {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(b, into))
}
