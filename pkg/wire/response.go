package wire

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
)

// Handshake is the first frame on a response connection: it tells the frontend
// which of its waiting streams is being answered.
type Handshake struct{ Subject, StreamType string }

// AppendHandshake appends the complete handshake frame of a response stream.
func AppendHandshake(dst []byte, subject string) []byte {
	return appendHeaderFrame(dst, func(dst []byte) []byte {
		dst = append(dst, `{"subject":`...)
		dst = AppendJSONString(dst, subject)
		return append(dst, `,"stream_type":"response"}`...)
	})
}

// ParseHandshake reads the header of a handshake frame. Errors are *ControlError.
func ParseHandshake(header []byte) (Handshake, error) {
	var obj object
	err := obj.read("", header)
	if err != nil {
		return Handshake{}, err
	}
	var h Handshake
	if h.Subject, err = obj.text("subject"); err != nil {
		return Handshake{}, err
	}
	if h.StreamType, err = obj.text("stream_type"); err != nil {
		return Handshake{}, err
	}
	return h, nil
}

// Prologue is the second frame: whether the worker took the request.
type Prologue struct {
	// Error is nil when the request was taken.
	Error *string
	// TypedError is the error object that came with Error, or nil.
	TypedError json.RawMessage
}

const prologueOK = `{"error":null}`

// AppendPrologueOK appends the complete frame that says the request was taken.
// Error items may still follow.
func AppendPrologueOK(dst []byte) []byte {
	dst = AppendFrameHead(dst, len(prologueOK), 0)
	return append(dst, prologueOK...)
}

// AppendPrologueError appends the complete frame that refuses a request. typed
// is the JSON of an error object, or nil. The frontend keeps away from a worker
// for some seconds after any refusal that is not typed InvalidRequest.
func AppendPrologueError(dst []byte, text string, typed []byte) []byte {
	return appendHeaderFrame(dst, func(dst []byte) []byte {
		dst = append(dst, `{"error":`...)
		dst = AppendJSONString(dst, text)
		if len(typed) > 0 {
			dst = append(dst, `,"typed_error":`...)
			dst = append(dst, typed...)
		}
		return append(dst, '}')
	})
}

// ParsePrologue reads the header of a prologue frame. Errors are *ControlError.
func ParsePrologue(header []byte) (Prologue, error) {
	var obj object
	if err := obj.read("", header); err != nil {
		return Prologue{}, err
	}
	if !obj.has("error") {
		return Prologue{}, nil
	}
	text, err := obj.text("error")
	if err != nil {
		return Prologue{}, err
	}
	p := Prologue{Error: &text}
	if obj.has("typed_error") {
		p.TypedError = obj.value("typed_error")
	}
	return p, nil
}

// Control is a control word on a response connection.
type Control uint8

// The control words. The frontend sends stop and kill, the worker the sentinel.
const (
	// ControlStop asks to end the generation soon.
	ControlStop Control = iota + 1
	// ControlKill asks to end it at once.
	ControlKill
	// ControlSentinel marks the regular end of the stream.
	ControlSentinel
)

var controlWords = [...]string{
	ControlStop:     `"stop"`,
	ControlKill:     `"kill"`,
	ControlSentinel: `"sentinel"`,
}

// ErrUnknownControl tells that a control frame holds none of the known words.
var ErrUnknownControl = errors.New("unknown control word")

func (c Control) String() string {
	if c < ControlStop || c > ControlSentinel {
		return fmt.Sprintf("Control(%d)", uint8(c))
	}
	word := controlWords[c]
	return word[1 : len(word)-1]
}

// AppendControl appends the complete frame of a control word. It panics for a
// value that is not one of the constants.
func AppendControl(dst []byte, c Control) []byte {
	word := controlWords[c]
	if word == "" {
		panic("wire: AppendControl of " + c.String())
	}
	dst = AppendFrameHead(dst, len(word), 0)
	return append(dst, word...)
}

// ParseControl reads the header of a control frame: a JSON string. The error
// matches ErrUnknownControl and does not repeat what was received.
func ParseControl(header []byte) (Control, error) {
	for c := ControlStop; c <= ControlSentinel; c++ {
		if string(header) == controlWords[c] {
			return c, nil
		}
	}
	// Not the usual spelling: an escaped or padded string means the same.
	var word string
	if err := json.Unmarshal(header, &word); err == nil && len(header) > 0 && header[0] != 'n' {
		for c := ControlStop; c <= ControlSentinel; c++ {
			if word == c.String() {
				return c, nil
			}
		}
	}
	return 0, fmt.Errorf("control frame of %d bytes: %w", len(header), ErrUnknownControl)
}

// appendHeaderFrame appends a frame that has only a header, written by write.
func appendHeaderFrame(dst []byte, write func([]byte) []byte) []byte {
	start := len(dst)
	dst = slices.Grow(dst, FrameHeaderLen)
	dst = AppendFrameHead(dst, 0, 0)
	dst = write(dst)
	SetFrameHead(dst[start:], len(dst)-start-FrameHeaderLen, 0)
	return dst
}
