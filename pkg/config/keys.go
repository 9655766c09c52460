package config

import (
	"reflect"
	"time"
)

// kind is how the value of a key is written and checked.
type kind uint8

const (
	kindString kind = iota
	kindBool
	kindInt
	kindDuration
	kindList
	kindFloat
	kindAdapters
	kindMap
)

// key is one setting.
type key struct {
	name string
	// doc is one line for people; it becomes the comment in worker.yaml.
	doc string
	// choices are the only values of a string, when not nil.
	choices []string
	// refused maps further values to the reason why they are not to be had.
	refused map[string]string
	// check is a rule that needs no other key. Its error is the reason alone.
	check func(v any) error
	// path marks the name of a file or folder, which resolves against the
	// folder of the configuration file.
	path bool
	// show renders a value that may hold something secret; nil shows all.
	show func(v any) any
	// secret marks values that are never shown.
	secret bool

	kind  kind
	index []int // of the field in Config
	def   any
}

// keys is the table of everything that can be set, in the order of reports and
// of worker.yaml. Kind and default come from Config and Default, see init.
var keys = []*key{
	{name: "namespace", doc: "Dynamo namespace in which the worker registers.", check: nonEmptyName},
	{name: "namespace_suffix", doc: "Appended to the namespace after a hyphen, to tell sets of workers apart during a rolling update.", check: name},
	{name: "component", doc: "Component in the namespace; the frontend expects backend for workers that answer.", check: nonEmptyLabel},
	{name: "endpoint", doc: "Endpoint of the component; dyn://namespace.component.endpoint sets all three and drops the suffix.", check: nonEmptyLabel},
	{name: "handler", doc: "unified reads the engine's affinity policy before it registers, legacy with its first request as Dynamo 1.6.1 does.", choices: []string{HandlerUnified, HandlerLegacy}},

	{name: "role", doc: "Part in serving a model: aggregated, or prefill or decode, of which one runs prompts and the other goes on from there.", choices: []string{RoleAggregated, RolePrefill, RoleDecode}},

	{name: "model.path", doc: "Folder with config.json and the tokenizer. Required to serve; nothing is ever downloaded.", path: true},
	{name: "model.name", doc: "Name under which callers find the model; empty uses the path.", check: oneWord},
	{name: "model.aliases", doc: "Further names for the same model.", check: words},
	{name: "model.endpoint_types", doc: "APIs of the frontend that serve the model: chat, completions, or none alone.", check: endpointTypes},
	{name: "model.kv_block_size", doc: "Tokens in a KV block, for the card, when the engine does not report it.", check: atLeast(1)},
	{name: "model.context_length", doc: "Context length for the card; 0 takes the engine's, or else the model's.", check: atLeast(0)},
	{name: "model.files", doc: "How the frontend gets the tokenizer files: http from this worker, or local from a disk that both can read.", choices: []string{FilesHTTP, FilesLocal}},
	{name: "model.files_address", doc: "Address in the files' URLs, host or host:port; empty finds one.", check: hostMaybePort},
	{name: "model.files_listen", doc: "Where the files are served while the system server is off; port 0 takes a free one.", check: hostPort},
	{name: "model.reasoning_parser", doc: "Reasoning parser that the frontend applies; empty is none."},
	{name: "model.tool_call_parser", doc: "Tool call parser that the frontend applies; empty is none."},
	{name: "model.custom_jinja_template", doc: "Chat template file that replaces the model's own.", path: true},
	{name: "model.stable_routing_id", doc: "Identity for routing that outlives restarts; empty is none."},

	{name: "lora", doc: "LoRA adapters that requests can name, as a list of {name, path}.", check: adapters},

	{name: "engine.kind", doc: "trtllm runs TensorRT-LLM, sim the simulated engine.", choices: []string{EngineTRTLLM, EngineSim}},
	{name: "engine.command", doc: "For trtllm the Python interpreter (python3) and its options, to which the built-in program is added; for sim program and arguments of the engine, empty for the built-in one.", check: command, show: showArgs},
	{name: "engine.env", doc: "Variables for the engine process, as KEY=VALUE, on top of the worker's own.", check: environment, show: showEnv},
	{name: "engine.start_timeout", doc: "Longest time from start to readiness; 0s leaves it to start_inactivity."},
	{name: "engine.start_inactivity", doc: "Longest silence of an engine that loads, before it counts as stuck.", check: positive},
	{name: "engine.stop_timeout", doc: "Time for the engine to shut down by itself before it is killed.", check: positive},
	{name: "engine.restart.policy", doc: "An engine that failed is started again by this worker (in_place), or ends it with exit code 1 (never), as Dynamo 1.6.1's workers end.", choices: []string{RestartInPlace, RestartNever}},
	{name: "engine.restart.max", doc: "Starts of an engine after failures within the window, after which the worker ends with exit code 1.", check: atLeast(1)},
	{name: "engine.restart.window", doc: "Time of serving after which all of these starts are forgiven; a part of it forgives its part.", check: positive},
	{name: "engine.restart.backoff", doc: "Pause before the first of these starts; it doubles with each, and up to half of it is left out by chance."},
	{name: "engine.restart.backoff_max", doc: "Longest such pause."},
	{name: "engine.restart.proof_timeout", doc: "Time for the request by which an engine that was started again has to prove itself.", check: positive},
	{name: "engine.restart.suspect_after", doc: "A request that was in flight when the engine failed this many times is answered with a lasting error instead of being moved on; 0 is never.", check: atLeast(0)},

	{name: "engine.watch.health_interval", doc: "Pause between questions to the engine whether it is well; 0s asks none."},
	{name: "engine.watch.health_timeout", doc: "Time for its answer, after which it counts as failed; 0s waits for ever."},
	{name: "engine.watch.no_progress", doc: "The engine counts as failed when requests are in flight and none of them gets anything for this long; 0s is never."},
	{name: "engine.watch.prompt_allowance", doc: "Added to no_progress and stream_inactivity for each token of a prompt that has got no output yet."},
	{name: "engine.watch.stream_inactivity", doc: "A request that gets nothing from the engine for this long is cancelled there and moved to another worker; 0s is never."},
	{name: "engine.watch.failure_window", doc: "Time over which failures of requests in the engine are counted.", check: positive},
	{name: "engine.watch.failure_share", doc: "The engine counts as failed when this share of the requests in the window failed in it; 0 is never.", check: share},
	{name: "engine.watch.failure_count", doc: "And at least this many did.", check: atLeast(1)},
	{name: "engine.watch.canary_failures", doc: "The engine counts as failed when this many health checks in a row get no good answer, see health_check; 0 is never.", check: atLeast(0)},

	{name: "engine.args", doc: "Arguments of TensorRT-LLM, merged after the engine file and like one: entries replace, those of kv_cache_config one by one.", show: showTree},

	{name: "engine.trtllm.tensor_parallel_size", doc: "Tensor-parallel ranks.", check: atLeast(1)},
	{name: "engine.trtllm.pipeline_parallel_size", doc: "Pipeline-parallel ranks.", check: atLeast(1)},
	{name: "engine.trtllm.expert_parallel_size", doc: "Expert-parallel ranks of a mixture of experts; 0 leaves it to the engine.", check: atLeast(0)},
	{name: "engine.trtllm.enable_attention_dp", doc: "Attention data parallelism: each tensor-parallel rank attends to requests of its own."},
	{name: "engine.trtllm.gpus_per_node", doc: "GPUs of a node; 0 counts the visible ones.", check: atLeast(0)},
	{name: "engine.trtllm.max_batch_size", doc: "Requests that a rank runs at once.", check: atLeast(1)},
	{name: "engine.trtllm.max_num_tokens", doc: "Tokens that a rank takes in one step.", check: atLeast(1)},
	{name: "engine.trtllm.max_seq_len", doc: "Longest sequence, prompt and answer together; 0 takes the model's.", check: atLeast(0)},
	{name: "engine.trtllm.max_beam_width", doc: "Beams of beam search.", check: atLeast(1)},
	{name: "engine.trtllm.free_gpu_memory_fraction", doc: "Share for the KV cache of the GPU memory that is free once the model is loaded.", check: fraction},
	{name: "engine.trtllm.load_format", doc: "How the weights are loaded, auto or dummy.", check: loadFormat},
	{name: "engine.trtllm.guided_decoding_backend", doc: "Backend for structured output, xgrammar or llguidance; empty is none.", check: guidedBackend},
	{name: "engine.trtllm.extra_engine_args", doc: "Engine file: YAML with arguments of TensorRT-LLM, which replace the settings above; empty is none.", path: true},
	{name: "engine.trtllm.override_engine_args", doc: "Arguments that come last; they are merged into plain sections and replace typed ones whole. --trtllm.a.b VALUE flags are the other way to write it.", show: showTree},

	{name: "engine.sim.vocab_size", doc: "Simulated vocabulary; must fit the tokenizer.", check: between(2, 1<<24)},
	{name: "engine.sim.first_token_id", doc: "Lowest token id that is made up, above the tokenizer's special ones.", check: atLeast(1)},
	{name: "engine.sim.last_token_id", doc: "Highest token id that is made up; 0 is the last of the vocabulary.", check: atLeast(0)},
	{name: "engine.sim.eos_token_id", doc: "Token that ends a text.", check: atLeast(1)},
	{name: "engine.sim.eos_every", doc: "About one token in this many is the end token; 0 never ends by itself.", check: atLeast(0)},
	{name: "engine.sim.max_seq_len", doc: "Longest sequence, prompt included.", check: atLeast(2)},
	{name: "engine.sim.max_batch_size", doc: "Sequences that run at once on a rank; more wait.", check: atLeast(1)},
	{name: "engine.sim.max_num_tokens", doc: "Longest prompt, as a step without chunked prefill takes it.", check: atLeast(1)},
	{name: "engine.sim.block_size", doc: "Tokens in a KV block.", check: atLeast(1)},
	{name: "engine.sim.total_blocks", doc: "KV blocks of a rank.", check: atLeast(1)},
	{name: "engine.sim.attention_dp_size", doc: "Attention-DP ranks; 1 is without attention DP.", check: between(1, 4096)},
	{name: "engine.sim.conversation_affinity", doc: "What the simulated engine configuration says about conversation affinity."},
	{name: "engine.sim.max_sessions", doc: "Conversations whose rank the simulated router remembers.", check: atLeast(1)},
	{name: "engine.sim.fair_share_multiplier", doc: "How far beyond an even share of the requests the simulated router fills a rank; below 1 is 1.", check: aboveZero},
	{name: "engine.sim.new_conv_placement", doc: "Where the simulated router puts a new conversation.", choices: []string{"round_robin", "least_queued"}},
	{name: "engine.sim.config_unreadable", doc: "Hides the simulated engine configuration from the worker."},
	{name: "engine.sim.token_delay", doc: "Time of one engine step."},
	{name: "engine.sim.first_token_delay", doc: "Time before the first token of a request."},
	{name: "engine.sim.load_time", doc: "Time that loading takes."},
	{name: "engine.sim.stats_interval", doc: "Least time between two reports of the simulated engine's load.", check: positive},
	{name: "engine.sim.kv_transfer_host", doc: "Host on which a simulated prefill engine listens, and which it tells to those that take over its requests.", check: notBlank},
	{name: "engine.sim.kv_transfer_timeout", doc: "How long a simulated prefill engine holds KV that nobody takes, and how long a transfer may take.", check: positive},
	{name: "engine.sim.kv_transfer_delay", doc: "How much longer a simulated KV transfer takes than it has to."},
	{name: "engine.sim.kv_transfer_lose_every", doc: "One KV transfer in this many ends half-way; 0 is none.", check: atLeast(0)},
	{name: "engine.sim.build", doc: "TensorRT-LLM build whose abilities are simulated.", choices: []string{"rc19", "hybrid", "rc21", "rc29"}},
	{name: "engine.sim.calls_log", doc: "File that gets one JSON line for each call; empty is none.", path: true},

	{name: "affinity.override", doc: "Asks for conversation affinity. It cannot turn an engine's policy off, and may not contradict it, see on_disagreement."},
	{name: "affinity.rank_source", doc: "Who picks the rank of a conversation's first turn: the engine's router, or dynamo's.", choices: []string{RankFromEngine, RankFromDynamo}},
	{name: "affinity.on_disagreement", doc: "An override that the engine contradicts: fail ends the start, warn goes on as Dynamo 1.6.1 does.", choices: []string{Fail, Warn}},
	{name: "affinity.out_of_range", doc: "A requested rank that the engine does not have: warn lets the engine choose, reject answers with an error.", choices: []string{Warn, Reject}},
	{name: "affinity.log_conversation_ids", doc: "Writes conversation ids to the log as they are, instead of a hash."},

	{name: "admission.max_requests", doc: "Requests served at once; 0 is no limit.", check: atLeast(0)},
	{name: "admission.queue", doc: "Requests that may wait beyond max_requests before the frontend is told to go elsewhere.", check: atLeast(0)},
	{name: "admission.max_prompt_tokens", doc: "Prompt tokens of all requests that are served or wait, beyond which the frontend is told to go elsewhere; 0 is no limit.", check: atLeast(0)},

	{name: "disaggregation.transfer_timeout", doc: "Longest time that KV blocks may be on their way from a prefill to a decode worker; the engine's own kv_transfer_timeout_ms should not be longer.", check: positive},
	{name: "disaggregation.max_deferred_aborts", doc: "Requests of callers that have gone which may wait for their KV blocks before they are aborted.", check: atLeast(0)},

	{name: "drain.grace", doc: "Longest time in which late requests are still taken, after the records are withdrawn."},
	{name: "drain.budget", doc: "Longest time from the signal until what still runs is cut short (and continued elsewhere)."},
	{name: "drain.route", doc: "Who may drain the worker with POST /engine/control/drain on the system server: callers on its own host (local), any, or nobody (off).", choices: []string{DrainLocal, DrainAny, DrainOff}},

	{name: "discovery.backend", doc: "Where records are kept; only etcd.", choices: []string{"etcd"}, refused: map[string]string{
		"kubernetes": "discovery through the Kubernetes API is not supported, only etcd is",
		"file":       "discovery through files is not supported, only etcd is",
		"mem":        "discovery in memory is not supported, only etcd is",
	}},

	{name: "etcd.endpoints", doc: "Addresses of etcd.", check: etcdEndpoints, show: showAddresses},
	{name: "etcd.lease_ttl", doc: "Time after which the records of a dead worker vanish; whole seconds.", check: wholeSeconds},
	{name: "etcd.startup_timeout", doc: "How long the start waits for etcd.", check: positive},
	{name: "etcd.keepalive_interval", doc: "Interval of gRPC pings; 0s is off."},
	{name: "etcd.keepalive_timeout", doc: "Time without an answer to a ping after which the connection is given up.", check: positive},
	{name: "etcd.username", doc: "User name; empty is without."},
	{name: "etcd.password", doc: "Password of the user.", secret: true},
	{name: "etcd.ca", doc: "CA that signed etcd's certificate, as a file or as PEM text.", path: true, check: pemOrFile},
	{name: "etcd.client_cert", doc: "Certificate to show to etcd, as a file or as PEM text.", path: true, check: pemOrFile},
	{name: "etcd.client_key", doc: "Key of that certificate, as a file or as PEM text.", path: true, check: pemOrFile, secret: true},

	{name: "request_plane.kind", doc: "How requests arrive: tcp (the frontend's default) or nats.", choices: []string{PlaneTCP, PlaneNATS}},
	{name: "request_plane.codec", doc: "Codec of request bodies that the worker advertises.", choices: []string{CodecMsgpack, CodecJSON}},
	{name: "request_plane.tcp.host", doc: "Address to listen on and to advertise; empty finds one. Names are not resolved by the frontend.", check: maybeIP},
	{name: "request_plane.tcp.port", doc: "Port to listen on; 0 takes a free one.", check: between(0, 65535)},
	{name: "request_plane.tcp.max_message_size", doc: "Largest request in bytes.", check: between(4096, 1<<31-1)},
	{name: "request_plane.tcp.tls.cert_file", doc: "Certificate of the listener; turns TLS on.", path: true},
	{name: "request_plane.tcp.tls.key_file", doc: "Key of that certificate.", path: true},
	{name: "request_plane.tcp.tls.client_ca_file", doc: "CA of frontends; they must then show a certificate.", path: true},
	{name: "request_plane.tcp.tls.handshake_timeout", doc: "Time for a TLS handshake.", check: positive},

	{name: "response_plane.kind", doc: "How answers go back; only tcp.", choices: []string{PlaneTCP}, refused: map[string]string{
		"quic": "the QUIC response plane is not supported, only tcp is",
	}},
	{name: "response_plane.dial_timeout", doc: "Time to reach a request's frontend, retries included.", check: positive},
	{name: "response_plane.write_timeout", doc: "Time without progress of a write after which the frontend counts as gone.", check: positive},
	{name: "response_plane.merge_tokens", doc: "Sends tokens that are ready together in one frame; false sends a frame for each engine step."},
	{name: "response_plane.tls.ca_file", doc: "CA of frontends; turns TLS on.", path: true},
	{name: "response_plane.tls.insecure", doc: "TLS without verifying the frontend, for trials."},
	{name: "response_plane.tls.server_name", doc: "Name that the frontend's certificate must carry; turns TLS on.", check: oneWord},
	{name: "response_plane.tls.cert_file", doc: "Certificate to show to the frontend; turns TLS on.", path: true},
	{name: "response_plane.tls.key_file", doc: "Key of that certificate.", path: true},
	{name: "response_plane.tls.handshake_timeout", doc: "Time for a TLS handshake.", check: positive},

	{name: "publish.kv_events", doc: "Publish the engine's KV events for KV-aware routers. Accepted, but nothing is published yet."},
	{name: "publish.metrics", doc: "Publish the engine's load and iteration figures. Accepted, but nothing is published yet."},

	{name: "event_plane.kind", doc: "How KV events are published, nats or zmq. Nothing is published yet.", choices: []string{PlaneNATS, PlaneZMQ}},

	{name: "nats.server", doc: "Address of NATS, nats:// or tls://; several with commas.", check: natsServer, show: showAddress},
	{name: "nats.username", doc: "User name. With no authentication set at all, user/user is used, as Dynamo does."},
	{name: "nats.password", doc: "Password of the user.", secret: true},
	{name: "nats.token", doc: "Token, used when there is no user name.", secret: true},
	{name: "nats.nkey", doc: "NKey seed, used when there is no user name and no token.", secret: true},
	{name: "nats.credentials_file", doc: "Credentials file, used when there is nothing of the above.", path: true},
	{name: "nats.startup_timeout", doc: "How long the start waits for NATS.", check: positive},
	{name: "nats.tls.ca_file", doc: "CA that signed the server's certificate.", path: true},
	{name: "nats.tls.cert_file", doc: "Certificate to show to the server.", path: true},
	{name: "nats.tls.key_file", doc: "Key of that certificate.", path: true},
	{name: "nats.tls.insecure", doc: "TLS without verifying the server, for trials."},

	{name: "system.host", doc: "Address of the HTTP server for probes, metrics and model files.", check: notBlank},
	{name: "system.port", doc: "Its port; 0 takes a free one, -1 turns the server off.", check: between(-1, 65535)},
	{name: "system.health_path", doc: "Path of readiness.", check: httpPath},
	{name: "system.live_path", doc: "Path of liveness.", check: httpPath},
	{name: "system.starting_health_status", doc: "What readiness says before the endpoint is served.", choices: []string{StatusReady, StatusNotReady}},

	{name: "health_check.enabled", doc: "Sends a small request through the worker when it has been idle, and turns unready when that fails."},
	{name: "health_check.wait", doc: "Idle time before such a request.", check: positive},
	{name: "health_check.timeout", doc: "Time for its answer.", check: positive},
	{name: "health_check.payload", doc: "Its body: a JSON object, or @file; empty is the built-in one.", path: true, check: payload},

	{name: "log.level", doc: "Least important level that is logged.", choices: []string{"trace", "debug", "info", "warn", "error", "off"}},
	{name: "log.format", doc: "json for machines, console for people.", choices: []string{"json", "console"}},
	{name: "log.slow_request", doc: "Time without progress (a next phase, a token) after which a request is logged with the phase in which it is stuck; 0 is never."},
}

// simPrefix is in front of the simulated engine's arguments.
const simPrefix = "engine.sim."

// trtllmPrefix is in front of settings that only TensorRT-LLM has.
const trtllmPrefix = "engine.trtllm."

// engineFileKey names the file that Resolve reads.
const engineFileKey = trtllmPrefix + "extra_engine_args"

// The keys with a value of any shape.
const (
	argsKey     = "engine.args"
	overrideKey = trtllmPrefix + "override_engine_args"
)

// Keys with a meaning of their own, see loader.finish.
const (
	payloadKey  = "health_check.payload"
	templateKey = "model.custom_jinja_template"
)

// endpointKey may set its neighbours as well, see fullEndpoint.
const endpointKey = "endpoint"

var (
	byName   = map[string]*key{}
	sections = map[string]bool{}
)

// The table says nothing about types and defaults, so that neither can differ
// from Config and Default. A name without a field, or a field without a name,
// is a mistake in this package that a test finds; here it would end the
// process before main.
func init() {
	fields := map[string]reflect.StructField{}
	collect(reflect.TypeFor[Config](), "", nil, fields)
	def := reflect.ValueOf(Default()).Elem()
	for _, k := range keys {
		f := fields[k.name]
		k.index = f.Index
		k.def = plainValue(def.FieldByIndex(f.Index))
		switch k.def.(type) {
		case bool:
			k.kind = kindBool
		case int:
			k.kind = kindInt
		case time.Duration:
			k.kind = kindDuration
		case []string:
			k.kind = kindList
		case float64:
			k.kind = kindFloat
		case []Adapter:
			k.kind = kindAdapters
		case map[string]any:
			k.kind = kindMap
		}
		byName[k.name] = k
		for i, c := range k.name {
			if c == '.' {
				sections[k.name[:i]] = true
			}
		}
	}
}

// collect finds the dotted names of all settable fields below t.
func collect(t reflect.Type, prefix string, index []int, out map[string]reflect.StructField) {
	for i := range t.NumField() {
		f := t.Field(i)
		tag := f.Tag.Get("mapstructure")
		if tag == "-" {
			tag = f.Tag.Get("key") // filled by this package instead of viper
		}
		if tag == "" {
			continue
		}
		f.Index = append(index[:len(index):len(index)], i)
		if f.Type.Kind() == reflect.Struct {
			collect(f.Type, prefix+tag+".", f.Index, out)
			continue
		}
		out[prefix+tag] = f
	}
}

// plainValue reads a field as one of string, bool, int, float64,
// time.Duration, []string, []Adapter and map[string]any.
func plainValue(v reflect.Value) any {
	if v.Kind() == reflect.String {
		return v.String() // a Secret, too
	}
	return v.Interface()
}

// value reads the key's value in c.
func (k *key) value(c *Config) any {
	return plainValue(reflect.ValueOf(c).Elem().FieldByIndex(k.index))
}

// Keys are the names of all settings, in the order of reports.
func Keys() []string {
	out := make([]string, len(keys))
	for i, k := range keys {
		out[i] = k.name
	}
	return out
}
