// Package ipc is the protocol between the worker and its engine process:
// message types, their bytes, and the limits that make it safe to read them
// from a process that may have gone wrong. It does no I/O of its own beyond
// reading from an io.Reader it is handed, and depends on the standard library
// only, so that both sides (pkg/engine and pkg/engine/sim) and the request
// handlers can share it. docs/engine-protocol.md describes the same protocol
// for authors of engines in other languages; a test checks its examples
// against this package.
//
// # Frames
//
// The channel is a byte stream in each direction. A frame is
//
//	u32 payload length (at most MaxPayload) | u8 kind | payload
//
// and every integer is little endian. Control payloads are JSON objects; token
// payloads (generate, outputs) are binary with JSON only where a message is
// rare or its shape depends on the engine's build.
//
// # Who sends what
//
//	engine → worker   hello, progress*, ready, then outputs, stats, events, answer; goodbye or fatal at the end
//	worker → engine   configure after hello, then generate, cancel, query, shutdown
//
// Every generate is answered by exactly one output record with the LAST flag.
// A kind that a side does not know, or that flows the wrong way, means the two
// sides no longer agree about the stream: the receiver gives the channel up.
// Unknown keys in JSON objects are ignored, so keys may be added within a
// protocol version; layouts and kinds may not.
//
// # Ownership
//
// Append functions write into the slice they are given. Parse functions return
// values that own their memory unless their comment says that they point into
// the input. A payload returned by Reader.Next is valid until the next call.
package ipc

import "fmt"

// Version is the protocol version that this package speaks. Both hello and
// configure carry it; a side that meets another number refuses to go on.
const Version = 1

// EnvFD names the environment variable that tells the engine process which
// file descriptor is its end of the channel.
const EnvFD = "DYNWORKER_ENGINE_FD"

// MaxPayload is the largest payload of a frame, in bytes.
const MaxPayload = 64 << 20

// HeaderLen is the number of bytes before a frame's payload.
const HeaderLen = 5

// Kind says what a frame's payload is.
type Kind uint8

// The kinds of protocol version 1.
const (
	KindHello     Kind = 1  // engine → worker: who I am, before anything slow
	KindConfigure Kind = 2  // worker → engine: what to load
	KindProgress  Kind = 3  // engine → worker: still loading
	KindReady     Kind = 4  // engine → worker: loaded; what I can do and my bounds
	KindGenerate  Kind = 5  // worker → engine: start a request
	KindCancel    Kind = 6  // worker → engine: end a request early
	KindOutputs   Kind = 7  // engine → worker: tokens of any number of requests
	KindStats     Kind = 8  // engine → worker: load figures
	KindEvents    Kind = 9  // engine → worker: KV cache events as the engine made them
	KindQuery     Kind = 10 // worker → engine: a question
	KindAnswer    Kind = 11 // engine → worker: the answer to one query
	KindShutdown  Kind = 12 // worker → engine: finish and exit 0
	KindGoodbye   Kind = 13 // engine → worker: last message of an orderly end
	KindFatal     Kind = 14 // engine → worker: the engine as a whole has failed
)

var kindNames = [...]string{
	KindHello: "hello", KindConfigure: "configure", KindProgress: "progress", KindReady: "ready",
	KindGenerate: "generate", KindCancel: "cancel", KindOutputs: "outputs", KindStats: "stats",
	KindEvents: "events", KindQuery: "query", KindAnswer: "answer", KindShutdown: "shutdown",
	KindGoodbye: "goodbye", KindFatal: "fatal",
}

// Valid reports whether k is a kind of this protocol version.
func (k Kind) Valid() bool { return k >= KindHello && k <= KindFatal }

// FromEngine reports whether k flows from the engine to the worker.
func (k Kind) FromEngine() bool {
	switch k {
	case KindHello, KindProgress, KindReady, KindOutputs, KindStats, KindEvents, KindAnswer, KindGoodbye, KindFatal:
		return true
	default:
		return false
	}
}

// String returns the kind's name as used in docs/engine-protocol.md.
func (k Kind) String() string {
	if k.Valid() {
		return kindNames[k]
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// SizeError reports a frame whose claimed payload is larger than the reader
// accepts. Nothing was allocated for it, and the stream cannot be followed any
// further.
type SizeError struct {
	Kind  Kind
	Size  uint64
	Limit uint64
}

func (e *SizeError) Error() string {
	return fmt.Sprintf("engine channel: %v frame of %d bytes is over the limit of %d", e.Kind, e.Size, e.Limit)
}

// KindError reports a frame of a kind that does not exist in this version. A
// peer that writes something else than the protocol into the channel shows up
// as this or as a SizeError.
type KindError struct{ Kind Kind }

func (e *KindError) Error() string {
	return fmt.Sprintf("engine channel: no such frame kind: %d", uint8(e.Kind))
}

// MalformedError reports a payload that does not have the layout of its kind.
type MalformedError struct {
	Kind   Kind
	Offset int    // byte offset in the payload, where it is known
	Reason string // what is wrong, without any of the payload's content
	Err    error  // the JSON decoder's error, or nil
}

func (e *MalformedError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("engine channel: malformed %v message: %s: %v", e.Kind, e.Reason, e.Err)
	}
	return fmt.Sprintf("engine channel: malformed %v message at byte %d: %s", e.Kind, e.Offset, e.Reason)
}

// Unwrap returns the JSON decoder's error, if there was one.
func (e *MalformedError) Unwrap() error { return e.Err }
