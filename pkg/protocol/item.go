package protocol

import (
	"math"
	"strconv"
	"strings"
)

// Item is one decoded response item.
type Item struct {
	// Chunk is nil for errors, events without data and the end of the stream.
	Chunk *Chunk
	// Err is not nil exactly when Event is "error".
	Err     *Error
	Event   string
	Comment []string
	// Final marks the end of the stream.
	Final bool
}

// ParseItem reads a response item back, as the frontend would: keys that it does
// not know and keys that are null do not count, and an item is an error only
// when its event says so. Errors are *DecodeError and *FieldError.
func ParseItem(c Codec, b []byte) (Item, error) {
	v, err := DecodeValue(c, b)
	if err != nil {
		return Item{}, err
	}
	p := &fieldReader{}
	item := p.wrapper(v)
	if p.err != nil {
		return Item{}, p.err
	}
	return item, nil
}

// fieldReader picks typed fields out of a decoded tree and keeps the first
// error. The zero value of a type stands for a field that is not there.
type fieldReader struct{ err error }

func (p *fieldReader) fail(path, reason string) {
	if p.err == nil {
		p.err = &FieldError{Field: path, Reason: reason}
	}
}

func (p *fieldReader) object(path string, v any) Map {
	m, ok := v.(Map)
	if !ok && v != nil {
		p.fail(path, "not a map")
	}
	return m
}

func (p *fieldReader) list(path string, v any) []any {
	l, ok := v.([]any)
	if !ok && v != nil {
		p.fail(path, "not a list")
	}
	return l
}

func (p *fieldReader) text(path string, v any) string {
	s, ok := v.(string)
	if !ok && v != nil {
		p.fail(path, "not a string")
	}
	return s
}

func (p *fieldReader) flag(path string, v any) bool {
	b, ok := v.(bool)
	if !ok && v != nil {
		p.fail(path, "not a boolean")
	}
	return b
}

// count reads an integer from 0 to limit.
func (p *fieldReader) count(path string, v any, limit int64) int64 {
	n, ok := v.(int64)
	switch {
	case v == nil:
	case !ok:
		p.fail(path, "not an integer in range")
	case n < 0 || n > limit:
		p.fail(path, "out of range")
	}
	return n
}

func (p *fieldReader) number(path string, v any) float64 {
	switch n := v.(type) {
	case float64:
		return n
	case int64:
		return float64(n)
	case uint64:
		return float64(n)
	default:
		p.fail(path, "not a number")
		return 0
	}
}

func at(path string, i int) string { return path + "[" + strconv.Itoa(i) + "]" }

func (p *fieldReader) wrapper(v any) Item {
	if v == nil {
		p.fail("item", "not a map")
		return Item{}
	}
	m := p.object("item", v)
	item := Item{Final: p.flag("complete_final", m["complete_final"])}
	if m["data"] == nil {
		if !item.Final && p.err == nil {
			p.fail("data", "missing in an item that is not the last")
		}
		return item
	}
	ann := p.object("data", m["data"])
	item.Event = p.text("data.event", ann["event"])
	for i, c := range p.list("data.comment", ann["comment"]) {
		item.Comment = append(item.Comment, p.text(at("data.comment", i), c))
	}
	if item.Event == eventError {
		item.Err = p.itemError(ann["error"], item.Comment)
		return item
	}
	if ann["data"] != nil {
		item.Chunk = p.chunk(p.object("data.data", ann["data"]))
	}
	return item
}

// itemError reads the error object, or makes an error of the comments when there
// is none.
func (p *fieldReader) itemError(v any, comment []string) *Error {
	if v == nil {
		return NewError(ReasonRuntimeUnclassified, strings.Join(comment, "; "))
	}
	return p.errorObject("data.error", p.object("data.error", v))
}

func (p *fieldReader) chunk(m Map) *Chunk {
	const base = "data.data."
	ch := &Chunk{
		TokenIDs:      p.tokenIDs(base+tokenField, m[tokenField]),
		StopReason:    p.stopReason(base+"stop_reason", m["stop_reason"]),
		EngineData:    m["engine_data"],
		Disaggregated: m["disaggregated_params"],
	}
	if v := m["index"]; v != nil {
		ch.HasIndex = true
		ch.Index = uint32(p.count(base+"index", v, math.MaxUint32))
	}
	if v := m["log_probs"]; v != nil {
		list := p.list(base+"log_probs", v)
		ch.LogProbs = make([]float64, len(list))
		for i, n := range list {
			ch.LogProbs[i] = p.number(at(base+"log_probs", i), n)
		}
	}
	if v := m["top_logprobs"]; v != nil {
		list := p.list(base+"top_logprobs", v)
		ch.TopLogProbs = make([][]TopLogProb, len(list))
		for i, tops := range list {
			ch.TopLogProbs[i] = p.topLogProbs(at(base+"top_logprobs", i), tops)
		}
	}
	ch.Finish, ch.ErrorText = p.finish(base+"finish_reason", m["finish_reason"])
	if v := m["completion_usage"]; v != nil {
		ch.Usage = p.usage(base+"completion_usage", p.object(base+"completion_usage", v))
	}
	return ch
}

func (p *fieldReader) tokenIDs(path string, v any) []uint32 {
	if v == nil {
		p.fail(path, "missing")
		return nil
	}
	list := p.list(path, v)
	ids := make([]uint32, len(list))
	for i, id := range list {
		if id == nil {
			p.fail(at(path, i), reasonNotToken)
		}
		ids[i] = uint32(p.count(at(path, i), id, math.MaxUint32))
	}
	return ids
}

func (p *fieldReader) stopReason(path string, v any) any {
	switch v := v.(type) {
	case nil, string, int64:
		return v
	case []any:
		ids := make([]int64, len(v))
		for i, id := range v {
			n, ok := id.(int64)
			if !ok {
				p.fail(at(path, i), "not an integer")
			}
			ids[i] = n
		}
		return ids
	default:
		p.fail(path, "not a string, an integer or a list of integers")
		return nil
	}
}

func (p *fieldReader) topLogProbs(path string, v any) []TopLogProb {
	if v == nil {
		p.fail(path, "not a list")
	}
	list := p.list(path, v)
	tops := make([]TopLogProb, len(list))
	for i, t := range list {
		path := at(path, i)
		m := p.object(path, t)
		tops[i] = TopLogProb{
			Rank:    uint32(p.count(path+".rank", m["rank"], math.MaxUint32)),
			TokenID: uint32(p.count(path+".token_id", m["token_id"], math.MaxUint32)),
			LogProb: p.number(path+".logprob", m["logprob"]),
		}
	}
	return tops
}

// finish reads the forms that the frontend reads: a word, {"error": text},
// "error: text".
func (p *fieldReader) finish(path string, v any) (FinishReason, string) {
	switch v := v.(type) {
	case nil:
		return FinishNone, ""
	case string:
		if v == "abort" {
			return FinishCancelled, ""
		}
		if text, ok := strings.CutPrefix(v, "error: "); ok {
			return FinishError, text
		}
		for f := FinishEOS; f <= FinishError; f++ {
			if v == f.String() {
				return f, ""
			}
		}
	case Map:
		if text, ok := v["error"].(string); ok && len(v) == 1 {
			return FinishError, text
		}
	}
	p.fail(path, "not a known finish reason")
	return FinishNone, ""
}

func (p *fieldReader) usage(path string, m Map) *Usage {
	u := &Usage{}
	for _, f := range []struct {
		key string
		to  *int
	}{
		{"prompt_tokens", &u.PromptTokens},
		{"completion_tokens", &u.CompletionTokens},
		{"total_tokens", &u.TotalTokens},
	} {
		if m[f.key] == nil {
			p.fail(path+"."+f.key, "missing")
		}
		*f.to = int(p.count(path+"."+f.key, m[f.key], math.MaxInt32))
	}
	if v := m["prompt_tokens_details"]; v != nil {
		details := p.object(path+".prompt_tokens_details", v)
		cached := p.count(path+".prompt_tokens_details.cached_tokens", details["cached_tokens"], math.MaxInt32)
		u.CachedTokens = int(cached)
		if details["cached_tokens"] == nil || len(details) != 1 {
			u.Details = details
		}
	}
	return u
}
