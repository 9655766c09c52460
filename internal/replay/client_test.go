package replay

import (
	"context"
	"errors"
	"io"
	"strconv"
	"strings"
	"testing"

	"dynworker/internal/caller"
	"dynworker/pkg/protocol"
	"dynworker/pkg/wire"

	"github.com/stretchr/testify/require"
)

// question is one request and what its client does.
type question struct {
	id     string
	codec  protocol.Codec
	body   any
	script []string
}

// question is a recorded request with the recorded client. Bodies are msgpack, as the frontend sends them, except where the case is about the other codec.
func (r *recording) question() question {
	q := question{id: r.recordedID(), codec: protocol.CodecMsgpack, body: r.request, script: script(r.frames)}
	if strings.HasSuffix(r.name, "/json_codec") {
		q.codec = protocol.CodecJSON
	}
	return q
}

// exchange is a request under way.
type exchange struct {
	t      *testing.T
	stream *caller.Stream
	codec  protocol.Codec
	tokens int
	over   error
}

// send sends a request and returns when the worker has called home.
func (w *worker) send(ctx context.Context, q question) *exchange {
	w.t.Helper()
	call := caller.Call{Transport: w.instance.Transport, Codec: q.codec, Body: protocol.AppendValue(nil, q.codec, q.body), ID: q.id, Trace: true, KeepOpen: true}
	stream, err := world.caller.Do(ctx, call)
	require.NoError(w.t, err, q.id)
	return &exchange{t: w.t, stream: stream, codec: q.codec}
}

// ask sends a request, does what its client did, and returns what came.
func (w *worker) ask(q question) []event {
	w.t.Helper()
	x := w.send(limited(w.t), q)
	for _, step := range q.script {
		x.perform(step)
	}
	return x.finish()
}

// perform does one thing that a recorded client did. "afterN" waits for so many frames of one token each, which is for so many tokens here.
func (x *exchange) perform(step string) {
	x.t.Helper()
	if n, err := strconv.Atoi(strings.TrimPrefix(step, "after")); err == nil {
		x.readTokens(n)
		return
	}
	var err error
	switch step {
	case "after_final":
		x.readTokens(-1)
	case "stop":
		err = x.stream.Stop()
	case "kill":
		// The worker may have closed the connection by now, after a stop before this.
		_ = x.stream.Kill()
	case "sentinel":
		err = x.stream.SendRaw(wire.AppendControl(nil, wire.ControlSentinel))
	case "close":
		err = x.stream.Drop()
		x.over = caller.ErrClosed
	case "reset":
		x.stream.Reset()
		x.over = caller.ErrClosed
	default:
		x.t.Fatalf("no client can %q", step)
	}
	require.NoError(x.t, err, step)
}

// readTokens reads until so many tokens have come or, with a negative number, to the end.
func (x *exchange) readTokens(n int) {
	x.t.Helper()
	for x.over == nil && (n < 0 || x.tokens < n) {
		item, err := x.stream.Next()
		x.over = err
		if item.Chunk != nil {
			x.tokens += len(item.Chunk.TokenIDs)
		}
	}
}

// finish reads to the end, sees the worker close the connection, and returns everything that happened.
func (x *exchange) finish() []event {
	x.t.Helper()
	x.readTokens(-1)
	ends := []error{io.EOF, caller.ErrIncomplete, caller.ErrCancelled, caller.ErrClosed}
	var refused *caller.PrologueError
	known := errors.As(x.over, &refused)
	for _, end := range ends {
		known = known || errors.Is(x.over, end)
	}
	require.True(x.t, known, "the answer ended with %v", x.over)
	if errors.Is(x.over, io.EOF) {
		require.NoError(x.t, x.stream.AwaitClose())
	}
	frames := x.stream.Frames()
	_ = x.stream.Close()
	events := make([]event, len(frames))
	for i, f := range frames {
		events[i] = x.event(f)
	}
	return events
}

// event decodes a frame.
func (x *exchange) event(f caller.Frame) event {
	e := event{kind: string(f.Kind), did: f.Did}
	var err error
	switch f.Kind {
	case caller.FrameHandshake, caller.FramePrologue, caller.FrameControl:
		e.header, err = protocol.DecodeValue(protocol.CodecJSON, f.Bytes)
	case caller.FrameData:
		e.body, err = protocol.DecodeValue(x.codec, f.Bytes)
	}
	require.NoError(x.t, err, "%s: %q", f.Kind, f.Bytes)
	return e
}
