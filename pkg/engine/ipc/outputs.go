package ipc

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
)

// Flags of an output record.
const (
	FlagMeta     uint16 = 1 // a JSON meta object follows
	FlagLast     uint16 = 2 // terminal record of the whole request; the id is free afterwards
	FlagLogProbs uint16 = 4 // log probabilities of the tokens follow them

	knownFlags = FlagMeta | FlagLast | FlagLogProbs
)

// Output is what the engine produced for one choice of one request.
type Output struct {
	ID       uint64
	Index    uint16   // choice, 0 to n-1
	Last     bool     // nothing comes after this for the request
	Tokens   []uint32 // new tokens of this choice
	LogProbs []TokenLogProb
	TopK     uint16 // alternatives per token that the engine was asked for; 0: chosen values only
	Meta     *Meta
}

// TokenLogProb holds the log probabilities at one position.
type TokenLogProb struct {
	LogProb float64 // of the chosen token
	Top     []TopLogProb
}

// TopLogProb is one alternative at a position. Rank 1 is the most likely token.
type TopLogProb struct {
	TokenID uint32
	Rank    uint32
	LogProb float64
}

const (
	recordHead   = 16 // id, index, flags, token count
	logProbHead  = 10 // chosen value, count
	topEntrySize = 16 // token id, rank, value
)

// AppendOutput appends one record to the payload of an outputs frame (see
// BeginFrame). It fails, leaving dst as it was, when the log probabilities do
// not fit their counts or the meta is no JSON.
func AppendOutput(dst []byte, o *Output) ([]byte, error) {
	var flags uint16
	if o.Last {
		flags |= FlagLast
	}
	if o.LogProbs != nil {
		flags |= FlagLogProbs
	}
	var meta []byte
	if o.Meta != nil {
		flags |= FlagMeta
		var err error
		if meta, err = json.Marshal(o.Meta); err != nil {
			return dst, fmt.Errorf("engine channel: encode output meta: %w", err)
		}
	}
	if o.LogProbs != nil && len(o.LogProbs) != len(o.Tokens) {
		return dst, fmt.Errorf("engine channel: %d log probabilities for %d tokens", len(o.LogProbs), len(o.Tokens))
	}
	start := len(dst)
	dst = AppendRecordHead(dst, o.ID, o.Index, flags, len(o.Tokens))
	for _, t := range o.Tokens {
		dst = binary.LittleEndian.AppendUint32(dst, t)
	}
	if o.LogProbs != nil {
		dst = binary.LittleEndian.AppendUint16(dst, o.TopK)
		for i := range o.LogProbs {
			p := &o.LogProbs[i]
			if len(p.Top) > math.MaxUint16 {
				return dst[:start], fmt.Errorf("engine channel: %d alternatives at one position", len(p.Top))
			}
			dst = binary.LittleEndian.AppendUint64(dst, math.Float64bits(p.LogProb))
			dst = binary.LittleEndian.AppendUint16(dst, uint16(len(p.Top)))
			for _, t := range p.Top {
				dst = binary.LittleEndian.AppendUint32(dst, t.TokenID)
				dst = binary.LittleEndian.AppendUint32(dst, t.Rank)
				dst = binary.LittleEndian.AppendUint64(dst, math.Float64bits(t.LogProb))
			}
		}
	}
	if o.Meta != nil {
		dst = binary.LittleEndian.AppendUint32(dst, uint32(len(meta)))
		dst = append(dst, meta...)
	}
	return dst, nil
}

// AppendRecordHead appends the fixed part of an output record; the caller
// appends what the flags and the token count announce.
func AppendRecordHead(dst []byte, id uint64, index, flags uint16, tokens int) []byte {
	dst = binary.LittleEndian.AppendUint64(dst, id)
	dst = binary.LittleEndian.AppendUint16(dst, index)
	dst = binary.LittleEndian.AppendUint16(dst, flags)
	return binary.LittleEndian.AppendUint32(dst, uint32(tokens))
}

// Record is an output record as it lies in the payload. The slices point into
// the payload and are only as long-lived as it is.
type Record struct {
	ID    uint64
	Index uint16
	Last  bool

	tokens   []byte
	logProbs []byte // per-token part, without k
	topK     uint16
	hasProbs bool
	meta     []byte // nil without FlagMeta
}

// Records walks over the records of an outputs payload without allocating.
type Records struct {
	rest []byte
	size int
}

// ParseRecords starts a walk over an outputs payload.
func ParseRecords(payload []byte) Records {
	return Records{rest: payload, size: len(payload)}
}

// Next reads the next record into rec. It returns false at the end of the
// payload, and a *MalformedError when what is left is no record; the records
// before it were sound, those after it cannot be found.
func (r *Records) Next(rec *Record) (bool, error) {
	b := r.rest
	if len(b) == 0 {
		return false, nil
	}
	if len(b) < recordHead {
		return false, r.malformed("record is shorter than its fixed part")
	}
	*rec = Record{ID: binary.LittleEndian.Uint64(b), Index: binary.LittleEndian.Uint16(b[8:])}
	flags := binary.LittleEndian.Uint16(b[10:])
	count := uint64(binary.LittleEndian.Uint32(b[12:]))
	if flags&^knownFlags != 0 {
		return false, r.malformed("record has unknown flags")
	}
	rec.Last = flags&FlagLast != 0
	b = b[recordHead:]
	if count*tokenSize > uint64(len(b)) {
		return false, r.malformed("record claims more tokens than it has bytes")
	}
	rec.tokens, b = b[:count*tokenSize], b[count*tokenSize:]
	if flags&FlagLogProbs != 0 {
		var reason string
		if b, reason = rec.splitLogProbs(b, int(count)); reason != "" {
			return false, r.malformed(reason)
		}
	}
	if flags&FlagMeta != 0 {
		if len(b) < 4 || uint64(binary.LittleEndian.Uint32(b)) > uint64(len(b)-4) {
			return false, r.malformed("record claims more meta than it has bytes")
		}
		n := 4 + int(binary.LittleEndian.Uint32(b))
		if n == 4 {
			return false, r.malformed("record has an empty meta")
		}
		rec.meta, b = b[4:n], b[n:]
	}
	r.rest = b
	return true, nil
}

// splitLogProbs cuts the log probabilities of count tokens off b.
func (rec *Record) splitLogProbs(b []byte, count int) (rest []byte, reason string) {
	if len(b) < 2 {
		return nil, "log probabilities are cut short"
	}
	rec.topK, rec.hasProbs = binary.LittleEndian.Uint16(b), true
	b = b[2:]
	all := b
	for range count {
		if len(b) < logProbHead {
			return nil, "log probabilities are cut short"
		}
		n := logProbHead + topEntrySize*int(binary.LittleEndian.Uint16(b[8:]))
		if n > len(b) {
			return nil, "more alternatives are claimed than there are bytes"
		}
		b = b[n:]
	}
	rec.logProbs = all[:len(all)-len(b)]
	return b, ""
}

func (r *Records) malformed(reason string) error {
	return &MalformedError{Kind: KindOutputs, Offset: r.size - len(r.rest), Reason: reason}
}

// TokenCount is the number of tokens in the record.
func (rec *Record) TokenCount() int { return len(rec.tokens) / tokenSize }

// AppendTokens appends the record's tokens to dst.
func (rec *Record) AppendTokens(dst []uint32) []uint32 {
	for b := rec.tokens; len(b) >= tokenSize; b = b[tokenSize:] {
		dst = append(dst, binary.LittleEndian.Uint32(b))
	}
	return dst
}

// HasLogProbs reports whether log probabilities came with the tokens.
func (rec *Record) HasLogProbs() bool { return rec.hasProbs }

// TopK is the number of alternatives that the engine was asked for; 0 means
// that it reports the chosen tokens' values only.
func (rec *Record) TopK() uint16 { return rec.topK }

// AppendLogProbs appends the record's log probabilities to dst, one entry a
// token. Entries of dst beyond its length are reused, including the memory of
// their Top slices.
func (rec *Record) AppendLogProbs(dst []TokenLogProb) []TokenLogProb {
	if rec.hasProbs && dst == nil {
		dst = []TokenLogProb{} // present but without tokens is not the same as absent
	}
	for b := rec.logProbs; len(b) >= logProbHead; {
		if len(dst) < cap(dst) {
			dst = dst[:len(dst)+1]
		} else {
			dst = append(dst, TokenLogProb{})
		}
		p := &dst[len(dst)-1]
		p.LogProb = math.Float64frombits(binary.LittleEndian.Uint64(b))
		p.Top = p.Top[:0]
		n := int(binary.LittleEndian.Uint16(b[8:]))
		b = b[logProbHead:]
		for range n {
			p.Top = append(p.Top, TopLogProb{
				TokenID: binary.LittleEndian.Uint32(b),
				Rank:    binary.LittleEndian.Uint32(b[4:]),
				LogProb: math.Float64frombits(binary.LittleEndian.Uint64(b[8:])),
			})
			b = b[topEntrySize:]
		}
	}
	return dst
}

// HasMeta reports whether a meta object came with the record.
func (rec *Record) HasMeta() bool { return rec.meta != nil }

// AppendMeta appends the JSON of the record's meta object to dst, nothing
// without one.
func (rec *Record) AppendMeta(dst []byte) []byte { return append(dst, rec.meta...) }

// Meta decodes the record's meta object; nil without one. The result owns its
// memory.
func (rec *Record) Meta() (*Meta, error) {
	if rec.meta == nil {
		return nil, nil
	}
	return ParseMeta(rec.meta)
}

// ParseMeta decodes the JSON of a meta object. The result owns its memory.
func ParseMeta(raw []byte) (*Meta, error) {
	m, err := parseObject[Meta](KindOutputs, raw)
	if err != nil {
		return nil, err
	}
	return &m, nil
}

// Size is the number of payload bytes that the record's variable parts take,
// a measure of the memory needed to keep it.
func (rec *Record) Size() int { return len(rec.tokens) + len(rec.logProbs) + len(rec.meta) }

// ParseOutputs decodes a whole outputs payload. It is for tests and tools; the
// worker itself walks the records without building this slice.
func ParseOutputs(payload []byte) ([]Output, error) {
	var outs []Output
	var rec Record
	records := ParseRecords(payload)
	for {
		more, err := records.Next(&rec)
		if err != nil || !more {
			return outs, err
		}
		meta, err := rec.Meta()
		if err != nil {
			return outs, err
		}
		outs = append(outs, Output{
			ID: rec.ID, Index: rec.Index, Last: rec.Last,
			Tokens: rec.AppendTokens(nil), LogProbs: rec.AppendLogProbs(nil), TopK: rec.TopK(), Meta: meta,
		})
	}
}
