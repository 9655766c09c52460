package protocol

import "encoding/json"

// File is a model file that the frontend fetches and checks.
type File struct {
	// Path is an absolute path or an http(s) URL; the last segment becomes the
	// file's name at the frontend.
	Path string `json:"path"`
	// Checksum is "blake3:" and 64 lower-case hex digits.
	Checksum string `json:"checksum"`
	// Size in bytes; the frontend refuses a longer body. Zero leaves it out.
	Size uint64 `json:"size,omitempty"`
}

// Kinds of TaggedFile and ChatTemplate.
const (
	KindConfig           = "hf_config_json"
	KindTokenizer        = "hf_tokenizer_json"
	KindTikToken         = "tik_token_model"
	KindTokenizerConfig  = "hf_tokenizer_config_json"
	KindGenerationConfig = "hf_generation_config_json"
	KindChatTemplate     = "hf_chat_template"
	KindChatTemplateJSON = "hf_chat_template_json"
)

// Values of Card.WorkerType, ModelType and ModelInput.
const (
	WorkerAggregated = "aggregated"
	WorkerPrefill    = "prefill"
	WorkerDecode     = "decode"
	WorkerEncode     = "encode"

	ModelTypeChat        = "Chat"
	ModelTypeCompletions = "Completions"
	ModelTypePrefill     = "Prefill"

	ModelInputTokens = "Tokens"
)

// TaggedFile is a file under the name of its format: {"hf_config_json": {…}}.
type TaggedFile struct {
	Kind string
	File File
}

// ChatTemplate is a chat template in a file of its own:
// {"hf_chat_template": {"is_custom": false, "file": {…}}}.
type ChatTemplate struct {
	// Kind is KindChatTemplate (jinja text) or KindChatTemplateJSON.
	Kind string
	// Custom tells that the template was chosen by hand, not found in the
	// model folder.
	Custom bool
	File   File
}

// LoRA describes an adapter, on the card of an adapter only.
type LoRA struct {
	Name            string  `json:"name"`
	MaxGPULoRACount *uint32 `json:"max_gpu_lora_count,omitempty"`
}

// Card describes a model and how its worker serves it. Fields are written in
// this order, which is the recorded one. What is free-form or not used by text
// workers stays raw JSON.
type Card struct {
	// DisplayName is the name that HTTP callers use, Slug a form of it that fits
	// into paths (see Slugify).
	DisplayName string `json:"display_name"`
	Slug        string `json:"slug"`
	// SourcePath is part of the checksum by which the frontend groups workers.
	SourcePath      string          `json:"source_path,omitempty"`
	ModelInfo       *TaggedFile     `json:"model_info"`
	Tokenizer       *TaggedFile     `json:"tokenizer"`
	PromptFormatter *TaggedFile     `json:"prompt_formatter,omitempty"`
	ChatTemplate    *ChatTemplate   `json:"chat_template_file,omitempty"`
	GenConfig       *TaggedFile     `json:"gen_config,omitempty"`
	PromptContext   json.RawMessage `json:"prompt_context,omitempty"`
	// ArchitecturalMaxContextLength is the config's own limit; ContextLength
	// repeats the effective one for old readers. In tokens.
	ArchitecturalMaxContextLength *uint32 `json:"architectural_max_context_length,omitempty"`
	ContextLength                 *uint32 `json:"context_length,omitempty"`
	KVCacheBlockSize              uint32  `json:"kv_cache_block_size"`
	MigrationLimit                uint32  `json:"migration_limit"`
	// ModelType holds flags joined by " | ", like "Chat | Completions".
	ModelType string `json:"model_type"`
	// ModelInput is "Tokens" for workers like ours.
	ModelInput string `json:"model_input"`
	// WorkerType is aggregated, prefill, decode or encode; left out it switches
	// the frontend to its lenient readiness rule.
	WorkerType string `json:"worker_type,omitempty"`
	// Needs lists alternatives of worker types that must be there too.
	Needs             [][]string      `json:"needs"`
	LoRA              *LoRA           `json:"lora,omitempty"`
	Aliases           []string        `json:"aliases,omitempty"`
	UserData          json.RawMessage `json:"user_data,omitempty"`
	RuntimeConfig     RuntimeConfig   `json:"runtime_config"`
	TensorModelConfig json.RawMessage `json:"tensor_model_config,omitempty"`
	MediaDecoder      json.RawMessage `json:"media_decoder"`
	MediaFetcher      json.RawMessage `json:"media_fetcher"`
	RouterConfig      json.RawMessage `json:"router_config,omitempty"`
	IndexerIdentity   json.RawMessage `json:"indexer_identity,omitempty"`
	// ExtraFiles are put next to the tokenizer at the frontend.
	ExtraFiles []File `json:"extra_files,omitempty"`
}

// StructuralTag is how the frontend builds structural tags for tool calls.
type StructuralTag struct {
	Scope                 string `json:"scope"`
	Schema                string `json:"schema"`
	AllowWithStructured   bool   `json:"allow_tool_calls_with_structured_output"`
	ExcludeSpecialTokens  *bool  `json:"exclude_special_tokens,omitempty"`
	ReasoningBoundary     string `json:"reasoning_boundary"`
	ToolArgumentsAnyOrder bool   `json:"tool_arguments_any_order"`
}

// EndpointRef names an endpoint.
type EndpointRef struct {
	Namespace string `json:"namespace"`
	Component string `json:"component"`
	Name      string `json:"name"`
}

// TokenBudget is the member token_budget of RuntimeConfig.RuntimeData. With it
// the frontend refuses prompts that are too long before it routes them.
type TokenBudget struct {
	CombinedLimit        uint32 `json:"combined_limit"`
	RejectPromptOverflow bool   `json:"reject_prompt_overflow"`
	RejectTotalOverflow  bool   `json:"reject_total_overflow"`
}

// RuntimeConfig describes how the engine runs. Pointers that are nil are left
// out or written as null, as recorded.
type RuntimeConfig struct {
	ContextLength       *uint32 `json:"context_length,omitempty"`
	TotalKVBlocks       *uint64 `json:"total_kv_blocks"`
	MaxNumSeqs          *uint64 `json:"max_num_seqs"`
	MaxNumBatchedTokens *uint64 `json:"max_num_batched_tokens"`

	ToolCallParser           *string `json:"tool_call_parser"`
	ReasoningParser          *string `json:"reasoning_parser"`
	ToolCallArgumentsFormat  string  `json:"tool_call_arguments_format"`
	TokenizerBackend         string  `json:"tokenizer_backend,omitempty"`
	TokenizerFallbackEnabled *bool   `json:"tokenizer_fallback_enabled,omitempty"`

	StructuralTag       *StructuralTag `json:"structural_tag,omitempty"`
	StructuralTagMode   string         `json:"structural_tag_mode,omitempty"`
	StructuralTagScope  string         `json:"structural_tag_scope,omitempty"`
	StructuralTagSchema string         `json:"structural_tag_schema,omitempty"`

	ExcludeToolsWhenToolChoiceNone bool   `json:"exclude_tools_when_tool_choice_none"`
	DataParallelStartRank          uint32 `json:"data_parallel_start_rank"`
	// DataParallelSize is the number of ranks, at least 1.
	DataParallelSize         uint32       `json:"data_parallel_size"`
	EnableLocalIndexer       bool         `json:"enable_local_indexer"`
	KVEventPublishingEnabled *bool        `json:"kv_event_publishing_enabled,omitempty"`
	KVEventSourceMode        string       `json:"kv_event_source_mode,omitempty"`
	KVStateEndpoint          *EndpointRef `json:"kv_state_endpoint,omitempty"`

	// RuntimeData is an open bag; see SetTokenBudget.
	RuntimeData           map[string]json.RawMessage `json:"runtime_data,omitempty"`
	DisaggregatedEndpoint json.RawMessage            `json:"disaggregated_endpoint,omitempty"`
	EnableEagle           bool                       `json:"enable_eagle"`

	Taints                    []string          `json:"taints,omitempty"`
	StableRoutingID           string            `json:"stable_routing_id,omitempty"`
	TopologyDomains           map[string]string `json:"topology_domains,omitempty"`
	KVTransferDomain          string            `json:"kv_transfer_domain,omitempty"`
	KVTransferEnforcement     string            `json:"kv_transfer_enforcement,omitempty"`
	KVTransferPreferredWeight *float32          `json:"kv_transfer_preferred_weight,omitempty"`
	MaxGPULoRACount           *uint32           `json:"max_gpu_lora_count,omitempty"`
}
