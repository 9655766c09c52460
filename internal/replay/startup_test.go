package replay

import (
	"testing"

	"dynworker/pkg/protocol"

	"github.com/stretchr/testify/require"
)

// bothSettings is what the message of a contradiction has to name.
var bothSettings = []string{"affinity.override", "--conversation-affinity", "DYN_ENGINE_CONV_AFFINITY", "attention_dp_config.kv_cache_routing_conversation_affinity", "affinity.on_disagreement: warn"}

// missingAPI is what the message about a build without conversations has to name: the build, the one that is needed, and what asked for it.
func missingAPI(build, by string) []string {
	return []string{by, "build " + build, "ConversationParams", "newer than 1.3.0rc20"}
}

// requireRefusedStart wants a worker to have ended while it started, with a message of these parts, without ever having been registered.
func requireRefusedStart(t *testing.T, w *worker, parts ...string) {
	t.Helper()
	require.True(t, w.ended, "the worker serves")
	require.NotZero(t, w.code)
	for _, part := range parts {
		require.Contains(t, w.log.String(), part)
	}
	require.Empty(t, world.witness.seen(t, w.namespace), "nothing may ever be in etcd")
}

// refusals are the parts of the messages with which a recorded start ends in this worker.
var refusals = map[string][]string{
	"startup/both_dotted_and_override_args":     {"--trtllm", "--override-engine-args"},
	"startup/hybrid_engine_affinity":            missingAPI("1.3.0rc20", "attention_dp_config.kv_cache_routing_conversation_affinity"),
	"startup/missing_model":                     {"/nonexistent/model"},
	"startup/no_gpu":                            {"0 GPUs"},
	"startup/rc19_engine_affinity":              {"kv_cache_routing_conversation_affinity"},
	"startup/rc19_engine_affinity_and_override": {"kv_cache_routing_conversation_affinity"},
	"startup/rc19_engine_affinity_dotted_flag":  {"kv_cache_routing_conversation_affinity"},
	"startup/rc19_engine_affinity_false":        {"kv_cache_routing_conversation_affinity"},
	"startup/rc19_override":                     bothSettings,
	"startup/rc19_override_by_env":              bothSettings,
	"startup/rc21_source_bad_env":               {"affinity.rank_source", "DYN_ENGINE_CONV_AFFINITY_DP_RANK_SOURCE", "router"},
	"startup/rc21_source_bad_value":             {"affinity.rank_source", "--conversation-affinity-dp-rank-source", "router"},
	"startup/unknown_flag":                      {"--no-such-flag"},
}

// TestStartup starts a worker with the recorded flags, variables and engine file, and compares whether it served, what its first request did, and its exit code.
func TestStartup(t *testing.T) {
	for _, r := range recordings(t, "startup") {
		for _, handler := range []string{"legacy", "unified"} {
			t.Run(r.name+"/"+handler, func(t *testing.T) {
				t.Parallel()
				w := run(t, startupSetup(r, handler))
				served := !w.ended
				ours := protocol.Map{"registered": served}
				if !served {
					requireRefusedStart(t, w, refusals[r.name]...)
					ours["exit_code"] = int64(w.code)
				} else {
					require.Empty(t, refusals[r.name], "this start should have failed")
					answer := w.ask(question{id: r.name, codec: protocol.CodecMsgpack, body: rowRequest("present/1")})
					ours["alive_after_first_request"] = len(recordsOf(t, w.namespace)) > 0
					ours["exit_code_on_sigterm"] = int64(w.stop())
					byID, _ := sortByRequest(w.engineLog())
					ours["first_request"] = rowOutcome(byID[r.name], answer)
				}
				settle(t, r.name, diff("", recordedStart(r, served), ours))
			})
		}
	}
}

// recordedStart is a recording without how it was made and how long it took, and without what came after the start if ours ended there.
func recordedStart(r *recording, served bool) protocol.Map {
	out := protocol.Map{}
	kept := []string{"registered", "exit_code"}
	if served {
		kept = append(kept, "alive_after_first_request", "exit_code_on_sigterm")
		if row, ok := r.fields["first_request"]; ok {
			out["first_request"] = recordedRow(row)
		}
	}
	for _, k := range kept {
		if v, ok := r.fields[k]; ok {
			out[k] = v
		}
	}
	return out
}

// startupSetup takes flags, variables and engine file as they were recorded.
func startupSetup(r *recording, handler string) setup {
	s := setup{settings: []string{"handler=" + handler}}
	for name, v := range r.fields["env"].(protocol.Map) {
		s.env = append(s.env, name+"="+v.(string))
	}
	for _, flag := range r.fields["flags"].([]any) {
		s.flags = append(s.flags, flag.(string))
	}
	s.engine, _ = r.fields["engine_args"].(protocol.Map)
	return s
}
