package config

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"dynworker/pkg/engineargs"
)

// Surroundings are what the engine's arguments depend on besides the
// configuration.
type Surroundings struct {
	// ReadFile reads the engine file; nil is os.ReadFile.
	ReadFile func(string) ([]byte, error)
	// VisibleGPUs are those that the engine will see; 0 is unknown.
	VisibleGPUs int
	// Environ is the environment of the engine.
	Environ []string
}

// Resolved is what a configuration comes to: the arguments of its engine and
// the facts that follow from them, as far as they are known without asking it.
type Resolved struct {
	// Engine is nil for the simulated engine, which takes no arguments.
	Engine *engineargs.Result
	// Summary is in the order in which it is printed.
	Summary []Fact
	// Warnings come from the merge of the arguments.
	Warnings []Warning
}

// Fact is one line of a summary. Value is nil, bool, int64, float64 or string.
type Fact struct {
	Name  string
	Value any
}

// defaultModel is what Dynamo 1.6.1 serves when no model is named.
const defaultModel = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"

// Resolve reads the engine file and merges the engine's arguments. The error is
// an Errors. Nothing is started and no model is looked at.
func (c *Config) Resolve(s Surroundings) (*Resolved, error) {
	r := &Resolved{}
	if c.Engine.Kind == EngineTRTLLM {
		if err := c.resolveEngine(s, r); err != nil {
			return nil, err
		}
	}
	c.summarise(r)
	return r, nil
}

func (c *Config) resolveEngine(s Surroundings, r *Resolved) error {
	t := &c.Engine.TRTLLM
	set := func(key string, v any) engineargs.Setting {
		return engineargs.Setting{Value: v, Origin: c.origins[key]}
	}
	number := func(name string, n int) engineargs.Setting { return set(trtllmPrefix+name, int64(n)) }
	// unless0 is for numbers of which 0 means that nobody set them.
	unless0 := func(name string, n int) engineargs.Setting {
		if n == 0 {
			return engineargs.Setting{}
		}
		return number(name, n)
	}
	in := engineargs.Input{
		Model:                 set("model.path", c.Model.Path),
		TensorParallelSize:    number("tensor_parallel_size", t.TensorParallelSize),
		PipelineParallelSize:  number("pipeline_parallel_size", t.PipelineParallelSize),
		ExpertParallelSize:    unless0("expert_parallel_size", t.ExpertParallelSize),
		EnableAttentionDP:     set(trtllmPrefix+"enable_attention_dp", t.EnableAttentionDP),
		GPUsPerNode:           unless0("gpus_per_node", t.GPUsPerNode),
		MaxBatchSize:          number("max_batch_size", t.MaxBatchSize),
		MaxNumTokens:          number("max_num_tokens", t.MaxNumTokens),
		MaxSeqLen:             unless0("max_seq_len", t.MaxSeqLen),
		MaxBeamWidth:          number("max_beam_width", t.MaxBeamWidth),
		FreeGPUMemoryFraction: set(trtllmPrefix+"free_gpu_memory_fraction", t.FreeGPUMemoryFraction),
		LoadFormat:            set(trtllmPrefix+"load_format", t.LoadFormat),
		Files:                 []*engineargs.Tree{nil, c.trees[argsKey]},
		Override:              c.trees[overrideKey],
		PublishKVEvents:       c.Publish.KVEvents,
		PublishMetrics:        set("publish.metrics", c.Publish.Metrics),
		StreamingEvents:       slices.Contains(s.Environ, "TLLM_KV_CACHE_MANAGER_V2_BACKEND=python"),
	}
	if c.Model.Path == "" {
		in.Model = engineargs.Setting{Value: defaultModel}
	}
	if in.GPUsPerNode.Value == nil && s.VisibleGPUs > 0 {
		in.GPUsPerNode = engineargs.Setting{Value: int64(s.VisibleGPUs)}
	}
	if t.GuidedDecodingBackend != "" {
		in.GuidedDecodingBackend = set(trtllmPrefix+"guided_decoding_backend", t.GuidedDecodingBackend)
	}
	var err error
	if in.Files[0], err = c.engineFile(s, r); err != nil {
		return err
	}
	if r.Engine, err = engineargs.Resolve(in); err != nil {
		var found engineargs.Errors
		if !errors.As(err, &found) {
			return err
		}
		var errs Errors
		for _, e := range found {
			errs = append(errs, &Problem{Key: engineargs.Dotted(e.Path), Origin: e.Origin, Kind: ErrValue, Reason: e.Reason, Err: e})
		}
		return errs
	}
	for _, w := range r.Engine.Warnings {
		r.Warnings = append(r.Warnings, Warning{Subject: w.Path, Text: w.Text})
	}
	if r.Engine.Args.Get("gpus_per_node") == nil {
		r.Warnings = append(r.Warnings, Warning{Subject: "gpus_per_node", Text: "no GPU is to be seen here, so it is left to the engine"})
	}
	return nil
}

// engineFile reads --extra-engine-args.
func (c *Config) engineFile(s Surroundings, r *Resolved) (*engineargs.Tree, error) {
	name := c.Engine.TRTLLM.ExtraEngineArgs
	if name == "" {
		return nil, nil
	}
	if s.ReadFile == nil {
		s.ReadFile = os.ReadFile
	}
	problem := &Problem{Key: engineFileKey, Origin: c.origins[engineFileKey], Kind: ErrFile}
	text, err := s.ReadFile(name)
	if err != nil {
		problem.Reason, problem.Err = fmt.Sprintf("%s cannot be read: %s", quote(name), fileReason(err)), err
		return nil, Errors{problem}
	}
	t, warnings, err := engineargs.ReadYAML(name, text)
	var e *engineargs.Error
	if errors.As(err, &e) {
		problem.Origin, problem.Reason, problem.Kind, problem.Err = e.Origin, e.Reason, ErrValue, e
		if len(e.Path) > 0 {
			problem.Key = engineargs.Dotted(e.Path)
		}
		return nil, Errors{problem}
	}
	for _, w := range warnings {
		r.Warnings = append(r.Warnings, Warning{Subject: w.Path, Text: w.Text})
	}
	return t, err
}

// CheckServing finds what a configuration may say, but no worker can serve.
// The error is an Errors.
func (c *Config) CheckServing() error {
	var errs Errors
	if c.Model.Path == "" {
		errs = append(errs, &Problem{Key: "model.path", Origin: c.origins["model.path"], Kind: ErrValue, Reason: "is required: the folder with config.json and the tokenizer; " + defaultModel + ", which Dynamo would serve, is not downloaded"})
	}
	return errs.err()
}

// modelType is what the card says about the model's use.
func (c *Config) modelType() string {
	if c.Role == RolePrefill {
		return "prefill"
	}
	return strings.Join(c.Model.EndpointTypes, ",")
}

// summarise lists the facts under the names that Dynamo's own settings have.
func (c *Config) summarise(r *Resolved) {
	fact := func(name string, v any) { r.Summary = append(r.Summary, Fact{name, v}) }
	fact("model", orNil(c.Model.Path))
	fact("served_model_name", orNil(c.Model.Name))
	fact("role", c.Role)
	fact("endpoint", fmt.Sprintf("dyn://%s.%s.%s", c.ServingNamespace(), c.Component, c.Endpoint))
	fact("model_type", c.modelType())
	if r.Engine != nil {
		r.Summary[0].Value = r.Engine.Facts().Model
		c.summariseEngine(r, fact)
	}
	fact("tool_call_parser", orNil(c.Model.ToolCallParser))
	fact("reasoning_parser", orNil(c.Model.ReasoningParser))
	fact("custom_jinja_template", orNil(c.Model.CustomJinjaTemplate))
	fact("discovery_backend", c.Discovery.Backend)
	fact("request_plane", c.RequestPlane.Kind)
	fact("response_plane", c.ResponsePlane.Kind)
	// Dynamo takes the plane from the other settings unless it is named.
	eventPlane := any(nil)
	if c.origins["event_plane.kind"].Kind != FromDefault {
		eventPlane = c.EventPlane.Kind
	}
	fact("event_plane", eventPlane)
	limit := any(nil)
	if c.Admission.MaxRequests > 0 {
		limit = int64(c.Admission.MaxRequests)
	}
	fact("engine_request_limit", limit)
}

func (c *Config) summariseEngine(r *Resolved, fact func(string, any)) {
	f := r.Engine.Facts()
	fact("tensor_parallel_size", value(f.TensorParallelSize))
	fact("pipeline_parallel_size", value(f.PipelineParallelSize))
	fact("expert_parallel_size", value(f.ExpertParallelSize))
	fact("attention_dp", f.AttentionDP)
	fact("attention_dp_size", f.AttentionDPSize)
	fact("gpus_per_node", value(f.GPUsPerNode))
	fact("max_batch_size", value(f.MaxBatchSize))
	fact("max_num_tokens", value(f.MaxNumTokens))
	fact("max_seq_len", value(f.MaxSeqLen))
	fact("max_beam_width", value(f.MaxBeamWidth))
	fact("kv_block_size", f.KVBlockSize)
	fact("kv_block_size_flag", int64(c.Model.KVBlockSize))
	fact("kv_free_gpu_memory_fraction", f.FreeGPUMemoryFraction)
	fact("kv_cache_dtype", f.KVCacheDtype)
	fact("kv_block_reuse", f.BlockReuse)
	fact("publish_kv_events", c.Publish.KVEvents)
	fact("kv_event_mode", string(r.Engine.EventMode))
	fact("kv_event_buffer_max_size", r.Engine.EventBuffer)
	fact("publish_metrics", c.Publish.Metrics)
	fact("publish_forward_pass_metrics", c.Publish.Metrics)
	fact("iteration_stats", f.IterationStats)
	fact("request_perf_metrics", c.Publish.Metrics)
	fact("conversation_affinity.override", c.Affinity.Override)
	fact("conversation_affinity.engine_flag", f.ConversationAffinity)
	fact("conversation_affinity.gate", c.Affinity.Override || f.ConversationAffinity)
	fact("conversation_affinity.dp_rank_source", c.Affinity.RankSource)
	fact("guided_decoding_backend", value(f.GuidedDecodingBackend))
	fact("load_format", value(f.LoadFormat))
	if c.Affinity.Override && !f.ConversationAffinity {
		text := "the engine's arguments do not turn conversation affinity on; a worker with affinity.on_disagreement: fail ends at start"
		if c.Affinity.OnDisagreement == Warn {
			text = "the engine's arguments do not turn conversation affinity on, so no rank is forced and the engine balances freely"
		}
		r.Warnings = append(r.Warnings, Warning{Subject: "affinity.override", Text: fmt.Sprintf("%s (%s)", text, c.origins["affinity.override"])})
	}
}

func orNil(s string) any {
	if s == "" {
		return nil
	}
	return s
}

func value[T any](v *T) any {
	if v == nil {
		return nil
	}
	return *v
}
