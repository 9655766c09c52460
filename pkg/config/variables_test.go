package config

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
)

// TestVariables checks the meaning of every variable that sets something.
func TestVariables(t *testing.T) {
	type values map[string]string // of the report
	tests := map[string][]struct {
		text string
		want values
	}{
		"DYN_NAMESPACE":                              {{"lab", values{"namespace": "lab"}}},
		"DYN_NAMESPACE_WORKER_SUFFIX":                {{"a1", values{"namespace_suffix": "a1"}}},
		"DYN_ENDPOINT":                               {{"dyn://n.c.e", values{"namespace": "n", "component": "c", "endpoint": "e", "namespace_suffix": `""`}}},
		"DYN_TRTLLM_MODEL":                           {{"Qwen/Qwen3-0.6B", values{"model.path": "Qwen/Qwen3-0.6B"}}},
		"DYN_TRTLLM_SERVED_MODEL_NAME":               {{"a/b", values{"model.name": "a/b", "model.aliases": "[]"}}, {" a, b\tc ", values{"model.name": "a", "model.aliases": "[b, c]"}}},
		"DYN_TRTLLM_KV_BLOCK_SIZE":                   {{"64", values{"model.kv_block_size": "64"}}},
		"DYN_ENDPOINT_TYPES":                         {{"chat, completions", values{"model.endpoint_types": "[chat, completions]"}}, {"none", values{"model.endpoint_types": "[none]"}}},
		"DYN_REASONING_PARSER":                       {{"qwen3", values{"model.reasoning_parser": "qwen3"}}},
		"DYN_TOOL_CALL_PARSER":                       {{"hermes", values{"model.tool_call_parser": "hermes"}}},
		"DYN_CUSTOM_JINJA_TEMPLATE":                  {{"/t.jinja", values{"model.custom_jinja_template": "/t.jinja"}}, {"~/t.jinja", values{"model.custom_jinja_template": "/home/me/t.jinja"}}, {"$HOME/t.jinja", values{"model.custom_jinja_template": "/home/me/t.jinja"}}},
		"DYN_SELF_HOST_METADATA":                     {{"true", values{"model.files": "http"}}, {"0", values{"model.files": "local"}}},
		"DYN_STABLE_ROUTING_ID":                      {{"id-1", values{"model.stable_routing_id": "id-1"}}},
		"DYN_TRTLLM_TENSOR_PARALLEL_SIZE":            {{"4", values{"engine.trtllm.tensor_parallel_size": "4"}}},
		"DYN_TRTLLM_PIPELINE_PARALLEL_SIZE":          {{"2", values{"engine.trtllm.pipeline_parallel_size": "2"}}},
		"DYN_TRTLLM_EXPERT_PARALLEL_SIZE":            {{"8", values{"engine.trtllm.expert_parallel_size": "8"}}},
		"DYN_TRTLLM_ENABLE_ATTENTION_DP":             {{"yes", values{"engine.trtllm.enable_attention_dp": "true"}}},
		"DYN_TRTLLM_GPUS_PER_NODE":                   {{"4", values{"engine.trtllm.gpus_per_node": "4"}}},
		"DYN_TRTLLM_MAX_BATCH_SIZE":                  {{"16", values{"engine.trtllm.max_batch_size": "16"}}},
		"DYN_TRTLLM_MAX_NUM_TOKENS":                  {{"4096", values{"engine.trtllm.max_num_tokens": "4096"}}},
		"DYN_TRTLLM_MAX_SEQ_LEN":                     {{"32768", values{"engine.trtllm.max_seq_len": "32768"}}},
		"DYN_TRTLLM_MAX_BEAM_WIDTH":                  {{"4", values{"engine.trtllm.max_beam_width": "4"}}},
		"DYN_TRTLLM_FREE_GPU_MEMORY_FRACTION":        {{"0.5", values{"engine.trtllm.free_gpu_memory_fraction": "0.5"}}, {"1", values{"engine.trtllm.free_gpu_memory_fraction": "1.0"}}},
		"DYN_TRTLLM_LOAD_FORMAT":                     {{"dummy", values{"engine.trtllm.load_format": "dummy"}}},
		"DYN_TRTLLM_GUIDED_DECODING_BACKEND":         {{"xgrammar", values{"engine.trtllm.guided_decoding_backend": "xgrammar"}}},
		"DYN_TRTLLM_EXTRA_ENGINE_ARGS":               {{"e.yaml", values{"engine.trtllm.extra_engine_args": "e.yaml"}}},
		"DYN_TRTLLM_OVERRIDE_ENGINE_ARGS":            {{"{}", values{overrideKey: "{}"}}},
		"DYN_TRTLLM_DISAGGREGATION_MODE":             {{"agg", values{"role": "aggregated"}}, {"pd", values{"role": "aggregated"}}, {"prefill", values{"role": "prefill"}}, {" decode ", values{"role": "decode"}}},
		"DYN_TRTLLM_PUBLISH_EVENTS_AND_METRICS":      {{"true", values{"publish.kv_events": "true", "publish.metrics": "true"}}, {"0", values{"publish.kv_events": "false", "publish.metrics": "false"}}},
		"DYN_TRTLLM_PUBLISH_KV_EVENTS":               {{"1", values{"publish.kv_events": "true"}}},
		"DYN_TRTLLM_PUBLISH_METRICS":                 {{"on", values{"publish.metrics": "true"}}},
		"DYN_ENGINE_CONV_AFFINITY":                   {{"1", values{"affinity.override": "true"}}, {"off", values{"affinity.override": "false"}}, {"YES", values{"affinity.override": "true"}}},
		"DYN_ENGINE_CONV_AFFINITY_DP_RANK_SOURCE":    {{"dynamo", values{"affinity.rank_source": "dynamo"}}},
		"DYN_ENGINE_REQUEST_LIMIT":                   {{"64", values{"admission.max_requests": "64"}}},
		"DYN_DYNAMO_REQUEST_QUEUE_LIMIT":             {{"0", values{"admission.queue": "0"}}},
		"DYN_ENGINE_HEALTH_CHECK_INTERVAL":           {{"5", values{"engine.watch.health_interval": "5s"}}, {"-1", values{"engine.watch.health_interval": "50ms"}}},
		"DYN_ENGINE_HEALTH_CHECK_TIMEOUT":            {{"7.5", values{"engine.watch.health_timeout": "7.5s"}}, {"-1", values{"engine.watch.health_timeout": "0s"}}},
		"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS":    {{"2.5", values{"drain.grace": "2.5s"}}, {"-3", values{"drain.grace": "0s"}}},
		"DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": {{"120", values{"drain.budget": "2m"}}, {"0", values{"drain.budget": "0s"}}},
		"DYN_DISCOVERY_BACKEND":                      {{"etcd", values{"discovery.backend": "etcd"}}},
		"ETCD_ENDPOINTS":                             {{"http://a:1, http://b:2", values{"etcd.endpoints": "[http://a:1, http://b:2]"}}, {"127.0.0.1:2379", values{"etcd.endpoints": "[127.0.0.1:2379]"}}},
		"ETCD_LEASE_TTL":                             {{"5", values{"etcd.lease_ttl": "5s"}}},
		"ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS":       {{"7", values{"etcd.startup_timeout": "7s"}}},
		"ETCD_KEEPALIVE_INTERVAL_SECONDS":            {{"0", values{"etcd.keepalive_interval": "0s"}}},
		"ETCD_KEEPALIVE_TIMEOUT_SECONDS":             {{"9", values{"etcd.keepalive_timeout": "9s"}}},
		"ETCD_AUTH_USERNAME":                         {{"root", values{"etcd.username": "root"}}},
		"ETCD_AUTH_PASSWORD":                         {{"hush", values{"etcd.password": "<secret>"}}},
		"ETCD_AUTH_CA":                               {{"/ca.pem", values{"etcd.ca": "/ca.pem"}}},
		"ETCD_AUTH_CLIENT_CERT":                      {{"/c.pem", values{"etcd.client_cert": "/c.pem"}}},
		"ETCD_AUTH_CLIENT_KEY":                       {{"/k.pem", values{"etcd.client_key": "<secret>"}}},
		"DYN_REQUEST_PLANE":                          {{"nats", values{"request_plane.kind": "nats"}}, {" tcp ", values{"request_plane.kind": "tcp"}}},
		"DYN_REQUEST_PLANE_CODEC":                    {{"json", values{"request_plane.codec": "json"}}},
		"DYN_TCP_RPC_HOST":                           {{"10.0.0.1", values{"request_plane.tcp.host": "10.0.0.1"}}, {"::1", values{"request_plane.tcp.host": `"::1"`}}},
		"DYN_TCP_RPC_PORT":                           {{"7000", values{"request_plane.tcp.port": "7000"}}},
		"DYN_TCP_MAX_MESSAGE_SIZE":                   {{"65536", values{"request_plane.tcp.max_message_size": "65536"}}},
		"DYN_TCP_TLS_CERT_PATH":                      {{"/c", values{"request_plane.tcp.tls.cert_file": "/c"}}},
		"DYN_TCP_TLS_KEY_PATH":                       {{"/k", values{"request_plane.tcp.tls.key_file": "/k"}}},
		"DYN_TCP_TLS_CLIENT_CA_CERT_PATH":            {{"/ca", values{"request_plane.tcp.tls.client_ca_file": "/ca"}}},
		"DYN_TCP_TLS_HANDSHAKE_TIMEOUT_SECS":         {{"8", values{"request_plane.tcp.tls.handshake_timeout": "8s", "response_plane.tls.handshake_timeout": "8s"}}},
		"DYN_RESPONSE_PLANE":                         {{"tcp", values{"response_plane.kind": "tcp"}}},
		"DYN_TCP_TLS_CA_CERT_PATH":                   {{"/ca", values{"response_plane.tls.ca_file": "/ca"}}},
		"DYN_TCP_TLS_INSECURE":                       {{"on", values{"response_plane.tls.insecure": "true"}}},
		"DYN_TCP_TLS_SERVER_NAME":                    {{"front", values{"response_plane.tls.server_name": "front"}}},
		"DYN_TCP_TLS_CLIENT_CERT_PATH":               {{"/c", values{"response_plane.tls.cert_file": "/c"}}},
		"DYN_TCP_TLS_CLIENT_KEY_PATH":                {{"/k", values{"response_plane.tls.key_file": "/k"}}},
		"DYN_EVENT_PLANE":                            {{"nats", values{"event_plane.kind": "nats"}}},
		"NATS_SERVER":                                {{"nats://u:hush@n:4222", values{"nats.server": "nats://<secret>@n:4222"}}, {"tls://n", values{"nats.server": "tls://n"}}},
		"NATS_AUTH_USERNAME":                         {{"u", values{"nats.username": "u"}}},
		"NATS_AUTH_PASSWORD":                         {{"hush", values{"nats.password": "<secret>"}}},
		"NATS_AUTH_TOKEN":                            {{"hush", values{"nats.token": "<secret>"}}},
		"NATS_AUTH_NKEY":                             {{"hush", values{"nats.nkey": "<secret>"}}},
		"NATS_AUTH_CREDENTIALS_FILE":                 {{"/c", values{"nats.credentials_file": "/c"}}},
		"NATS_STARTUP_CONNECT_TIMEOUT_SECONDS":       {{"3", values{"nats.startup_timeout": "3s"}}},
		"NATS_TLS_CA_CERT_PATH":                      {{"/ca", values{"nats.tls.ca_file": "/ca"}}},
		"NATS_TLS_CLIENT_CERT_PATH":                  {{"/c", values{"nats.tls.cert_file": "/c"}}},
		"NATS_TLS_CLIENT_KEY_PATH":                   {{"/k", values{"nats.tls.key_file": "/k"}}},
		"NATS_TLS_INSECURE":                          {{"1", values{"nats.tls.insecure": "true"}}},
		"DYN_SYSTEM_HOST":                            {{"127.0.0.1", values{"system.host": "127.0.0.1"}}},
		"DYN_SYSTEM_PORT":                            {{"9090", values{"system.port": "9090"}}, {"0", values{"system.port": "0"}}, {"-1", values{"system.port": "-1"}}},
		"DYN_SYSTEM_HEALTH_PATH":                     {{"/h", values{"system.health_path": "/h"}}},
		"DYN_SYSTEM_LIVE_PATH":                       {{"/l", values{"system.live_path": "/l"}}},
		"DYN_SYSTEM_STARTING_HEALTH_STATUS":          {{"ready", values{"system.starting_health_status": "ready"}}},
		"DYN_HEALTH_CHECK_ENABLED":                   {{"True", values{"health_check.enabled": "true"}}},
		"DYN_CANARY_WAIT_TIME":                       {{"20", values{"health_check.wait": "20s"}}},
		"DYN_HEALTH_CHECK_REQUEST_TIMEOUT":           {{"4", values{"health_check.timeout": "4s"}}},
		"DYN_HEALTH_CHECK_PAYLOAD":                   {{`{"token_ids":[1]}`, values{"health_check.payload": `"{\"token_ids\":[1]}"`}}, {"@/p.json", values{"health_check.payload": `"{}"`}}},
		"DYN_LOG":                                    {{"debug", values{"log.level": "debug"}}, {"WARN,dynamo_runtime=debug", values{"log.level": "warn"}}, {"dynamo_llm=debug", values{"log.level": "info"}}, {"info,h2", values{"log.level": "info"}}},
		"DYN_LOGGING_JSONL":                          {{"false", values{"log.format": "console"}}, {"1", values{"log.format": "json"}}},
	}
	for _, v := range Variables() {
		if v.Status != Used {
			continue
		}
		cases := tests[v.Name]
		require.NotEmpty(t, cases, "%s is in the table but not in this test", v.Name)
		delete(tests, v.Name)
		for _, tc := range cases {
			t.Run(v.Name+"="+tc.text, func(t *testing.T) {
				in := input{env: []string{"HOME=/home/me", v.Name + "=" + tc.text}, files: map[string]string{"/p.json": "{}\n"}}
				_, r, err := in.load()
				// Half of a pair is a conflict of its own; what the variable
				// set can be seen all the same.
				if err != nil {
					require.ErrorIs(t, err, ErrConflict)
				}
				for key, want := range tc.want {
					s, ok := r.Lookup(key)
					require.True(t, ok, key)
					require.Equal(t, want, s.Value, key)
					require.Contains(t, v.Keys, key, "the table names what the variable sets")
					if s.Value != Default().shown(t, key) {
						require.Equal(t, "env "+v.Name, s.Origin.String(), key)
					}
				}
			})
		}
	}
	require.Empty(t, tests, "variables that the table does not have")
}

// shown is the rendering of a default.
func (c *Config) shown(t *testing.T, name string) string {
	t.Helper()
	require.Contains(t, byName, name)
	return byName[name].shown(c)
}

// section12 are the variables that Dynamo 1.6.1's worker side reads, as far as
// its documentation and source name them. Each has to be in the table.
const section12 = `
DYN_DISCOVERY_BACKEND DYN_REQUEST_PLANE DYN_RESPONSE_PLANE DYN_EVENT_PLANE DYN_REQUEST_PLANE_CODEC DYN_EVENT_PLANE_CODEC DYN_EVENT_PLANE_HOST
DYN_ZMQ_BROKER_URL DYN_ZMQ_BROKER_ENABLED DYN_ZMQ_IO_THREADS DYN_NAMESPACE DYN_NAMESPACE_WORKER_SUFFIX DYN_ENDPOINT DYN_KV_STATE_ENDPOINT DYN_STABLE_ROUTING_ID
ETCD_ENDPOINTS ETCD_LEASE_TTL ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS ETCD_KEEPALIVE_INTERVAL_SECONDS ETCD_KEEPALIVE_TIMEOUT_SECONDS
ETCD_AUTH_USERNAME ETCD_AUTH_PASSWORD ETCD_AUTH_CA ETCD_AUTH_CLIENT_CERT ETCD_AUTH_CLIENT_KEY
NATS_SERVER NATS_AUTH_USERNAME NATS_AUTH_PASSWORD NATS_AUTH_TOKEN NATS_AUTH_NKEY NATS_AUTH_CREDENTIALS_FILE
NATS_TLS_CA_CERT_PATH NATS_TLS_CLIENT_CERT_PATH NATS_TLS_CLIENT_KEY_PATH NATS_TLS_INSECURE NATS_STARTUP_CONNECT_TIMEOUT_SECONDS DYN_NATS_REQUEST_TIMEOUT_SECS
DYN_TCP_RPC_HOST DYN_TCP_RPC_PORT DYN_TCP_MAX_MESSAGE_SIZE DYN_TCP_SHRINK_MESSAGE_SIZE DYN_TCP_WORKER_POOL_SIZE DYN_TCP_WORK_QUEUE_SIZE
DYN_ENGINE_REQUEST_LIMIT DYN_DYNAMO_REQUEST_QUEUE_LIMIT DYN_TCP_REQUEST_TIMEOUT DYN_TCP_CONNECT_TIMEOUT DYN_TCP_POOL_SIZE DYN_TCP_CHANNEL_BUFFER
DYN_TCP_RESPONSE_STREAM_HOST DYN_TCP_RESPONSE_STREAM_PORT DYN_TCP_LISTEN_BACKLOG
DYN_TCP_TLS_CERT_PATH DYN_TCP_TLS_KEY_PATH DYN_TCP_TLS_CLIENT_CA_CERT_PATH DYN_TCP_TLS_CA_CERT_PATH DYN_TCP_TLS_INSECURE DYN_TCP_TLS_SERVER_NAME
DYN_TCP_TLS_CLIENT_CERT_PATH DYN_TCP_TLS_CLIENT_KEY_PATH DYN_TCP_TLS_HANDSHAKE_TIMEOUT_SECS
DYN_SYSTEM_PORT DYN_SYSTEM_HOST DYN_SYSTEM_HEALTH_PATH DYN_SYSTEM_LIVE_PATH DYN_SYSTEM_STARTING_HEALTH_STATUS DYN_SYSTEM_ENABLED DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS
DYN_HEALTH_CHECK_ENABLED DYN_CANARY_WAIT_TIME DYN_HEALTH_CHECK_REQUEST_TIMEOUT DYN_HEALTH_CHECK_PAYLOAD
DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT DYN_RUNTIME_INHIBITED_DURATION_SECS
DYN_RUNTIME_NUM_WORKER_THREADS DYN_RUNTIME_MAX_BLOCKING_THREADS DYN_SELF_HOST_METADATA DYN_LORA_ENABLED DYN_LORA_PATH
DYN_LOG DYN_LOGGING_JSONL DYN_LOGGING_CONSOLE_FORMAT DYN_LOGGING_CONFIG_PATH DYN_LOG_USE_LOCAL_TZ DYN_SDK_DISABLE_ANSI_LOGGING DYN_LOGGING_SPAN_EVENTS
OTEL_EXPORT_ENABLED OTEL_EXPORTER_OTLP_ENDPOINT OTEL_SERVICE_NAME OTEL_TRACES_SAMPLE_RATIO OTEL_METRICS_EXPORTER DYN_LIFECYCLE_TRACE_ENABLED DYN_LIFECYCLE_TRACE_MODE
CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES DYN_FORWARDPASS_METRIC_PORT DYN_FPM_TRACE DYN_FPM_WORKER_ID DYN_TOKEN_IDS_AS_BYTES
DYN_TRTLLM_MAX_BATCH_SIZE DYN_ENGINE_CONV_AFFINITY DYN_ENGINE_CONV_AFFINITY_DP_RANK_SOURCE`

func TestTheTableIsComplete(t *testing.T) {
	used := map[string]bool{}
	seen := map[string]bool{}
	for _, v := range Variables() {
		require.False(t, seen[v.Name], "%s is in the table twice", v.Name)
		seen[v.Name] = true
		used[v.Name] = v.Status == Used
		require.NotEmpty(t, v.Note, v.Name)
		require.Contains(t, []Status{Used, Ignored, Refused}, v.Status, v.Name)
		require.Equal(t, v.Status == Used, len(v.Keys) > 0, v.Name)
		for _, k := range v.Keys {
			require.Contains(t, byName, k, v.Name)
		}
	}
	for _, name := range strings.Fields(section12) {
		if !used[name] {
			require.NotNil(t, lookup(name), name)
		}
	}
}

// TestVariablesThatSetNothing checks ignored and refused ones, with values
// that ask for something and values that do not.
func TestVariablesThatSetNothing(t *testing.T) {
	base, _ := input{}.must(t)
	for _, v := range Variables() {
		if v.Status == Used {
			continue
		}
		name := strings.Replace(v.Name, "*", "OF_SOME_KIND", 1)
		c, r, err := input{env: []string{name + "=something"}}.load()
		switch {
		case v.Status == Refused:
			var errs Errors
			require.ErrorAs(t, err, &errs, v.Name)
			require.Equal(t, []string{name}, errs.Keys())
			require.ErrorIs(t, err, ErrUnsupported)
			require.ErrorContains(t, err, v.Note)
		default:
			require.NoError(t, err, v.Name)
			require.Empty(t, cmp.Diff(base, c, sameConfig), v.Name)
			require.Equal(t, v.Warn, len(r.Warnings) == 1, "%s: %v", v.Name, r.Warnings)
		}
		for _, harmless := range append(v.Harmless, "") {
			c, r, err := input{env: []string{name + "=" + strings.ToUpper(harmless)}}.load()
			require.NoError(t, err, v.Name)
			require.Empty(t, r.Warnings, v.Name)
			require.Empty(t, cmp.Diff(base, c, sameConfig), v.Name)
		}
	}
}

func TestUnknownVariables(t *testing.T) {
	for env, want := range map[string]string{
		"DYN_NAMESAPCE=a":                  "DYN_NAMESAPCE: is not a variable of this worker; did you mean DYN_NAMESPACE?",
		"DYN_ZEBRA=a":                      "DYN_ZEBRA: is not a variable of this worker",
		"ETCD_ENDPOINT=a":                  "ETCD_ENDPOINT: is not a variable of this worker; did you mean ETCD_ENDPOINTS?",
		"NATS_SERVERS=a":                   "NATS_SERVERS: is not a variable of this worker; did you mean NATS_SERVER?",
		"NATS_SERVICE_PORT=4222":           "",
		"ETCD_NAME=etcd-0":                 "",
		"PATH=/bin":                        "",
		"DYN_SYSTEM_PORT=":                 "DYN_SYSTEM_PORT: is set but empty, and therefore ignored",
		"DYN_REQUEST_PLANE=":               "DYN_REQUEST_PLANE: is set but empty, and therefore ignored",
		"DYN_NAMESPACE_WORKER_SUFFIX=":     "",
		"DYN_NAMESPACE=":                   "",
		"MALFORMED":                        "",
		"DYN_TCP_WORKER_POOL_SIZE=10":      "DYN_TCP_WORKER_POOL_SIZE: has no effect: there is no pool of workers; admission.max_requests bounds requests",
		"DYN_SYSTEM_ENABLED=true":          "DYN_SYSTEM_ENABLED: has no effect: is obsolete; DYN_SYSTEM_PORT turns the server on and off",
		"DYN_ROUTER_SESSION_AFFINITY=true": "",
	} {
		_, r := input{env: []string{env}}.must(t)
		if want == "" {
			require.Empty(t, r.Warnings, env)
			continue
		}
		require.Len(t, r.Warnings, 1, env)
		require.Equal(t, want, r.Warnings[0].String())
	}
}

func TestTheLastOfADoubledVariableCounts(t *testing.T) {
	c, _ := input{env: []string{"DYN_NAMESPACE=a", "DYN_NAMESPACE=b"}}.must(t)
	require.Equal(t, "b", c.Namespace)
}
