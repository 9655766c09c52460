package config

import (
	"fmt"
	"slices"
	"strings"
)

// Status says what the worker does with an environment variable.
type Status string

const (
	// Used variables set keys.
	Used Status = "used"
	// Ignored variables are known and have no effect here.
	Ignored Status = "ignored"
	// Refused variables ask for something that this worker does not have; the
	// start fails unless their value asks for nothing.
	Refused Status = "refused"
)

// Variable is an environment variable of Dynamo's workers.
type Variable struct {
	// Name may end in *, for all names that begin so.
	Name   string
	Status Status
	// Keys are what a used variable sets.
	Keys []string
	// Flag is the flag of the same meaning, or empty.
	Flag string
	// Harmless are the values of a refused variable that ask for nothing, in
	// lower case.
	Harmless []string
	// Warn says that setting an ignored variable is worth a warning, because
	// whoever did so may wait for an effect.
	Warn bool
	// Note says why, for documents and messages.
	Note string

	// arg is the placeholder for the flag's value; a flag without one is a
	// switch. several marks a flag that takes more than one word.
	arg     string
	several bool
}

var (
	falseWords = []string{"false", "0", "no", "off"}
	trueWords  = []string{"true", "1", "yes", "on"}
)

const (
	noteFrontend = "concerns the frontend or router only"
	noteRust     = "tunes the Rust runtime, which is not used here"
	noteMedia    = "only text models are served; for anything else run Dynamo's own worker, python3 -m dynamo.trtllm"
	noteVisual   = "concerns the generation of images and video"
	noteBackend  = "belongs to another backend"
	noteEvents   = "KV events and load are not published yet"
	noteCard     = "the card always carries the default"
	noteTraces   = "traces are not exported yet"
)

// others are the variables that set nothing, in the order of the document.
var others = append([]Variable{
	{Name: "DYN_EVENT_PLANE_CODEC", Status: Ignored, Note: "has no effect on publishers in Dynamo either"},
	{Name: "DYN_EVENT_PLANE_HOST", Status: Ignored, Warn: true, Note: noteEvents},
	{Name: "DYN_KV_STATE_ENDPOINT", Status: Ignored, Flag: "--kv-state-endpoint", arg: "ENDPOINT", Warn: true, Note: noteEvents},
	{Name: "DYN_ZMQ_BROKER_URL", Status: Ignored, Warn: true, Note: noteEvents},
	{Name: "DYN_ZMQ_BROKER_ENABLED", Status: Ignored, Warn: true, Harmless: falseWords, Note: noteEvents},
	{Name: "DYN_ZMQ_IO_THREADS", Status: Ignored, Note: noteRust},
	{Name: "DYN_FILE_KV", Status: Ignored, Note: "belongs to discovery through files"},
	{Name: "DYN_KUBE_DISCOVERY_MODE", Status: Ignored, Note: "belongs to discovery through Kubernetes"},

	{Name: "DYN_NATS_REQUEST_TIMEOUT_SECS", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_TCP_REQUEST_TIMEOUT", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_TCP_CONNECT_TIMEOUT", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_TCP_POOL_SIZE", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_TCP_CHANNEL_BUFFER", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_TCP_RESPONSE_STREAM_HOST", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_TCP_RESPONSE_STREAM_PORT", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_TCP_LISTEN_BACKLOG", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_RUNTIME_INHIBITED_DURATION_SECS", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_TOKEN_IDS_AS_BYTES", Status: Ignored, Note: noteFrontend + "; both forms of token ids are understood"},
	{Name: "DYN_TCP_SHRINK_MESSAGE_SIZE", Status: Ignored, Note: noteRust},
	{Name: "DYN_TCP_WORKER_POOL_SIZE", Status: Ignored, Warn: true, Note: "there is no pool of workers; admission.max_requests bounds requests"},
	{Name: "DYN_TCP_WORK_QUEUE_SIZE", Status: Ignored, Warn: true, Note: "there is no pool of workers; admission.queue bounds what waits"},
	{Name: "DYN_RUNTIME_NUM_WORKER_THREADS", Status: Ignored, Note: noteRust},
	{Name: "DYN_RUNTIME_MAX_BLOCKING_THREADS", Status: Ignored, Note: noteRust},
	{Name: "DYN_COMPUTE_*", Status: Ignored, Note: noteRust},
	{Name: "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", Status: Ignored, Note: "is read by Rust-only workers; drain.budget bounds the shutdown"},

	{Name: "DYN_SYSTEM_ENABLED", Status: Ignored, Note: "is obsolete; DYN_SYSTEM_PORT turns the server on and off", Warn: true},
	{Name: "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS", Status: Ignored, Note: "is obsolete", Warn: true},

	{Name: "DYN_LORA_ENABLED", Status: Refused, Harmless: falseWords, Note: "adapters cannot be loaded while the worker runs"},
	{Name: "DYN_LORA_PATH", Status: Ignored, Note: "adapters cannot be loaded while the worker runs"},
	{Name: "DYN_LORA_*", Status: Ignored, Note: noteFrontend},

	{Name: "DYN_LOGGING_CONSOLE_FORMAT", Status: Ignored, Note: "log.format decides"},
	{Name: "DYN_LOGGING_CONFIG_PATH", Status: Ignored, Warn: true, Note: "there is no file for log settings; log.level decides"},
	{Name: "DYN_LOG_USE_LOCAL_TZ", Status: Ignored, Note: "log times are in UTC"},
	{Name: "DYN_SDK_DISABLE_ANSI_LOGGING", Status: Ignored, Note: "JSON has no colours, and the console form only on a terminal"},
	{Name: "DYN_LOGGING_SPAN_EVENTS", Status: Ignored, Note: noteRust},
	{Name: "OTEL_EXPORT_ENABLED", Status: Ignored, Warn: true, Harmless: falseWords, Note: noteTraces},
	{Name: "OTEL_EXPORTER_OTLP_*", Status: Ignored, Note: noteTraces},
	{Name: "OTEL_SERVICE_NAME", Status: Ignored, Note: noteTraces},
	{Name: "OTEL_TRACES_SAMPLE_RATIO", Status: Ignored, Note: noteTraces},
	{Name: "OTEL_METRICS_EXPORTER", Status: Ignored, Note: "metrics are scraped from the system server"},
	{Name: "DYN_LIFECYCLE_TRACE_ENABLED", Status: Ignored, Warn: true, Harmless: falseWords, Note: noteTraces},
	{Name: "DYN_LIFECYCLE_TRACE_MODE", Status: Ignored, Note: noteTraces},

	{Name: "CUDA_VISIBLE_DEVICES", Status: Ignored, Note: "reaches the engine unchanged; not a setting of the worker"},
	{Name: "NVIDIA_VISIBLE_DEVICES", Status: Ignored, Note: "reaches the engine unchanged; not a setting of the worker"},

	{Name: "DYN_FORWARDPASS_METRIC_PORT", Status: Ignored, Warn: true, Note: "forward-pass metrics are not published yet"},
	{Name: "DYN_FPM_TRACE", Status: Ignored, Flag: "--fpm-trace", Warn: true, Harmless: falseWords, Note: "forward-pass metrics are not published yet"},
	{Name: "DYN_FPM_*", Status: Ignored, Note: "forward-pass metrics are not published yet"},

	// The Python worker's own variables, one for each of its flags.
	{Name: "DYN_TRTLLM_MODEL_LOADER_EXTRA_CONFIG", Status: Refused, Flag: "--model-loader-extra-config", arg: "JSON", Note: "no loader takes it here"},
	{Name: "DYN_TRTLLM_ENABLE_MULTIMODAL", Status: Refused, Flag: "--enable-multimodal", Harmless: falseWords, Note: noteMedia},
	{Name: "DYN_TRTLLM_MODALITY", Status: Refused, Flag: "--modality", arg: "KIND", Harmless: []string{"text"}, Note: noteMedia},
	{Name: "DYN_TRTLLM_ENCODE_ENDPOINT", Status: Refused, Flag: "--encode-endpoint", arg: "ENDPOINT", Note: noteMedia},
	{Name: "DYN_TRTLLM_FRONTEND_DECODING", Status: Refused, Flag: "--frontend-decoding", Harmless: falseWords, Note: noteMedia},
	{Name: "DYN_TRTLLM_ALLOWED_LOCAL_MEDIA_PATH", Status: Ignored, Flag: "--allowed-local-media-path", arg: "PATH", Note: noteMedia},
	{Name: "DYN_TRTLLM_MAX_FILE_SIZE_MB", Status: Ignored, Flag: "--max-file-size-mb", arg: "N", Note: noteMedia},
	{Name: "DYN_TRTLLM_REVISION", Status: Ignored, Flag: "--revision", arg: "NAME", Warn: true, Note: "models are never downloaded"},
	{Name: "DYN_TRTLLM_SERVER_DISABLE_GC", Status: Ignored, Note: "reaches the engine unchanged"},
	{Name: "DYN_TRTLLM_KV_EVENT_HOSTS", Status: Ignored, Warn: true, Note: noteEvents},
	{Name: "DYN_TRTLLM_*", Status: Ignored, Note: noteVisual},
	{Name: "DYN_CONNECTOR", Status: Refused, Flag: "--connector", arg: "NAME", several: true, Harmless: []string{"none", "null"}, Note: "KV connectors are not supported"},
	{Name: "DYN_DEFAULT_THINKING_MODE", Status: Refused, Flag: "--dyn-default-thinking-mode", arg: "MODE", Note: "the card does not carry it yet"},
	{Name: "DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE", Status: Refused, Flag: "--exclude-tools-when-tool-choice-none", Harmless: trueWords, Note: "the card always says true"},
	{Name: "DYN_STRUCTURAL_TAG", Status: Refused, Harmless: trueWords, Note: noteCard},
	{Name: "DYN_ENABLE_STRUCTURAL_TAG", Status: Refused, Flag: "--dyn-enable-structural-tag", Harmless: trueWords, Note: noteCard},
	{Name: "DYN_STRUCTURAL_TAG_SCOPE", Status: Refused, Flag: "--dyn-structural-tag-scope", arg: "SCOPE", Harmless: []string{"always"}, Note: noteCard},
	{Name: "DYN_STRUCTURAL_TAG_SCHEMA", Status: Refused, Flag: "--dyn-structural-tag-schema", arg: "SCHEMA", Harmless: []string{"auto"}, Note: noteCard},
	{Name: "DYN_DUMP_CONFIG_TO", Status: Ignored, Flag: "--dump-config-to", arg: "FILE", Warn: true, Note: "worker check prints the configuration"},
	{Name: "DYN_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB", Status: Ignored, Flag: "--multimodal-embedding-cache-capacity-gb", arg: "N", Note: noteMedia},
	{Name: "DYN_MULTIMODAL_EMBEDDING_CACHE_PUBLISHER", Status: Ignored, Flag: "--multimodal-embedding-cache-publisher", Note: noteMedia},
	{Name: "DYN_MULTIMODAL_EMBEDDING_CACHE_*", Status: Ignored, Note: noteMedia},
	{Name: "DYN_OUTPUT_MODALITIES", Status: Refused, Flag: "--output-modalities", arg: "KIND", several: true, Harmless: []string{"text"}, Note: noteMedia},
	{Name: "DYN_MEDIA_OUTPUT_FS_URL", Status: Ignored, Flag: "--media-output-fs-url", arg: "URL", Note: noteMedia},
	{Name: "DYN_MEDIA_OUTPUT_HTTP_URL", Status: Ignored, Flag: "--media-output-http-url", arg: "URL", Note: noteMedia},
	{Name: "DYN_MEDIA_OUTPUT_*", Status: Ignored, Note: noteMedia},
	{Name: "DYN_MM_*", Status: Ignored, Note: noteMedia},
	{Name: "DYN_TOPOLOGY_ENABLED", Status: Refused, Harmless: falseWords, Note: "topology domains are not published"},
	{Name: "DYN_TOPOLOGY_MOUNT_PATH", Status: Ignored, Note: "topology domains are not published"},
	{Name: "DYN_KV_TRANSFER_*", Status: Ignored, Warn: true, Note: "topology domains are not published"},
	{Name: "DYN_SNAPSHOT_CONTROL_DIR", Status: Refused, Note: "snapshots of the process are not supported"},
	{Name: "DYN_ENABLE_TEST_LOGITS_PROCESSOR", Status: Refused, Harmless: falseWords, Note: "logits processors are not supported"},
	{Name: "DYN_ENGINE_HEALTH_SHUTDOWN_TIMEOUT", Status: Ignored, Note: "engine.stop_timeout bounds the engine's end"},
	{Name: "DYN_PREFILL_DRAIN_TIMEOUT_S", Status: Ignored, Note: "drain.budget bounds the shutdown"},

	// What operators and shared environments set for everyone.
	{Name: "DYN_COMPONENT", Status: Ignored, Note: "is a label of the operator's; DYN_ENDPOINT names a component"},
	{Name: "DYN_NAMESPACE_PREFIX", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_PARENT_DGD_K8S_NAME", Status: Ignored, Note: "is a label of the operator's"},
	{Name: "DYN_PARENT_DGD_K8S_NAMESPACE", Status: Ignored, Note: "is a label of the operator's"},
	{Name: "DYN_HTTP_*", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_ROUTER_MODE", Status: Ignored, Flag: "--router-mode", arg: "MODE", Warn: true, Note: "the frontend's own router mode applies; the card does not advertise one"},
	{Name: "DYN_ROUTER_*", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_FRONTEND_*", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_MIGRATION_*", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_TOKENIZER*", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_TLS_*", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_MODEL_NAME", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_MODEL_PATH", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_KV_CACHE_BLOCK_SIZE", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_CHAT_PROCESSOR", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_REQUEST_TRACE_*", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_METRICS_PREFIX", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_BENCH*", Status: Ignored, Note: "concerns benchmarks"},
	{Name: "DYN_GLOBAL_ROUTER_*", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_RELAY_*", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_SHARED_CACHE_*", Status: Ignored, Note: noteFrontend},
	{Name: "DYN_VLLM_*", Status: Ignored, Note: noteBackend},
	{Name: "DYN_SGL_*", Status: Ignored, Note: noteBackend},
	{Name: "DYN_SGLANG_*", Status: Ignored, Note: noteBackend},
	{Name: "DYN_TRITON_*", Status: Ignored, Note: noteBackend},
	{Name: "DYN_OMNI_*", Status: Ignored, Note: noteBackend},
	{Name: "DYN_SIDECAR_*", Status: Ignored, Note: noteBackend},
}, visual()...)

// visual are the settings of Dynamo's worker for images and video. A text
// worker is started with them now and then, and they do nothing there.
func visual() []Variable {
	var out []Variable
	add := func(arg string, flags ...string) {
		for _, f := range flags {
			name := "DYN_TRTLLM_" + strings.ToUpper(strings.ReplaceAll(strings.TrimPrefix(f, "--"), "-", "_"))
			out = append(out, Variable{Name: name, Status: Ignored, Flag: f, Note: noteVisual, arg: arg})
		}
	}
	add("", "--quant-dynamic", "--enable-teacache", "--teacache-use-ret-steps", "--disable-torch-compile", "--enable-fullgraph", "--enable-cuda-graph", "--enable-layerwise-nvtx-marker", "--skip-warmup")
	add("VALUE", "--quant-algo", "--teacache-thresh", "--torch-dtype", "--attn-backend", "--dit-ulysses-size", "--dit-ring-size", "--dit-cfg-size",
		"--default-height", "--default-width", "--default-num-inference-steps", "--default-guidance-scale", "--default-num-frames", "--default-num-images-per-prompt")
	return out
}

// Variables is the table of all environment variables that the worker knows,
// those that set something first. Any other DYN_ variable is warned about.
func Variables() []Variable {
	var out []Variable
	for _, b := range bindings {
		v := Variable{Name: b.env, Status: Used, Keys: slices.Clone(b.keys), Note: b.note}
		if v.Note == "" {
			v.Note = byName[b.keys[0]].doc
			if b.seconds {
				v.Note += " In seconds."
			}
		}
		if len(b.flags) > 0 {
			v.Flag = b.flags[0]
		}
		out = append(out, v)
	}
	for _, v := range others {
		v.Harmless = slices.Clone(v.Harmless)
		out = append(out, v)
	}
	return out
}

// lookup finds the entry for a name among those that set nothing: an exact
// name first, then the longest pattern.
func lookup(name string) *Variable {
	var best *Variable
	for i := range others {
		v := &others[i]
		if v.Name == name {
			return v
		}
		prefix, ok := strings.CutSuffix(v.Name, "*")
		if ok && strings.HasPrefix(name, prefix) && (best == nil || len(v.Name) > len(best.Name)) {
			best = v
		}
	}
	return best
}

// environLayer reads the variables, in the order of the table of bindings.
func (l *loader) environLayer(environ []string) {
	set := map[string]string{}
	var order []string
	for _, kv := range environ {
		name, value, ok := strings.Cut(kv, "=")
		if !ok {
			continue
		}
		if _, seen := set[name]; !seen {
			order = append(order, name)
		}
		set[name] = value
	}
	l.environ = set

	bound := map[string]bool{}
	for _, b := range bindings {
		bound[b.env] = true
		value, ok := set[b.env]
		if !ok {
			continue
		}
		if value == "" {
			// Manifests and scripts pass unset values on as empty ones. For
			// text that means unset anyway; for anything else say so.
			if k := byName[b.keys[0]]; k.kind != kindString && k.kind != kindList && k.kind != kindMap || k.choices != nil {
				l.warn(b.env, "is set but empty, and therefore ignored")
			}
			continue
		}
		l.apply(b, value, Origin{Kind: FromEnv, Name: b.env})
	}

	var names []string
	for _, v := range Variables() {
		if !strings.HasSuffix(v.Name, "*") {
			names = append(names, v.Name)
		}
	}
	slices.Sort(order)
	for _, name := range order {
		if bound[name] {
			continue
		}
		value := set[name]
		v := lookup(name)
		switch {
		case v == nil && strings.HasPrefix(name, "DYN_"):
			l.warn(name, "is not a variable of this worker"+didYouMean(nearest(name, names)))
		case v == nil && (strings.HasPrefix(name, "ETCD_") || strings.HasPrefix(name, "NATS_")):
			// Other programs use these prefixes as well, so only a slip of the
			// finger is worth a word.
			for _, known := range names {
				if distance(name, known, 2) <= 2 {
					l.warn(name, "is not a variable of this worker"+didYouMean(known))
					break
				}
			}
		case v != nil:
			l.setsNothing(v, value, Origin{Kind: FromEnv, Name: name})
		}
	}
}

// setsNothing handles the text of a variable or flag that sets nothing: it may
// ask for what this worker does not have.
func (l *loader) setsNothing(v *Variable, text string, origin Origin) {
	asks := false
	for word := range strings.FieldsSeq(strings.ToLower(text)) {
		asks = asks || !slices.Contains(v.Harmless, word)
	}
	switch {
	case !asks:
	case v.Status == Refused:
		l.problem(&Problem{Key: origin.Name, Origin: origin, Kind: ErrUnsupported, Reason: v.refusal(text)})
	case v.Warn:
		l.warn(origin.Name, "has no effect: "+v.Note)
	}
}

// refusal quotes the value only where it is one of a few words; elsewhere it
// may be long, or hold a secret.
func (v *Variable) refusal(value string) string {
	if len(v.Harmless) == 0 {
		return "is not supported: " + v.Note
	}
	return fmt.Sprintf("%s is not supported: %s", quote(value), v.Note)
}

func didYouMean(s string) string {
	if s == "" {
		return ""
	}
	return "; did you mean " + s + "?"
}
