package handoff

import (
	"encoding/json"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/protocol"
)

// recorded is what a prefill worker of Dynamo 1.6.1 handed over.
const recorded = `{"request_type":"context_only","first_gen_tokens":[18],"first_gen_log_probs":[[{"token_id":18,"logprob":-0.25,"rank":1},{"token_id":19,"logprob":-1.25,"rank":2}]],"first_gen_logits":null,"ctx_request_id":5,
"opaque_state":"c3RhbmRpbi01","draft_tokens":null,"disagg_request_id":4398046511105,"ctx_dp_rank":0,"ctx_info_endpoint":"tcp://standin:0","schedule_style":null,"multimodal_embedding_handles":null,"multimodal_hashes":null,
"mrope_position_ids_handle":null,"mrope_position_deltas_handle":null}`

func parse(t testing.TB, text string) protocol.Map {
	m, err := FromEngine(json.RawMessage(text))
	require.NoError(t, err)
	return m
}

func TestTheRecordedHandoffBecomesTheRecordedOrder(t *testing.T) {
	fields := parse(t, recorded)
	require.True(t, Complete(fields))
	fields["worker_id"] = protocol.Map{"prefill_worker_id": int64(1)}
	order, err := Generation(fields)
	require.NoError(t, err)
	require.JSONEq(t, `{"request_type":"generation_only","first_gen_tokens":[18],"first_gen_log_probs":[[{"token_id":18,"logprob":-0.25,"rank":1},{"token_id":19,"logprob":-1.25,"rank":2}]],"ctx_request_id":5,
		"opaque_state":"c3RhbmRpbi01","disagg_request_id":4398046511105,"ctx_dp_rank":0,"ctx_info_endpoint":"tcp://standin:0"}`, string(order))
}

func TestOrders(t *testing.T) {
	require.JSONEq(t, `{"request_type":"context_only","machine_id":0}`, string(Context(0)))
	require.JSONEq(t, `{"request_type":"context_only"}`, string(Context(-1)))
	require.JSONEq(t, `{"request_type":"context_and_generation"}`, string(Local()))
}

func TestLayoutsAndForms(t *testing.T) {
	for name, c := range map[string]struct{ in, want string }{
		"older log probabilities": {`{"ctx_request_id":1,"first_gen_log_probs":[{"19":{"logprob":-1,"rank":2},"18":{"logprob":-0.25,"rank":1}}]}`,
			`{"request_type":"generation_only","ctx_request_id":1,"first_gen_log_probs":[[{"token_id":18,"logprob":-0.25,"rank":1},{"token_id":19,"logprob":-1.0,"rank":2}]]}`},
		"values alone":             {`{"ctx_request_id":1,"first_gen_log_probs":[{"18":-0.25}]}`, `{"request_type":"generation_only","ctx_request_id":1,"first_gen_log_probs":[[{"token_id":18,"logprob":-0.25,"rank":null}]]}`},
		"a field of a later build": {`{"ctx_request_id":1,"surprise":{"a":[1]}}`, `{"request_type":"generation_only","ctx_request_id":1,"surprise":{"a":[1]}}`},
		"large ids":                {`{"ctx_request_id":18446744073709551615,"disagg_request_id":9223372036854775808}`, `{"request_type":"generation_only","ctx_request_id":18446744073709551615,"disagg_request_id":9223372036854775808}`},
		"drafts":                   {`{"ctx_request_id":1,"draft_tokens":[1,2],"opaque_state":""}`, `{"request_type":"generation_only","ctx_request_id":1,"draft_tokens":[1,2],"opaque_state":""}`},
	} {
		got, err := Generation(parse(t, c.in))
		require.NoError(t, err, name)
		require.Equal(t, string(encode(parse(t, c.want))), string(got), name)
	}
	got, err := Generation(protocol.Map{"ctx_request_id": int64(1), "opaque_state": []byte("standin-5")})
	require.NoError(t, err)
	require.JSONEq(t, `{"request_type":"generation_only","ctx_request_id":1,"opaque_state":"c3RhbmRpbi01"}`, string(got))
}

func TestEveryFaultNamesItsField(t *testing.T) {
	for in, field := range map[string]string{
		`{}`:                                                                                   "ctx_request_id",
		`{"ctx_request_id":null}`:                                                              "ctx_request_id",
		`{"ctx_request_id":"7"}`:                                                               "ctx_request_id",
		`{"ctx_request_id":-1}`:                                                                "ctx_request_id",
		`{"ctx_request_id":1,"request_type":2}`:                                                "request_type",
		`{"ctx_request_id":1,"opaque_state":"!!!"}`:                                            "opaque_state",
		`{"ctx_request_id":1,"opaque_state":"c3R"}`:                                            "opaque_state",
		`{"ctx_request_id":1,"opaque_state":7}`:                                                "opaque_state",
		`{"ctx_request_id":1,"first_gen_tokens":18}`:                                           "first_gen_tokens",
		`{"ctx_request_id":1,"first_gen_tokens":[18,-1]}`:                                      "first_gen_tokens[1]",
		`{"ctx_request_id":1,"draft_tokens":["a"]}`:                                            "draft_tokens[0]",
		`{"ctx_request_id":1,"ctx_dp_rank":-1}`:                                                "ctx_dp_rank",
		`{"ctx_request_id":1,"disagg_request_id":1.5}`:                                         "disagg_request_id",
		`{"ctx_request_id":1,"first_gen_log_probs":{}}`:                                        "first_gen_log_probs",
		`{"ctx_request_id":1,"first_gen_log_probs":[1]}`:                                       "first_gen_log_probs[0]",
		`{"ctx_request_id":1,"first_gen_log_probs":[[{"logprob":1}]]}`:                         "first_gen_log_probs[0][0]",
		`{"ctx_request_id":1,"first_gen_log_probs":[[],[{"token_id":1}]]}`:                     "first_gen_log_probs[1][0].logprob",
		`{"ctx_request_id":1,"first_gen_log_probs":[[{"token_id":1,"logprob":-1,"rank":-1}]]}`: "first_gen_log_probs[0][0].rank",
		`{"ctx_request_id":1,"first_gen_log_probs":[{"x":-1}]}`:                                "first_gen_log_probs[0]",
		`{"ctx_request_id":1,"first_gen_log_probs":[{"18":"a"}]}`:                              "first_gen_log_probs[0].18.logprob",
	} {
		_, err := Generation(parse(t, in))
		var fault *FieldError
		require.ErrorAs(t, err, &fault, in)
		require.Equal(t, field, fault.Field, in)
	}
	for _, raw := range []string{``, `[]`, `{"a":`} {
		_, err := FromEngine(json.RawMessage(raw))
		var fault *FieldError
		require.ErrorAs(t, err, &fault, raw)
	}
	require.False(t, Complete(protocol.Map{"request_type": Both, "ctx_request_id": int64(1)}))
	require.False(t, Complete(protocol.Map{"request_type": ContextOnly}))
}

// FuzzGeneration: whatever comes, the answer is an order that can come in again, or a fault that names a field.
func FuzzGeneration(f *testing.F) {
	f.Add([]byte(recorded))
	f.Add([]byte(`{"ctx_request_id":1,"first_gen_log_probs":[{"18":-0.25}],"opaque_state":"AA=="}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		fields, err := FromEngine(raw)
		if err != nil {
			return
		}
		order, err := Generation(fields)
		if err != nil {
			if fault, ok := errors.AsType[*FieldError](err); !ok || fault.Field == "" {
				t.Fatalf("%T: %v", err, err)
			}
			return
		}
		again, err := FromEngine(order)
		if err != nil {
			t.Fatalf("%s: %v", order, err)
		}
		twice, err := Generation(again)
		if err != nil || string(twice) != string(order) {
			t.Fatalf("%s, then %s, %v", order, twice, err)
		}
	})
}
