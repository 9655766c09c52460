package protocol

import (
	"encoding/binary"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"dynworker/pkg/wire"
)

// The methods below write one piece of either codec, so that everything above
// them is written once. i is the position of an element, from 0; JSON needs it
// for the comma.

func (c Codec) mapHead(dst []byte, n int) []byte {
	if c == CodecJSON {
		return append(dst, '{')
	}
	return appendMsgpackHead(dst, n, 0x80, 16, 0xde)
}

func (c Codec) mapEnd(dst []byte) []byte {
	if c == CodecJSON {
		return append(dst, '}')
	}
	return dst
}

func (c Codec) listHead(dst []byte, n int) []byte {
	if c == CodecJSON {
		return append(dst, '[')
	}
	return appendMsgpackHead(dst, n, 0x90, 16, 0xdc)
}

func (c Codec) listEnd(dst []byte) []byte {
	if c == CodecJSON {
		return append(dst, ']')
	}
	return dst
}

// comma separates list elements.
func (c Codec) comma(dst []byte, i int) []byte {
	if c == CodecJSON && i > 0 {
		return append(dst, ',')
	}
	return dst
}

// key writes the name of a member.
func (c Codec) key(dst []byte, i int, k string) []byte {
	dst = c.comma(dst, i)
	dst = c.text(dst, k)
	if c == CodecJSON {
		dst = append(dst, ':')
	}
	return dst
}

// field writes a name that is one of our own: short, and without anything to
// escape.
func (c Codec) field(dst []byte, i int, k string) []byte {
	if c == CodecMsgpack {
		dst = append(dst, 0xa0|byte(len(k)))
		return append(dst, k...)
	}
	dst = c.comma(dst, i)
	dst = append(dst, '"')
	dst = append(dst, k...)
	return append(dst, '"', ':')
}

func (c Codec) null(dst []byte) []byte {
	if c == CodecJSON {
		return append(dst, "null"...)
	}
	return append(dst, 0xc0)
}

func (c Codec) boolean(dst []byte, v bool) []byte {
	switch {
	case c == CodecJSON:
		return strconv.AppendBool(dst, v)
	case v:
		return append(dst, 0xc3)
	default:
		return append(dst, 0xc2)
	}
}

func (c Codec) signed(dst []byte, v int64) []byte {
	if v >= 0 {
		return c.unsigned(dst, uint64(v))
	}
	if c == CodecJSON {
		return strconv.AppendInt(dst, v, 10)
	}
	switch {
	case v >= -32:
		return append(dst, byte(v))
	case v >= math.MinInt8:
		return append(dst, 0xd0, byte(v))
	case v >= math.MinInt16:
		return binary.BigEndian.AppendUint16(append(dst, 0xd1), uint16(v))
	case v >= math.MinInt32:
		return binary.BigEndian.AppendUint32(append(dst, 0xd2), uint32(v))
	default:
		return binary.BigEndian.AppendUint64(append(dst, 0xd3), uint64(v))
	}
}

func (c Codec) unsigned(dst []byte, v uint64) []byte {
	if c == CodecJSON {
		return strconv.AppendUint(dst, v, 10)
	}
	switch {
	case v <= 0x7f:
		return append(dst, byte(v))
	case v <= math.MaxUint8:
		return append(dst, 0xcc, byte(v))
	case v <= math.MaxUint16:
		return append(dst, 0xcd, byte(v>>8), byte(v))
	case v <= math.MaxUint32:
		return binary.BigEndian.AppendUint32(append(dst, 0xce), uint32(v))
	default:
		return binary.BigEndian.AppendUint64(append(dst, 0xcf), v)
	}
}

// float writes 64 bits. In JSON a whole number keeps a ".0", so that it is read
// back as a float.
func (c Codec) float(dst []byte, v float64) []byte {
	if c == CodecMsgpack {
		return binary.BigEndian.AppendUint64(append(dst, 0xcb), math.Float64bits(v))
	}
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return append(dst, "null"...)
	}
	form := byte('f')
	if abs := math.Abs(v); abs != 0 && (abs < 1e-6 || abs >= 1e17) {
		form = 'e'
	}
	start := len(dst)
	dst = strconv.AppendFloat(dst, v, form, -1, 64)
	if form == 'f' && !slices.Contains(dst[start:], '.') {
		dst = append(dst, '.', '0')
	}
	return dst
}

func (c Codec) text(dst []byte, s string) []byte {
	if c == CodecJSON {
		return wire.AppendJSONString(dst, s)
	}
	if !utf8.ValidString(s) {
		s = strings.ToValidUTF8(s, "\uFFFD")
	}
	if n := len(s); n > 31 && n <= math.MaxUint8 {
		dst = append(dst, 0xd9, byte(n))
	} else {
		dst = appendMsgpackHead(dst, n, 0xa0, 32, 0xda)
	}
	return append(dst, s...)
}

func (c Codec) bytes(dst, b []byte) []byte {
	if c == CodecMsgpack {
		return append(appendMsgpackBinHead(dst, len(b)), b...)
	}
	dst = append(dst, '[')
	for i, v := range b {
		dst = c.comma(dst, i)
		dst = strconv.AppendUint(dst, uint64(v), 10)
	}
	return append(dst, ']')
}

// appendMsgpackHead writes a length: in the type byte when it is below small,
// else in 16 or 32 bits behind wide or wide+1.
func appendMsgpackHead(dst []byte, n int, fix byte, small int, wide byte) []byte {
	switch {
	case n < small:
		return append(dst, fix|byte(n))
	case n <= math.MaxUint16:
		return append(dst, wide, byte(n>>8), byte(n))
	default:
		return binary.BigEndian.AppendUint32(append(dst, wide+1), uint32(n))
	}
}

func appendMsgpackBinHead(dst []byte, n int) []byte {
	switch {
	case n <= math.MaxUint8:
		return append(dst, 0xc4, byte(n))
	case n <= math.MaxUint16:
		return append(dst, 0xc5, byte(n>>8), byte(n))
	default:
		return binary.BigEndian.AppendUint32(append(dst, 0xc6), uint32(n))
	}
}

// appendMap writes a map with its keys sorted; few keys are sorted on the stack.
func appendMap(dst []byte, c Codec, m Map) []byte {
	var few [16]string
	keys := few[:0]
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	dst = c.mapHead(dst, len(keys))
	for i, k := range keys {
		dst = c.key(dst, i, k)
		dst = AppendValue(dst, c, m[k])
	}
	return c.mapEnd(dst)
}

func appendObject(dst []byte, c Codec, o Object) []byte {
	dst = c.mapHead(dst, len(o))
	for i := range o {
		dst = c.key(dst, i, o[i].Key)
		dst = AppendValue(dst, c, o[i].Value)
	}
	return c.mapEnd(dst)
}

// AppendValue appends v, which is built of the types of a decoded tree, of
// Object and KVCacheHit, and of other integers, floats, strings, slices and maps
// with string keys. Keys of maps are sorted. A float that JSON cannot express is
// written as null there, and bytes as a list of numbers, which is what the
// frontend's JSON library reads bytes from. Text that is not UTF-8 is repaired.
// It panics for a type that has no encoding.
func AppendValue(dst []byte, c Codec, v any) []byte {
	switch v := v.(type) {
	case nil:
		return c.null(dst)
	case bool:
		return c.boolean(dst, v)
	case int:
		return c.signed(dst, int64(v))
	case int64:
		return c.signed(dst, v)
	case uint64:
		return c.unsigned(dst, v)
	case float64:
		return c.float(dst, v)
	case string:
		return c.text(dst, v)
	case []byte:
		return c.bytes(dst, v)
	case []any:
		dst = c.listHead(dst, len(v))
		for i := range v {
			dst = AppendValue(c.comma(dst, i), c, v[i])
		}
		return c.listEnd(dst)
	case Map:
		return appendMap(dst, c, v)
	case Object:
		return appendObject(dst, c, v)
	case KVCacheHit:
		return v.append(dst, c)
	case []int32:
		return appendTokenList(dst, c, v)
	case []uint32:
		return appendTokenList(dst, c, v)
	default:
		return appendReflect(dst, c, reflect.ValueOf(v))
	}
}

// appendTokenList is the inner loop of requests and responses.
func appendTokenList[T int32 | uint32](dst []byte, c Codec, ids []T) []byte {
	dst = c.listHead(dst, len(ids))
	for i, id := range ids {
		dst = c.signed(c.comma(dst, i), int64(id))
	}
	return c.listEnd(dst)
}

// appendReflect writes the types that are not worth a case of their own.
func appendReflect(dst []byte, c Codec, v reflect.Value) []byte {
	switch v.Kind() {
	case reflect.Bool:
		return c.boolean(dst, v.Bool())
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return c.signed(dst, v.Int())
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return c.unsigned(dst, v.Uint())
	case reflect.Float32, reflect.Float64:
		return c.float(dst, v.Float())
	case reflect.String:
		return c.text(dst, v.String())
	case reflect.Slice, reflect.Array:
		dst = c.listHead(dst, v.Len())
		for i := range v.Len() {
			dst = AppendValue(c.comma(dst, i), c, v.Index(i).Interface())
		}
		return c.listEnd(dst)
	case reflect.Map:
		if v.Type().Key().Kind() == reflect.String {
			m := make(Map, v.Len())
			for it := v.MapRange(); it.Next(); {
				m[it.Key().String()] = it.Value().Interface()
			}
			return appendMap(dst, c, m)
		}
	case reflect.Pointer:
		if v.IsNil() {
			return c.null(dst)
		}
		return AppendValue(dst, c, v.Elem().Interface())
	}
	panic(fmt.Sprintf("protocol: no encoding for %s", v.Type()))
}
