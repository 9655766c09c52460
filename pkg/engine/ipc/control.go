package ipc

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// Hello is the engine's first message, sent before any slow import so that the
// worker can tell a wrong program from a slow one.
type Hello struct {
	Protocol int    `json:"protocol"`
	Engine   string `json:"engine"`            // "sim", "tensorrt_llm", …
	Version  string `json:"version,omitempty"` // of the engine program itself
	PID      int    `json:"pid,omitempty"`
}

// Configure tells the engine what to load.
type Configure struct {
	Protocol      int             `json:"protocol"`
	WorkerVersion string          `json:"worker_version,omitempty"`
	Args          json.RawMessage `json:"args,omitempty"`    // object: the engine's own arguments, verbatim
	Options       json.RawMessage `json:"options,omitempty"` // object: settings of the program around the engine
}

// Progress is sent any number of times while the engine loads; each one resets
// the worker's start-up inactivity timer.
type Progress struct {
	Phase    string   `json:"phase"`
	Detail   string   `json:"detail,omitempty"`
	Fraction *float64 `json:"fraction,omitempty"` // of the phase, 0 to 1
}

// Query asks the engine something. Seq is chosen by the worker and comes back
// in the Answer.
type Query struct {
	Seq  uint64 `json:"seq"`
	What string `json:"what"`
}

// What a Query can ask.
const (
	QueryStats       = "stats"       // answer key "stats": array of rows as in a stats message
	QueryHealth      = "health"      // answer keys "healthy": bool, "detail": text
	QueryHeldKV      = "held_kv"     // answer keys "requests", "blocks", "receiving", "dangling", "expired": int
	QueryDescendants = "descendants" // answer key "descendants": array of {"pid": int, "start_time": int}
)

// Answer is the reply to one Query. OK false means that the engine could not
// answer; Error then says why.
type Answer struct {
	Seq   uint64          `json:"seq"`
	OK    bool            `json:"ok"`
	Error string          `json:"error,omitempty"`
	Body  json.RawMessage `json:"-"` // the whole answer object as sent
}

// Shutdown asks the engine to end what is running and exit with status 0
// within the deadline.
type Shutdown struct {
	DeadlineMillis int64 `json:"deadline_ms"`
}

// Goodbye is the engine's last message before an orderly exit.
type Goodbye struct {
	Reason string `json:"reason"`
}

// Fatal says that the engine as a whole cannot go on. Everything in flight is
// lost; the process is expected to exit by itself soon after.
type Fatal struct {
	ErrorType   string `json:"error_type"`
	Message     string `json:"message"`
	Recoverable bool   `json:"recoverable"`
}

func (f Fatal) Error() string {
	if f.ErrorType == "" {
		return "engine failed: " + f.Message
	}
	return fmt.Sprintf("engine failed: %s: %s", f.ErrorType, f.Message)
}

// Message is a control message: a frame whose payload is one JSON object.
type Message interface{ kind() Kind }

func (Hello) kind() Kind     { return KindHello }
func (Configure) kind() Kind { return KindConfigure }
func (Progress) kind() Kind  { return KindProgress }
func (Ready) kind() Kind     { return KindReady }
func (Query) kind() Kind     { return KindQuery }
func (Shutdown) kind() Kind  { return KindShutdown }
func (Goodbye) kind() Kind   { return KindGoodbye }
func (Fatal) kind() Kind     { return KindFatal }

// AppendMessage appends the frame of a control message. It fails, leaving dst
// as it was, when a raw JSON field is no JSON or the message is too large.
func AppendMessage(dst []byte, m Message) ([]byte, error) {
	return AppendJSON(dst, m.kind(), m)
}

// AppendJSON appends a frame of kind k whose payload is the JSON of v. It
// serves answers, stats and events, whose keys depend on the engine.
func AppendJSON(dst []byte, k Kind, v any) ([]byte, error) {
	payload, err := json.Marshal(v)
	if err != nil {
		return dst, fmt.Errorf("engine channel: encode %v message: %w", k, err)
	}
	return AppendFrame(dst, k, payload)
}

// ParseHello decodes a hello payload. It does not judge the version, so that
// the caller can say which two versions met.
func ParseHello(payload []byte) (Hello, error) { return parseObject[Hello](KindHello, payload) }

// ParseConfigure decodes a configure payload.
func ParseConfigure(payload []byte) (Configure, error) {
	return parseObject[Configure](KindConfigure, payload)
}

// ParseProgress decodes a progress payload.
func ParseProgress(payload []byte) (Progress, error) {
	return parseObject[Progress](KindProgress, payload)
}

// ParseQuery decodes a query payload.
func ParseQuery(payload []byte) (Query, error) { return parseObject[Query](KindQuery, payload) }

// ParseAnswer decodes an answer payload; Body is a copy of all of it.
func ParseAnswer(payload []byte) (Answer, error) {
	a, err := parseObject[Answer](KindAnswer, payload)
	if err != nil {
		return Answer{}, err
	}
	a.Body = bytes.Clone(payload)
	return a, nil
}

// ParseShutdown decodes a shutdown payload.
func ParseShutdown(payload []byte) (Shutdown, error) {
	return parseObject[Shutdown](KindShutdown, payload)
}

// ParseGoodbye decodes a goodbye payload.
func ParseGoodbye(payload []byte) (Goodbye, error) {
	return parseObject[Goodbye](KindGoodbye, payload)
}

// ParseFatal decodes a fatal payload.
func ParseFatal(payload []byte) (Fatal, error) { return parseObject[Fatal](KindFatal, payload) }

// ParseRows decodes the payload of a stats or events message into its rows.
// The rows are copies.
func ParseRows(k Kind, payload []byte) ([]json.RawMessage, error) {
	var rows []json.RawMessage
	if err := json.Unmarshal(payload, &rows); err != nil {
		return nil, &MalformedError{Kind: k, Reason: "not a JSON array", Err: err}
	}
	return rows, nil
}

// parseObject decodes a JSON object. The first byte is checked because the
// JSON decoder takes null for a struct without complaint.
func parseObject[T any](k Kind, payload []byte) (T, error) {
	var v, zero T
	if t := bytes.TrimLeft(payload, " \t\r\n"); len(t) == 0 || t[0] != '{' {
		return zero, &MalformedError{Kind: k, Reason: "payload is not a JSON object"}
	}
	if err := json.Unmarshal(payload, &v); err != nil {
		return zero, &MalformedError{Kind: k, Reason: "payload is not the expected JSON object", Err: err}
	}
	return v, nil
}
