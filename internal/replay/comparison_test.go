package replay

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"dynworker/pkg/protocol"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// The comparison is tested too: one that saw nothing would pass everything.

// TestTheListOfDifferencesIsInOrder reads it as a whole, and says how long it is.
func TestTheListOfDifferencesIsInOrder(t *testing.T) {
	all, err := listed()
	require.NoError(t, err)
	perFolder, perGround, entries := map[string]int{}, map[string]int{}, map[*entry]bool{}
	played := casesPlayed(t)
	for at, e := range all {
		require.Contains(t, played, at.name)
		require.Contains(t, grounds, e.Ground, "%s %s", at.name, at.path)
		require.NotEmpty(t, e.Reason, "%s %s", at.name, at.path)
		require.NotEqual(t, value(&e.Recorded), value(&e.Ours), "%s %s", at.name, at.path)
		perFolder[filepath.Dir(at.name)]++
		perGround[e.Ground]++
		entries[e] = true
	}
	t.Logf("%d deliberate differences in %d entries; by folder %v; by ground %v", len(all), len(entries), perFolder, perGround)
}

// casesPlayed are the names of all cases that some test plays.
func casesPlayed(t *testing.T) (names []string) {
	folders, err := os.ReadDir(filepath.Join("testdata", "golden"))
	require.NoError(t, err)
	for _, f := range folders {
		for _, r := range recordings(t, f.Name()) {
			names = append(names, r.name)
			if config, ok := r.fields["config"].(protocol.Map); ok && f.Name() == "affinity" && contradicts(config) {
				names = append(names, r.name+failing)
			}
		}
	}
	return names
}

// TestWhatFails goes through the ways in which a case and the list can disagree.
func TestWhatFails(t *testing.T) {
	var entries []*entry
	require.NoError(t, yaml.Unmarshal([]byte(`[{recorded: 1, ours: {a: [2]}}, {ours: x}]`), &entries))
	all := map[place]*entry{{"c", "p"}: entries[0], {"c", "q"}: entries[1], {"other", "p"}: entries[0]}
	p := difference{"p", int64(1), protocol.Map{"a": []any{int64(2)}}}
	q := difference{"q", absent{}, "x"}
	for _, row := range []struct {
		name  string
		found []difference
		want  []string
	}{
		{"as listed", []difference{q, p}, nil},
		{"unlisted", []difference{p, q, {"r", absent{}, nil}}, []string{"not listed: r"}},
		{"unused", []difference{p}, []string{"none: q"}},
		{"other value", []difference{p, {"q", absent{}, "y"}}, []string{"otherwise than listed: q"}},
		{"null for nothing", []difference{p, {"q", nil, "x"}}, []string{"otherwise than listed: q"}},
	} {
		got := judge(all, "c", row.found)
		require.Len(t, got, len(row.want), "%s: %v", row.name, got)
		for i, part := range row.want {
			require.Contains(t, got[i], part, row.name)
		}
	}
}

// Keys that the rules leave out of the comparison: wordings, and the values of ids that are made anew each time.
var (
	wordings = []string{"message", "diagnostic", "public"}
	made     = []string{"subject", "request-id", "request_id"}
)

// unseen tells whether a change is one that the rules do not want to see.
func (a altered) unseen() bool {
	key := a.path[strings.LastIndex(a.path, ".")+1:]
	wording := slices.Contains(wordings, key) || strings.Contains(a.path, ".public.")
	return wording || !a.removed && (slices.Contains(made, key) || strings.HasSuffix(a.path, ".finish_reason.error"))
}

// TestAChangeAnywhereShows alters every single value of recorded requests, one at a time, and wants to see it. The recordings have, together, everything that there is to see.
func TestAChangeAnywhereShows(t *testing.T) {
	chosen := []string{"core/n2_uneven", "core/logprobs_n2", "core/prompt_logprobs_1", "core/guided_structural_tag", "core/health_check_disagg_params", "core/image_in_messages", "core/engine_no_outputs", "core/engine_no_finish_reason"}
	changes := 0
	for _, r := range recordings(t, "core") {
		if !slices.Contains(chosen, r.name) {
			continue
		}
		before := comparable(t, r.fields)
		for _, part := range []string{"engine", "frames"} {
			for _, change := range alterations(r.fields[part], part) {
				fields := shallow(r.fields)
				fields[part] = change.value
				require.Equal(t, change.unseen(), len(diff("", before, comparable(t, fields))) == 0, "%s %s, removed %t", r.name, change.path, change.removed)
				changes++
			}
		}
	}
	require.Greater(t, changes, 800)
}

// comparable is the canonical form of a whole recording.
func comparable(t *testing.T, fields protocol.Map) protocol.Map {
	r := &recording{fields: fields}
	return protocol.Map{"engine": recordedSide(t, r).canonical(), "frames": canonicalAnswer(recordedEvents(t, fields["frames"]))}
}

// altered is a tree in which one value is another.
type altered struct {
	path    string
	value   any
	removed bool
}

// alterations are all trees that differ from v in one value.
func alterations(v any, path string) (all []altered) {
	switch v := v.(type) {
	case protocol.Map:
		for _, k := range keys(v) {
			for _, a := range alterations(v[k], path+"."+k) {
				whole := shallow(v)
				whole[k] = a.value
				all = append(all, altered{a.path, whole, a.removed})
			}
			if k != "kind" && k != "event" && k != "index" && k != "request_id" {
				whole := shallow(v)
				delete(whole, k)
				all = append(all, altered{path + "." + k, whole, true})
			}
		}
	case []any:
		for i := range v {
			for _, a := range alterations(v[i], fmt.Sprintf("%s[%d]", path, i)) {
				whole := slices.Clone(v)
				whole[i] = a.value
				all = append(all, altered{a.path, whole, a.removed})
			}
		}
	case int64:
		all = append(all, altered{path, v + 1, false})
	case float64:
		all = append(all, altered{path, v + 0.5, false})
	case bool:
		all = append(all, altered{path, !v, false})
	case string:
		if !strings.HasSuffix(path, ".kind") && !strings.HasSuffix(path, ".event") {
			all = append(all, altered{path, v + "!", false})
		}
	case nil:
		all = append(all, altered{path, "not null", false})
	}
	return all
}

func shallow(m protocol.Map) protocol.Map {
	out := protocol.Map{}
	for k, v := range m {
		out[k] = v
	}
	return out
}

// TestWhatIsNoDifference goes through the rules that make unequal runs equal.
func TestWhatIsNoDifference(t *testing.T) {
	call := func(change string) protocol.Map {
		line := object(t, []byte(`{"event": "generate_async", "trace_headers": {"request-id": "a", "traceparent": "<traceparent>"}, "sampling_params": {"stop_token_ids": [3, 2], "guided_decoding": {"structural_tag": "{\"a\": 1, \"b\": [2]}"}}}`))
		for k, v := range object(t, []byte(change)) {
			line[k] = v
		}
		return canonicalCall(line)
	}
	same := []string{
		`{"sampling_params": {"stop_token_ids": [2, 3], "guided_decoding": {"structural_tag": "{\"b\":[2],\"a\":1}"}}}`,
		`{"trace_headers": {"request-id": "b", "traceparent": "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"}}`,
		`{"t": 5.25}`,
	}
	for _, change := range same {
		require.Empty(t, diff("", call(`{}`), call(change)), change)
	}
	for _, change := range []string{
		`{"sampling_params": {"stop_token_ids": [2], "guided_decoding": {"structural_tag": "{\"a\": 1, \"b\": [2]}"}}}`,
		`{"trace_headers": {"request-id": "b", "traceparent": "00-short-01"}}`,
		`{"trace_headers": {"request-id": "b"}}`,
		`{"conversation_params": null}`,
	} {
		require.NotEmpty(t, diff("", call(`{}`), call(change)), change)
	}
}

// TestFramesMayBeCutDifferently joins and splits tokens of two choices.
func TestFramesMayBeCutDifferently(t *testing.T) {
	answer := func(chunks ...string) protocol.Map {
		events := []event{{kind: "handshake"}, {kind: "prologue"}}
		for _, c := range chunks {
			events = append(events, event{kind: "data", body: object(t, []byte(`{"data": {"data": `+c+`}, "complete_final": false}`))})
		}
		return canonicalAnswer(append(events, event{kind: "data", body: protocol.Map{"complete_final": true}}, event{kind: "eof"}))
	}
	stepwise := answer(`{"token_ids": [1], "index": 0, "log_probs": [-1]}`, `{"token_ids": [5], "index": 1}`, `{"token_ids": [2], "index": 0, "log_probs": [-2]}`, `{"token_ids": [6], "index": 1, "finish_reason": "stop"}`)
	merged := answer(`{"token_ids": [5, 6], "index": 1, "finish_reason": "stop"}`, `{"token_ids": [1, 2], "index": 0, "log_probs": [-1, -2]}`)
	require.Empty(t, diff("", stepwise, merged))
	for name, other := range map[string]protocol.Map{
		"a token more":              answer(`{"token_ids": [5, 6, 7], "index": 1, "finish_reason": "stop"}`, `{"token_ids": [1, 2], "index": 0, "log_probs": [-1, -2]}`),
		"after the finish":          answer(`{"token_ids": [5], "index": 1, "finish_reason": "stop"}`, `{"token_ids": [6], "index": 1}`, `{"token_ids": [1, 2], "index": 0, "log_probs": [-1, -2]}`),
		"log probabilities missing": answer(`{"token_ids": [5, 6], "index": 1, "finish_reason": "stop"}`, `{"token_ids": [1], "index": 0, "log_probs": [-1]}`, `{"token_ids": [2], "index": 0}`),
		"null for an absent key":    answer(`{"token_ids": [5, 6], "index": 1, "finish_reason": "stop", "stop_reason": null}`, `{"token_ids": [1, 2], "index": 0, "log_probs": [-1, -2]}`),
	} {
		require.NotEmpty(t, diff("", stepwise, other), name)
	}
}

// TestACutAnswerIsAPrefix compares answers that ended at another moment.
func TestACutAnswerIsAPrefix(t *testing.T) {
	answer := func(end string, tokens ...any) protocol.Map {
		events := []event{{kind: "handshake"}}
		if len(tokens) > 0 {
			events = append(events, event{kind: "prologue", header: protocol.Map{"error": nil}}, event{kind: "data", body: protocol.Map{"complete_final": false, "data": protocol.Map{"data": protocol.Map{"index": int64(0), "token_ids": tokens}}}})
		}
		return canonicalAnswer(append(events, event{kind: end}))
	}
	compare := func(a, b protocol.Map) []difference {
		cut(a, b)
		return diff("", a, b)
	}
	one, two, three := int64(1), int64(2), int64(3)
	require.Empty(t, compare(answer("eof", one, two), answer("eof", one, two, three)))
	require.Empty(t, compare(answer("eof", one), answer("eof")))
	require.NotEmpty(t, compare(answer("eof", one, three), answer("eof", one, two, three)))
	require.NotEmpty(t, compare(answer("eof", one), answer("reset", one)))
}

// TestTheRecordingsAreAllThere counts the folders, so that none goes unnoticed.
func TestTheRecordingsAreAllThere(t *testing.T) {
	folders, err := os.ReadDir(filepath.Join("testdata", "golden"))
	require.NoError(t, err)
	count := map[string]int{}
	for _, f := range folders {
		count[f.Name()] = len(recordings(t, f.Name()))
	}
	require.Equal(t, map[string]int{"core": 72, "core-no-max-seq-len": 3, "cancel": 11, "canary": 3, "fatal": 6, "startup": 15, "affinity": 15, "prefill": 8, "decode": 10, "decode-cancel": 1}, count)
}
