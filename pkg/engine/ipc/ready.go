package ipc

import (
	"encoding/json"
)

// Ready is what the engine tells about itself once it can take requests. It is
// the worker's only source of what the engine is and can do.
type Ready struct {
	Engine  string `json:"engine"`  // "sim", "tensorrt_llm"
	Version string `json:"version"` // of the inference library, for example "1.3.0rc29"
	Model   string `json:"model,omitempty"`

	// ResolvedConfig is the engine's configuration after all of its own
	// defaults and corrections, as a JSON object. ConfigReadable is false when
	// the engine could not read its configuration back; ResolvedConfig then
	// proves nothing.
	ResolvedConfig json.RawMessage `json:"resolved_config,omitempty"`
	ConfigReadable bool            `json:"config_readable"`

	Capabilities Capabilities `json:"capabilities"`
	Bounds       Bounds       `json:"bounds"`

	// AttentionDPSize is the number of attention data-parallel ranks, 1 without
	// attention DP.
	AttentionDPSize int `json:"attention_dp_size"`
	KV              KV  `json:"kv"`

	ModelTypes []string `json:"model_types,omitempty"`
}

// Capabilities are the parts of its API that the engine was probed for. What
// is not reported counts as missing.
type Capabilities struct {
	ConversationParams    bool `json:"conversation_params"`      // generate takes a conversation id
	SchedulingParams      bool `json:"scheduling_params"`        // generate takes a rank
	CacheSalt             bool `json:"cache_salt"`               // generate takes a cache salt
	Priority              bool `json:"priority"`                 // generate takes a priority
	BindsExplicitRank     bool `json:"binds_explicit_rank"`      // an explicit first rank is remembered for the conversation
	ArrayPrompts          bool `json:"array_prompts"`            // prompts need not be lists
	EngineDeadError       bool `json:"engine_dead_error"`        // the loss of a rank process is reported
	KVCacheCapacity       bool `json:"kv_cache_capacity"`        // the KV figures come from the engine
	GuidedDecoding        bool `json:"guided_decoding"`          // a guided decoding backend is configured
	AbortBeforeFirstToken bool `json:"abort_before_first_token"` // a cancel may reach the engine before its first token
}

// Bounds are the engine's limits. Zero means that the engine did not report
// the limit, and nothing is checked against it.
type Bounds struct {
	VocabSize    int `json:"vocab_size,omitempty"`     // token ids are below it
	MaxSeqLen    int `json:"max_seq_len,omitempty"`    // prompt and output together
	MaxNumTokens int `json:"max_num_tokens,omitempty"` // of one step on one rank
	MaxBatchSize int `json:"max_batch_size,omitempty"` // requests at once on one rank
	MaxBeamWidth int `json:"max_beam_width,omitempty"`
	// MachineIDs is the number of machine ids out of which the engine's program can make global request ids for disaggregated serving; ids are below it.
	MachineIDs int `json:"machine_ids,omitempty"`
}

// KV describes the KV cache of one rank. Zero means not reported.
type KV struct {
	TotalBlocks int `json:"total_blocks,omitempty"`
	BlockSize   int `json:"block_size,omitempty"` // tokens
}

// ParseReady decodes a ready payload. A missing rank count is 1; negative
// numbers and a configuration that is no object are refused.
func ParseReady(payload []byte) (Ready, error) {
	r, err := parseObject[Ready](KindReady, payload)
	if err != nil {
		return Ready{}, err
	}
	if r.AttentionDPSize == 0 {
		r.AttentionDPSize = 1
	}
	b := r.Bounds
	for _, n := range []int{
		r.AttentionDPSize, b.VocabSize, b.MaxSeqLen, b.MaxNumTokens, b.MaxBatchSize, b.MaxBeamWidth, b.MachineIDs,
		r.KV.TotalBlocks, r.KV.BlockSize,
	} {
		if n < 0 {
			return Ready{}, &MalformedError{Kind: KindReady, Reason: "a bound, rank count or block count is negative"}
		}
	}
	if len(r.ResolvedConfig) > 0 && r.ResolvedConfig[0] != '{' && string(r.ResolvedConfig) != "null" {
		return Ready{}, &MalformedError{Kind: KindReady, Reason: "resolved_config is not an object"}
	}
	return r, nil
}

// Config returns the raw JSON at a path of keys in the resolved configuration,
// and false when the configuration was not readable or has nothing there.
func (r *Ready) Config(path ...string) (json.RawMessage, bool) {
	if !r.ConfigReadable {
		return nil, false
	}
	at := r.ResolvedConfig
	for _, key := range path {
		var m map[string]json.RawMessage
		if json.Unmarshal(at, &m) != nil {
			return nil, false
		}
		next, ok := m[key]
		if !ok {
			return nil, false
		}
		at = next
	}
	return at, len(at) > 0
}
