package protocol

import "math"

// TopLogProb is one alternative at one position.
type TopLogProb struct {
	// Rank counts from 1, the likeliest.
	Rank    uint32
	TokenID uint32
	// LogProb is a natural logarithm.
	LogProb float64
}

// Usage is the token count of a request, on the last chunk of a choice.
type Usage struct {
	PromptTokens, CompletionTokens, TotalTokens int
	// CachedTokens is how many prompt tokens were found in the KV cache.
	CachedTokens int
	// Details replaces {"cached_tokens": CachedTokens} when it is not nil.
	Details any
}

// KVCacheHit is the member kv_cache_hit of a chunk's engine data. It encodes as
// {"prompt_tokens": n, "reused_tokens": n}.
type KVCacheHit struct{ PromptTokens, ReusedTokens int }

// FinishReason tells why a choice ended.
type FinishReason uint8

// The finish reasons that the frontend can read; any other word makes it drop
// the whole item.
const (
	FinishNone FinishReason = iota // not finished
	FinishEOS
	FinishLength
	FinishStop
	FinishCancelled
	FinishContentFilter
	// FinishError goes with a text; the frontend answers 500 and does not move
	// the request to another worker.
	FinishError
)

var finishWords = [...]string{
	FinishNone:          "",
	FinishEOS:           "eos",
	FinishLength:        "length",
	FinishStop:          "stop",
	FinishCancelled:     "cancelled",
	FinishContentFilter: "content_filter",
	FinishError:         "error",
}

// String returns the word on the wire; FinishNone is the empty string.
func (f FinishReason) String() string {
	if int(f) < len(finishWords) {
		return finishWords[f]
	}
	return "invalid"
}

// Chunk is what a worker sends about one choice: the tokens since its previous
// chunk and, once, how it ended. The zero value of a field leaves its key out,
// except TokenIDs, which is always written.
type Chunk struct {
	TokenIDs []uint32
	// Index is the choice, counted from 0; HasIndex is false on chunks that
	// report an error of the whole request.
	Index    uint32
	HasIndex bool
	// LogProbs and TopLogProbs hold one entry for each token of TokenIDs.
	LogProbs    []float64
	TopLogProbs [][]TopLogProb
	Finish      FinishReason
	// ErrorText goes with FinishError.
	ErrorText string
	// StopReason is nil, int64, string or []int64.
	StopReason any
	Usage      *Usage
	// EngineData and Disaggregated are nil, Map or Object.
	EngineData    any
	Disaggregated any
}

// LogProbFloor is written for a log probability that is not a finite number:
// JSON has no such number, and the frontend's callers read JSON. It is the value
// that OpenAI documents for tokens too unlikely to rank.
const LogProbFloor = -9999.0

// AppendChunk appends a chunk as a response item,
// {"data":{"data":{…}},"complete_final":false}. Keys come in the order of the
// recordings. It does not allocate when dst is large enough.
func AppendChunk(dst []byte, c Codec, ch *Chunk) []byte {
	dst = appendItemHead(dst, c, 1)
	dst = c.field(dst, 0, "data")
	dst = c.mapHead(dst, ch.keys())
	i := 0
	if ch.Finish == FinishError {
		dst = c.field(dst, i, "finish_reason")
		dst = c.mapHead(dst, 1)
		dst = c.field(dst, 0, "error")
		dst = c.text(dst, ch.ErrorText)
		dst = c.mapEnd(dst)
		i++
	}
	dst = c.field(dst, i, tokenField)
	dst = appendTokenList(dst, c, ch.TokenIDs)
	if ch.HasIndex {
		dst = c.field(dst, 1, "index")
		dst = c.unsigned(dst, uint64(ch.Index))
	}
	// From here on only that it is not the first key matters.
	if ch.LogProbs != nil {
		dst = c.field(dst, 1, "log_probs")
		dst = appendLogProbs(dst, c, ch.LogProbs)
	}
	if ch.TopLogProbs != nil {
		dst = c.field(dst, 1, "top_logprobs")
		dst = appendTopLogProbs(dst, c, ch.TopLogProbs)
	}
	if ch.Finish != FinishNone && ch.Finish != FinishError {
		dst = c.field(dst, 1, "finish_reason")
		dst = c.text(dst, ch.Finish.String())
	}
	if ch.StopReason != nil {
		dst = c.field(dst, 1, "stop_reason")
		dst = AppendValue(dst, c, ch.StopReason)
	}
	if ch.Disaggregated != nil {
		dst = c.field(dst, 1, "disaggregated_params")
		dst = AppendValue(dst, c, ch.Disaggregated)
	}
	if ch.EngineData != nil {
		dst = c.field(dst, 1, "engine_data")
		dst = AppendValue(dst, c, ch.EngineData)
	}
	if ch.Usage != nil {
		dst = c.field(dst, 1, "completion_usage")
		dst = ch.Usage.append(dst, c)
	}
	dst = c.mapEnd(dst)
	return appendItemEnd(dst, c)
}

// keys counts the keys that AppendChunk writes.
func (ch *Chunk) keys() int {
	n := 1
	for _, there := range [...]bool{
		ch.HasIndex, ch.LogProbs != nil, ch.TopLogProbs != nil, ch.Finish != FinishNone,
		ch.StopReason != nil, ch.Disaggregated != nil, ch.EngineData != nil, ch.Usage != nil,
	} {
		if there {
			n++
		}
	}
	return n
}

func appendLogProb(dst []byte, c Codec, v float64) []byte {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		v = LogProbFloor
	}
	return c.float(dst, v)
}

func appendLogProbs(dst []byte, c Codec, list []float64) []byte {
	dst = c.listHead(dst, len(list))
	for i, v := range list {
		dst = appendLogProb(c.comma(dst, i), c, v)
	}
	return c.listEnd(dst)
}

func appendTopLogProbs(dst []byte, c Codec, list [][]TopLogProb) []byte {
	dst = c.listHead(dst, len(list))
	for i, tops := range list {
		dst = c.listHead(c.comma(dst, i), len(tops))
		for j := range tops {
			dst = c.mapHead(c.comma(dst, j), 4)
			dst = c.field(dst, 0, "rank")
			dst = c.unsigned(dst, uint64(tops[j].Rank))
			dst = c.field(dst, 1, "token_id")
			dst = c.unsigned(dst, uint64(tops[j].TokenID))
			// The frontend has the tokenizer and fills the text in.
			dst = c.field(dst, 2, "token")
			dst = c.null(dst)
			dst = c.field(dst, 3, "logprob")
			dst = appendLogProb(dst, c, tops[j].LogProb)
			dst = c.mapEnd(dst)
		}
		dst = c.listEnd(dst)
	}
	return c.listEnd(dst)
}

func (u *Usage) append(dst []byte, c Codec) []byte {
	dst = c.mapHead(dst, 4)
	dst = c.field(dst, 0, "prompt_tokens")
	dst = c.signed(dst, int64(u.PromptTokens))
	dst = c.field(dst, 1, "completion_tokens")
	dst = c.signed(dst, int64(u.CompletionTokens))
	dst = c.field(dst, 2, "total_tokens")
	dst = c.signed(dst, int64(u.TotalTokens))
	dst = c.field(dst, 3, "prompt_tokens_details")
	if u.Details != nil {
		dst = AppendValue(dst, c, u.Details)
	} else {
		dst = c.mapHead(dst, 1)
		dst = c.field(dst, 0, "cached_tokens")
		dst = c.signed(dst, int64(u.CachedTokens))
		dst = c.mapEnd(dst)
	}
	return c.mapEnd(dst)
}

func (h KVCacheHit) append(dst []byte, c Codec) []byte {
	dst = c.mapHead(dst, 2)
	dst = c.field(dst, 0, "prompt_tokens")
	dst = c.signed(dst, int64(h.PromptTokens))
	dst = c.field(dst, 1, "reused_tokens")
	dst = c.signed(dst, int64(h.ReusedTokens))
	return c.mapEnd(dst)
}

// AppendErrorItem appends an error as a response item. The frontend takes an
// item for an error only when the event says so, whatever else is in it.
func AppendErrorItem(dst []byte, c Codec, e *Error) []byte {
	dst = appendItemHead(dst, c, 2)
	dst = c.field(dst, 0, "event")
	dst = c.text(dst, eventError)
	dst = c.field(dst, 1, "error")
	dst = e.append(dst, c)
	return appendItemEnd(dst, c)
}

// AppendFinal appends the item that ends a complete stream. A stream without it
// counts as cut short.
func AppendFinal(dst []byte, c Codec) []byte {
	dst = c.mapHead(dst, 1)
	dst = c.field(dst, 0, "complete_final")
	dst = c.boolean(dst, true)
	return c.mapEnd(dst)
}

const eventError = "error"

// appendItemHead opens the wrapper and the annotated item inside it, which will
// have n keys.
func appendItemHead(dst []byte, c Codec, n int) []byte {
	dst = c.mapHead(dst, 2)
	dst = c.field(dst, 0, "data")
	return c.mapHead(dst, n)
}

func appendItemEnd(dst []byte, c Codec) []byte {
	dst = c.mapEnd(dst)
	dst = c.field(dst, 1, "complete_final")
	dst = c.boolean(dst, false)
	return c.mapEnd(dst)
}
