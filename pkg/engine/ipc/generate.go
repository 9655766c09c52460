package ipc

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
)

// Generate holds everything about a request except its id and prompt. A nil
// pointer or map means that the argument is not passed to the engine at all.
type Generate struct {
	RequestID     string            `json:"request_id,omitempty"` // the frontend's id, for the engine's log
	Streaming     bool              `json:"streaming"`
	Sampling      Sampling          `json:"sampling"`
	Guided        *Guided           `json:"guided,omitempty"`
	Scheduling    *Scheduling       `json:"scheduling,omitempty"`
	Conversation  *Conversation     `json:"conversation,omitempty"`
	CacheSalt     *string           `json:"cache_salt,omitempty"`
	Priority      *float64          `json:"priority,omitempty"`
	TraceHeaders  map[string]string `json:"trace_headers,omitempty"`
	LoRA          *LoRA             `json:"lora,omitempty"`
	Disaggregated json.RawMessage   `json:"disaggregated,omitempty"` // object
}

// Sampling carries the arguments of TensorRT-LLM's SamplingParams under their
// own names. Only what is set is sent; a pointer to zero is set.
type Sampling struct {
	MaxTokens              *int64   `json:"max_tokens,omitempty"`
	MinTokens              *int64   `json:"min_tokens,omitempty"`
	N                      *int64   `json:"n,omitempty"`
	BestOf                 *int64   `json:"best_of,omitempty"`
	Temperature            *float64 `json:"temperature,omitempty"`
	TopP                   *float64 `json:"top_p,omitempty"`
	TopK                   *int64   `json:"top_k,omitempty"`
	MinP                   *float64 `json:"min_p,omitempty"`
	RepetitionPenalty      *float64 `json:"repetition_penalty,omitempty"`
	PresencePenalty        *float64 `json:"presence_penalty,omitempty"`
	FrequencyPenalty       *float64 `json:"frequency_penalty,omitempty"`
	LengthPenalty          *float64 `json:"length_penalty,omitempty"`
	UseBeamSearch          *bool    `json:"use_beam_search,omitempty"`
	Seed                   *int64   `json:"seed,omitempty"`
	EndID                  *int64   `json:"end_id,omitempty"`
	PadID                  *int64   `json:"pad_id,omitempty"`
	StopTokenIDs           []int64  `json:"stop_token_ids,omitzero"` // nil: not passed; empty: passed as an empty list
	IncludeStopStrInOutput *bool    `json:"include_stop_str_in_output,omitempty"`
	IgnoreEOS              *bool    `json:"ignore_eos,omitempty"`
	LogProbs               *int64   `json:"logprobs,omitempty"`
	PromptLogProbs         *int64   `json:"prompt_logprobs,omitempty"`
	Detokenize             *bool    `json:"detokenize,omitempty"`
	ReturnPerfMetrics      *bool    `json:"return_perf_metrics,omitempty"`
}

// Guided carries the arguments of TensorRT-LLM's GuidedDecodingParams.
type Guided struct {
	JSON          json.RawMessage `json:"json,omitempty"` // a schema: object, or string holding one
	Regex         *string         `json:"regex,omitempty"`
	Grammar       *string         `json:"grammar,omitempty"`
	JSONObject    *bool           `json:"json_object,omitempty"`
	StructuralTag *string         `json:"structural_tag,omitempty"`
}

// Scheduling asks for one attention-DP rank.
type Scheduling struct {
	AttentionDPRank  int  `json:"attention_dp_rank"`
	AttentionDPRelax bool `json:"attention_dp_relax"` // false: wait for the rank rather than run elsewhere
}

// Conversation is the engine's conversation argument. A nil ID means that the
// argument is passed as None, which is not the same as not passing it.
type Conversation struct {
	ID *string `json:"id"`
}

// LoRA selects an adapter.
type LoRA struct {
	Name string `json:"name"`
	Path string `json:"path"`
	ID   int64  `json:"id"`
}

// Request is a decoded generate message.
type Request struct {
	ID     uint64
	Tokens []int32 // the prompt
	Params Generate
}

const (
	generateHead = 12 // id, token count
	tokenSize    = 4
)

// AppendGenerate appends a generate frame. The prompt is copied into dst as it
// is, four bytes a token. On an error dst is returned as it was.
func AppendGenerate(dst []byte, id uint64, tokens []int32, params *Generate) ([]byte, error) {
	meta, err := json.Marshal(params)
	if err != nil {
		return dst, fmt.Errorf("engine channel: encode generate message: %w", err)
	}
	size := uint64(generateHead) + tokenSize*uint64(len(tokens)) + uint64(len(meta))
	if size > MaxPayload {
		return dst, &SizeError{Kind: KindGenerate, Size: size, Limit: MaxPayload}
	}
	start := len(dst)
	dst = BeginFrame(dst, KindGenerate)
	dst = binary.LittleEndian.AppendUint64(dst, id)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(tokens)))
	for _, t := range tokens {
		dst = binary.LittleEndian.AppendUint32(dst, uint32(t))
	}
	return EndFrame(append(dst, meta...), start)
}

// ParseGenerate decodes a generate payload. When the id could be read but the
// rest is malformed, the returned request carries the id, so that the engine
// can still answer for it.
func ParseGenerate(payload []byte) (Request, error) {
	if len(payload) < generateHead {
		return Request{}, &MalformedError{Kind: KindGenerate, Offset: len(payload), Reason: "shorter than its fixed part"}
	}
	req := Request{ID: binary.LittleEndian.Uint64(payload)}
	n := uint64(binary.LittleEndian.Uint32(payload[8:]))
	rest := payload[generateHead:]
	if n*tokenSize > uint64(len(rest)) {
		return req, &MalformedError{Kind: KindGenerate, Offset: 8, Reason: "claims more tokens than it has bytes"}
	}
	params, err := parseObject[Generate](KindGenerate, rest[n*tokenSize:])
	if err != nil {
		return req, err
	}
	req.Params = params
	req.Tokens = make([]int32, n)
	for i := range req.Tokens {
		req.Tokens[i] = int32(binary.LittleEndian.Uint32(rest[tokenSize*i:]))
	}
	return req, nil
}

// AppendCancel appends a cancel frame.
func AppendCancel(dst []byte, id uint64) []byte {
	dst = append(dst, 8, 0, 0, 0, byte(KindCancel))
	return binary.LittleEndian.AppendUint64(dst, id)
}

// ParseCancel decodes a cancel payload.
func ParseCancel(payload []byte) (uint64, error) {
	if len(payload) != 8 {
		return 0, &MalformedError{Kind: KindCancel, Offset: len(payload), Reason: "is not 8 bytes"}
	}
	return binary.LittleEndian.Uint64(payload), nil
}
