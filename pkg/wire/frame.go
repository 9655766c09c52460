package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// FrameHeaderLen is the number of bytes in front of the two parts of a frame:
// header length, data length and checksum, each a big-endian 64-bit number.
const FrameHeaderLen = 24

// Frame is one message of the two-part codec. Requests carry both parts,
// control messages only a header, response items only data. Both slices are
// views into the buffer the frame was read from.
type Frame struct{ Header, Data []byte }

// Limits bounds the two parts of a frame, in bytes. A part may be as long as
// its limit; the zero value lets only empty frames pass.
type Limits struct{ MaxHeader, MaxData uint64 }

// Part names the piece of a message that a SizeError or TruncatedError is about.
type Part string

// The parts that are measured.
const (
	PartHead    Part = "frame head"      // the 24 bytes in front of a frame
	PartHeader  Part = "header"          // first part of a two-part frame
	PartData    Part = "data"            // second part of a two-part frame
	PartMessage Part = "message"         // whole message of the TCP request plane
	PartPath    Part = "path"            // endpoint path of the TCP request plane
	PartHeaders Part = "request headers" // headers of the TCP request plane
	PartReply   Part = "reply"           // reply of the TCP request plane
)

// ErrTruncated is matched by every TruncatedError.
var ErrTruncated = errors.New("truncated frame")

// TruncatedError tells that the input ended inside a frame.
type TruncatedError struct {
	Part Part
	// Have and Want are counts of bytes of that part.
	Have, Want uint64
}

func (e *TruncatedError) Error() string {
	return fmt.Sprintf("truncated frame: %s has %d of %d bytes", e.Part, e.Have, e.Want)
}

// Unwrap lets errors.Is find ErrTruncated.
func (e *TruncatedError) Unwrap() error { return ErrTruncated }

// SizeError tells that a message announces more bytes than are allowed.
type SizeError struct {
	Part Part
	// Size is what was announced, Limit what is allowed, both in bytes.
	Size, Limit uint64
	// Skip is how many bytes of the message are still unread in the stream.
	// A reader that drops exactly that many finds the next message. Only the
	// TCP request plane sets it.
	Skip uint64
}

func (e *SizeError) Error() string {
	return fmt.Sprintf("%s of %d bytes is over the limit of %d bytes", e.Part, e.Size, e.Limit)
}

// AppendFrame appends a whole frame. The checksum field is zero: release builds
// of Dynamo write zero and do not look at it, debug builds skip the comparison
// when it is zero.
func AppendFrame(dst, header, data []byte) []byte {
	dst = AppendFrameHead(dst, len(header), len(data))
	dst = append(dst, header...)
	return append(dst, data...)
}

// AppendFrameHead appends only the 24 bytes in front of the two parts, for
// writers that append the parts themselves. To fill the lengths in afterwards
// append a head with zero lengths and call SetFrameHead.
func AppendFrameHead(dst []byte, headerLen, dataLen int) []byte {
	dst = binary.BigEndian.AppendUint64(dst, uint64(headerLen))
	dst = binary.BigEndian.AppendUint64(dst, uint64(dataLen))
	return binary.BigEndian.AppendUint64(dst, 0)
}

// SetFrameHead overwrites the lengths in a head that AppendFrameHead wrote at
// the start of b. It panics when b is shorter than a head.
func SetFrameHead(b []byte, headerLen, dataLen int) {
	_ = b[FrameHeaderLen-1]
	binary.BigEndian.PutUint64(b, uint64(headerLen))
	binary.BigEndian.PutUint64(b[8:], uint64(dataLen))
}

// ParseFrame takes one frame off the front of b and returns what follows it.
// Errors are *TruncatedError and *SizeError. When only the data part is at
// fault and the header part is whole, the frame is returned with its header all
// the same, so that the sender can still be told.
func ParseFrame(b []byte, lim Limits) (f Frame, rest []byte, err error) {
	if len(b) < FrameHeaderLen {
		return Frame{}, b, &TruncatedError{Part: PartHead, Have: uint64(len(b)), Want: FrameHeaderLen}
	}
	header, data := frameLens(b)
	if header > lim.MaxHeader {
		return Frame{}, b, &SizeError{Part: PartHeader, Size: header, Limit: lim.MaxHeader}
	}
	parts := b[FrameHeaderLen:]
	if header > uint64(len(parts)) {
		return Frame{}, b, &TruncatedError{Part: PartHeader, Have: uint64(len(parts)), Want: header}
	}
	f.Header, parts = parts[:header:header], parts[header:]
	if data > lim.MaxData {
		return f, b, &SizeError{Part: PartData, Size: data, Limit: lim.MaxData}
	}
	if data > uint64(len(parts)) {
		return f, b, &TruncatedError{Part: PartData, Have: uint64(len(parts)), Want: data}
	}
	f.Data, rest = parts[:data:data], parts[data:]
	return f, rest, nil
}

// frameLens reads the two lengths of a head; b holds at least 24 bytes. The
// checksum is not looked at.
func frameLens(b []byte) (header, data uint64) {
	return binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:])
}
