package protocol

import (
	"encoding/binary"
	"math"
	"unicode/utf8"
)

// Phrases of DecodeError.Reason that both codecs use.
const (
	reasonEnd       = "unexpected end"
	reasonLength    = "length is beyond the end of the body"
	reasonDepth     = "nested too deep"
	reasonValues    = "too many values"
	reasonUTF8      = "text is not UTF-8"
	reasonKey       = "map key is not a string"
	reasonDuplicate = "duplicate map key"
	reasonTrailing  = "bytes after the value"
)

// Phrases that only msgpack needs.
const (
	reasonExtension = "extension types are not used"
	reasonReserved  = "reserved type byte"
)

// kind is what a value is.
type kind uint8

const (
	kindNil kind = iota
	kindBool
	kindInt
	kindFloat
	kindString
	kindBytes
	kindList
	kindMap
)

// Names of the kinds, as they appear in errors.
var kindNames = [...]string{"null", "boolean", "integer", "number", "string", "byte string", "list", "map"}

// head is a msgpack value without what is inside it.
type head struct {
	kind kind
	size int    // bytes of a string, elements of a list, pairs of a map
	bits uint64 // integer (two's complement), float bits, or 0/1
	big  bool   // bits is an integer above the range of int64
}

// msgpackReader walks over one body.
type msgpackReader struct {
	b      []byte
	off    int
	budget int // values that may still be claimed
}

func (r *msgpackReader) fail(off int, reason string) error {
	return &DecodeError{Codec: CodecMsgpack, Offset: off, Reason: reason}
}

func (r *msgpackReader) left() int { return len(r.b) - r.off }

// number reads n bytes (1, 2, 4 or 8) as a big-endian integer.
func (r *msgpackReader) number(n int) (uint64, error) {
	if r.left() < n {
		return 0, r.fail(len(r.b), reasonEnd)
	}
	b := r.b[r.off : r.off+n]
	r.off += n
	switch n {
	case 1:
		return uint64(b[0]), nil
	case 2:
		return uint64(binary.BigEndian.Uint16(b)), nil
	case 4:
		return uint64(binary.BigEndian.Uint32(b)), nil
	default:
		return binary.BigEndian.Uint64(b), nil
	}
}

// head reads the next value's type and its fixed part. The size of a string or
// container has been compared with the bytes that are left: every element takes
// at least one byte, every pair two.
func (r *msgpackReader) head() (head, error) {
	if r.left() == 0 {
		return head{}, r.fail(r.off, reasonEnd)
	}
	start, t := r.off, r.b[r.off]
	r.off++
	switch {
	case t <= 0x7f:
		return head{kind: kindInt, bits: uint64(t)}, nil
	case t >= 0xe0:
		return head{kind: kindInt, bits: uint64(int64(int8(t)))}, nil
	case t <= 0x8f:
		return r.sized(start, kindMap, uint64(t&0x0f))
	case t <= 0x9f:
		return r.sized(start, kindList, uint64(t&0x0f))
	case t <= 0xbf:
		return r.sized(start, kindString, uint64(t&0x1f))
	}
	switch t {
	case 0xc0:
		return head{kind: kindNil}, nil
	case 0xc1:
		return head{}, r.fail(start, reasonReserved)
	case 0xc2, 0xc3:
		return head{kind: kindBool, bits: uint64(t & 1)}, nil
	case 0xc4, 0xc5, 0xc6:
		return r.sizedBy(start, kindBytes, 1<<(t-0xc4))
	case 0xca, 0xcb:
		return r.float(t)
	case 0xcc, 0xcd, 0xce, 0xcf:
		u, err := r.number(1 << (t - 0xcc))
		return head{kind: kindInt, bits: u, big: u > math.MaxInt64}, err
	case 0xd0, 0xd1, 0xd2, 0xd3:
		return r.signed(1 << (t - 0xd0))
	case 0xd9, 0xda, 0xdb:
		return r.sizedBy(start, kindString, 1<<(t-0xd9))
	case 0xdc, 0xdd:
		return r.sizedBy(start, kindList, 2<<(t-0xdc))
	case 0xde, 0xdf:
		return r.sizedBy(start, kindMap, 2<<(t-0xde))
	default: // 0xc7-0xc9 and 0xd4-0xd8
		return head{}, r.fail(start, reasonExtension)
	}
}

func (r *msgpackReader) float(t byte) (head, error) {
	if t == 0xca {
		u, err := r.number(4)
		return head{kind: kindFloat, bits: math.Float64bits(float64(math.Float32frombits(uint32(u))))}, err
	}
	u, err := r.number(8)
	return head{kind: kindFloat, bits: u}, err
}

func (r *msgpackReader) signed(n int) (head, error) {
	u, err := r.number(n)
	shift := 64 - 8*n
	return head{kind: kindInt, bits: uint64(int64(u<<shift) >> shift)}, err
}

func (r *msgpackReader) sizedBy(start int, k kind, width int) (head, error) {
	n, err := r.number(width)
	if err != nil {
		return head{}, err
	}
	return r.sized(start, k, n)
}

func (r *msgpackReader) sized(start int, k kind, n uint64) (head, error) {
	room := uint64(r.left())
	if k == kindMap {
		room /= 2
	}
	if n > room {
		return head{}, r.fail(start, reasonLength)
	}
	return head{kind: k, size: int(n)}, nil
}

// claim takes n values from the budget before memory is made for them.
func (r *msgpackReader) claim(start, n int) error {
	if n > r.budget {
		return r.fail(start, reasonValues)
	}
	r.budget -= n
	return nil
}

// value reads one value; depth is how many containers it is in.
func (r *msgpackReader) value(depth int) (any, error) {
	start := r.off
	h, err := r.head()
	if err != nil {
		return nil, err
	}
	return r.rest(start, h, depth)
}

// rest reads what follows a head.
func (r *msgpackReader) rest(start int, h head, depth int) (any, error) {
	switch h.kind {
	case kindNil:
		return nil, nil
	case kindBool:
		return h.bits != 0, nil
	case kindInt:
		if h.big {
			return h.bits, nil
		}
		return int64(h.bits), nil
	case kindFloat:
		return math.Float64frombits(h.bits), nil
	case kindString:
		return r.text(h.size)
	case kindBytes:
		b := make([]byte, h.size)
		r.off += copy(b, r.b[r.off:])
		return b, nil
	case kindList:
		return r.list(start, h.size, depth)
	default:
		return r.mapping(start, h.size, depth)
	}
}

func (r *msgpackReader) text(n int) (string, error) {
	b := r.b[r.off : r.off+n]
	if !utf8.Valid(b) {
		return "", r.fail(r.off, reasonUTF8)
	}
	r.off += n
	return string(b), nil
}

func (r *msgpackReader) list(start, n, depth int) (any, error) {
	if depth >= MaxDepth {
		return nil, r.fail(start, reasonDepth)
	}
	if err := r.claim(start, n); err != nil {
		return nil, err
	}
	list := make([]any, n)
	for i := range list {
		v, err := r.value(depth + 1)
		if err != nil {
			return nil, err
		}
		list[i] = v
	}
	return list, nil
}

func (r *msgpackReader) mapping(start, n, depth int) (any, error) {
	if depth >= MaxDepth {
		return nil, r.fail(start, reasonDepth)
	}
	if err := r.claim(start, 2*n); err != nil {
		return nil, err
	}
	m := make(Map, n)
	for range n {
		at := r.off
		key, err := r.key()
		if err != nil {
			return nil, err
		}
		if _, dup := m[key]; dup {
			return nil, r.fail(at, reasonDuplicate)
		}
		if m[key], err = r.value(depth + 1); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (r *msgpackReader) key() (string, error) {
	at := r.off
	h, err := r.head()
	if err != nil {
		return "", err
	}
	if h.kind != kindString {
		return "", r.fail(at, reasonKey)
	}
	return r.text(h.size)
}

// finish checks that the body is used up.
func (r *msgpackReader) finish() error {
	if r.left() != 0 {
		return r.fail(r.off, reasonTrailing)
	}
	return nil
}

func decodeMsgpack(b []byte) (any, error) {
	r := msgpackReader{b: b, budget: MaxValues}
	v, err := r.value(0)
	if err != nil {
		return nil, err
	}
	if err := r.finish(); err != nil {
		return nil, err
	}
	return v, nil
}
