package engineargs

import "dynworker/pkg/config/origin"

// Setting is one of the worker's own settings that becomes an argument. A nil
// Value is one that nobody set and that has no default.
type Setting struct {
	Value  any
	Origin origin.Origin
}

// Input is everything that takes part in the merge.
type Input struct {
	// The settings behind the arguments of the same name. The types of their
	// values are those of a Tree.
	Model                                               Setting // model
	TensorParallelSize, PipelineParallelSize            Setting // …_parallel_size
	ExpertParallelSize                                  Setting // moe_expert_parallel_size
	EnableAttentionDP                                   Setting // enable_attention_dp
	GPUsPerNode                                         Setting // gpus_per_node; left out when nil, the engine then counts
	MaxBatchSize, MaxNumTokens, MaxSeqLen, MaxBeamWidth Setting
	FreeGPUMemoryFraction                               Setting // kv_cache_config.free_gpu_memory_fraction
	LoadFormat                                          Setting
	GuidedDecodingBackend                               Setting // left out when nil

	// Files are merged in this order: the engine file, then arguments that are
	// written in the worker's own file. A nil one is skipped.
	Files []*Tree
	// Override is an override or the dynamic flags; nil is none.
	Override *Tree

	// PublishKVEvents and PublishMetrics make the engine produce what is to be
	// published.
	PublishKVEvents bool
	PublishMetrics  Setting // a bool
	// StreamingEvents says that TLLM_KV_CACHE_MANAGER_V2_BACKEND=python is in
	// the engine's environment, which its streaming of KV events needs.
	StreamingEvents bool
}

// Result is what Resolve found.
type Result struct {
	// Args is everything, backend included, as Dynamo 1.6.1 hands it on.
	Args     *Tree
	Warnings []Warning
	// EventMode and EventBuffer are how the engine produces KV events.
	EventMode   EventMode
	EventBuffer int64
}

// EventMode is how KV events come out of the engine.
type EventMode string

// The modes, in the words of Dynamo 1.6.1.
const (
	EventsOff       EventMode = "disabled"
	EventsPolling   EventMode = "polling"
	EventsStreaming EventMode = "streaming"
)

// Resolve merges the layers. The error is an Errors.
func Resolve(in Input) (*Result, error) {
	m := &merger{args: base(in)}
	for _, layer := range in.Files {
		if layer != nil {
			m.mergeFile(layer)
		}
	}
	if in.Override != nil {
		m.mergeOverride(m.args, in.Override, nil)
	}
	r := &Result{Args: m.args, EventMode: EventsOff}
	m.dropPostprocessWorkers()
	m.checkBackend()
	m.events(in, r)
	r.Warnings = m.warnings
	if len(m.errs) > 0 {
		return nil, m.errs
	}
	return r, nil
}

// base is the argument map of Dynamo 1.6.1 before any merge
// (dynamo/trtllm/workers/llm_worker.py).
func base(in Input) *Tree {
	def := origin.Origin{}
	t := NewTree(def)
	set := func(name string, s Setting) { t.put(name, &Tree{Value: s.Value, Origin: s.Origin}) }
	set("model", in.Model)
	set("tensor_parallel_size", in.TensorParallelSize)
	set("pipeline_parallel_size", in.PipelineParallelSize)
	set("moe_expert_parallel_size", in.ExpertParallelSize)
	set("enable_attention_dp", in.EnableAttentionDP)
	set("max_batch_size", in.MaxBatchSize)
	set("max_num_tokens", in.MaxNumTokens)
	set("max_seq_len", in.MaxSeqLen)
	set("max_beam_width", in.MaxBeamWidth)
	set("load_format", in.LoadFormat)
	set("enable_iter_perf_stats", in.PublishMetrics)
	if in.GPUsPerNode.Value != nil {
		set("gpus_per_node", in.GPUsPerNode)
	}
	if in.GuidedDecodingBackend.Value != nil {
		set("guided_decoding_backend", in.GuidedDecodingBackend)
	}
	set("backend", Setting{Value: backend})
	set("return_perf_metrics", Setting{Value: false})
	set("kv_connector_config", Setting{})

	kv := NewTree(def)
	kv.put("free_gpu_memory_fraction", &Tree{Value: in.FreeGPUMemoryFraction.Value, Origin: in.FreeGPUMemoryFraction.Origin})
	kv.typed = true
	t.put(kvCache, kv)

	batch := NewTree(def)
	batch.put("enable_batch_size_tuning", &Tree{Value: true})
	batch.put("enable_max_num_tokens_tuning", &Tree{Value: false})
	batch.put("dynamic_batch_moving_average_window", &Tree{Value: int64(128)})
	scheduler := NewTree(def)
	scheduler.put("capacity_scheduler_policy", &Tree{Value: "GUARANTEED_NO_EVICT"})
	scheduler.put("dynamic_batch_config", batch)
	scheduler.typed = true
	t.put("scheduler_config", scheduler)
	return t
}

// Engine is what goes to the engine process: the arguments of LLM(). The
// backend is not among them, as in Dynamo 1.6.1, whose one value is the class
// itself.
func (r *Result) Engine() *Tree {
	t := r.Args.clone()
	t.drop("backend")
	return t
}
