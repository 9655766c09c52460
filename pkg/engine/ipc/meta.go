package ipc

import (
	"bytes"
	"encoding/json"
	"errors"
)

// Meta is what an output record tells besides its tokens. Everything in it is
// optional.
type Meta struct {
	// FinishReason is the engine's own word ("stop", "length", "timeout",
	// "cancelled", …) and says that this choice is complete. A record with LAST
	// and no finish reason means that the engine ended without giving one.
	FinishReason string `json:"finish_reason,omitempty"`
	// StopReason is the token (int64) or text (string) that stopped the choice;
	// nil for an end-of-sequence token.
	StopReason any `json:"stop_reason,omitempty"`
	// CachedTokens is the number of prompt tokens taken from the KV cache.
	CachedTokens *int64 `json:"cached_tokens,omitempty"`
	// CompletionTokens is the number of tokens that all choices of the request
	// had together after the step that this record belongs to. It comes with a
	// finish reason when there are several choices, since a reader that gets
	// several steps at once cannot tell where a step ended.
	CompletionTokens *int64 `json:"completion_tokens,omitempty"`
	// PromptLogProbs is an array with one entry a prompt token: null or an
	// object from token id (as text) to {"logprob": number, "rank": int}.
	PromptLogProbs json.RawMessage `json:"prompt_logprobs,omitempty"`
	// Rank is the attention-DP rank that runs the request (simulated engine only).
	Rank *int `json:"rank,omitempty"`
	// Error ends the request, not the engine (unless its kind is ErrorFatal).
	Error *RequestError `json:"error,omitempty"`
	// Disaggregated is what a decode worker needs to take over: an object.
	Disaggregated json.RawMessage `json:"disaggregated_params,omitempty"`
	// NoOutputs says that the engine gave a result without any choice in it.
	NoOutputs bool `json:"no_outputs,omitempty"`
	// Perf holds the engine's own timing figures: an object.
	Perf json.RawMessage `json:"perf,omitempty"`
	// EngineRequestID is the id under which the engine's own log knows the request.
	EngineRequestID *uint64 `json:"engine_request_id,omitempty"`
}

// ErrorKind says how an error of the engine came about, which decides how the
// caller is told.
type ErrorKind string

// The kinds of per-request errors.
const (
	ErrorRequest        ErrorKind = "request"         // the engine refused or failed this request
	ErrorValue          ErrorKind = "value"           // an argument has a value the engine does not take
	ErrorType           ErrorKind = "type"            // an argument has a type the engine does not take
	ErrorNotImplemented ErrorKind = "not_implemented" // the engine's build cannot do it
	ErrorParams         ErrorKind = "params"          // what was asked for cannot be put into the engine's terms; nothing was asked of it
	ErrorFatal          ErrorKind = "fatal"           // the engine as a whole has failed
)

// RequestError is an error of one request as the engine reported it.
type RequestError struct {
	Kind    ErrorKind `json:"kind"`
	Type    string    `json:"type,omitempty"` // the engine's exception class
	Message string    `json:"message"`
}

func (e *RequestError) Error() string {
	if e.Type == "" {
		return e.Message
	}
	return e.Type + ": " + e.Message
}

// UnmarshalJSON keeps integers of stop_reason exact.
func (m *Meta) UnmarshalJSON(b []byte) error {
	type plain Meta
	aux := struct {
		*plain
		StopReason json.RawMessage `json:"stop_reason"`
	}{plain: (*plain)(m)}
	if err := json.Unmarshal(b, &aux); err != nil {
		return err
	}
	reason, err := parseStopReason(aux.StopReason)
	m.StopReason = reason
	return err
}

func parseStopReason(raw json.RawMessage) (any, error) {
	if len(raw) == 0 || bytes.Equal(raw, []byte("null")) {
		return nil, nil
	}
	var text string
	if raw[0] == '"' {
		return unmarshalInto(raw, &text)
	}
	var token int64
	if v, err := unmarshalInto(raw, &token); err == nil {
		return v, nil
	}
	return nil, errors.New("stop_reason is neither text nor an integer")
}

func unmarshalInto[T any](raw json.RawMessage, v *T) (any, error) {
	if err := json.Unmarshal(raw, v); err != nil {
		return nil, err
	}
	return *v, nil
}
