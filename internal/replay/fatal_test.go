package replay

import (
	"testing"

	"dynworker/pkg/protocol"

	"github.com/stretchr/testify/require"
)

// survived are the recorded ends that are none for this worker: a prompt that killed the recorded one is refused before it reaches the engine.
var survived = map[string]bool{"fatal/empty_token_ids": true, "fatal/text_token_ids": true}

// TestFatal replays the recordings of a worker's end. Each has a request that brings it about, or a signal, and a bystander whose answer is under way.
func TestFatal(t *testing.T) {
	for _, r := range recordings(t, "fatal") {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			w := run(t, setup{standin: []string{"STANDIN_DELAY_MS=20"}, engine: protocol.Map{"max_seq_len": int64(8192)}, settings: []string{"handler=legacy", "drain.budget=1ms"}})
			end := r.meetTheEnd(t, w)
			byID, _ := sortByRequest(w.engineLog())
			recorded, ours := r.recordedEnd(t), end.canonical(byID, r.ids())
			cutBoth := []string{"bystander"}
			if r.fields["signal"] != nil {
				cutBoth = append(cutBoth, "subject")
			}
			for _, who := range cutBoth {
				cut(recorded[who].(protocol.Map)["frames"].(protocol.Map), ours[who].(protocol.Map)["frames"].(protocol.Map))
			}
			settle(t, r.name, diff("", recorded, ours))
			require.Empty(t, recordsOf(t, w.namespace), "a worker that has ended is not registered")
		})
	}
}

// theEnd is what came of a worker and of two requests.
type theEnd struct {
	subject, bystander []event
	worker             protocol.Map
}

// meetTheEnd sends both requests, does what ended the recorded worker, and returns what came.
func (r *recording) meetTheEnd(t *testing.T, w *worker) (end theEnd) {
	bystander := w.send(limited(t), r.theBystander(t))
	bystander.readTokens(2)
	subject := w.send(limited(t), question{id: r.ids()[1], codec: protocol.CodecMsgpack, body: r.request})
	if r.fields["signal"] != nil {
		subject.readTokens(2)
		w.signal()
	}
	end.subject = subject.finish()
	if survived[r.name] {
		// It goes on as if nothing had been, until nobody wants to hear more.
		bystander.readTokens(bystander.tokens + 20)
		require.NoError(t, bystander.over)
		end.worker = protocol.Map{"exit": "none, it serves on", "registered": len(recordsOf(t, w.namespace)) > 0}
		require.NoError(t, bystander.stream.Stop())
	}
	end.bystander = bystander.finish()
	if survived[r.name] {
		w.stop()
	} else {
		end.worker = protocol.Map{"exit": int64(w.wait()), "registered": len(recordsOf(t, w.namespace)) > 0}
	}
	return end
}

// theBystander is the request whose answer is under way when the worker's end comes. Its body was not recorded; what the engine was asked for tells it.
func (r *recording) theBystander(t *testing.T) question {
	request := object(t, protocol.AppendValue(nil, protocol.CodecJSON, r.request))
	call := listOf(r.fields["engine"])[0]
	request["token_ids"] = call["inputs"]
	request["stop_conditions"].(protocol.Map)["max_tokens"] = call["sampling_params"].(protocol.Map)["max_tokens"]
	return question{id: r.ids()[0], codec: protocol.CodecMsgpack, body: request}
}

// ids are the request ids of a recording in the order in which they reached the engine.
func (r *recording) ids() (ids []string) {
	for _, e := range listOf(r.fields["engine"]) {
		if headers, ok := e["trace_headers"].(protocol.Map); ok {
			ids = append(ids, headers["request-id"].(string))
		}
	}
	return ids
}

func (r *recording) recordedEnd(t *testing.T) protocol.Map {
	require.Len(t, r.ids(), 2)
	byID, _ := sortByRequest(listOf(r.fields["engine"]))
	end := theEnd{subject: r.frames, bystander: r.bystander, worker: protocol.Map{"exit": r.fields["exit_code"], "registered": r.fields["still_registered"]}}
	return end.canonical(byID, r.ids())
}

// canonical is an end for comparison. What the engine made of the bystander depends on the moment, except what it was asked for.
func (e *theEnd) canonical(byID map[string]*engineSide, ids []string) protocol.Map {
	side := func(id string) protocol.Map {
		if s := byID[id]; s != nil {
			return s.canonical()
		}
		return (&engineSide{}).canonical()
	}
	return protocol.Map{
		"worker":    e.worker,
		"subject":   protocol.Map{"engine": side(ids[1]), "frames": canonicalAnswer(e.subject)},
		"bystander": protocol.Map{"engine": protocol.Map{"calls": side(ids[0])["calls"]}, "frames": canonicalAnswer(e.bystander)},
	}
}
