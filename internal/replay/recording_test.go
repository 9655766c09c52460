package replay

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"dynworker/pkg/protocol"

	"github.com/stretchr/testify/require"
)

// recording is one file of testdata/golden.
type recording struct {
	// name is folder and file without its ending, core/plain for instance.
	name string
	// fields is the whole file as decoded.
	fields protocol.Map
	// request is the body that was sent, in its own order of keys and with shortened lists filled up.
	request any
	frames  []event
	// bystander is another answer that was under way at the same time, in fatal/ only.
	bystander []event
}

// event is something that happened on a response connection, recorded or our own.
type event struct {
	kind   string // handshake, prologue, data, control, eof, reset, client
	header any    // of handshake, prologue and control
	body   any    // of data
	did    string // by the client
}

// recordings reads a folder below testdata/golden.
func recordings(t *testing.T, folder string) []*recording {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("testdata", "golden", folder, "*.json"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	var all []*recording
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		r := &recording{name: folder + "/" + strings.TrimSuffix(filepath.Base(file), ".json")}
		r.fields = object(t, text)
		var raw struct{ Request json.RawMessage }
		require.NoError(t, json.Unmarshal(text, &raw))
		if raw.Request != nil {
			r.request = inOrder(t, raw.Request)
		}
		r.frames = recordedEvents(t, r.fields["frames"])
		r.bystander = recordedEvents(t, r.fields["bystander_frames"])
		all = append(all, r)
	}
	return all
}

// object decodes JSON that has to be an object.
func object(t *testing.T, text []byte) protocol.Map {
	t.Helper()
	v, err := protocol.DecodeValue(protocol.CodecJSON, text)
	require.NoError(t, err)
	m, ok := v.(protocol.Map)
	require.True(t, ok, "not an object: %.80s", text)
	return m
}

// inOrder decodes JSON like protocol.DecodeValue but keeps the order of keys, which counts in a request: a guide's members may appear in their own order only.
func inOrder(t *testing.T, text []byte) any {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	v, err := nextInOrder(d)
	require.NoError(t, err)
	return v
}

func nextInOrder(d *json.Decoder) (any, error) {
	token, err := d.Token()
	if err != nil {
		return nil, err
	}
	switch token := token.(type) {
	case json.Number:
		return protocol.DecodeValue(protocol.CodecJSON, []byte(token))
	case json.Delim:
		list, members := []any{}, protocol.Object{}
		for d.More() {
			var key any
			if token == '{' {
				if key, err = d.Token(); err != nil {
					return nil, err
				}
			}
			v, err := nextInOrder(d)
			if err != nil {
				return nil, err
			}
			if token == '{' {
				members = append(members, protocol.Member{Key: key.(string), Value: v})
			} else {
				list = append(list, v)
			}
		}
		if _, err := d.Token(); err != nil {
			return nil, err
		}
		if token == '{' {
			return filledUp(members), nil
		}
		return list, nil
	default:
		return token, nil
	}
}

// filledUp makes a list again of one that the recorder shortened to length, sum and head. Any list with these three does: the stand-in's answer depends on nothing else.
func filledUp(o protocol.Object) any {
	fields := protocol.Map{}
	for _, m := range o {
		fields[m.Key] = m.Value
	}
	length, shortened := fields["_len"].(int64)
	if !shortened {
		return o
	}
	list := make([]any, length)
	rest := fields["_sum"].(int64)
	for i := range list {
		list[i] = int64(0)
	}
	for i, v := range fields["head"].([]any) {
		list[i] = v
		rest -= v.(int64)
	}
	list[length-1] = rest
	return list
}

// recordedEvents reads a list of frames.
func recordedEvents(t *testing.T, v any) []event {
	t.Helper()
	if v == nil {
		return nil
	}
	var events []event
	for _, f := range v.([]any) {
		f := f.(protocol.Map)
		e := event{kind: f["kind"].(string), header: f["header"], body: f["body"]}
		e.did, _ = f["did"].(string)
		if n, ok := f["data_frames"].(int64); ok {
			events = append(events, leftOut(t, events[len(events)-1], n)...)
			continue
		}
		events = append(events, e)
	}
	return events
}

// leftOut makes up the frames that the recorder left out of a long answer: each has one token, seven more than the one before, in a vocabulary of 355.
func leftOut(t *testing.T, before event, n int64) []event {
	t.Helper()
	const vocabulary, step = 355, 7
	chunk := before.body.(protocol.Map)["data"].(protocol.Map)["data"].(protocol.Map)
	token := chunk["token_ids"].([]any)[0].(int64)
	var events []event
	for range n {
		token = (token + step) % vocabulary
		body := fmt.Sprintf(`{"data": {"data": {"token_ids": [%d], "index": 0}}, "complete_final": false}`, token)
		events = append(events, event{kind: "data", body: object(t, []byte(body))})
	}
	return events
}

// script is what the recorded client did, in order.
func script(events []event) []string {
	var did []string
	for _, e := range events {
		if e.kind == "client" {
			did = append(did, e.did)
		}
	}
	return did
}

// recordedID is the request id under which a recorded request reached the engine, or its name if it did not.
func (r *recording) recordedID() string {
	for _, e := range listOf(r.fields["engine"]) {
		headers, _ := e["trace_headers"].(protocol.Map)
		if id, ok := headers["request-id"].(string); ok {
			return id
		}
	}
	return r.name
}

func listOf(v any) []protocol.Map {
	list, _ := v.([]any)
	maps := make([]protocol.Map, len(list))
	for i := range list {
		maps[i], _ = list[i].(protocol.Map)
	}
	return maps
}
