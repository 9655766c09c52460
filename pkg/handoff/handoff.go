// Package handoff is the codec of what a prefill worker leaves for a decode worker: the disaggregated parameters of TensorRT-LLM, as they cross the engine's channel and as they cross the wire.
//
// The two forms hold the same fields. On the wire they are a map in the body's codec: the prefill worker's first item carries it as disaggregated_params, the frontend copies it unread into prefill_result of the decode request (Dynamo 1.6.1,
// recorded). The engine's opaque state is base64 in both. Fields that this package does not know are passed on: a build of the engine that does not know them either refuses the request.
package handoff

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"

	"dynworker/pkg/protocol"
)

// What the engine is asked to do with a request, in its own words.
const (
	// ContextOnly makes it run the prompt, sample the first token and keep the KV blocks for another engine.
	ContextOnly = "context_only"
	// GenerationOnly makes it fetch the KV blocks of another engine and go on from there.
	GenerationOnly = "generation_only"
	// Both makes it do both halves itself.
	Both = "context_and_generation"
)

// Names of fields that have a meaning here.
const (
	fieldRequestType = "request_type"
	fieldContextID   = "ctx_request_id"
	fieldState       = "opaque_state"
	fieldLogProbs    = "first_gen_log_probs"
	// fieldMachine is the worker's own: the slot out of which the engine program makes disagg_request_id.
	fieldMachine = "machine_id"
)

// dropped are fields that are about the way of a request and not for the engine, and those of modalities that this worker does not serve.
var dropped = []string{"worker_id", "_epd_metadata", "multimodal_embedding_handles", "multimodal_hashes"}

// FieldError says which field of a hand-off cannot be used, and why.
type FieldError struct {
	// Field is its path below disaggregated_params.
	Field, Reason string
}

func (e *FieldError) Error() string { return e.Field + " " + e.Reason }

func wrong(field, format string, args ...any) error {
	return &FieldError{Field: field, Reason: fmt.Sprintf(format, args...)}
}

// Context is what a prefill worker orders from its engine. With a machine slot (0 and up) the engine program adds a global request id of its own making.
func Context(machine int) json.RawMessage {
	order := protocol.Map{fieldRequestType: ContextOnly}
	if machine >= 0 {
		order[fieldMachine] = int64(machine)
	}
	return encode(order)
}

// Local is what orders both halves from one engine.
func Local() json.RawMessage { return encode(protocol.Map{fieldRequestType: Both}) }

// Generation turns what came with a decode request into the order for its engine. The error is a *FieldError.
func Generation(fields protocol.Map) (json.RawMessage, error) {
	order := make(protocol.Map, len(fields))
	for name, value := range fields {
		if value == nil || slices.Contains(dropped, name) {
			continue
		}
		checked, err := check(name, value)
		if err != nil {
			return nil, err
		}
		order[name] = checked
	}
	if order[fieldContextID] == nil {
		return nil, wrong(fieldContextID, "is missing: without it no KV blocks can be fetched")
	}
	order[fieldRequestType] = GenerationOnly
	return encode(order), nil
}

// check looks at one field of a hand-off and gives the engine's form of it.
func check(name string, value any) (any, error) {
	switch name {
	case fieldRequestType:
		if _, ok := value.(string); !ok {
			return nil, wrong(name, "is not text")
		}
	case fieldContextID, "disagg_request_id":
		if !natural(value, math.MaxUint64) {
			return nil, wrong(name, "is not a request id")
		}
	case "ctx_dp_rank", "schedule_style":
		if !natural(value, math.MaxInt32) {
			return nil, wrong(name, "is not a small natural number")
		}
	case "first_gen_tokens", "draft_tokens":
		list, ok := value.([]any)
		if !ok {
			return nil, wrong(name, "is not a list of token ids")
		}
		for i, id := range list {
			if !natural(id, math.MaxInt32) {
				return nil, wrong(name+"["+strconv.Itoa(i)+"]", "is not a token id")
			}
		}
	case fieldState:
		return state(value)
	case fieldLogProbs:
		return logProbs(value)
	}
	return value, nil
}

func natural(v any, most uint64) bool {
	switch n := v.(type) {
	case int64:
		return n >= 0 && uint64(n) <= most
	case uint64:
		return n <= most
	}
	return false
}

// state takes base64, or bytes where the codec has them, and gives base64.
func state(value any) (any, error) {
	switch v := value.(type) {
	case string:
		// Bent into nothing, a damaged state would be generation from no prompt at all.
		if _, err := base64.StdEncoding.Strict().DecodeString(v); err != nil {
			return nil, wrong(fieldState, "is not base64")
		}
		return v, nil
	case []byte:
		return base64.StdEncoding.EncodeToString(v), nil
	}
	return nil, wrong(fieldState, "is not base64")
}

// logProbs takes a list with an entry for each first token: a list of {token_id, logprob, rank}, or in the older layout a map from token id, as text, to {logprob, rank} or to the value alone. It gives the former.
func logProbs(value any) (any, error) {
	positions, ok := value.([]any)
	if !ok {
		return nil, wrong(fieldLogProbs, "is not a list")
	}
	out := make([]any, len(positions))
	for i, position := range positions {
		at := fieldLogProbs + "[" + strconv.Itoa(i) + "]"
		var err error
		switch p := position.(type) {
		case []any:
			out[i], err = listed(at, p)
		case protocol.Map:
			out[i], err = mapped(at, p)
		default:
			err = wrong(at, "is neither a list nor a map of alternatives")
		}
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

func listed(at string, entries []any) (any, error) {
	out := make([]any, len(entries))
	for i, e := range entries {
		at := at + "[" + strconv.Itoa(i) + "]"
		entry, ok := e.(protocol.Map)
		if !ok || !natural(entry["token_id"], math.MaxInt32) {
			return nil, wrong(at, "has no token_id")
		}
		alternative, err := alternative(at, entry["token_id"], entry)
		if err != nil {
			return nil, err
		}
		out[i] = alternative
	}
	return out, nil
}

func mapped(at string, entries protocol.Map) (any, error) {
	ids := make([]int64, 0, len(entries))
	for text := range entries {
		id, err := strconv.ParseInt(text, 10, 32)
		if err != nil || id < 0 || strconv.FormatInt(id, 10) != text {
			return nil, wrong(at, "has the key %q, which is no token id", text)
		}
		ids = append(ids, id)
	}
	slices.Sort(ids)
	out := make([]any, len(ids))
	for i, id := range ids {
		text := strconv.FormatInt(id, 10)
		entry, ok := entries[text].(protocol.Map)
		if !ok {
			entry = protocol.Map{"logprob": entries[text]}
		}
		alternative, err := alternative(at+"."+text, id, entry)
		if err != nil {
			return nil, err
		}
		out[i] = alternative
	}
	return out, nil
}

func alternative(at string, token any, entry protocol.Map) (any, error) {
	value := entry["logprob"]
	switch v := value.(type) {
	case int64:
		value = float64(v)
	case float64:
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return nil, wrong(at+".logprob", "is not a finite number")
		}
	default:
		return nil, wrong(at+".logprob", "is not a number")
	}
	rank := entry["rank"]
	if rank != nil && !natural(rank, math.MaxInt32) {
		return nil, wrong(at+".rank", "is not a rank")
	}
	return protocol.Map{"token_id": token, "logprob": value, "rank": rank}, nil
}

// FromEngine reads what the engine left after the first half, for the wire. The error is a *FieldError.
func FromEngine(raw json.RawMessage) (protocol.Map, error) {
	v, err := protocol.DecodeValue(protocol.CodecJSON, raw)
	if err != nil {
		return nil, wrong("disaggregated_params", "of the engine cannot be read: %v", err)
	}
	fields, ok := v.(protocol.Map)
	if !ok {
		return nil, wrong("disaggregated_params", "of the engine is not an object")
	}
	return fields, nil
}

// Complete tells whether a decode worker can go on from a hand-off; the frontend refuses those without a context id.
func Complete(fields protocol.Map) bool {
	return fields[fieldRequestType] == ContextOnly && fields[fieldContextID] != nil
}

func encode(m protocol.Map) json.RawMessage { return protocol.AppendValue(nil, protocol.CodecJSON, m) }
