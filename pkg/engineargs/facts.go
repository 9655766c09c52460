package engineargs

// Facts are what the worker reads out of resolved arguments, before there is an
// engine to ask. A nil pointer is an argument that nobody set and that has no
// default here, or one of another type; the engine says what becomes of it.
type Facts struct {
	Model                                               string
	TensorParallelSize, PipelineParallelSize            *int64
	ExpertParallelSize                                  *int64
	AttentionDP                                         bool
	AttentionDPSize                                     int64
	GPUsPerNode                                         *int64
	MaxBatchSize, MaxNumTokens, MaxSeqLen, MaxBeamWidth *int64
	KVBlockSize                                         int64
	FreeGPUMemoryFraction                               float64
	KVCacheDtype                                        string
	BlockReuse                                          bool
	IterationStats                                      bool
	GuidedDecodingBackend, LoadFormat                   *string
	// ConversationAffinity is true for a genuine true alone.
	ConversationAffinity bool
}

// TensorRT-LLM's defaults for arguments that are usually left to it.
const (
	defaultBlockSize = 32
	defaultFraction  = 0.9
	defaultDtype     = "auto"
)

// Facts reads the arguments.
func (r *Result) Facts() Facts {
	a := r.Args
	f := Facts{
		TensorParallelSize:   read[int64](a, "tensor_parallel_size"),
		PipelineParallelSize: read[int64](a, "pipeline_parallel_size"),
		ExpertParallelSize:   read[int64](a, "moe_expert_parallel_size"),
		AttentionDP:          or(read[bool](a, "enable_attention_dp"), false),
		AttentionDPSize:      1,
		GPUsPerNode:          read[int64](a, "gpus_per_node"),
		MaxBatchSize:         read[int64](a, "max_batch_size"),
		MaxNumTokens:         read[int64](a, "max_num_tokens"),
		MaxSeqLen:            read[int64](a, "max_seq_len"),
		MaxBeamWidth:         read[int64](a, "max_beam_width"),
		Model:                or(read[string](a, "model"), ""),

		KVBlockSize:           or(read[int64](a, kvCache, "tokens_per_block"), defaultBlockSize),
		FreeGPUMemoryFraction: or(read[float64](a, kvCache, "free_gpu_memory_fraction"), defaultFraction),
		KVCacheDtype:          or(read[string](a, kvCache, "dtype"), defaultDtype),
		BlockReuse:            or(read[bool](a, kvCache, "enable_block_reuse"), true),
		IterationStats:        or(read[bool](a, "enable_iter_perf_stats"), false),
		GuidedDecodingBackend: read[string](a, "guided_decoding_backend"),
		LoadFormat:            read[string](a, "load_format"),
		ConversationAffinity:  or(read[bool](a, "attention_dp_config", "kv_cache_routing_conversation_affinity"), false),
	}
	// With attention DP every tensor-parallel rank attends for itself.
	if f.AttentionDP && f.TensorParallelSize != nil {
		f.AttentionDPSize = *f.TensorParallelSize
	}
	return f
}

// read finds a value of one type; a whole number is also a float.
func read[T any](t *Tree, path ...string) *T {
	t = t.Get(path...)
	if t == nil {
		return nil
	}
	v, ok := t.Value.(T)
	if i, whole := t.Value.(int64); whole && !ok {
		v, ok = any(float64(i)).(T)
	}
	if !ok {
		return nil
	}
	return &v
}

func or[T any](v *T, def T) T {
	if v == nil {
		return def
	}
	return *v
}
