package wire

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/netip"
	"strconv"
	"strings"
	"unicode/utf8"
)

// PlaneRequest is one message of the TCP request plane. The bytes before the
// payload are the path's length (16 bits), the path, the headers' length (16
// bits), the headers as a JSON object of strings, and the payload's length (32
// bits), all big-endian.
type PlaneRequest struct {
	// Path selects the endpoint, as PlanePath writes it.
	Path string
	// Headers are those that NATS carries as message headers.
	Headers map[string]string
	// Payload is a whole two-part frame.
	Payload []byte
}

// planeFixed is what the three length fields take.
const planeFixed = 2 + 2 + 4

// readChunk is how much memory a payload gets before its bytes have arrived.
const readChunk = 64 << 10

// ReadPlaneRequest reads one message of at most maxMessage bytes, its length
// fields included.
//
// io.EOF means that the stream ended between two messages. After a *SizeError
// and a *ControlError (headers or path that are not what they should be) path
// and headers are returned as far as they are known and the connection can go
// on: after a *SizeError once Skip bytes were dropped (see Discard), after a
// *ControlError at once. After any other error the connection is lost.
func ReadPlaneRequest(r *bufio.Reader, maxMessage int) (PlaneRequest, error) {
	var req PlaneRequest
	path, err := readShort(r, io.EOF)
	if err != nil {
		return req, err
	}
	headers, err := readShort(r, io.ErrUnexpectedEOF)
	if err != nil {
		return req, err
	}
	var length [4]byte
	if err := readFull(r, length[:], io.ErrUnexpectedEOF); err != nil {
		return req, err
	}
	// Names are judged only after the lengths, so that a bad one costs this
	// message and not the connection.
	nameErr := req.setNames(path, headers)
	payload := uint64(binary.BigEndian.Uint32(length[:]))
	size := planeFixed + uint64(len(path)) + uint64(len(headers)) + payload
	if limit := uint64(max(maxMessage, 0)); size > limit {
		return req, &SizeError{Part: PartMessage, Size: size, Limit: limit, Skip: payload}
	}
	if req.Payload, err = readGrowing(r, int(payload)); err != nil {
		return req, err
	}
	return req, nameErr
}

func (req *PlaneRequest) setNames(path, headers []byte) error {
	if !utf8.Valid(path) {
		return &ControlError{"path", "not UTF-8"}
	}
	req.Path = string(path)
	if !utf8.Valid(headers) {
		return &ControlError{"headers", "not UTF-8"}
	}
	if len(headers) == 0 {
		return nil
	}
	var m map[string]string
	if err := json.Unmarshal(headers, &m); err != nil {
		return &ControlError{"headers", "not a JSON object of strings"}
	}
	req.Headers = m
	return nil
}

// Discard drops n bytes, to get past a message that was too large.
func Discard(r *bufio.Reader, n uint64) error {
	for n > 0 {
		step := int(min(n, math.MaxInt32))
		if _, err := r.Discard(step); err != nil {
			return unexpected(err, io.ErrUnexpectedEOF)
		}
		n -= uint64(step)
	}
	return nil
}

// AppendPlaneRequest appends one message of the TCP request plane. The error is
// a *SizeError when path, headers or payload are too long for their length
// field; dst is then returned as it was.
func AppendPlaneRequest(dst []byte, r *PlaneRequest) ([]byte, error) {
	headers := appendStringMap(nil, r.Headers)
	switch {
	case len(r.Path) > math.MaxUint16:
		return dst, &SizeError{Part: PartPath, Size: uint64(len(r.Path)), Limit: math.MaxUint16}
	case len(headers) > math.MaxUint16:
		return dst, &SizeError{Part: PartHeaders, Size: uint64(len(headers)), Limit: math.MaxUint16}
	case uint64(len(r.Payload)) > math.MaxUint32:
		return dst, &SizeError{Part: PartMessage, Size: uint64(len(r.Payload)), Limit: math.MaxUint32}
	}
	dst = binary.BigEndian.AppendUint16(dst, uint16(len(r.Path)))
	dst = append(dst, r.Path...)
	dst = binary.BigEndian.AppendUint16(dst, uint16(len(headers)))
	dst = append(dst, headers...)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(r.Payload)))
	return append(dst, r.Payload...), nil
}

// AppendPlaneReply appends one reply: a 32-bit big-endian length and the text.
// The empty reply accepts. Replies carry no id, the frontend takes them in the
// order of its requests.
func AppendPlaneReply(dst, body []byte) []byte {
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(body)))
	return append(dst, body...)
}

// ReadPlaneReply reads one reply of at most maxBody bytes. io.EOF means that the
// stream ended between two replies; a *SizeError has Skip set.
func ReadPlaneReply(r *bufio.Reader, maxBody int) ([]byte, error) {
	var length [4]byte
	if err := readFull(r, length[:], io.EOF); err != nil {
		return nil, err
	}
	size := uint64(binary.BigEndian.Uint32(length[:]))
	if limit := uint64(max(maxBody, 0)); size > limit {
		return nil, &SizeError{Part: PartReply, Size: size, Limit: limit, Skip: size}
	}
	return readGrowing(r, int(size))
}

// PlanePath is the path of an endpoint on the TCP request plane. A slash or a
// percent sign inside a name is escaped.
func PlanePath(instanceID uint64, ns, comp, ep string) string {
	return strconv.FormatUint(instanceID, 16) +
		"/" + pathEscaper.Replace(ns) + "/" + pathEscaper.Replace(comp) + "/" + pathEscaper.Replace(ep)
}

var pathEscaper = strings.NewReplacer("%", "%25", "/", "%2F")

// Subject is the NATS subject of an endpoint. The frontend publishes to the
// subject in the instance record and never works it out, so what is registered
// must be what is subscribed to.
func Subject(instanceID uint64, ns, comp, ep string) string {
	return ns + "_" + comp + "." + ep + "-" + strconv.FormatUint(instanceID, 16)
}

// PlaneAddress is the address of an endpoint on the TCP request plane as the
// instance record holds it: "ip:port/path".
func PlaneAddress(addr netip.AddrPort, path string) string { return addr.String() + "/" + path }

// SplitPlaneAddress takes apart what PlaneAddress made.
func SplitPlaneAddress(s string) (addr netip.AddrPort, path string, err error) {
	host, path, ok := strings.Cut(s, "/")
	if !ok || path == "" {
		return netip.AddrPort{}, "", fmt.Errorf("plane address %q has no path", s)
	}
	addr, err = netip.ParseAddrPort(host)
	if err != nil {
		return netip.AddrPort{}, "", fmt.Errorf("plane address %q: %w", s, err)
	}
	return addr, path, nil
}

// readShort reads a piece with a 16-bit length.
func readShort(r *bufio.Reader, atEnd error) ([]byte, error) {
	var length [2]byte
	if err := readFull(r, length[:], atEnd); err != nil {
		return nil, err
	}
	return readGrowing(r, int(binary.BigEndian.Uint16(length[:])))
}

// readGrowing reads n bytes and takes memory as they come: nobody gets 4 GiB
// for a length field.
func readGrowing(r *bufio.Reader, n int) ([]byte, error) {
	if n == 0 {
		return nil, nil
	}
	b := make([]byte, 0, min(n, readChunk))
	for len(b) < n {
		if len(b) == cap(b) {
			bigger := make([]byte, len(b), min(n, 2*cap(b)))
			copy(bigger, b)
			b = bigger
		}
		have := len(b)
		b = b[:cap(b)]
		if err := readFull(r, b[have:], io.ErrUnexpectedEOF); err != nil {
			return nil, err
		}
	}
	return b, nil
}

// readFull fills b. atEnd is returned when the stream ends before its first byte.
func readFull(r io.Reader, b []byte, atEnd error) error {
	_, err := io.ReadFull(r, b)
	return unexpected(err, atEnd)
}

func unexpected(err, atEnd error) error {
	if err == io.EOF {
		return atEnd
	}
	return err
}
