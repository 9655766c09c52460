package wire

import (
	"errors"
	"io"
)

const (
	// defaultReadBuffer suits a worker, which reads a few control words of
	// 30 bytes a request.
	defaultReadBuffer = 512
	// keepReadBuffer is the largest buffer that is kept after the frame that
	// needed it.
	keepReadBuffer = 64 << 10
	// maxEmptyReads is how many reads without bytes and without an error are
	// taken for a broken source.
	maxEmptyReads = 100
)

// Reader cuts a byte stream into frames. Its buffer grows with the bytes that
// have arrived, not with what a head announces. It is for one goroutine.
type Reader struct {
	src        io.Reader
	lim        Limits
	buf        []byte
	start, end int // buf[start:end] is read and not yet consumed
	size       int
	err        error // came together with bytes; reported when they are used up
}

// NewReader returns a Reader with a small buffer. It does not read ahead of
// what the source has to give, and allocates on the first Next.
func NewReader(r io.Reader, lim Limits) *Reader { return NewReaderSize(r, lim, defaultReadBuffer) }

// NewReaderSize returns a Reader whose buffer holds at least size bytes, for
// streams with many frames.
func NewReaderSize(r io.Reader, lim Limits, size int) *Reader {
	return &Reader{src: r, lim: lim, size: max(size, FrameHeaderLen)}
}

// Next returns the next frame, which stays valid until the following call. The
// error is io.EOF at the end of the stream between two frames,
// io.ErrUnexpectedEOF when the stream ends inside one, a *SizeError when a part
// is over its limit (the stream cannot be used any further), or the source's
// own error. After a source error that goes away (a read deadline) Next may be
// called again.
func (r *Reader) Next() (Frame, error) {
	if r.start == r.end {
		r.start, r.end = 0, 0
		if cap(r.buf) > max(keepReadBuffer, r.size) {
			r.buf = nil
		}
	}
	if err := r.fill(FrameHeaderLen); err != nil {
		return Frame{}, err
	}
	header, data := frameLens(r.buf[r.start:r.end])
	if header > r.lim.MaxHeader {
		return Frame{}, &SizeError{Part: PartHeader, Size: header, Limit: r.lim.MaxHeader}
	}
	if data > r.lim.MaxData {
		return Frame{}, &SizeError{Part: PartData, Size: data, Limit: r.lim.MaxData}
	}
	const maxInt = uint64(^uint(0) >> 1)
	if header > maxInt-FrameHeaderLen || data > maxInt-FrameHeaderLen-header {
		return Frame{}, &SizeError{Part: PartMessage, Size: header, Limit: maxInt}
	}
	total := FrameHeaderLen + int(header) + int(data)
	if err := r.fill(total); err != nil {
		return Frame{}, err
	}
	b := r.buf[r.start+FrameHeaderLen : r.start+total : r.start+total]
	r.start += total
	return Frame{Header: b[:header:header], Data: b[header:]}, nil
}

// Buffered returns the number of bytes that were read and not yet returned.
func (r *Reader) Buffered() int { return r.end - r.start }

// fill reads until want bytes are at hand.
func (r *Reader) fill(want int) error {
	for r.end-r.start < want {
		if r.err != nil {
			return r.takeErr()
		}
		r.makeRoom(want)
		if err := r.read(); err != nil {
			return err
		}
	}
	return nil
}

// makeRoom sees to free space behind end. The buffer at most doubles, so that
// the memory taken stays in proportion to the bytes that came.
func (r *Reader) makeRoom(want int) {
	if r.start > 0 && (r.end == len(r.buf) || r.start+want > len(r.buf)) {
		r.end = copy(r.buf, r.buf[r.start:r.end])
		r.start = 0
	}
	if r.end < len(r.buf) {
		return
	}
	size := max(r.size, min(want, 2*len(r.buf)))
	bigger := make([]byte, size)
	r.end = copy(bigger, r.buf[:r.end])
	r.buf = bigger
}

func (r *Reader) read() error {
	for range maxEmptyReads {
		n, err := r.src.Read(r.buf[r.end:])
		if n < 0 || n > len(r.buf)-r.end {
			return errors.New("wire: source returned an impossible byte count")
		}
		r.end += n
		if n > 0 {
			r.err = err
			return nil
		}
		if err != nil {
			r.err = err
			return r.takeErr()
		}
	}
	return io.ErrNoProgress
}

// takeErr returns the stored error once: a deadline that has passed may be
// moved, and an end of stream will be reported again by the source.
func (r *Reader) takeErr() error {
	err := r.err
	r.err = nil
	if err == io.EOF && r.end > r.start {
		return io.ErrUnexpectedEOF
	}
	return err
}
