package ipc

import (
	"encoding/binary"
	"fmt"
	"io"
)

// BeginFrame appends the header of a frame of kind k with an open length. The
// caller appends the payload and then calls EndFrame with the length that dst
// had before BeginFrame.
func BeginFrame(dst []byte, k Kind) []byte {
	return append(dst, 0, 0, 0, 0, byte(k))
}

// EndFrame fills in the length of the frame that starts at start. On a payload
// over MaxPayload it returns dst cut back to start and a *SizeError.
func EndFrame(dst []byte, start int) ([]byte, error) {
	n := len(dst) - start - HeaderLen
	if n > MaxPayload {
		return dst[:start], &SizeError{Kind: Kind(dst[start+4]), Size: uint64(n), Limit: MaxPayload}
	}
	binary.LittleEndian.PutUint32(dst[start:], uint32(n))
	return dst, nil
}

// AppendFrame appends a complete frame with the given payload.
func AppendFrame(dst []byte, k Kind, payload []byte) ([]byte, error) {
	start := len(dst)
	return EndFrame(append(BeginFrame(dst, k), payload...), start)
}

const (
	readBuffer = 64 << 10 // enough for a step of a thousand streams
	keepBuffer = 1 << 20  // a buffer grown past this is given back
)

// Reader splits a byte stream into frames. It is not safe for concurrent use.
type Reader struct {
	src   io.Reader
	limit uint32
	buf   []byte
	start int // first unread byte
	end   int // end of the bytes read so far
	used  int // size of the frame handed out last, dropped by the next call
	err   error
}

// NewReader reads frames from src. Payloads over limit bytes are refused;
// limit 0 means MaxPayload, and more than MaxPayload is never accepted.
func NewReader(src io.Reader, limit int) *Reader {
	if limit <= 0 || limit > MaxPayload {
		limit = MaxPayload
	}
	return &Reader{src: src, limit: uint32(limit)}
}

// Next returns the next frame. The payload points into the reader's buffer and
// is valid until the next call. The error is io.EOF when the stream ended
// between two frames, wraps io.ErrUnexpectedEOF when it ended inside one, and
// is a *SizeError or *KindError when the bytes are not a frame. After an error
// every call returns it again: the stream cannot be resynchronised.
func (r *Reader) Next() (Kind, []byte, error) {
	if r.err != nil {
		return 0, nil, r.err
	}
	r.release()
	if err := r.fill(HeaderLen); err != nil {
		return 0, nil, r.fail(err)
	}
	head := r.buf[r.start:]
	size, kind := binary.LittleEndian.Uint32(head), Kind(head[4])
	if size > r.limit {
		return 0, nil, r.fail(&SizeError{Kind: kind, Size: uint64(size), Limit: uint64(r.limit)})
	}
	if !kind.Valid() {
		return 0, nil, r.fail(&KindError{Kind: kind})
	}
	total := HeaderLen + int(size)
	if err := r.fill(total); err != nil {
		return 0, nil, r.fail(err)
	}
	r.used = total
	return kind, r.buf[r.start+HeaderLen : r.start+total : r.start+total], nil
}

// Buffered reports whether a complete frame is already in memory, so that the
// next call of Next will not block.
func (r *Reader) Buffered() bool {
	have := r.end - r.start - r.used
	if r.err != nil || have < HeaderLen {
		return r.err != nil
	}
	size := binary.LittleEndian.Uint32(r.buf[r.start+r.used:])
	return size > r.limit || have >= HeaderLen+int(size)
}

func (r *Reader) fail(err error) error {
	r.err, r.buf = err, nil
	return err
}

// release forgets the frame that the last call handed out.
func (r *Reader) release() {
	r.start += r.used
	r.used = 0
	if r.start == r.end {
		r.start, r.end = 0, 0
		if len(r.buf) > keepBuffer {
			r.buf = nil
		}
	}
}

// fill reads until n bytes are buffered. Memory follows the bytes that really
// arrive (at most doubling), not the length that a header claims.
func (r *Reader) fill(n int) error {
	for r.end-r.start < n {
		if r.end == len(r.buf) {
			r.makeRoom(n)
		}
		got, err := r.src.Read(r.buf[r.end:])
		if got < 0 || got > len(r.buf)-r.end {
			return fmt.Errorf("engine channel: reader returned an impossible count %d", got)
		}
		r.end += got
		if r.end-r.start >= n {
			return nil // an error that came with the last bytes shows at the next read
		}
		if err != nil {
			return r.readError(err)
		}
	}
	return nil
}

func (r *Reader) readError(err error) error {
	if err != io.EOF {
		return fmt.Errorf("engine channel: read: %w", err)
	}
	if r.end == r.start {
		return io.EOF
	}
	return fmt.Errorf("engine channel: stream ended inside a frame: %w", io.ErrUnexpectedEOF)
}

// makeRoom is called when the buffer is full up to its end. It drops the bytes
// that were handed out before, or, if there are none, grows the buffer towards
// a frame of n bytes.
func (r *Reader) makeRoom(n int) {
	have := r.end - r.start
	into := r.buf
	if have == len(r.buf) {
		into = make([]byte, max(readBuffer, min(2*have, n)))
	}
	copy(into, r.buf[r.start:r.end])
	r.buf, r.start, r.end = into, 0, have
}
