package config

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// setting is one key with a checked value.
type setting struct {
	key   string
	value any
}

// convert turns the text of a variable or flag into settings. Its error is the
// reason alone; a *keyError blames another key than the binding's first.
type convert func(text string) ([]setting, error)

// keyError blames one of several keys that a text sets.
type keyError struct {
	key string
	err error
}

func (e *keyError) Error() string { return e.err.Error() }
func (e *keyError) Unwrap() error { return e.err }

// binding connects keys with a variable and with flags of today's Python
// worker. A flag's meaning is that of its variable, as it is there.
type binding struct {
	env   string
	flags []string // with dashes; the first is the name, the rest are aliases
	// negatable marks a flag without argument that has a --no- form.
	negatable bool
	keys      []string
	// seconds marks a plain number of seconds, for all the keys.
	seconds bool
	// to defaults to the reading of keys[0] as text.
	to convert
	// arg is the placeholder in help.
	arg string
	// note replaces the key's own description where the text means something
	// else.
	note string
	// deprecated names what to use instead, for a variable or a flag.
	deprecated func(Origin) string
}

// bindings is the table of variables and flags that set something. Names and
// meanings were read from Dynamo 1.6.1 (dynamo/common/configuration and
// dynamo/trtllm/backend_args.py, and the runtime's environment names).
var bindings = []*binding{
	{env: "DYN_NAMESPACE", flags: []string{"--namespace"}, keys: []string{"namespace"}, arg: "NAME"},
	{env: "DYN_NAMESPACE_WORKER_SUFFIX", keys: []string{"namespace_suffix"}},
	{env: "DYN_ENDPOINT", flags: []string{"--endpoint"}, keys: []string{endpointKey, "namespace", "component", "namespace_suffix"}, to: toEndpoint, arg: "dyn://NS.COMP.EP"},

	{env: "DYN_TRTLLM_MODEL", flags: []string{"--model", "--model-path"}, keys: []string{"model.path"}, arg: "PATH"},
	{env: "DYN_TRTLLM_SERVED_MODEL_NAME", flags: []string{"--served-model-name"}, keys: []string{"model.name", "model.aliases"}, to: toModelNames, arg: "NAME", note: "Names of the model; the first is its own, the rest are aliases."},
	{env: "DYN_TRTLLM_KV_BLOCK_SIZE", flags: []string{"--kv-block-size"}, keys: []string{"model.kv_block_size"}, arg: "N"},
	{env: "DYN_ENDPOINT_TYPES", flags: []string{"--endpoint-types", "--dyn-endpoint-types"}, keys: []string{"model.endpoint_types"}, arg: "LIST"},
	{env: "DYN_REASONING_PARSER", flags: []string{"--dyn-reasoning-parser"}, keys: []string{"model.reasoning_parser"}, arg: "NAME"},
	{env: "DYN_TOOL_CALL_PARSER", flags: []string{"--dyn-tool-call-parser"}, keys: []string{"model.tool_call_parser"}, arg: "NAME"},
	{env: "DYN_CUSTOM_JINJA_TEMPLATE", flags: []string{"--custom-jinja-template"}, keys: []string{"model.custom_jinja_template"}, arg: "FILE"},
	{env: "DYN_SELF_HOST_METADATA", keys: []string{"model.files"}, to: toChoice("model.files", FilesHTTP, FilesLocal), note: "True serves the model's files over HTTP, false names local files."},
	{env: "DYN_STABLE_ROUTING_ID", keys: []string{"model.stable_routing_id"}},

	{env: "DYN_TRTLLM_TENSOR_PARALLEL_SIZE", flags: []string{"--tensor-parallel-size"}, keys: []string{"engine.trtllm.tensor_parallel_size"}, arg: "N"},
	{env: "DYN_TRTLLM_PIPELINE_PARALLEL_SIZE", flags: []string{"--pipeline-parallel-size"}, keys: []string{"engine.trtllm.pipeline_parallel_size"}, arg: "N"},
	{env: "DYN_TRTLLM_EXPERT_PARALLEL_SIZE", flags: []string{"--expert-parallel-size"}, keys: []string{"engine.trtllm.expert_parallel_size"}, arg: "N"},
	{env: "DYN_TRTLLM_ENABLE_ATTENTION_DP", flags: []string{"--enable-attention-dp"}, negatable: true, keys: []string{"engine.trtllm.enable_attention_dp"}},
	{env: "DYN_TRTLLM_GPUS_PER_NODE", flags: []string{"--gpus-per-node"}, keys: []string{"engine.trtllm.gpus_per_node"}, arg: "N"},
	{env: "DYN_TRTLLM_MAX_BATCH_SIZE", flags: []string{"--max-batch-size"}, keys: []string{"engine.trtllm.max_batch_size"}, arg: "N"},
	{env: "DYN_TRTLLM_MAX_NUM_TOKENS", flags: []string{"--max-num-tokens"}, keys: []string{"engine.trtllm.max_num_tokens"}, arg: "N"},
	{env: "DYN_TRTLLM_MAX_SEQ_LEN", flags: []string{"--max-seq-len"}, keys: []string{"engine.trtllm.max_seq_len"}, arg: "N"},
	{env: "DYN_TRTLLM_MAX_BEAM_WIDTH", flags: []string{"--max-beam-width"}, keys: []string{"engine.trtllm.max_beam_width"}, arg: "N"},
	{env: "DYN_TRTLLM_FREE_GPU_MEMORY_FRACTION", flags: []string{"--free-gpu-memory-fraction"}, keys: []string{"engine.trtllm.free_gpu_memory_fraction"}, arg: "SHARE"},
	{env: "DYN_TRTLLM_LOAD_FORMAT", flags: []string{"--load-format"}, keys: []string{"engine.trtllm.load_format"}, arg: "FORMAT"},
	{env: "DYN_TRTLLM_GUIDED_DECODING_BACKEND", flags: []string{"--guided-decoding-backend"}, keys: []string{"engine.trtllm.guided_decoding_backend"}, arg: "NAME"},
	{env: "DYN_TRTLLM_EXTRA_ENGINE_ARGS", flags: []string{"--extra-engine-args"}, keys: []string{"engine.trtllm.extra_engine_args"}, arg: "FILE"},
	{env: "DYN_TRTLLM_OVERRIDE_ENGINE_ARGS", flags: []string{"--override-engine-args"}, keys: []string{overrideKey}, arg: "JSON", note: "A JSON object with engine arguments that come last; not together with --trtllm.* flags."},
	{env: "DYN_TRTLLM_DISAGGREGATION_MODE", flags: []string{"--disaggregation-mode"}, keys: []string{"role"}, to: toRole, arg: "MODE", note: "agg or pd for an aggregated worker, prefill, or decode."},

	// The deprecated pair stands first, so that either half can be replaced.
	{env: "DYN_TRTLLM_PUBLISH_EVENTS_AND_METRICS", flags: []string{"--publish-events-and-metrics"}, negatable: true, keys: []string{"publish.kv_events", "publish.metrics"}, to: toBoth, note: "Deprecated: both of the following.", deprecated: func(o Origin) string {
		if o.Kind == FromEnv {
			return "DYN_TRTLLM_PUBLISH_KV_EVENTS and DYN_TRTLLM_PUBLISH_METRICS"
		}
		return "both --publish-kv-events and --publish-metrics"
	}},
	{env: "DYN_TRTLLM_PUBLISH_KV_EVENTS", flags: []string{"--publish-kv-events"}, negatable: true, keys: []string{"publish.kv_events"}},
	{env: "DYN_TRTLLM_PUBLISH_METRICS", flags: []string{"--publish-metrics"}, negatable: true, keys: []string{"publish.metrics"}},

	{env: "DYN_ENGINE_CONV_AFFINITY", flags: []string{"--conversation-affinity"}, negatable: true, keys: []string{"affinity.override"}},
	{env: "DYN_ENGINE_CONV_AFFINITY_DP_RANK_SOURCE", flags: []string{"--conversation-affinity-dp-rank-source"}, keys: []string{"affinity.rank_source"}, arg: "SOURCE"},

	{env: "DYN_ENGINE_REQUEST_LIMIT", flags: []string{"--engine-request-limit"}, keys: []string{"admission.max_requests"}, to: toRequestLimit, arg: "N", note: "Requests served at once, at least 1; without it there is no limit."},
	{env: "DYN_DYNAMO_REQUEST_QUEUE_LIMIT", keys: []string{"admission.queue"}},

	{env: "DYN_ENGINE_HEALTH_CHECK_INTERVAL", keys: []string{"engine.watch.health_interval"}, to: toHealthInterval, note: "Seconds; less than 0.05 is taken for that."},
	{env: "DYN_ENGINE_HEALTH_CHECK_TIMEOUT", keys: []string{"engine.watch.health_timeout"}, to: toHealthTimeout, note: "Seconds, 0 or less for no bound."},

	{env: "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", keys: []string{"drain.grace"}, to: toGrace, note: "Seconds; a negative number is taken for 0."},
	{env: "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", keys: []string{"drain.budget"}, seconds: true},

	{env: "DYN_DISCOVERY_BACKEND", flags: []string{"--discovery-backend"}, keys: []string{"discovery.backend"}, arg: "etcd"},
	{env: "ETCD_ENDPOINTS", keys: []string{"etcd.endpoints"}},
	{env: "ETCD_LEASE_TTL", keys: []string{"etcd.lease_ttl"}, seconds: true},
	{env: "ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS", keys: []string{"etcd.startup_timeout"}, seconds: true},
	{env: "ETCD_KEEPALIVE_INTERVAL_SECONDS", keys: []string{"etcd.keepalive_interval"}, seconds: true},
	{env: "ETCD_KEEPALIVE_TIMEOUT_SECONDS", keys: []string{"etcd.keepalive_timeout"}, seconds: true},
	{env: "ETCD_AUTH_USERNAME", keys: []string{"etcd.username"}},
	{env: "ETCD_AUTH_PASSWORD", keys: []string{"etcd.password"}},
	{env: "ETCD_AUTH_CA", keys: []string{"etcd.ca"}},
	{env: "ETCD_AUTH_CLIENT_CERT", keys: []string{"etcd.client_cert"}},
	{env: "ETCD_AUTH_CLIENT_KEY", keys: []string{"etcd.client_key"}},

	{env: "DYN_REQUEST_PLANE", flags: []string{"--request-plane"}, keys: []string{"request_plane.kind"}, arg: "PLANE"},
	{env: "DYN_REQUEST_PLANE_CODEC", keys: []string{"request_plane.codec"}},
	{env: "DYN_TCP_RPC_HOST", keys: []string{"request_plane.tcp.host"}},
	{env: "DYN_TCP_RPC_PORT", keys: []string{"request_plane.tcp.port"}},
	{env: "DYN_TCP_MAX_MESSAGE_SIZE", keys: []string{"request_plane.tcp.max_message_size"}},
	{env: "DYN_TCP_TLS_CERT_PATH", flags: []string{"--tcp-tls-cert-path"}, keys: []string{"request_plane.tcp.tls.cert_file"}, arg: "FILE"},
	{env: "DYN_TCP_TLS_KEY_PATH", flags: []string{"--tcp-tls-key-path"}, keys: []string{"request_plane.tcp.tls.key_file"}, arg: "FILE"},
	{env: "DYN_TCP_TLS_CLIENT_CA_CERT_PATH", flags: []string{"--tcp-tls-client-ca-cert-path"}, keys: []string{"request_plane.tcp.tls.client_ca_file"}, arg: "FILE"},
	{env: "DYN_TCP_TLS_HANDSHAKE_TIMEOUT_SECS", flags: []string{"--tcp-tls-handshake-timeout"}, keys: []string{"request_plane.tcp.tls.handshake_timeout", "response_plane.tls.handshake_timeout"}, seconds: true, arg: "SECONDS"},

	{env: "DYN_RESPONSE_PLANE", flags: []string{"--response-plane"}, keys: []string{"response_plane.kind"}, arg: "tcp"},
	{env: "DYN_TCP_TLS_CA_CERT_PATH", flags: []string{"--tcp-tls-ca-cert-path"}, keys: []string{"response_plane.tls.ca_file"}, arg: "FILE"},
	{env: "DYN_TCP_TLS_INSECURE", flags: []string{"--tcp-tls-insecure"}, negatable: true, keys: []string{"response_plane.tls.insecure"}},
	{env: "DYN_TCP_TLS_SERVER_NAME", flags: []string{"--tcp-tls-server-name"}, keys: []string{"response_plane.tls.server_name"}, arg: "NAME"},
	{env: "DYN_TCP_TLS_CLIENT_CERT_PATH", flags: []string{"--tcp-tls-client-cert-path"}, keys: []string{"response_plane.tls.cert_file"}, arg: "FILE"},
	{env: "DYN_TCP_TLS_CLIENT_KEY_PATH", flags: []string{"--tcp-tls-client-key-path"}, keys: []string{"response_plane.tls.key_file"}, arg: "FILE"},

	{env: "DYN_EVENT_PLANE", flags: []string{"--event-plane"}, keys: []string{"event_plane.kind"}, arg: "PLANE"},

	{env: "NATS_SERVER", keys: []string{"nats.server"}},
	{env: "NATS_AUTH_USERNAME", keys: []string{"nats.username"}},
	{env: "NATS_AUTH_PASSWORD", keys: []string{"nats.password"}},
	{env: "NATS_AUTH_TOKEN", keys: []string{"nats.token"}},
	{env: "NATS_AUTH_NKEY", keys: []string{"nats.nkey"}},
	{env: "NATS_AUTH_CREDENTIALS_FILE", keys: []string{"nats.credentials_file"}},
	{env: "NATS_STARTUP_CONNECT_TIMEOUT_SECONDS", keys: []string{"nats.startup_timeout"}, seconds: true},
	{env: "NATS_TLS_CA_CERT_PATH", flags: []string{"--nats-tls-ca-cert-path"}, keys: []string{"nats.tls.ca_file"}, arg: "FILE"},
	{env: "NATS_TLS_CLIENT_CERT_PATH", flags: []string{"--nats-tls-client-cert-path"}, keys: []string{"nats.tls.cert_file"}, arg: "FILE"},
	{env: "NATS_TLS_CLIENT_KEY_PATH", flags: []string{"--nats-tls-client-key-path"}, keys: []string{"nats.tls.key_file"}, arg: "FILE"},
	{env: "NATS_TLS_INSECURE", flags: []string{"--nats-tls-insecure"}, negatable: true, keys: []string{"nats.tls.insecure"}},

	{env: "DYN_SYSTEM_HOST", keys: []string{"system.host"}},
	{env: "DYN_SYSTEM_PORT", keys: []string{"system.port"}},
	{env: "DYN_SYSTEM_HEALTH_PATH", keys: []string{"system.health_path"}},
	{env: "DYN_SYSTEM_LIVE_PATH", keys: []string{"system.live_path"}},
	{env: "DYN_SYSTEM_STARTING_HEALTH_STATUS", keys: []string{"system.starting_health_status"}},
	{env: "DYN_HEALTH_CHECK_ENABLED", keys: []string{"health_check.enabled"}},
	{env: "DYN_CANARY_WAIT_TIME", keys: []string{"health_check.wait"}, seconds: true},
	{env: "DYN_HEALTH_CHECK_REQUEST_TIMEOUT", keys: []string{"health_check.timeout"}, seconds: true},
	{env: "DYN_HEALTH_CHECK_PAYLOAD", flags: []string{"--health-check-payload"}, keys: []string{"health_check.payload"}, arg: "JSON|@FILE"},

	{env: "DYN_LOG", flags: []string{"--log-level"}, keys: []string{"log.level"}, to: toLogLevel, arg: "LEVEL", note: "A level; of a list with levels for single modules the level for everything else counts."},
	{env: "DYN_LOGGING_JSONL", keys: []string{"log.format"}, to: toChoice("log.format", "json", "console"), note: "True writes JSON, false lines for people."},
}

// The readings of bindings; init completes those that have none.
func init() {
	for _, b := range bindings {
		switch {
		case b.to != nil:
		case b.seconds:
			b.to = toSeconds(b.keys...)
		case b.keys[0] == overrideKey: // see loader.override
		default:
			b.to = toText(b.keys[0])
		}
	}
}

// one checks a value against the rules of a key.
func one(name string, v any) (setting, error) {
	if err := checkValue(byName[name], v); err != nil {
		return setting{}, &keyError{key: name, err: err}
	}
	return setting{key: name, value: v}, nil
}

// toText is the ordinary reading: the text is the value of one key.
func toText(name string) convert {
	return func(text string) ([]setting, error) {
		k := byName[name]
		v, err := parseText(k, text)
		if err != nil {
			return nil, err
		}
		s, err := one(name, v)
		return []setting{s}, err
	}
}

// toSeconds reads a number of seconds without a unit, into all the keys.
func toSeconds(names ...string) convert {
	return func(text string) ([]setting, error) {
		d, err := parseSeconds(text)
		if err != nil {
			return nil, err
		}
		var out []setting
		for _, n := range names {
			s, err := one(n, d)
			if err != nil {
				return nil, err
			}
			out = append(out, s)
		}
		return out, nil
	}
}

// toChoice maps true and false onto two words.
func toChoice(name, yes, no string) convert {
	return func(text string) ([]setting, error) {
		b, err := parseBool(text)
		if err != nil {
			return nil, err
		}
		v := no
		if b {
			v = yes
		}
		return []setting{{key: name, value: v}}, nil
	}
}

// toEndpoint takes an endpoint name or a whole address. A whole address is
// taken as it stands: Dynamo appends the suffix to its own default only.
func toEndpoint(text string) ([]setting, error) {
	parts, full, err := fullEndpoint(text)
	if err != nil {
		return nil, err
	}
	if !full {
		s, err := one(endpointKey, text)
		return []setting{s}, err
	}
	return []setting{
		{key: "namespace", value: parts[0]},
		{key: "namespace_suffix", value: ""},
		{key: "component", value: parts[1]},
		{key: endpointKey, value: parts[2]},
	}, nil
}

// toModelNames splits at white space and commas, as Dynamo does.
func toModelNames(text string) ([]setting, error) {
	names := strings.FieldsFunc(text, func(r rune) bool {
		return r == ',' || r == ' ' || r == '\t' || r == '\n' || r == '\r' || r == '\f' || r == '\v'
	})
	if len(names) == 0 {
		return nil, errors.New("holds no name")
	}
	out := []setting{{key: "model.name", value: names[0]}}
	if len(names) > 1 {
		s, err := one("model.aliases", names[1:])
		if err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return out, nil
}

// toRole reads a disaggregation mode of Dynamo.
func toRole(text string) ([]setting, error) {
	mode := strings.TrimSpace(text)
	const known = "agg, pd, prefill, decode"
	switch mode {
	case "agg", "pd":
		mode = RoleAggregated
	case RolePrefill, RoleDecode:
	case "prefill_and_decode":
		return nil, fmt.Errorf("%s is no mode any more; agg or pd is meant", quote(mode))
	case "encode":
		return nil, &valueError{kind: ErrUnsupported, reason: quote(mode) + " is not supported: " + noteMedia}
	default:
		return nil, &valueError{kind: ErrValue, reason: fmt.Sprintf("%s is not one of %s", quote(text), known), suggestion: nearest(mode, strings.Split(known, ", "))}
	}
	return []setting{{key: "role", value: mode}}, nil
}

// toBoth reads the switch for both kinds of publishing.
func toBoth(text string) ([]setting, error) {
	on, err := parseBool(text)
	if err != nil {
		return nil, err
	}
	return []setting{{key: "publish.kv_events", value: on}, {key: "publish.metrics", value: on}}, nil
}

// toRequestLimit refuses 0: in the file it means no limit, but whoever sets
// the limit here means one.
func toRequestLimit(text string) ([]setting, error) {
	n, err := parseInt(text)
	if err != nil {
		return nil, err
	}
	if n < 1 {
		return nil, fmt.Errorf("%d is less than 1", n)
	}
	return []setting{{key: "admission.max_requests", value: n}}, nil
}

func toGrace(text string) ([]setting, error) {
	d, err := parseSeconds(text)
	if err != nil {
		return nil, err
	}
	return []setting{{key: "drain.grace", value: max(d, 0)}}, nil
}

// toHealthInterval knows no way to turn the check off, as Dynamo knows none.
func toHealthInterval(text string) ([]setting, error) {
	d, err := parseSeconds(text)
	if err != nil {
		return nil, err
	}
	return []setting{{key: "engine.watch.health_interval", value: max(d, 50*time.Millisecond)}}, nil
}

func toHealthTimeout(text string) ([]setting, error) {
	d, err := parseSeconds(text)
	if err != nil {
		return nil, err
	}
	return []setting{{key: "engine.watch.health_timeout", value: max(d, 0)}}, nil
}

// toLogLevel understands the filters of Dynamo's runtime: "info",
// "warn,dynamo_runtime=debug", "dynamo_llm=debug". Only the part that concerns
// everything counts, as there are no Rust modules here.
func toLogLevel(text string) ([]setting, error) {
	level := ""
	levels := byName["log.level"].choices
	parts := strings.Split(text, ",")
	for _, part := range parts {
		part = strings.ToLower(strings.TrimSpace(part))
		if part == "warning" {
			part = "warn"
		}
		switch {
		case part == "" || strings.ContainsAny(part, "=[]{}:"):
			continue
		case slices.Contains(levels, part):
			level = part
		case len(parts) == 1:
			_, err := one("log.level", part)
			return nil, err
		}
	}
	if level == "" {
		return nil, nil
	}
	return []setting{{key: "log.level", value: level}}, nil
}
