package protocol

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

// KVCacheHit is the engine data that reports prefix reuse. It encodes as
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
	FinishError // with a text; the frontend answers 500 and does not migrate
)

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

// AppendChunk appends a chunk as a response item.
func AppendChunk(dst []byte, c Codec, ch *Chunk) []byte { panic("not yet") }

// AppendErrorItem appends an error as a response item.
func AppendErrorItem(dst []byte, c Codec, e *Error) []byte { panic("not yet") }

// AppendFinal appends the item that ends a complete stream.
func AppendFinal(dst []byte, c Codec) []byte { panic("not yet") }

// ParseItem reads a response item back. Errors are *DecodeError and *FieldError.
func ParseItem(c Codec, b []byte) (Item, error) { panic("not yet") }
