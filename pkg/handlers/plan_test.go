package handlers

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/protocol"

	"github.com/stretchr/testify/require"
)

// base is a body that says nothing beyond the prompt; sections are filled in by the tests.
const base = `{"token_ids":[5,6,7],"stop_conditions":{"max_tokens":4},"sampling_options":{},"output_options":{}}`

// with replaces one section of base.
func with(section, value string) string {
	var m map[string]json.RawMessage
	if err := json.Unmarshal([]byte(base), &m); err != nil {
		panic(err)
	}
	m[section] = json.RawMessage(value)
	out, err := json.Marshal(m)
	if err != nil {
		panic(err)
	}
	return string(out)
}

// TestFieldsThatReachTheEngine is the forwarding half of the request table in docs/handlers.md: body in, the engine's arguments (as JSON) out.
func TestFieldsThatReachTheEngine(t *testing.T) {
	for _, row := range []struct {
		name, body string
		// want is compared with the part of the engine call that it names.
		want string
	}{
		{"max_tokens", with("stop_conditions", `{"max_tokens":9}`), `{"sampling":{"max_tokens":9}}`},
		{"max_tokens derived from the context", with("stop_conditions", `{"max_tokens":null}`), `{"sampling":{"max_tokens":97}}`},
		{"max_tokens at top level", `{"token_ids":[1],"max_tokens":5,"min_tokens":2,"ignore_eos":true,"temperature":0.5}`, `{"sampling":{"max_tokens":5,"min_tokens":2,"ignore_eos":true,"temperature":0.5}}`},
		{"inner min_tokens wins", `{"token_ids":[1],"min_tokens":3,"stop_conditions":{"max_tokens":32,"min_tokens":16}}`, `{"sampling":{"max_tokens":32,"min_tokens":16}}`},
		{"min_tokens zero is nothing", with("stop_conditions", `{"max_tokens":4,"min_tokens":0}`), `{"sampling":{"max_tokens":4}}`},
		{"numbers", with("sampling_options", `{"temperature":0,"top_p":0.5,"min_p":0.25,"repetition_penalty":1.5,"presence_penalty":-1,"frequency_penalty":0,"length_penalty":2,"seed":0}`),
			`{"sampling":{"max_tokens":4,"temperature":0,"top_p":0.5,"min_p":0.25,"repetition_penalty":1.5,"presence_penalty":-1,"frequency_penalty":0,"length_penalty":2,"seed":0}}`},
		{"nulls are skipped", with("sampling_options", `{"temperature":null,"n":null,"seed":null,"guided_decoding":null}`), `{"sampling":{"max_tokens":4}}`},
		{"top_k off", with("sampling_options", `{"top_k":-1}`), `{"sampling":{"max_tokens":4,"top_k":0}}`},
		{"n lifts best_of", with("sampling_options", `{"n":2,"best_of":1,"temperature":0.7}`), `{"sampling":{"max_tokens":4,"n":2,"best_of":2,"temperature":0.7}}`},
		{"best_of above n stays", with("sampling_options", `{"n":2,"best_of":3,"temperature":0.7}`), `{"sampling":{"max_tokens":4,"n":2,"best_of":3,"temperature":0.7}}`},
		{"beam search", with("sampling_options", `{"n":2,"use_beam_search":true}`), `{"sampling":{"max_tokens":4,"n":2,"best_of":2,"use_beam_search":true}}`},
		{"include stop", with("sampling_options", `{"include_stop_str_in_output":true}`), `{"sampling":{"max_tokens":4,"include_stop_str_in_output":true}}`},
		{"logprobs 0 asks for one", with("output_options", `{"logprobs":0,"prompt_logprobs":0}`), `{"sampling":{"max_tokens":4,"logprobs":1,"prompt_logprobs":0}}`},
		{"hidden stops", with("stop_conditions", `{"max_tokens":4,"stop_token_ids_hidden":[2,32,2],"stop":["x"],"stop_token_ids":[9]}`), `{"sampling":{"max_tokens":4,"stop_token_ids":[2,32]}}`},
		{"visible stops leave the hidden ones", with("stop_conditions", `{"max_tokens":4,"stop_token_ids_hidden":[2,25,32],"stop_token_ids_visible":[32]}`), `{"sampling":{"max_tokens":4,"ignore_eos":true,"stop_token_ids":[2,25]}}`},
		{"no_stop_trim", with("output_options", `{"no_stop_trim":true}`), `{"sampling":{"max_tokens":4,"ignore_eos":true}}`},
		{"ignored options", with("output_options", `{"skip_special_tokens":false,"formatted_prompt":true,"return_tokens_as_token_ids":true}`), `{"sampling":{"max_tokens":4}}`},
		{"choice", with("sampling_options", `{"guided_decoding":{"choice":["yes",null,"a.b c-d"]}}`), `{"guided":{"regex":"(yes|a\\.b\\ c\\-d)"}}`},
		{"regex beats choice", with("sampling_options", `{"guided_decoding":{"choice":["yes"],"regex":"[a-z]+"}}`), `{"guided":{"regex":"[a-z]+"}}`},
		{"empty choice", with("sampling_options", `{"guided_decoding":{"choice":[null]}}`), `{"guided":{}}`},
		{"schema keeps its order", with("sampling_options", `{"guided_decoding":{"json":{"z":1,"a":{"y":2,"b":[3]}}}}`), `{"guided":{"json":{"z":1,"a":{"y":2,"b":[3]}}}}`},
		{"schema as text", with("sampling_options", `{"guided_decoding":{"json":"{\"z\":1}"}}`), `{"guided":{"json":"{\"z\":1}"}}`},
		{"json object", with("sampling_options", `{"guided_decoding":{"json_object":true,"backend":"x","whitespace_pattern":"y"}}`), `{"guided":{"json_object":true}}`},
		{"structural tag", with("sampling_options", `{"guided_decoding":{"structural_tag":{"type":"t","format":{"b":1,"a":2}}}}`), `{"guided":{"structural_tag":"{\"type\":\"t\",\"format\":{\"b\":1,\"a\":2}}"}}`},
		{"salt of the routing", with("routing", `{"cache_salt":"a"}`), `{"cache_salt":"a"}`},
		{"salt of the extension", `{"token_ids":[1],"routing":{"cache_salt":""},"extra_args":{"nvext":{"cache_salt":"b"}}}`, `{"cache_salt":"b"}`},
		{"priority", with("priority", `1.0`), `{"priority":1}`},
		{"routing priority is the router's", with("routing", `{"priority":5,"priority_jump":1.5,"strict_priority":2}`), `{"priority":0.5}`},
		{"rank", with("routing", `{"dp_rank":3}`), `{"scheduling":{"attention_dp_rank":3,"attention_dp_relax":false}}`},
		{"unknown keys at top level", with("some_new_field", `{"a":1}`), `{"sampling":{"max_tokens":4}}`},
		{"text messages", with("extra_args", `{"messages":[{"role":"user","content":[{"type":"text","text":"x"}]},{"content":"y"}]}`), `{"sampling":{"max_tokens":4}}`},
		{"a canary over the wire", `{"token_ids":[1],"_HEALTH_CHECK":true,"disaggregated_params":{"request_type":"context_and_generation"},"stop_conditions":{"max_tokens":1}}`,
			`{"cache_salt":"dynamo-health-check","disaggregated":{"request_type":"context_and_generation"}}`},
	} {
		for _, kind := range []Kind{Unified, Legacy} {
			b := newBench(t, kind, nil)
			body := row.body
			if kind == Legacy {
				// That handler wants the key, as the recordings say; a test of its own shows what happens without it.
				body = strings.Replace(body, `{"token_ids":[1],"routing"`, `{"token_ids":[1],"stop_conditions":{"max_tokens":4},"routing"`, 1)
			}
			p, err := b.handler.plan(call(t, body))
			require.NoError(t, err, "%s: %s", kind, row.name)
			text, err := json.Marshal(&p.generate)
			require.NoError(t, err)
			var got, want map[string]json.RawMessage
			require.NoError(t, json.Unmarshal(text, &got))
			require.NoError(t, json.Unmarshal([]byte(row.want), &want))
			for key, value := range want {
				if key == "guided" {
					require.Equal(t, string(value), string(got[key]), "%s: %s: %s, in this very order", kind, row.name, key)
					continue
				}
				require.JSONEq(t, string(value), string(got[key]), "%s: %s: %s", kind, row.name, key)
			}
		}
	}
}

// refusal is a row of the refusing half of the table.
type refusal struct{ name, body, public string }

// refusals are 4xx answers in both handlers.
var refusals = []refusal{
	{"no prompt", `{"stop_conditions":{"max_tokens":1}}`, "token_ids is missing"},
	{"null prompt", with("token_ids", `null`), "token_ids is null"},
	{"empty prompt", with("token_ids", `[]`), "token_ids is empty: a prompt needs at least one token"},
	{"outside the vocabulary", with("token_ids", `[1,1000]`), "token_ids[1] is 1000, outside the vocabulary of 1000 tokens"},
	{"above one step", with("token_ids", "["+strings.Repeat("1,", 80)+"1]"), "the prompt has 81 tokens, above the engine's limit of 80 in one step (max_num_tokens without chunked prefill)"},
	{"negative max_tokens", with("stop_conditions", `{"max_tokens":-1}`), "stop_conditions.max_tokens must not be negative, got -1"},
	{"huge max_tokens", with("stop_conditions", `{"max_tokens":2147483648}`), "stop_conditions.max_tokens is too large: 2147483648"},
	{"text max_tokens", with("stop_conditions", `{"max_tokens":"4"}`), "stop_conditions.max_tokens must be an integer, got text"},
	{"section is a list", with("stop_conditions", `[]`), "stop_conditions must be a map, got a list"},
	{"negative min_tokens", with("stop_conditions", `{"max_tokens":4,"min_tokens":-1}`), "stop_conditions.min_tokens must be between 0 and max_tokens (4), got -1"},
	{"stop id is no id", with("stop_conditions", `{"max_tokens":4,"stop_token_ids_hidden":[-2]}`), "stop_conditions.stop_token_ids_hidden[0] must be a token id"},
	{"ignore_eos is a number", with("stop_conditions", `{"max_tokens":4,"ignore_eos":1}`), "stop_conditions.ignore_eos must be a boolean, got an integer"},
	{"negative temperature", with("sampling_options", `{"temperature":-0.5}`), "sampling_options.temperature must not be negative, got -0.5"},
	{"text temperature", with("sampling_options", `{"temperature":"hot"}`), "sampling_options.temperature must be a number, got text"},
	{"top_p above one", with("sampling_options", `{"top_p":2.0}`), "sampling_options.top_p must be within 0 and 1, got 2"},
	{"top_k", with("sampling_options", `{"top_k":-2}`), "sampling_options.top_k must not be below -1, got -2"},
	{"n", with("sampling_options", `{"n":0}`), "sampling_options.n must be between 1 and 255, got 0"},
	{"greedy n", with("sampling_options", `{"n":2}`), "sampling_options.n asks for 2 sequences but the sampling is greedy, which gives only one: set temperature, top_p or top_k"},
	{"greedy best_of", with("sampling_options", `{"best_of":2,"temperature":0}`), "sampling_options.best_of asks for 2 sequences but the sampling is greedy, which gives only one: set temperature, top_p or top_k"},
	{"beam too wide", with("sampling_options", `{"n":3,"use_beam_search":true}`), "beam search over 3 sequences is above the engine's beam width of 2 (sampling_options.n, sampling_options.best_of)"},
	{"unknown sampling key", with("sampling_options", `{"zebra":1,"logit_bias":{"5":1.0}}`), "sampling_options.logit_bias is not a sampling option that this worker knows"},
	{"unknown sampling key with null", with("sampling_options", `{"logit_bias":null}`), "sampling_options.logit_bias is not a sampling option that this worker knows"},
	{"seed beyond 63 bits", with("sampling_options", `{"seed":18446744073709551615}`), "sampling_options.seed is too large: 18446744073709551615"},
	{"two guides", with("sampling_options", `{"guided_decoding":{"regex":"a","grammar":"b"}}`), "sampling_options.guided_decoding takes one guide, got 2"},
	{"guide is text", with("sampling_options", `{"guided_decoding":"json"}`), "sampling_options.guided_decoding must be a map, got text"},
	{"choice is no list", with("sampling_options", `{"guided_decoding":{"choice":"yes"}}`), "sampling_options.guided_decoding.choice must be a list of texts, got text"},
	{"rank is text", with("routing", `{"dp_rank":"1"}`), "routing.dp_rank must be an integer, got text"},
	{"image", with("extra_args", `{"messages":[{"content":[{"type":"image_url"}]}]}`), "extra_args.messages holds an image, audio or video part, which needs a multimodal worker; this one serves text"},
	{"media", with("multi_modal_data", `{"image_url":[]}`), "multi_modal_data needs a multimodal worker; this one serves text"},
	{"media ids", with("multi_modal_uuids", `{"image":["u1"]}`), "multi_modal_uuids belongs to another engine"},
}

// unifiedRefusals are 4xx answers in the unified handler only.
var unifiedRefusals = []refusal{
	{"thinking budget", with("stop_conditions", `{"max_tokens":4,"max_thinking_tokens":9}`), "stop_conditions.max_thinking_tokens is not served: the engine has no thinking budget"},
	{"embeddings", with("prompt_embeds", `"AAAA"`), "prompt_embeds is not served: send token ids"},
	{"prefill result", with("prefill_result", `{}`), "prefill_result belongs to a decode worker, which this one is not"},
	{"sampler lists", with("extra_args", `{"sampling_options":{"allowed_token_ids":[1]}}`), "extra_args.sampling_options.allowed_token_ids is not served by this worker"},
	{"min_p", with("sampling_options", `{"min_p":2}`), "sampling_options.min_p must be within 0 and 1, got 2"},
	{"repetition_penalty", with("sampling_options", `{"repetition_penalty":0}`), "sampling_options.repetition_penalty must be above 0, got 0"},
	{"seed", with("sampling_options", `{"seed":-1}`), "sampling_options.seed must not be negative, got -1"},
	{"priority", with("priority", `1.5`), "priority must be within 0 and 1, got 1.5"},
	{"logprobs", with("output_options", `{"logprobs":-1}`), "output_options.logprobs must not be negative, got -1"},
	{"prompt_logprobs", with("output_options", `{"prompt_logprobs":-1}`), "output_options.prompt_logprobs must not be negative, got -1"},
	{"min above max", with("stop_conditions", `{"max_tokens":4,"min_tokens":5}`), "stop_conditions.min_tokens must be between 0 and max_tokens (4), got 5"},
	{"adapter", with("routing", `{"lora_name":"other"}`), "routing.lora_name names no adapter that this worker serves (lora in its configuration)"},
	{"guide without a backend", with("sampling_options", `{"guided_decoding":{"regex":"a"}}`), "sampling_options.guided_decoding cannot be served: the engine was started without a guided decoding backend (guided_decoding_backend)"},
}

func (r refusal) check(t *testing.T, kind Kind) {
	b := newBench(t, kind, func(c *Config, _ *scripted) { c.GuidedDecoding = ptr(false) })
	err := b.handler.Generate(context.Background(), call(t, r.body), &record{})
	var refused *protocol.Error
	require.ErrorAs(t, err, &refused, "%s: %s", kind, r.name)
	require.Equal(t, protocol.ClassInvalidRequest, refused.Class, "%s: %s: %v", kind, r.name, err)
	require.NotNil(t, refused.Public, "%s: %s: the caller must read why", kind, r.name)
	require.Equal(t, r.public, refused.Public.Message, "%s: %s", kind, r.name)
	require.Empty(t, b.engine.calls, "%s: %s: nothing may reach the engine", kind, r.name)
}

func TestRefusals(t *testing.T) {
	for _, r := range refusals {
		r.check(t, Unified)
		r.check(t, Legacy)
	}
	for _, r := range unifiedRefusals {
		r.check(t, Unified)
		b := newBench(t, Legacy, func(c *Config, _ *scripted) { c.GuidedDecoding = ptr(false) })
		_, err := b.handler.plan(call(t, r.body))
		require.NoError(t, err, "legacy lets this pass, as recorded: %s", r.name)
	}
}

func TestAPromptThatFillsTheContextIsRefusedWithTheNumbers(t *testing.T) {
	for _, kind := range []Kind{Unified, Legacy} {
		b := newBench(t, kind, func(c *Config, _ *scripted) { c.Bounds.MaxNumTokens = 0 })
		_, err := b.handler.plan(call(t, with("token_ids", "["+strings.Repeat("1,", 99)+"1]")))
		var refused *protocol.Error
		require.ErrorAs(t, err, &refused)
		require.Equal(t, protocol.PublicContextLength, refused.Public.Type)
		require.Equal(t, int64(100), *refused.Public.Limit)
		require.Equal(t, int64(100), *refused.Public.Actual)
	}
}

func TestBoundsThatWereNotReportedAreNotChecked(t *testing.T) {
	b := newBench(t, Unified, func(c *Config, _ *scripted) { c.Bounds = ipc.Bounds{} })
	p, err := b.handler.plan(call(t, with("token_ids", "["+strings.Repeat("1,", 5000)+"99999]")))
	require.NoError(t, err)
	require.Equal(t, 4, p.budget)
	p, err = b.handler.plan(call(t, with("stop_conditions", `{"max_tokens":null}`)))
	require.NoError(t, err)
	require.Equal(t, unbounded, p.budget)
	require.Nil(t, p.generate.Sampling.MaxTokens)
}

func TestChunkedPrefillLiftsTheLimitOfOneStep(t *testing.T) {
	b := newBench(t, Unified, func(c *Config, _ *scripted) { c.ChunkedPrefill = true })
	_, err := b.handler.plan(call(t, with("token_ids", "["+strings.Repeat("1,", 80)+"1]")))
	require.NoError(t, err)
}

func TestLegacyFailsWhereTheRecordingsFail(t *testing.T) {
	for name, body := range map[string]string{
		"no max_tokens":         `{"token_ids":[1],"stop_conditions":{}}`,
		"no stop_conditions":    `{"token_ids":[1],"sampling_options":{}}`,
		"null sampling_options": with("sampling_options", "null"),
	} {
		_, err := newBench(t, Legacy, nil).handler.plan(call(t, body))
		var failed *protocol.Error
		require.ErrorAs(t, err, &failed, name)
		require.Equal(t, protocol.ReasonBackendUnknown, failed.Reason, name)
		_, err = newBench(t, Unified, nil).handler.plan(call(t, body))
		require.NoError(t, err, name)
	}
}

func TestANullPriority(t *testing.T) {
	p, err := newBench(t, Legacy, nil).handler.plan(call(t, with("priority", "null")))
	require.NoError(t, err)
	require.Nil(t, p.generate.Priority)
	p, err = newBench(t, Unified, nil).handler.plan(call(t, with("priority", "null")))
	require.NoError(t, err)
	require.Equal(t, DefaultPriority, *p.generate.Priority)
}

func TestAdapters(t *testing.T) {
	lora := func(c *Config, _ *scripted) { c.Adapters = []Adapter{{Name: "sql", Path: "/adapters/sql", ID: 1}} }
	p, err := newBench(t, Unified, lora).handler.plan(call(t, with("routing", `{"lora_name":"sql"}`)))
	require.NoError(t, err)
	require.Equal(t, &ipc.LoRA{Name: "sql", Path: "/adapters/sql", ID: 1}, p.generate.LoRA)
	p, err = newBench(t, Legacy, lora).handler.plan(call(t, with("routing", `{"lora_name":"sql"}`)))
	require.NoError(t, err)
	require.Nil(t, p.generate.LoRA, "the 1.6.1 worker ignores the name")
}

func TestTraceHeaders(t *testing.T) {
	b := newBench(t, Unified, nil)
	p, err := b.handler.plan(call(t, base))
	require.NoError(t, err)
	require.Equal(t, "req-1", p.generate.TraceHeaders["request-id"])
	require.Regexp(t, "^00-[0-9a-f]{32}-[0-9a-f]{16}-01$", p.generate.TraceHeaders["traceparent"])

	c := call(t, base)
	c.Trace = map[string]string{"traceparent": "00-aa-bb-01", "tracestate": "k=v"}
	p, err = b.handler.plan(c)
	require.NoError(t, err)
	require.Equal(t, map[string]string{"request-id": "req-1", "traceparent": "00-aa-bb-01", "tracestate": "k=v"}, p.generate.TraceHeaders)

	c.Canary = true
	p, err = b.handler.plan(c)
	require.NoError(t, err)
	require.Nil(t, p.generate.TraceHeaders, "a health check sends none")
}

func TestEscapeRegexIsPythons(t *testing.T) {
	require.Equal(t, `a\.b\ \-\#\~\&\|x_y"'<>@!%,/:;=日\	\
`, escapeRegex("a.b -#~&|x_y\"'<>@!%,/:;=日\t\n"))
}
