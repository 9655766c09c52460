package replay

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"dynworker/pkg/protocol"

	"github.com/stretchr/testify/require"
)

// sessions are the values of agent_context under the labels of the recordings; absent{} leaves the key out.
var sessions = map[string]any{
	"present":        protocol.Map{"session_id": "s1"},
	"padded":         protocol.Map{"session_id": "  s1 \t"},
	"unicode":        protocol.Map{"session_id": "séance-日本"},
	"empty":          protocol.Map{"session_id": ""},
	"spaces":         protocol.Map{"session_id": "   "},
	"number":         protocol.Map{"session_id": int64(123)},
	"null":           protocol.Map{"session_id": nil},
	"list":           protocol.Map{"session_id": []any{"s1"}},
	"no_key":         protocol.Map{},
	"context_null":   nil,
	"context_text":   "s1",
	"context_absent": absent{},
	"parent_only":    protocol.Map{"parent_session_id": "p1"},
	"with_parent":    protocol.Map{"session_id": "s1", "parent_session_id": "p1"},
	"final":          protocol.Map{"session_id": "s1", "session_final": true},
}

// ranks are the values of routing.dp_rank.
var ranks = map[string]any{
	"absent": absent{}, "null": nil, "0": int64(0), "1": int64(1), "out_of_range": int64(7), "negative": int64(-1), "text": "1", "float": 1.0, "true": true,
}

// rowRequest is the request of one row, "session/rank".
func rowRequest(row string) protocol.Map {
	session, rank, _ := strings.Cut(row, "/")
	request := protocol.Map{
		"model": "tiny", "token_ids": []any{int64(5), int64(6), int64(7)}, "eos_token_ids": []any{int64(2)}, "annotations": []any{},
		"stop_conditions": protocol.Map{"max_tokens": int64(1), "stop_token_ids_hidden": []any{int64(2)}}, "sampling_options": protocol.Map{}, "output_options": protocol.Map{},
	}
	routing := protocol.Map{}
	for _, f := range []struct {
		into  protocol.Map
		key   string
		value any
	}{{request, "agent_context", sessions[session]}, {routing, "dp_rank", ranks[rank]}} {
		if f.value != (absent{}) {
			f.into[f.key] = f.value
		}
	}
	request["routing"] = routing
	return request
}

// rowOutcome is what came of a row: what the engine was told, or the class of an error.
func rowOutcome(engine *engineSide, answer []event) protocol.Map {
	if engine == nil {
		out := protocol.Map{}
		errors, _ := canonicalAnswer(answer)["errors"].([]any)
		for _, e := range errors {
			out["class"] = e.(protocol.Map)["class"]
		}
		return out
	}
	call := engine.calls[0]
	out := protocol.Map{"conversation_params": "absent", "attention_dp_rank": nil, "attention_dp_relax": nil}
	if conversation, passed := call["conversation_params"]; passed {
		out["conversation_params"] = nil
		if params, ok := conversation.(protocol.Map); ok {
			out["conversation_params"] = params["conversation_id"]
		}
	}
	if scheduling, ok := call["scheduling_params"].(protocol.Map); ok {
		out["attention_dp_rank"] = scheduling["attention_dp_rank"]
		out["attention_dp_relax"] = scheduling["attention_dp_relax"]
	}
	return out
}

// recordedRow is a recorded row without the wording of an error.
func recordedRow(row any) protocol.Map {
	out := protocol.Map{}
	for k, v := range row.(protocol.Map) {
		if k != "error" {
			out[k] = v
		}
	}
	return out
}

// affinitySetup is the configuration that a recording was made with.
func affinitySetup(config protocol.Map, handler string) setup {
	s := setup{api: config["api"].(string), engine: protocol.Map{"max_seq_len": int64(8192)}, settings: []string{"handler=" + handler, fmt.Sprintf("affinity.rank_source=%s", config["dp_rank_source"])}}
	if config["attention_dp"] == true {
		s.engine["tensor_parallel_size"], s.engine["enable_attention_dp"] = int64(4), true
	}
	if config["engine_affinity"] == true {
		s.engine["attention_dp_config"] = protocol.Map{"kv_cache_routing_conversation_affinity": true}
	}
	if config["override"] == true {
		s.flags = append(s.flags, "--conversation-affinity")
	}
	return s
}

// TestAffinity replays every shape of session id with every shape of rank under every recorded configuration.
func TestAffinity(t *testing.T) {
	for _, r := range recordings(t, "affinity") {
		config := r.fields["config"].(protocol.Map)
		for _, handler := range []string{"legacy", "unified"} {
			t.Run(r.name+"/"+handler, func(t *testing.T) {
				t.Parallel()
				s := affinitySetup(config, handler)
				s.settings = append(s.settings, "affinity.on_disagreement=warn", "system.port=0")
				w := run(t, s)
				recorded, ours := protocol.Map{"serves": true}, protocol.Map{"serves": !w.ended}
				require.True(t, r.fields["worker_alive_after"] == true)
				if w.ended {
					requireRefusedStart(t, w, missingAPI("1.3.0rc19", "affinity.override")...)
				} else {
					recorded["rows"], ours["rows"] = replayRows(t, w, r.fields["rows"].(protocol.Map))
				}
				settle(t, r.name, diffRows(recorded, ours))
			})
		}
	}
}

// failing is what the name of a case ends in when on_disagreement is fail.
const failing = " on_disagreement=fail"

// contradicts tells whether a recording's override asks for what its engine says off to.
func contradicts(config protocol.Map) bool {
	return config["override"] == true && config["engine_affinity"] == false
}

// TestAnOverrideAgainstTheEngineEndsTheStart takes the same configurations where the override contradicts the engine, with the setting's default.
func TestAnOverrideAgainstTheEngineEndsTheStart(t *testing.T) {
	for _, r := range recordings(t, "affinity") {
		config := r.fields["config"].(protocol.Map)
		if !contradicts(config) {
			continue
		}
		for _, handler := range []string{"legacy", "unified"} {
			t.Run(r.name+"/"+handler, func(t *testing.T) {
				t.Parallel()
				w := run(t, affinitySetup(config, handler))
				if w.ended {
					requireRefusedStart(t, w, bothSettings...)
				}
				settle(t, r.name+failing, diff("", protocol.Map{"serves": true}, protocol.Map{"serves": !w.ended}))
			})
		}
	}
}

// replayRows sends the request of every row and returns the outcomes, recorded and ours.
func replayRows(t *testing.T, w *worker, rows protocol.Map) (recorded, ours protocol.Map) {
	require.Len(t, rows, len(sessions)*len(ranks))
	answers := map[string][]event{}
	for _, row := range keys(rows) {
		answers[row] = w.ask(question{id: row, codec: protocol.CodecMsgpack, body: rowRequest(row)})
	}
	byID, _ := sortByRequest(w.engineLog())
	requireAccounted(t, w, byID)
	require.Zero(t, w.stop(), "the worker is alive after all rows")
	recorded, ours = protocol.Map{}, protocol.Map{}
	for row, outcome := range rows {
		recorded[row] = recordedRow(outcome)
		ours[row] = rowOutcome(byID[row], answers[row])
	}
	return recorded, ours
}

// decisions are the lines of /metrics that count decisions by reason.
var decisions = regexp.MustCompile(`(?m)^dynworker_affinity_decisions_total\{.*reason="(\w+)".*\} (\d+)$`)

// requireAccounted wants one line in the log for each request that reached the engine, which says what the engine was told, and the same reasons counted on /metrics.
func requireAccounted(t *testing.T, w *worker, byID map[string]*engineSide) {
	t.Helper()
	logged, counted := map[string]int64{}, map[string]int64{}
	lines := 0
	for _, line := range w.log.messages() {
		if line["message"] != "request accepted" {
			continue
		}
		lines++
		id := line["request_id"].(string)
		require.NotNil(t, byID[id], id)
		require.NotZero(t, line["engine_request_id"], id)
		logged[line["affinity"].(string)]++
		told := rowOutcome(byID[id], nil)
		require.Equal(t, told["attention_dp_rank"], plain(line["attention_dp_rank"]), id)
		conversation, _ := line["conversation"].(string)
		if name, passed := told["conversation_params"].(string); passed && name != "absent" {
			require.Regexp(t, `^sha256:[0-9a-f]{16}$`, conversation, "%s: ids of conversations are hashed", id)
		} else {
			require.Empty(t, conversation, id)
		}
	}
	require.Equal(t, len(byID), lines)
	for _, m := range decisions.FindAllStringSubmatch(fetch(t, w.serving.SystemAddress, "/metrics"), -1) {
		if n := number(m[2]); n > 0 {
			counted[m[1]] = n
		}
	}
	require.Equal(t, logged, counted)
}

// diffRows is diff with a row as the smallest part.
func diffRows(recorded, ours protocol.Map) (found []difference) {
	if recorded["rows"] == nil {
		return diff("", recorded, ours)
	}
	found = diff("serves", recorded["serves"], ours["serves"])
	a, b := recorded["rows"].(protocol.Map), ours["rows"].(protocol.Map)
	for _, row := range keys(a) {
		if x, y := plain(a[row]), plain(b[row]); len(diff("", x, y)) > 0 {
			found = append(found, difference{row, x, y})
		}
	}
	return found
}
