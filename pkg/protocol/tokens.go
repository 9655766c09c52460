package protocol

import (
	"encoding/binary"
	"math"
	"strconv"
)

const tokenField = "token_ids"

// Phrases of FieldError.Reason about token ids.
const (
	reasonNotToken  = "not an integer"
	reasonNegative  = "negative"
	reasonTokenSize = "over 2147483647"
	reasonPacked    = "packed ids are not a multiple of 4 bytes"
)

func tokenError(i int, reason string) error {
	return &FieldError{Field: tokenField + "[" + strconv.Itoa(i) + "]", Reason: reason}
}

func notTokens(k kind) error {
	return &FieldError{Field: tokenField, Reason: "is " + article(kindNames[k]) + ", not a list of token ids"}
}

// tokens reads the value of token_ids into req. Its elements do not count as
// values: a list of them takes four bytes an id and nothing else.
func (r *msgpackReader) tokens(req *Request) error {
	h, err := r.head()
	if err != nil {
		return err
	}
	switch h.kind {
	case kindNil:
		req.TokensState = TokensNull
		return nil
	case kindList:
		req.TokensState = TokensList
		req.TokenIDs, err = r.tokenList(h.size)
		return err
	case kindBytes:
		req.TokensState, req.Packed = TokensList, true
		packed := r.b[r.off : r.off+h.size]
		r.off += h.size
		req.TokenIDs, err = unpackTokens(packed)
		return err
	default:
		return notTokens(h.kind)
	}
}

func (r *msgpackReader) tokenList(n int) ([]int32, error) {
	ids := make([]int32, n)
	for i := range ids {
		// The three forms that nearly all ids have, without a head.
		b := r.b[r.off:]
		switch {
		case len(b) >= 1 && b[0] <= 0x7f:
			ids[i] = int32(b[0])
			r.off++
			continue
		case len(b) >= 3 && b[0] == 0xcd:
			ids[i] = int32(binary.BigEndian.Uint16(b[1:]))
			r.off += 3
			continue
		case len(b) >= 5 && b[0] == 0xce && b[1] <= 0x7f:
			ids[i] = int32(binary.BigEndian.Uint32(b[1:]))
			r.off += 5
			continue
		}
		h, err := r.head()
		if err != nil {
			return nil, err
		}
		switch {
		case h.kind != kindInt:
			return nil, tokenError(i, reasonNotToken)
		case h.big || int64(h.bits) > math.MaxInt32:
			return nil, tokenError(i, reasonTokenSize)
		case int64(h.bits) < 0:
			return nil, tokenError(i, reasonNegative)
		}
		ids[i] = int32(h.bits)
	}
	return ids, nil
}

func unpackTokens(b []byte) ([]int32, error) {
	if len(b)%4 != 0 {
		return nil, &FieldError{Field: tokenField, Reason: reasonPacked}
	}
	ids := make([]int32, len(b)/4)
	for i := range ids {
		id := int32(binary.LittleEndian.Uint32(b[4*i:]))
		if id < 0 {
			return nil, tokenError(i, reasonNegative)
		}
		ids[i] = id
	}
	return ids, nil
}

// tokens reads the value of token_ids into req.
func (r *jsonReader) tokens(req *Request) error {
	c, err := r.peek()
	if err != nil {
		return err
	}
	if c != '[' {
		v, err := r.value(1)
		if err != nil {
			return err
		}
		if v == nil {
			req.TokensState = TokensNull
			return nil
		}
		return notTokens(kindOf(v))
	}
	req.TokensState = TokensList
	r.off++
	// A list of short ids takes some four bytes of text each.
	ids := make([]int32, 0, min(1024, (len(r.b)-r.off)/4))
	if done, err := r.empty(']'); done || err != nil {
		req.TokenIDs = ids
		return err
	}
	for {
		id, err := r.token(len(ids))
		if err != nil {
			return err
		}
		ids = append(ids, id)
		if again, err := r.more(']'); err != nil {
			return err
		} else if !again {
			req.TokenIDs = ids
			return nil
		}
	}
}

func (r *jsonReader) token(i int) (int32, error) {
	c, err := r.peek()
	if err != nil {
		return 0, err
	}
	if c != '-' && (c < '0' || c > '9') {
		// Read it all the same: text that is not JSON is the worse fault.
		if _, err := r.value(2); err != nil {
			return 0, err
		}
		return 0, tokenError(i, reasonNotToken)
	}
	start := r.off
	whole, err := r.scanNumber()
	if err != nil {
		return 0, err
	}
	if !whole {
		return 0, tokenError(i, reasonNotToken)
	}
	id := int64(0)
	for _, d := range r.b[start:r.off] {
		if d == '-' {
			continue
		}
		if id = id*10 + int64(d-'0'); id > math.MaxInt32 {
			if c == '-' {
				break
			}
			return 0, tokenError(i, reasonTokenSize)
		}
	}
	if c == '-' && id != 0 {
		return 0, tokenError(i, reasonNegative)
	}
	return int32(id), nil
}

// kindOf names the kind of a decoded value.
func kindOf(v any) kind {
	switch v.(type) {
	case nil:
		return kindNil
	case bool:
		return kindBool
	case int64, uint64:
		return kindInt
	case float64:
		return kindFloat
	case string:
		return kindString
	case []byte:
		return kindBytes
	case []any:
		return kindList
	default:
		return kindMap
	}
}

// article puts a or an in front of the name of a kind.
func article(name string) string {
	if name == kindNames[kindInt] {
		return "an " + name
	}
	return "a " + name
}
