package config

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestBroken is the contract of `worker check`: a mistake is reported under
// exactly the keys (or the name of the variable or flag, when there is no key)
// that are wrong, and nothing else is reported.
func TestBroken(t *testing.T) {
	sim := "engine:\n  kind: sim\n"
	for _, tc := range []struct {
		name string
		in   input
		keys []string
		kind error
		says []string // parts of the message
	}{
		// The file as a whole.
		{name: "no such file", in: input{args: []string{"--config", "gone.yaml"}}, keys: []string{"--config"}, kind: ErrFile, says: []string{"gone.yaml", "file does not exist"}},
		{name: "no YAML", in: input{yaml: "a: [1\nb: 2\n"}, keys: []string{""}, kind: ErrSyntax, says: []string{"conf/w.yaml", "line"}},
		{name: "a list at the top", in: input{yaml: "- namespace\n"}, keys: []string{""}, kind: ErrValue, says: []string{"mapping"}},
		{name: "two documents", in: input{yaml: "namespace: a\n---\nnamespace: b\n"}, keys: []string{""}, kind: ErrSyntax, says: []string{"second document"}},
		{name: "too large", in: input{yaml: strings.Repeat("# padding\n", 200_000)}, keys: []string{"--config"}, kind: ErrFile},

		// Names.
		{name: "unknown key", in: input{yaml: "namespce: a\n"}, keys: []string{"namespce"}, kind: ErrUnknownKey, says: []string{"did you mean namespace?", "conf/w.yaml:1"}},
		{name: "unknown nested key", in: input{yaml: "drain:\n  grace: 1s\n  bugdet: 30s\n"}, keys: []string{"drain.bugdet"}, kind: ErrUnknownKey, says: []string{"did you mean drain.budget?", ":3"}},
		{name: "unknown section", in: input{yaml: "drian:\n  budget: 30s\n  more: 1\n"}, keys: []string{"drian"}, kind: ErrUnknownKey, says: []string{"did you mean drain?"}},
		{name: "key of another section", in: input{yaml: "lease_ttl: 5s\n"}, keys: []string{"lease_ttl"}, kind: ErrUnknownKey, says: []string{"did you mean etcd.lease_ttl?"}},
		{name: "wrong case", in: input{yaml: "Namespace: a\n"}, keys: []string{"Namespace"}, kind: ErrUnknownKey, says: []string{"did you mean namespace?"}},
		{name: "dotted key", in: input{yaml: "drain.budget: 30s\n"}, keys: []string{"drain.budget"}, kind: ErrUnknownKey, says: []string{"nest it"}},
		{name: "duplicate key", in: input{yaml: "namespace: a\nhandler: legacy\nnamespace: b\n"}, keys: []string{"namespace"}, kind: ErrDuplicateKey, says: []string{":3", "line 1"}},
		{name: "duplicate section", in: input{yaml: "drain: {grace: 1s}\nlog: {level: info}\ndrain: {budget: 1s}\n"}, keys: []string{"drain"}, kind: ErrDuplicateKey},
		{name: "duplicate engine argument", in: input{yaml: "engine:\n  args:\n    KV:\n      a: 1\n      a: 2\n"}, keys: []string{"engine.args.KV.a"}, kind: ErrDuplicateKey, says: []string{":5"}},
		{name: "merge key", in: input{yaml: "drain: &d {grace: 1s}\netcd:\n  <<: *d\n"}, keys: []string{"etcd.<<"}, kind: ErrUnsupported},
		{name: "key that is a list", in: input{yaml: "drain:\n  ? [a]\n  : 1\n"}, keys: []string{"drain"}, kind: ErrSyntax},
		{name: "value instead of a section", in: input{yaml: "drain: 30s\n"}, keys: []string{"drain"}, kind: ErrValue, says: []string{"mapping"}},
		{name: "section instead of a value", in: input{yaml: "namespace:\n  name: a\n"}, keys: []string{"namespace"}, kind: ErrValue, says: []string{"is a mapping"}},

		// Types.
		{name: "duration without unit", in: input{yaml: "drain:\n  budget: 30\n"}, keys: []string{"drain.budget"}, kind: ErrValue, says: []string{"no unit", "30s"}},
		{name: "duration without unit, with fraction", in: input{yaml: "drain:\n  budget: 1.5\n"}, keys: []string{"drain.budget"}, kind: ErrValue, says: []string{"no unit"}},
		{name: "duration of nonsense", in: input{yaml: "drain:\n  budget: soon\n"}, keys: []string{"drain.budget"}, kind: ErrValue},
		{name: "negative duration", in: input{yaml: "drain:\n  budget: -1s\n"}, keys: []string{"drain.budget"}, kind: ErrValue, says: []string{"negative"}},
		{name: "number in quotes", in: input{yaml: "system:\n  port: '8080'\n"}, keys: []string{"system.port"}, kind: ErrValue, says: []string{"is text"}},
		{name: "fraction for a number", in: input{yaml: "system:\n  port: 8080.5\n"}, keys: []string{"system.port"}, kind: ErrValue},
		{name: "huge number", in: input{yaml: "admission:\n  max_requests: 99999999999999999999\n"}, keys: []string{"admission.max_requests"}, kind: ErrValue},
		{name: "text for a switch", in: input{yaml: "health_check:\n  enabled: 'yes'\n"}, keys: []string{"health_check.enabled"}, kind: ErrValue, says: []string{"true or false"}},
		{name: "switch for text", in: input{yaml: "namespace: true\n"}, keys: []string{"namespace"}, kind: ErrValue, says: []string{"quotes"}},
		{name: "value left out", in: input{yaml: "namespace:\n"}, keys: []string{"namespace"}, kind: ErrValue, says: []string{"no value"}},
		{name: "text for a list", in: input{yaml: "etcd:\n  endpoints: http://a:1\n"}, keys: []string{"etcd.endpoints"}, kind: ErrValue, says: []string{"list"}},
		{name: "mapping in a list", in: input{yaml: "engine:\n  command: [a, {b: c}]\n"}, keys: []string{"engine.command"}, kind: ErrValue, says: []string{"entry 2"}},
		{name: "list for engine arguments", in: input{yaml: "engine:\n  args: [a]\n"}, keys: []string{"engine.args"}, kind: ErrValue},
		{name: "infinite engine argument", in: input{yaml: "engine:\n  args:\n    a: {b: .inf}\n"}, keys: []string{"engine.args.a.b"}, kind: ErrValue, says: []string{":3"}},
		{name: "engine argument of a strange type", in: input{yaml: "engine:\n  args:\n    a: !!binary aGk=\n"}, keys: []string{"engine.args.a"}, kind: ErrValue},

		// Ranges and choices.
		{name: "port too high", in: input{yaml: "system:\n  port: 65536\n"}, keys: []string{"system.port"}, kind: ErrValue, says: []string{"-1 to 65535"}},
		{name: "port too low", in: input{yaml: "system:\n  port: -2\n"}, keys: []string{"system.port"}, kind: ErrValue},
		{name: "size of nothing", in: input{yaml: "model:\n  kv_block_size: 0\n"}, keys: []string{"model.kv_block_size"}, kind: ErrValue},
		{name: "no time to dial", in: input{yaml: "response_plane:\n  dial_timeout: 0s\n"}, keys: []string{"response_plane.dial_timeout"}, kind: ErrValue},
		{name: "lease of half a second", in: input{yaml: "etcd:\n  lease_ttl: 1500ms\n"}, keys: []string{"etcd.lease_ttl"}, kind: ErrValue, says: []string{"whole number of seconds"}},
		{name: "unknown plane", in: input{yaml: "request_plane:\n  kind: http\n"}, keys: []string{"request_plane.kind"}, kind: ErrValue, says: []string{"tcp, nats"}},
		{name: "misspelt choice", in: input{yaml: "handler: legcy\n"}, keys: []string{"handler"}, kind: ErrValue, says: []string{"did you mean legacy?"}},
		{name: "quic", in: input{yaml: "response_plane:\n  kind: quic\n"}, keys: []string{"response_plane.kind"}, kind: ErrUnsupported, says: []string{"QUIC"}},
		{name: "unknown endpoint type", in: input{yaml: "model:\n  endpoint_types: [chat, completion]\n"}, keys: []string{"model.endpoint_types"}, kind: ErrValue, says: []string{"did you mean completions?"}},
		{name: "none and chat", in: input{yaml: "model:\n  endpoint_types: [none, chat]\n"}, keys: []string{"model.endpoint_types"}, kind: ErrValue},
		{name: "no endpoint type", in: input{yaml: "model:\n  endpoint_types: []\n"}, keys: []string{"model.endpoint_types"}, kind: ErrValue},
		{name: "alias twice", in: input{yaml: "model:\n  aliases: [a, a]\n"}, keys: []string{"model.aliases"}, kind: ErrValue},
		{name: "blank name", in: input{yaml: "namespace: ' '\n"}, keys: []string{"namespace"}, kind: ErrValue},
		{name: "separator in a name", in: input{yaml: "namespace: a/b\n"}, keys: []string{"namespace"}, kind: ErrValue},
		{name: "wildcard in a name", in: input{yaml: "component: '*'\n"}, keys: []string{"component"}, kind: ErrValue},
		{name: "endpoint of two parts", in: input{yaml: "endpoint: a.b\n"}, keys: []string{"endpoint"}, kind: ErrValue, says: []string{"dyn://namespace.component.endpoint"}},
		{name: "endpoint with an empty part", in: input{yaml: "endpoint: dyn://a..c\n"}, keys: []string{"endpoint"}, kind: ErrValue},
		{name: "wrong scheme", in: input{yaml: "nats:\n  server: http://a:4222\n"}, keys: []string{"nats.server"}, kind: ErrValue, says: []string{"nats://"}},
		{name: "second server wrong", in: input{yaml: "nats:\n  server: nats://a:4222,b:4222\n"}, keys: []string{"nats.server"}, kind: ErrValue},
		{name: "no etcd", in: input{yaml: "etcd:\n  endpoints: []\n"}, keys: []string{"etcd.endpoints"}, kind: ErrValue},
		{name: "etcd port of words", in: input{yaml: "etcd:\n  endpoints: ['http://a:port']\n"}, keys: []string{"etcd.endpoints"}, kind: ErrValue},
		{name: "host name to listen on", in: input{yaml: "request_plane:\n  tcp:\n    host: localhost\n"}, keys: []string{"request_plane.tcp.host"}, kind: ErrValue, says: []string{"IP address"}},
		{name: "URL as an address", in: input{yaml: "model:\n  files_address: http://a:1\n"}, keys: []string{"model.files_address"}, kind: ErrValue},
		{name: "address without a port to reach", in: input{yaml: "model:\n  files_address: a:0\n"}, keys: []string{"model.files_address"}, kind: ErrValue},
		{name: "listener without a port", in: input{yaml: "model:\n  files_listen: 0.0.0.0\n"}, keys: []string{"model.files_listen"}, kind: ErrValue},
		{name: "path without a slash", in: input{yaml: "system:\n  health_path: health\n"}, keys: []string{"system.health_path"}, kind: ErrValue},
		{name: "variable without a value", in: input{yaml: "engine:\n  env: [A=1, B]\n"}, keys: []string{"engine.env"}, kind: ErrValue, says: []string{"entry 2"}},
		{name: "variable twice", in: input{yaml: "engine:\n  env: [A=1, A=2]\n"}, keys: []string{"engine.env"}, kind: ErrValue, says: []string{"sets A twice"}},
		{name: "empty program", in: input{yaml: "engine:\n  command: ['', x]\n"}, keys: []string{"engine.command"}, kind: ErrValue},
		{name: "payload of nonsense", in: input{yaml: "health_check:\n  payload: '{'\n"}, keys: []string{"health_check.payload"}, kind: ErrValue, says: []string{"JSON object"}},
		{name: "payload that is no object", in: input{yaml: "health_check:\n  payload: '[1]'\n"}, keys: []string{"health_check.payload"}, kind: ErrValue},
		{name: "payload file that is not there", in: input{yaml: "health_check:\n  payload: '@p.json'\n"}, keys: []string{"health_check.payload"}, kind: ErrFile, says: []string{"conf/p.json"}},
		{name: "broken payload file", in: input{yaml: "health_check:\n  payload: '@p.json'\n", files: map[string]string{"conf/p.json": "no"}}, keys: []string{"health_check.payload"}, kind: ErrValue},
		{name: "PEM in pieces", in: input{yaml: "etcd:\n  ca: |\n    MIIB\n    AAAA\n"}, keys: []string{"etcd.ca"}, kind: ErrValue},

		{name: "dot in a component", in: input{yaml: "component: a.b\n"}, keys: []string{"component"}, kind: ErrValue, says: []string{"dot"}},
		{name: "white space in a model name", in: input{yaml: "model:\n  name: a b\n"}, keys: []string{"model.name"}, kind: ErrValue},
		{name: "empty alias", in: input{yaml: "model:\n  aliases: ['']\n"}, keys: []string{"model.aliases"}, kind: ErrValue},
		{name: "white space in an alias", in: input{yaml: "model:\n  aliases: [a b]\n"}, keys: []string{"model.aliases"}, kind: ErrValue},
		{name: "zero byte in an argument", in: input{yaml: "engine:\n  command: [a, \"b\\0\"]\n"}, keys: []string{"engine.command"}, kind: ErrValue, says: []string{"entry 2"}},
		{name: "zero byte in text", in: input{yaml: "model:\n  reasoning_parser: \"b\\0\"\n"}, keys: []string{"model.reasoning_parser"}, kind: ErrValue},
		{name: "port beyond the last", in: input{yaml: "model:\n  files_listen: 'a:65536'\n"}, keys: []string{"model.files_listen"}, kind: ErrValue},
		{name: "list for a duration", in: input{yaml: "drain:\n  budget: [1s]\n"}, keys: []string{"drain.budget"}, kind: ErrValue, says: []string{"duration such as"}},
		{name: "list for a switch", in: input{yaml: "health_check:\n  enabled: [true]\n"}, keys: []string{"health_check.enabled"}, kind: ErrValue},
		{name: "mapping for a number", in: input{yaml: "system:\n  port: {a: 1}\n"}, keys: []string{"system.port"}, kind: ErrValue, says: []string{"whole number"}},
		{name: "nothing for a list", in: input{yaml: "etcd:\n  endpoints:\n"}, keys: []string{"etcd.endpoints"}, kind: ErrValue, says: []string{"[]"}},
		{name: "long nonsense", in: input{yaml: "handler: " + strings.Repeat("x", 500) + "\n"}, keys: []string{"handler"}, kind: ErrValue, says: []string{"xxx…"}},

		// Settings that do not go together.
		{name: "two overrides", in: input{args: []string{"--override-engine-args", "{}", "--trtllm.a", "1"}}, keys: []string{"engine.trtllm.override_engine_args"}, kind: ErrConflict, says: []string{"flag --override-engine-args", "flag --trtllm.a"}},
		{name: "two overrides from afar", in: input{yaml: "engine:\n  trtllm:\n    override_engine_args: {a: 1}\n", args: []string{"--trtllm.a", "1"}}, keys: []string{"engine.trtllm.override_engine_args"}, kind: ErrConflict, says: []string{"conf/w.yaml:3"}},
		{name: "alias is the name", in: input{yaml: "model:\n  name: a\n  aliases: [b, a]\n"}, keys: []string{"model.aliases"}, kind: ErrConflict},
		{name: "address for local files", in: input{yaml: "model:\n  files: local\n  files_address: a\n"}, keys: []string{"model.files_address"}, kind: ErrConflict},
		{name: "user without a password", in: input{yaml: "nats:\n  username: u\n"}, keys: []string{"nats.username"}, kind: ErrConflict, says: []string{"nats.password is not"}},
		{name: "password without a user", in: input{yaml: "etcd:\n  password: p\n"}, keys: []string{"etcd.password"}, kind: ErrConflict},
		{name: "certificate without a key", in: input{yaml: "nats:\n  tls:\n    cert_file: c\n"}, keys: []string{"nats.tls.cert_file"}, kind: ErrConflict},
		{name: "client CA without TLS", in: input{yaml: "request_plane:\n  tcp:\n    tls:\n      client_ca_file: c\n"}, keys: []string{"request_plane.tcp.tls.client_ca_file"}, kind: ErrConflict},
		{name: "TLS to plain etcd", in: input{yaml: "etcd:\n  ca: ca.pem\n"}, keys: []string{"etcd.ca"}, kind: ErrConflict, says: []string{"https://"}},
		{name: "one port twice", in: input{yaml: "system:\n  port: 9000\nrequest_plane:\n  tcp:\n    port: 9000\n"}, keys: []string{"request_plane.tcp.port"}, kind: ErrConflict, says: []string{"system.port", ":5"}},
		{name: "one path twice", in: input{yaml: "system:\n  health_path: /live\n"}, keys: []string{"system.live_path"}, kind: ErrConflict},
		{name: "path of the metrics", in: input{yaml: "system:\n  health_path: /metrics\n"}, keys: []string{"system.health_path"}, kind: ErrConflict},
		{name: "token outside of the vocabulary", in: input{yaml: sim + "  sim:\n    vocab_size: 10\n    eos_token_id: 10\n"}, keys: []string{"engine.sim.eos_token_id"}, kind: ErrConflict},
		{name: "range of tokens upside down", in: input{yaml: sim + "  sim:\n    first_token_id: 9\n    last_token_id: 8\n"}, keys: []string{"engine.sim.last_token_id"}, kind: ErrConflict},
		{name: "vocabulary without room", in: input{yaml: sim + "  sim:\n    vocab_size: 6\n"}, keys: []string{"engine.sim.first_token_id"}, kind: ErrConflict},
		{name: "share of nothing of the load", in: input{yaml: sim + "  sim:\n    fair_share_multiplier: 0\n"}, keys: []string{"engine.sim.fair_share_multiplier"}, kind: ErrValue, says: []string{"not above 0"}},
		{name: "no time for a transfer", in: input{yaml: sim + "  sim:\n    kv_transfer_timeout: 0s\n"}, keys: []string{"engine.sim.kv_transfer_timeout"}, kind: ErrValue},
		{name: "build of nobody", in: input{yaml: sim + "  sim:\n    build: rc20\n"}, keys: []string{"engine.sim.build"}, kind: ErrValue},
		{name: "engine arguments for the simulator", in: input{yaml: sim + "  args: {a: 1}\n"}, keys: []string{"engine.args"}, kind: ErrConflict},

		// Variables.
		{name: "variable of the wrong type", in: input{env: []string{"DYN_SYSTEM_PORT=http"}}, keys: []string{"system.port"}, kind: ErrValue, says: []string{"env DYN_SYSTEM_PORT", `"http"`}},
		{name: "switch of another spelling", in: input{env: []string{"DYN_HEALTH_CHECK_ENABLED=enabled"}}, keys: []string{"health_check.enabled"}, kind: ErrValue, says: []string{"env DYN_HEALTH_CHECK_ENABLED"}},
		{name: "seconds with a unit", in: input{env: []string{"ETCD_LEASE_TTL=30s"}}, keys: []string{"etcd.lease_ttl"}, kind: ErrValue, says: []string{"plain number of seconds", "env ETCD_LEASE_TTL"}},
		{name: "seconds without end", in: input{env: []string{"DYN_CANARY_WAIT_TIME=1e300"}}, keys: []string{"health_check.wait"}, kind: ErrValue},
		{name: "seconds that are no number", in: input{env: []string{"DYN_CANARY_WAIT_TIME=nan"}}, keys: []string{"health_check.wait"}, kind: ErrValue},
		{name: "one variable for two keys", in: input{env: []string{"DYN_TCP_TLS_HANDSHAKE_TIMEOUT_SECS=0"}}, keys: []string{"request_plane.tcp.tls.handshake_timeout"}, kind: ErrValue},
		{name: "kubernetes", in: input{env: []string{"DYN_DISCOVERY_BACKEND=kubernetes"}}, keys: []string{"discovery.backend"}, kind: ErrUnsupported, says: []string{"Kubernetes", "env DYN_DISCOVERY_BACKEND"}},
		{name: "discovery in files", in: input{env: []string{"DYN_DISCOVERY_BACKEND=file"}}, keys: []string{"discovery.backend"}, kind: ErrUnsupported},
		{name: "discovery in memory", in: input{env: []string{"DYN_DISCOVERY_BACKEND=mem"}}, keys: []string{"discovery.backend"}, kind: ErrUnsupported},
		{name: "quic by variable", in: input{env: []string{"DYN_RESPONSE_PLANE=quic"}}, keys: []string{"response_plane.kind"}, kind: ErrUnsupported, says: []string{"env DYN_RESPONSE_PLANE"}},
		{name: "rank source of nobody", in: input{env: []string{"DYN_ENGINE_CONV_AFFINITY_DP_RANK_SOURCE=router"}}, keys: []string{"affinity.rank_source"}, kind: ErrValue, says: []string{"router"}},
		{name: "limit of nothing", in: input{env: []string{"DYN_ENGINE_REQUEST_LIMIT=0"}}, keys: []string{"admission.max_requests"}, kind: ErrValue},
		{name: "limit of words", in: input{env: []string{"DYN_ENGINE_REQUEST_LIMIT=many"}}, keys: []string{"admission.max_requests"}, kind: ErrValue},
		{name: "limit without end", in: input{env: []string{"DYN_DYNAMO_REQUEST_QUEUE_LIMIT=99999999999999999999"}}, keys: []string{"admission.queue"}, kind: ErrValue, says: []string{"too large"}},
		{name: "grace of words", in: input{env: []string{"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS=long"}}, keys: []string{"drain.grace"}, kind: ErrValue},
		{name: "model without a name", in: input{env: []string{"DYN_TRTLLM_SERVED_MODEL_NAME=, "}}, keys: []string{"model.name"}, kind: ErrValue},
		{name: "aliases twice", in: input{env: []string{"DYN_TRTLLM_SERVED_MODEL_NAME=a b b"}}, keys: []string{"model.aliases"}, kind: ErrValue},
		{name: "level of nobody", in: input{env: []string{"DYN_LOG=inof"}}, keys: []string{"log.level"}, kind: ErrValue, says: []string{"did you mean info?", "env DYN_LOG"}},
		{name: "removed mode", in: input{env: []string{"DYN_TRTLLM_DISAGGREGATION_MODE=prefill_and_decode"}}, keys: []string{"role"}, kind: ErrValue, says: []string{"agg or pd", "env DYN_TRTLLM_DISAGGREGATION_MODE"}},
		{name: "encode worker", in: input{args: []string{"--disaggregation-mode", "encode"}}, keys: []string{"role"}, kind: ErrUnsupported, says: []string{"flag --disaggregation-mode", "dynamo.trtllm"}},
		{name: "misspelt mode", in: input{args: []string{"--disaggregation-mode", "prefil"}}, keys: []string{"role"}, kind: ErrValue, says: []string{"did you mean prefill?"}},
		{name: "mode in the file", in: input{yaml: "role: agg\n"}, keys: []string{"role"}, kind: ErrValue, says: []string{"aggregated, prefill, decode"}},
		{name: "both of nonsense", in: input{args: []string{"--publish-events-and-metrics=maybe"}}, keys: []string{"publish.kv_events"}, kind: ErrValue},
		{name: "both of nonsense by variable", in: input{env: []string{"DYN_TRTLLM_PUBLISH_EVENTS_AND_METRICS=maybe"}}, keys: []string{"publish.kv_events"}, kind: ErrValue},
		{name: "share of nothing", in: input{env: []string{"DYN_TRTLLM_FREE_GPU_MEMORY_FRACTION=0"}}, keys: []string{"engine.trtllm.free_gpu_memory_fraction"}, kind: ErrValue, says: []string{"0.0 is not above 0"}},
		{name: "share in words", in: input{env: []string{"DYN_TRTLLM_FREE_GPU_MEMORY_FRACTION=most"}}, keys: []string{"engine.trtllm.free_gpu_memory_fraction"}, kind: ErrValue, says: []string{"is not a number"}},
		{name: "no ranks", in: input{args: []string{"--tensor-parallel-size", "0"}}, keys: []string{"engine.trtllm.tensor_parallel_size"}, kind: ErrValue},
		{name: "GPU memory service", in: input{args: []string{"--load-format", "gms"}}, keys: []string{"engine.trtllm.load_format"}, kind: ErrUnsupported},
		{name: "empty load format", in: input{yaml: "engine: {trtllm: {load_format: ''}}\n"}, keys: []string{"engine.trtllm.load_format"}, kind: ErrValue},
		{name: "guided backend of nobody", in: input{args: []string{"--guided-decoding-backend", "xgramar"}}, keys: []string{"engine.trtllm.guided_decoding_backend"}, kind: ErrValue, says: []string{"did you mean xgrammar?"}},
		{name: "broken override", in: input{args: []string{"--override-engine-args", "{a: 1}"}}, keys: []string{"engine.trtllm.override_engine_args"}, kind: ErrValue, says: []string{"JSON", "flag --override-engine-args"}},
		{name: "override of no object", in: input{env: []string{"DYN_TRTLLM_OVERRIDE_ENGINE_ARGS=[1]"}}, keys: []string{"engine.trtllm.override_engine_args"}, kind: ErrValue, says: []string{"JSON object", "env DYN_TRTLLM_OVERRIDE_ENGINE_ARGS"}},
		{name: "huge override", in: input{args: []string{"--override-engine-args", strings.Repeat(" ", 1<<20) + "{}"}}, keys: []string{"engine.trtllm.override_engine_args"}, kind: ErrValue, says: []string{"more than"}},
		{name: "infinite override", in: input{args: []string{"--override-engine-args", `{"a": {"b": 1e999}}`}}, keys: []string{"engine.trtllm.override_engine_args.a.b"}, kind: ErrValue},
		{name: "dynamic flag without a value", in: input{args: []string{"--trtllm.a.b"}}, keys: []string{"--trtllm.a.b"}, kind: ErrSyntax, says: []string{"needs a value"}},
		{name: "dynamic flag before a flag", in: input{args: []string{"--trtllm.a.b", "--publish-kv-events"}}, keys: []string{"--trtllm.a.b"}, kind: ErrSyntax, says: []string{"needs a value"}},
		{name: "dynamic flag with an equals sign", in: input{args: []string{"--trtllm.a.b=1"}}, keys: []string{"--trtllm.a.b"}, kind: ErrSyntax, says: []string{"equals sign"}},
		{name: "dynamic flag with a hole", in: input{args: []string{"--trtllm.a..b", "1"}}, keys: []string{"engine.trtllm.override_engine_args.a..b"}, kind: ErrValue, says: []string{"empty part", "flag --trtllm.a..b"}},
		{name: "dynamic flags across", in: input{args: []string{"--trtllm.a", "5", "--trtllm.a.b", "6"}}, keys: []string{"engine.trtllm.override_engine_args.a.b"}, kind: ErrValue, says: []string{"flag --trtllm.a.b"}},
		{name: "list for an override", in: input{yaml: "engine: {trtllm: {override_engine_args: [a]}}\n"}, keys: []string{"engine.trtllm.override_engine_args"}, kind: ErrValue, says: []string{"mapping"}},
		{name: "number in quotes for a share", in: input{yaml: "engine: {trtllm: {free_gpu_memory_fraction: '0.5'}}\n"}, keys: []string{"engine.trtllm.free_gpu_memory_fraction"}, kind: ErrValue, says: []string{"must be a number"}},
		{name: "list for a share", in: input{yaml: "engine: {trtllm: {free_gpu_memory_fraction: [0.5]}}\n"}, keys: []string{"engine.trtllm.free_gpu_memory_fraction"}, kind: ErrValue, says: []string{"must be a number"}},

		{name: "adapters that are no list", in: input{yaml: "lora: {name: a, path: b}\n"}, keys: []string{"lora"}, kind: ErrValue, says: []string{"must be a list"}},
		{name: "adapter that is no mapping", in: input{yaml: "lora: [a]\n"}, keys: []string{"lora"}, kind: ErrValue, says: []string{"entry 1 is text"}},
		{name: "adapter without a name", in: input{yaml: "lora: [{path: b}]\n"}, keys: []string{"lora"}, kind: ErrValue, says: []string{"entry 1 has no name"}},
		{name: "adapter without a path", in: input{yaml: "lora: [{name: a, path: b}, {name: c}]\n"}, keys: []string{"lora"}, kind: ErrValue, says: []string{"entry 2 has no path"}},
		{name: "adapter twice", in: input{yaml: "lora: [{name: a, path: b}, {name: a, path: c}]\n"}, keys: []string{"lora"}, kind: ErrValue, says: []string{`holds "a" twice`}},
		{name: "adapter with an unknown key", in: input{yaml: "lora: [{nmae: a, path: b}]\n"}, keys: []string{"lora"}, kind: ErrUnknownKey, says: []string{"did you mean name?"}},
		{name: "adapter with a doubled key", in: input{yaml: "lora: [{name: a, name: b}]\n"}, keys: []string{"lora"}, kind: ErrDuplicateKey},
		{name: "adapter with a list for a name", in: input{yaml: "lora: [{name: [a], path: b}]\n"}, keys: []string{"lora"}, kind: ErrValue, says: []string{"entry 1 has a name that is a list"}},
		{name: "adapter with a zero byte", in: input{yaml: "lora: [{name: \"a\\0\", path: b}]\n"}, keys: []string{"lora"}, kind: ErrValue, says: []string{"zero byte"}},
		{name: "adapters by set, broken", in: input{args: []string{"--set", "lora=[{"}}, keys: []string{"lora"}, kind: ErrValue},
		{name: "images", in: input{env: []string{"DYN_TRTLLM_MODALITY=multimodal"}}, keys: []string{"DYN_TRTLLM_MODALITY"}, kind: ErrUnsupported, says: []string{"multimodal"}},
		{name: "adapters", in: input{env: []string{"DYN_LORA_ENABLED=true"}}, keys: []string{"DYN_LORA_ENABLED"}, kind: ErrUnsupported},

		// The command line.
		{name: "unknown flag", in: input{args: []string{"--namspace", "a"}}, keys: []string{"--namspace"}, kind: ErrUnknownKey, says: []string{"did you mean --namespace?"}},
		{name: "unknown short flag", in: input{args: []string{"-x"}}, keys: []string{"-x"}, kind: ErrUnknownKey},
		{name: "flag without a value", in: input{args: []string{"--namespace"}}, keys: []string{"namespace"}, kind: ErrValue, says: []string{"flag --namespace"}},
		{name: "flag of the wrong type", in: input{args: []string{"--engine-request-limit", "many"}}, keys: []string{"admission.max_requests"}, kind: ErrValue, says: []string{"flag --engine-request-limit", "many"}},
		{name: "flag outside of its choices", in: input{args: []string{"--conversation-affinity-dp-rank-source", "router"}}, keys: []string{"affinity.rank_source"}, kind: ErrValue, says: []string{"--conversation-affinity-dp-rank-source", "router"}},
		{name: "switch with nonsense", in: input{args: []string{"--conversation-affinity=perhaps"}}, keys: []string{"affinity.override"}, kind: ErrValue, says: []string{"--conversation-affinity"}},
		{name: "file as discovery", in: input{args: []string{"--discovery-backend", "file"}}, keys: []string{"discovery.backend"}, kind: ErrUnsupported, says: []string{"flag --discovery-backend"}},
		{name: "images by flag", in: input{args: []string{"--modality", "multimodal"}}, keys: []string{"--modality"}, kind: ErrUnsupported, says: []string{`"multimodal"`, "only text models are served", "python3 -m dynamo.trtllm"}},
		{name: "images by switch", in: input{args: []string{"--enable-multimodal"}}, keys: []string{"--enable-multimodal"}, kind: ErrUnsupported},
		{name: "connectors", in: input{args: []string{"--connector", "none", "kvbm", "--namespace", "a"}}, keys: []string{"--connector"}, kind: ErrUnsupported, says: []string{`"none kvbm"`}},
		{name: "flag for a value", in: input{args: []string{"--namespace", "--request-plane", "nats"}}, keys: []string{"namespace"}, kind: ErrValue, says: []string{"needs a value", "flag --namespace"}},
		{name: "abbreviation of many", in: input{args: []string{"--max", "8"}}, keys: []string{"--max"}, kind: ErrUnknownKey, says: []string{"--max-batch-size, --max-num-tokens"}},
		{name: "stray word", in: input{args: []string{"serve"}}, keys: []string{"serve"}, kind: ErrSyntax},
		{name: "empty file name", in: input{args: []string{"--config="}}, keys: []string{"--config"}, kind: ErrValue},
		{name: "set of an unknown key", in: input{args: []string{"--set", "drain.bugdet=1s"}}, keys: []string{"drain.bugdet"}, kind: ErrUnknownKey, says: []string{"did you mean drain.budget?", "--set"}},
		{name: "set of a section", in: input{args: []string{"--set", "drain=1s"}}, keys: []string{"drain"}, kind: ErrUnknownKey, says: []string{"section"}},
		{name: "set without a value", in: input{args: []string{"--set", "drain.budget"}}, keys: []string{"--set"}, kind: ErrSyntax},
		{name: "set of the wrong type", in: input{args: []string{"--set", "drain.budget=30"}}, keys: []string{"drain.budget"}, kind: ErrValue, says: []string{"no unit", "--set"}},
		{name: "set below a value", in: input{yaml: "engine:\n  args: {a: 1}\n", args: []string{"--set", "engine.args.a.b=1"}}, keys: []string{"engine.args.a.b"}, kind: ErrConflict},
		{name: "set of nothing in particular", in: input{args: []string{"--set", "engine.args..b=1"}}, keys: []string{"engine.args..b"}, kind: ErrSyntax},
		{name: "set of engine arguments to a word", in: input{args: []string{"--set", "engine.args=fast"}}, keys: []string{"engine.args"}, kind: ErrValue},
		{name: "set of broken YAML", in: input{args: []string{"--set", "engine.args.a=[1"}}, keys: []string{"engine.args.a"}, kind: ErrValue},
		{name: "set of a strange type", in: input{args: []string{"--set", "engine.args.a={b: !!binary aGk=}"}}, keys: []string{"engine.args.a.b"}, kind: ErrValue},
		{name: "set of a broken list", in: input{args: []string{"--set", "etcd.endpoints=[a"}}, keys: []string{"etcd.endpoints"}, kind: ErrValue},

		// Several at once, in the order of the layers.
		{
			name: "everywhere",
			in: input{
				yaml: "namespce: a\nsystem:\n  port: 99999\n  color: red\n",
				env:  []string{"DYN_CANARY_WAIT_TIME=x", "DYN_RESPONSE_PLANE=quic"},
				args: []string{"--set", "drain.budget=30", "--request-plane", "http"},
			},
			keys: []string{"namespce", "system.port", "system.color", "response_plane.kind", "health_check.wait", "drain.budget", "request_plane.kind"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, r, err := tc.in.load()
			require.Error(t, err)
			require.Nil(t, c)
			require.NotNil(t, r)
			var errs Errors
			require.ErrorAs(t, err, &errs)
			require.Equal(t, tc.keys, errs.Keys(), "%v", err)
			if tc.kind != nil {
				require.ErrorIs(t, err, tc.kind)
			}
			for _, part := range tc.says {
				require.ErrorContains(t, err, part)
			}
			for _, p := range errs {
				require.NotContains(t, p.Error(), "\n")
				require.True(t, strings.HasPrefix(p.Error(), p.Key))
			}
		})
	}
}

// TestValidate checks that a Config made in code is held to the same rules.
func TestValidate(t *testing.T) {
	c := Default()
	c.Model.Path = "/m"
	require.NoError(t, c.Validate())
	c.System.Port = 70000
	c.Handler = "other"
	var errs Errors
	require.ErrorAs(t, c.Validate(), &errs)
	require.Equal(t, []string{"handler", "system.port"}, errs.Keys())
	require.Equal(t, Origin{}, errs[0].Origin)
}

func TestSuggestions(t *testing.T) {
	for name, want := range map[string]string{
		"namespce":              "namespace",
		"nmaespace":             "namespace",
		"drain.gracee":          "drain.grace",
		"drain.tls":             "",
		"etcd.endpoint":         "etcd.endpoints",
		"lease_ttl":             "etcd.lease_ttl",
		"cert_file":             "", // three sections have one
		"system.color":          "",
		"a":                     "",
		"engine.sim.eos_token":  "engine.sim.eos_token_id",
		"request_plan.kind":     "request_plane.kind",
		"":                      "",
		strings.Repeat("x", 99): "",
	} {
		require.Equal(t, want, nearestKey(name), name)
	}
	require.Empty(t, nearest("http", []string{"tcp", "nats"}))
	require.Equal(t, "info", nearest("inof", []string{"warn", "info"}))
}
