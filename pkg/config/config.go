// Package config is the worker's configuration: what can be set, where a value
// came from, and what is wrong with it.
//
// Load reads four layers, each of which replaces values of the one before:
// defaults, a YAML file, environment variables, and the command line (flags of
// today's Python worker and --set key=value). Every value remembers its
// origin. A mistake is never guessed away: unknown and doubled keys, values of
// the wrong type, durations without a unit and contradicting settings are
// *Problem values that name the key and the place, and Load reports as many as
// it can find at once, as Errors.
//
// The table of keys is in keys.go, that of variables and flags in bindings.go;
// configs/worker.yaml is generated from them. Each key appears in the report
// of Load with its value, secrets left out.
//
// Only this package imports viper and pflag. The file is read with yaml.v3
// nodes, because viper lower-cases the keys of maps (the engine's arguments
// would arrive under other names), takes a number for nanoseconds and knows no
// line numbers; viper then stacks the checked layers and fills the struct.
//
// A *Config is not changed after Load and may be shared between goroutines.
package config

import (
	"strings"
	"time"

	"dynworker/pkg/engineargs"
)

// Values of Config.Handler.
const (
	HandlerUnified = "unified"
	HandlerLegacy  = "legacy"
)

// Values of Config.Role.
const (
	RoleAggregated = "aggregated"
	RolePrefill    = "prefill"
	RoleDecode     = "decode"
)

// Values of Restart.Policy.
const (
	RestartInPlace = "in_place"
	RestartNever   = "never"
)

// Values of Drain.Route.
const (
	DrainLocal = "local"
	DrainAny   = "any"
	DrainOff   = "off"
)

// Values of RequestPlane.Kind, EventPlane.Kind and ResponsePlane.Kind.
const (
	PlaneNATS = "nats"
	PlaneTCP  = "tcp"
	PlaneZMQ  = "zmq"
)

// Values of RequestPlane.Codec.
const (
	CodecMsgpack = "msgpack"
	CodecJSON    = "json"
)

// Values of Model.Files.
const (
	FilesHTTP  = "http"
	FilesLocal = "local"
)

// Values of Engine.Kind.
const (
	EngineSim    = "sim"
	EngineTRTLLM = "trtllm"
)

// Values of Affinity.RankSource.
const (
	RankFromEngine = "engine"
	RankFromDynamo = "dynamo"
)

// Values of Affinity.OnDisagreement and Affinity.OutOfRange.
const (
	Fail   = "fail"
	Warn   = "warn"
	Reject = "reject"
)

// Values of System.StartingHealthStatus.
const (
	StatusReady    = "ready"
	StatusNotReady = "notready"
)

// Config is the whole configuration. The meaning, range and default of each
// field stand in the table of keys.
type Config struct {
	Namespace       string `mapstructure:"namespace"`
	NamespaceSuffix string `mapstructure:"namespace_suffix"`
	Component       string `mapstructure:"component"`
	Endpoint        string `mapstructure:"endpoint"`
	Handler         string `mapstructure:"handler"`
	Role            string `mapstructure:"role"`

	Model  Model  `mapstructure:"model"`
	Engine Engine `mapstructure:"engine"`
	// LoRA are the adapters that requests can name, in the order of the file.
	LoRA      []Adapter `mapstructure:"lora"`
	Affinity  Affinity  `mapstructure:"affinity"`
	Admission Admission `mapstructure:"admission"`
	Drain     Drain     `mapstructure:"drain"`
	// Disaggregation is for prefill and decode workers.
	Disaggregation Disaggregation `mapstructure:"disaggregation"`
	Discovery      Discovery      `mapstructure:"discovery"`
	Etcd           Etcd           `mapstructure:"etcd"`
	RequestPlane   RequestPlane   `mapstructure:"request_plane"`
	ResponsePlane  ResponsePlane  `mapstructure:"response_plane"`
	Publish        Publish        `mapstructure:"publish"`
	EventPlane     EventPlane     `mapstructure:"event_plane"`
	NATS           NATS           `mapstructure:"nats"`
	System         System         `mapstructure:"system"`
	HealthCheck    HealthCheck    `mapstructure:"health_check"`
	Log            Log            `mapstructure:"log"`

	// origins lets Validate and CheckFiles say where an offending value came
	// from, trees does so for the keys with a value of any shape. Both are nil
	// in a Config that was not made by Load.
	origins map[string]Origin
	trees   map[string]*engineargs.Tree
}

// Model says what is served and what the model card tells the frontend.
type Model struct {
	Path                string   `mapstructure:"path"`
	Name                string   `mapstructure:"name"`
	Aliases             []string `mapstructure:"aliases"`
	EndpointTypes       []string `mapstructure:"endpoint_types"`
	KVBlockSize         int      `mapstructure:"kv_block_size"`
	ContextLength       int      `mapstructure:"context_length"`
	Files               string   `mapstructure:"files"`
	FilesAddress        string   `mapstructure:"files_address"`
	FilesListen         string   `mapstructure:"files_listen"`
	ReasoningParser     string   `mapstructure:"reasoning_parser"`
	ToolCallParser      string   `mapstructure:"tool_call_parser"`
	CustomJinjaTemplate string   `mapstructure:"custom_jinja_template"`
	StableRoutingID     string   `mapstructure:"stable_routing_id"`
}

// Engine says which engine process serves the model and how it is started.
type Engine struct {
	Kind            string        `mapstructure:"kind"`
	Command         []string      `mapstructure:"command"`
	Env             []string      `mapstructure:"env"`
	StartTimeout    time.Duration `mapstructure:"start_timeout"`
	StartInactivity time.Duration `mapstructure:"start_inactivity"`
	StopTimeout     time.Duration `mapstructure:"stop_timeout"`
	Restart         Restart       `mapstructure:"restart"`
	Watch           Watch         `mapstructure:"watch"`
	// Args are the engine's own arguments, exactly as written: keys keep their
	// case, numbers their type (int64, uint64 above its range, or float64).
	Args   map[string]any `mapstructure:"-" key:"args"`
	TRTLLM TRTLLM         `mapstructure:"trtllm"`
	Sim    Sim            `mapstructure:"sim"`
}

// Restart says what becomes of a worker whose engine failed.
type Restart struct {
	Policy       string        `mapstructure:"policy"`
	Max          int           `mapstructure:"max"`
	Window       time.Duration `mapstructure:"window"`
	Backoff      time.Duration `mapstructure:"backoff"`
	BackoffMax   time.Duration `mapstructure:"backoff_max"`
	ProofTimeout time.Duration `mapstructure:"proof_timeout"`
	SuspectAfter int           `mapstructure:"suspect_after"`
}

// Watch says when an engine that is there as a process counts as failed. Most
// of its limits can be turned off with 0.
type Watch struct {
	HealthInterval   time.Duration `mapstructure:"health_interval"`
	HealthTimeout    time.Duration `mapstructure:"health_timeout"`
	NoProgress       time.Duration `mapstructure:"no_progress"`
	PromptAllowance  time.Duration `mapstructure:"prompt_allowance"`
	StreamInactivity time.Duration `mapstructure:"stream_inactivity"`
	FailureWindow    time.Duration `mapstructure:"failure_window"`
	FailureShare     float64       `mapstructure:"failure_share"`
	FailureCount     int           `mapstructure:"failure_count"`
	CanaryFailures   int           `mapstructure:"canary_failures"`
}

// TRTLLM are the settings of a TensorRT-LLM engine that today's Python worker
// has flags for. They are the weakest of the layers that Resolve merges into
// the engine's arguments.
type TRTLLM struct {
	TensorParallelSize    int     `mapstructure:"tensor_parallel_size"`
	PipelineParallelSize  int     `mapstructure:"pipeline_parallel_size"`
	ExpertParallelSize    int     `mapstructure:"expert_parallel_size"`
	EnableAttentionDP     bool    `mapstructure:"enable_attention_dp"`
	GPUsPerNode           int     `mapstructure:"gpus_per_node"`
	MaxBatchSize          int     `mapstructure:"max_batch_size"`
	MaxNumTokens          int     `mapstructure:"max_num_tokens"`
	MaxSeqLen             int     `mapstructure:"max_seq_len"`
	MaxBeamWidth          int     `mapstructure:"max_beam_width"`
	FreeGPUMemoryFraction float64 `mapstructure:"free_gpu_memory_fraction"`
	LoadFormat            string  `mapstructure:"load_format"`
	GuidedDecodingBackend string  `mapstructure:"guided_decoding_backend"`
	ExtraEngineArgs       string  `mapstructure:"extra_engine_args"`
	// OverrideEngineArgs is like Engine.Args.
	OverrideEngineArgs map[string]any `mapstructure:"-" key:"override_engine_args"`
}

// Sim configures the simulated engine. Its keys are the names of the engine's
// own arguments, see Args.
type Sim struct {
	VocabSize            int           `mapstructure:"vocab_size"`
	FirstTokenID         int           `mapstructure:"first_token_id"`
	LastTokenID          int           `mapstructure:"last_token_id"`
	EOSTokenID           int           `mapstructure:"eos_token_id"`
	EOSEvery             int           `mapstructure:"eos_every"`
	MaxSeqLen            int           `mapstructure:"max_seq_len"`
	MaxBatchSize         int           `mapstructure:"max_batch_size"`
	MaxNumTokens         int           `mapstructure:"max_num_tokens"`
	BlockSize            int           `mapstructure:"block_size"`
	TotalBlocks          int           `mapstructure:"total_blocks"`
	AttentionDPSize      int           `mapstructure:"attention_dp_size"`
	ConversationAffinity bool          `mapstructure:"conversation_affinity"`
	MaxSessions          int           `mapstructure:"max_sessions"`
	FairShareMultiplier  float64       `mapstructure:"fair_share_multiplier"`
	NewConvPlacement     string        `mapstructure:"new_conv_placement"`
	ConfigUnreadable     bool          `mapstructure:"config_unreadable"`
	TokenDelay           time.Duration `mapstructure:"token_delay"`
	FirstTokenDelay      time.Duration `mapstructure:"first_token_delay"`
	LoadTime             time.Duration `mapstructure:"load_time"`
	StatsInterval        time.Duration `mapstructure:"stats_interval"`
	KVTransferHost       string        `mapstructure:"kv_transfer_host"`
	KVTransferTimeout    time.Duration `mapstructure:"kv_transfer_timeout"`
	KVTransferDelay      time.Duration `mapstructure:"kv_transfer_delay"`
	KVTransferLoseEvery  int           `mapstructure:"kv_transfer_lose_every"`
	Build                string        `mapstructure:"build"`
	CallsLog             string        `mapstructure:"calls_log"`
}

// Affinity holds the operator's wishes about conversation affinity.
type Affinity struct {
	Override bool `mapstructure:"override"`
	// OverrideSet tells an override that somebody turned off (or on) from one
	// that nobody touched.
	OverrideSet        bool   `mapstructure:"-"`
	RankSource         string `mapstructure:"rank_source"`
	OnDisagreement     string `mapstructure:"on_disagreement"`
	OutOfRange         string `mapstructure:"out_of_range"`
	LogConversationIDs bool   `mapstructure:"log_conversation_ids"`
}

// Admission bounds the requests inside the worker.
type Admission struct {
	MaxRequests     int `mapstructure:"max_requests"`
	Queue           int `mapstructure:"queue"`
	MaxPromptTokens int `mapstructure:"max_prompt_tokens"`
}

// Disaggregation bounds what happens between prefill and decode workers.
type Disaggregation struct {
	TransferTimeout   time.Duration `mapstructure:"transfer_timeout"`
	MaxDeferredAborts int           `mapstructure:"max_deferred_aborts"`
}

// Drain bounds the way out after the first signal.
type Drain struct {
	Grace  time.Duration `mapstructure:"grace"`
	Budget time.Duration `mapstructure:"budget"`
	Route  string        `mapstructure:"route"`
}

// Discovery says where records are kept.
type Discovery struct {
	Backend string `mapstructure:"backend"`
}

// Etcd is the connection to etcd and the lease in it. CA, ClientCert and
// ClientKey are the name of a file or the PEM text itself; IsPEM tells.
type Etcd struct {
	Endpoints         []string      `mapstructure:"endpoints"`
	LeaseTTL          time.Duration `mapstructure:"lease_ttl"`
	StartupTimeout    time.Duration `mapstructure:"startup_timeout"`
	KeepaliveInterval time.Duration `mapstructure:"keepalive_interval"`
	KeepaliveTimeout  time.Duration `mapstructure:"keepalive_timeout"`
	Username          string        `mapstructure:"username"`
	Password          Secret        `mapstructure:"password"`
	CA                string        `mapstructure:"ca"`
	ClientCert        string        `mapstructure:"client_cert"`
	ClientKey         Secret        `mapstructure:"client_key"`
}

// RequestPlane says how requests arrive.
type RequestPlane struct {
	Kind  string          `mapstructure:"kind"`
	Codec string          `mapstructure:"codec"`
	TCP   RequestPlaneTCP `mapstructure:"tcp"`
}

// RequestPlaneTCP is the listener of the TCP request plane.
type RequestPlaneTCP struct {
	Host           string    `mapstructure:"host"`
	Port           int       `mapstructure:"port"`
	MaxMessageSize int       `mapstructure:"max_message_size"`
	TLS            ServerTLS `mapstructure:"tls"`
}

// ServerTLS is TLS on a listener.
type ServerTLS struct {
	CertFile         string        `mapstructure:"cert_file"`
	KeyFile          string        `mapstructure:"key_file"`
	ClientCAFile     string        `mapstructure:"client_ca_file"`
	HandshakeTimeout time.Duration `mapstructure:"handshake_timeout"`
}

// Enabled reports whether the listener speaks TLS: it does when it has a
// certificate.
func (t *ServerTLS) Enabled() bool { return t.CertFile != "" }

// ResponsePlane is the connection that the worker opens back to the frontend
// for each request.
type ResponsePlane struct {
	Kind         string            `mapstructure:"kind"`
	DialTimeout  time.Duration     `mapstructure:"dial_timeout"`
	WriteTimeout time.Duration     `mapstructure:"write_timeout"`
	MergeTokens  bool              `mapstructure:"merge_tokens"`
	TLS          ResponseClientTLS `mapstructure:"tls"`
}

// ResponseClientTLS is TLS on the connection back to the frontend.
type ResponseClientTLS struct {
	CAFile           string        `mapstructure:"ca_file"`
	Insecure         bool          `mapstructure:"insecure"`
	ServerName       string        `mapstructure:"server_name"`
	CertFile         string        `mapstructure:"cert_file"`
	KeyFile          string        `mapstructure:"key_file"`
	HandshakeTimeout time.Duration `mapstructure:"handshake_timeout"`
}

// Enabled reports whether the connection speaks TLS: it does as soon as the
// settings say how to verify the frontend, or what to show to it.
func (t *ResponseClientTLS) Enabled() bool {
	return t.CAFile != "" || t.Insecure || t.ServerName != "" || t.CertFile != ""
}

// Publish says what routers and planners are told.
type Publish struct {
	KVEvents bool `mapstructure:"kv_events"`
	Metrics  bool `mapstructure:"metrics"`
}

// EventPlane says how KV events are published.
type EventPlane struct {
	Kind string `mapstructure:"kind"`
}

// NATS is the connection to NATS.
type NATS struct {
	Server          string        `mapstructure:"server"`
	Username        string        `mapstructure:"username"`
	Password        Secret        `mapstructure:"password"`
	Token           Secret        `mapstructure:"token"`
	NKey            Secret        `mapstructure:"nkey"`
	CredentialsFile string        `mapstructure:"credentials_file"`
	StartupTimeout  time.Duration `mapstructure:"startup_timeout"`
	TLS             ClientTLS     `mapstructure:"tls"`
}

// ClientTLS is TLS towards a NATS server. A tls:// address turns it on with
// the system's roots even when nothing is set here.
type ClientTLS struct {
	CAFile   string `mapstructure:"ca_file"`
	CertFile string `mapstructure:"cert_file"`
	KeyFile  string `mapstructure:"key_file"`
	Insecure bool   `mapstructure:"insecure"`
}

// Enabled reports whether TLS is asked for by these settings.
func (t *ClientTLS) Enabled() bool { return t.CAFile != "" || t.CertFile != "" || t.Insecure }

// System is the HTTP server for probes, metrics and model files.
type System struct {
	Host                 string `mapstructure:"host"`
	Port                 int    `mapstructure:"port"`
	HealthPath           string `mapstructure:"health_path"`
	LivePath             string `mapstructure:"live_path"`
	StartingHealthStatus string `mapstructure:"starting_health_status"`
}

// Enabled reports whether the server runs at all.
func (s *System) Enabled() bool { return s.Port >= 0 }

// HealthCheck is the canary: a request that the worker sends to itself.
type HealthCheck struct {
	Enabled bool          `mapstructure:"enabled"`
	Wait    time.Duration `mapstructure:"wait"`
	Timeout time.Duration `mapstructure:"timeout"`
	// Payload is the text of a JSON object, or empty for the engine's own.
	// Load has already replaced @file by what the file holds.
	Payload string `mapstructure:"payload"`
}

// Log says what is logged and how.
type Log struct {
	Level  string `mapstructure:"level"`
	Format string `mapstructure:"format"`
	// SlowRequest is for how long a request may make no progress before it is
	// logged; 0 is never.
	SlowRequest time.Duration `mapstructure:"slow_request"`
}

// Default returns the configuration in which nothing is set. It is valid, but
// cannot be served: the model has no default.
func Default() *Config {
	return &Config{
		Namespace: "dynamo",
		Component: "backend",
		Endpoint:  "generate",
		Handler:   HandlerUnified,
		Role:      RoleAggregated,
		LoRA:      []Adapter{},
		Model: Model{
			Aliases:       []string{},
			EndpointTypes: []string{"chat", "completions"},
			KVBlockSize:   32,
			Files:         FilesHTTP,
			FilesListen:   "0.0.0.0:0",
		},
		Engine: Engine{
			Kind:            EngineTRTLLM,
			Command:         []string{},
			Env:             []string{},
			StartInactivity: 10 * time.Minute,
			StopTimeout:     30 * time.Second,
			Restart: Restart{
				Policy:       RestartInPlace,
				Max:          5,
				Window:       30 * time.Minute,
				Backoff:      time.Second,
				BackoffMax:   time.Minute,
				ProofTimeout: time.Minute,
				SuspectAfter: 2,
			},
			Watch: Watch{
				HealthInterval:   2 * time.Second,
				HealthTimeout:    30 * time.Second,
				NoProgress:       2 * time.Minute,
				PromptAllowance:  time.Millisecond,
				StreamInactivity: 10 * time.Minute,
				FailureWindow:    time.Minute,
				FailureShare:     0.8,
				FailureCount:     30,
				CanaryFailures:   3,
			},
			Args: map[string]any{},
			TRTLLM: TRTLLM{
				TensorParallelSize:    1,
				PipelineParallelSize:  1,
				MaxBatchSize:          2048,
				MaxNumTokens:          8192,
				MaxBeamWidth:          1,
				FreeGPUMemoryFraction: 0.9,
				LoadFormat:            "auto",
				OverrideEngineArgs:    map[string]any{},
			},
			Sim: Sim{
				VocabSize:           355,
				FirstTokenID:        6,
				EOSTokenID:          2,
				MaxSeqLen:           8192,
				MaxBatchSize:        2048,
				MaxNumTokens:        8192,
				BlockSize:           32,
				TotalBlocks:         1024,
				AttentionDPSize:     1,
				MaxSessions:         65536,
				FairShareMultiplier: 2,
				NewConvPlacement:    "round_robin",
				StatsInterval:       250 * time.Millisecond,
				KVTransferHost:      "127.0.0.1",
				KVTransferTimeout:   time.Minute,
				Build:               "rc29",
			},
		},
		Disaggregation: Disaggregation{
			TransferTimeout:   time.Minute,
			MaxDeferredAborts: 256,
		},
		Affinity: Affinity{
			RankSource:     RankFromEngine,
			OnDisagreement: Fail,
			OutOfRange:     Warn,
		},
		Admission: Admission{Queue: 16},
		Drain: Drain{
			Grace:  5 * time.Second,
			Budget: 900 * time.Second,
			Route:  DrainLocal,
		},
		Discovery: Discovery{Backend: "etcd"},
		Etcd: Etcd{
			Endpoints:         []string{"http://localhost:2379"},
			LeaseTTL:          30 * time.Second,
			StartupTimeout:    120 * time.Second,
			KeepaliveInterval: 15 * time.Second,
			KeepaliveTimeout:  10 * time.Second,
		},
		RequestPlane: RequestPlane{
			Kind:  PlaneTCP,
			Codec: CodecMsgpack,
			TCP: RequestPlaneTCP{
				MaxMessageSize: 32 << 20,
				TLS:            ServerTLS{HandshakeTimeout: 3 * time.Second},
			},
		},
		ResponsePlane: ResponsePlane{
			Kind:         PlaneTCP,
			DialTimeout:  4 * time.Second,
			WriteTimeout: 30 * time.Second,
			MergeTokens:  true,
			TLS:          ResponseClientTLS{HandshakeTimeout: 3 * time.Second},
		},
		EventPlane: EventPlane{Kind: PlaneZMQ},
		NATS: NATS{
			Server:         "nats://localhost:4222",
			StartupTimeout: 120 * time.Second,
		},
		System: System{
			Host:                 "0.0.0.0",
			Port:                 -1,
			HealthPath:           "/health",
			LivePath:             "/live",
			StartingHealthStatus: StatusNotReady,
		},
		HealthCheck: HealthCheck{
			Wait:    10 * time.Second,
			Timeout: 3 * time.Second,
		},
		Log: Log{Level: "info", Format: "json", SlowRequest: 30 * time.Second},
	}
}

// ServingNamespace is the namespace under which the worker registers: with a
// suffix, so that an old and a new set of workers can stand side by side
// during a rolling update, it is "namespace-suffix".
func (c *Config) ServingNamespace() string {
	if c.NamespaceSuffix == "" {
		return c.Namespace
	}
	return c.Namespace + "-" + c.NamespaceSuffix
}

// ServedName is the model name that callers use: the configured one, or else
// the model's path as it is.
func (m *Model) ServedName() string {
	if m.Name != "" {
		return m.Name
	}
	return m.Path
}

// Args are the arguments for the simulated engine's process as it takes them
// in JSON: one for each key, durations as text with a unit.
func (s *Sim) Args() map[string]any {
	out := map[string]any{}
	for _, k := range keys {
		name, ok := strings.CutPrefix(k.name, simPrefix)
		if !ok {
			continue
		}
		v := k.value(&Config{Engine: Engine{Sim: *s}})
		if d, ok := v.(time.Duration); ok {
			v = d.String()
		}
		out[name] = v
	}
	return out
}

// Login returns the user name and password for NATS. Dynamo's clients present
// themselves as user/user when nothing at all is configured, and servers are
// set up for that pair; so does this worker. With another kind of
// authentication, or a user in the address, both are empty.
func (n *NATS) Login() (username string, password Secret) {
	if n.Username != "" {
		return n.Username, n.Password
	}
	if n.Token != "" || n.NKey != "" || n.CredentialsFile != "" || hasUser(n.Server) {
		return "", ""
	}
	return "user", "user"
}
