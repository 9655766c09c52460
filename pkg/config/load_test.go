package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/stretchr/testify/require"
)

// input is what one Load sees. The file is called conf/w.yaml; an empty text
// is no file at all.
type input struct {
	yaml  string
	env   []string
	args  []string
	files map[string]string
	// noModel leaves model.path out, which is otherwise set so that a case has
	// to say only what it is about.
	noModel bool
}

func (in input) load() (*Config, *Report, error) {
	files := map[string]string{}
	for k, v := range in.files {
		files[k] = v
	}
	var args []string
	if !in.noModel {
		// The variable is weaker than a flag, so a case can still set a path.
		in.env = append([]string{"DYN_TRTLLM_MODEL=/models/m"}, in.env...)
	}
	if in.yaml != "" {
		files["conf/w.yaml"] = in.yaml
		args = append(args, "--config", "conf/w.yaml")
	}
	return Load(append(args, in.args...), in.env, func(name string) ([]byte, error) {
		if text, ok := files[name]; ok {
			return []byte(text), nil
		}
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	})
}

func (in input) must(t *testing.T) (*Config, *Report) {
	t.Helper()
	c, r, err := in.load()
	require.NoError(t, err)
	return c, r
}

// sameConfig compares what was set, not where.
var sameConfig = cmpopts.IgnoreUnexported(Config{})

func TestDefaults(t *testing.T) {
	c, r := input{noModel: true, args: []string{"--model", "/m"}}.must(t)
	want := Default()
	want.Model.Path = "/m"
	require.Empty(t, cmp.Diff(want, c, sameConfig))
	require.Empty(t, r.Warnings)
	require.Len(t, r.Settings, len(keys))
	for i, s := range r.Settings {
		require.Equal(t, keys[i].name, s.Key)
		if s.Key != "model.path" {
			require.Equal(t, "default", s.Origin.String(), s.Key)
		}
	}
}

func TestLaterLayersWin(t *testing.T) {
	in := input{
		yaml: "namespace: file\ncomponent: file\nendpoint: file\nnamespace_suffix: file\n",
		env:  []string{"DYN_NAMESPACE=env", "DYN_NAMESPACE_WORKER_SUFFIX=env"},
		args: []string{"--namespace", "flag", "--set", "component=set"},
	}
	c, r := in.must(t)
	require.Equal(t, [4]string{"flag", "env", "set", "file"}, [4]string{c.Namespace, c.NamespaceSuffix, c.Component, c.Endpoint})
	for key, origin := range map[string]string{
		"namespace":        "flag --namespace",
		"namespace_suffix": "env DYN_NAMESPACE_WORKER_SUFFIX",
		"component":        "--set",
		"endpoint":         "conf/w.yaml:3",
		"handler":          "default",
	} {
		s, ok := r.Lookup(key)
		require.True(t, ok)
		require.Equal(t, origin, s.Origin.String(), key)
	}
	require.Equal(t, "conf/w.yaml", r.File)
}

func TestTheLastOfSeveralOptionsWins(t *testing.T) {
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"--model", "/a", "--model-path", "/b"}, "/b"},
		{[]string{"--model-path=/b", "--model=/a"}, "/a"},
		{[]string{"--set", "model.path=/s", "--model", "/f"}, "/f"},
		{[]string{"--model", "/f", "--set", "model.path=/s", "--set=model.path=/t"}, "/t"},
	} {
		c, _ := input{args: tc.args}.must(t)
		require.Equal(t, tc.want, c.Model.Path, "%v", tc.args)
	}
}

func TestEndpointAddress(t *testing.T) {
	type got struct{ ns, suffix, comp, ep string }
	for _, tc := range []struct {
		name  string
		in    input
		want  got
		warns string
	}{
		{name: "plain", in: input{env: []string{"DYN_ENDPOINT=other"}}, want: got{"dynamo", "", "backend", "other"}},
		{name: "full", in: input{env: []string{"DYN_ENDPOINT=dyn://a.b.c"}}, want: got{"a", "", "b", "c"}},
		{name: "full without scheme", in: input{args: []string{"--endpoint", "a.b.c"}}, want: got{"a", "", "b", "c"}},
		{
			name: "full beats namespace and suffix of the same layer",
			in:   input{env: []string{"DYN_ENDPOINT=dyn://a.b.c", "DYN_NAMESPACE=n", "DYN_NAMESPACE_WORKER_SUFFIX=s"}},
			want: got{"a", "", "b", "c"},
		},
		{
			name: "wherever it stands on the command line",
			in:   input{args: []string{"--endpoint", "dyn://a.b.c", "--namespace", "n"}},
			want: got{"a", "", "b", "c"},
		},
		{
			name: "in the file",
			in:   input{yaml: "endpoint: dyn://a.b.c\nnamespace: n\n"},
			want: got{"a", "", "b", "c"},
		},
		{
			name:  "a stronger namespace is kept, with a warning",
			in:    input{env: []string{"DYN_ENDPOINT=dyn://a.b.c"}, args: []string{"--namespace", "n"}},
			want:  got{"n", "", "b", "c"},
			warns: "namespace",
		},
		{
			name: "a suffix goes with the namespace",
			in:   input{env: []string{"DYN_NAMESPACE=lab", "DYN_NAMESPACE_WORKER_SUFFIX=a1b2c3d4"}},
			want: got{"lab", "a1b2c3d4", "backend", "generate"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, r := tc.in.must(t)
			require.Equal(t, tc.want, got{c.Namespace, c.NamespaceSuffix, c.Component, c.Endpoint})
			if tc.warns == "" {
				require.Empty(t, r.Warnings)
				return
			}
			require.Len(t, r.Warnings, 1)
			require.Equal(t, tc.warns, r.Warnings[0].Subject)
		})
	}
	require.Equal(t, "lab-a1", (&Config{Namespace: "lab", NamespaceSuffix: "a1"}).ServingNamespace())
	require.Equal(t, "lab", (&Config{Namespace: "lab"}).ServingNamespace())
}

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

		// Settings that do not go together.
		{name: "no model", in: input{noModel: true}, keys: []string{"model.path"}, kind: ErrValue, says: []string{"required"}},
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
		{name: "level of nobody", in: input{env: []string{"DYN_LOG=inof"}}, keys: []string{"log.level"}, kind: ErrValue, says: []string{"did you mean info?", "env DYN_LOG"}},
		{name: "prefill worker", in: input{env: []string{"DYN_TRTLLM_DISAGGREGATION_MODE=prefill"}}, keys: []string{"DYN_TRTLLM_DISAGGREGATION_MODE"}, kind: ErrUnsupported},
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
		{name: "stray word", in: input{args: []string{"serve"}}, keys: []string{"serve"}, kind: ErrSyntax},
		{name: "empty file name", in: input{args: []string{"--config="}}, keys: []string{"--config"}, kind: ErrValue},
		{name: "set of an unknown key", in: input{args: []string{"--set", "drain.bugdet=1s"}}, keys: []string{"drain.bugdet"}, kind: ErrUnknownKey, says: []string{"did you mean drain.budget?", "--set"}},
		{name: "set of a section", in: input{args: []string{"--set", "drain=1s"}}, keys: []string{"drain"}, kind: ErrUnknownKey, says: []string{"section"}},
		{name: "set without a value", in: input{args: []string{"--set", "drain.budget"}}, keys: []string{"--set"}, kind: ErrSyntax},
		{name: "set of the wrong type", in: input{args: []string{"--set", "drain.budget=30"}}, keys: []string{"drain.budget"}, kind: ErrValue, says: []string{"no unit", "--set"}},
		{name: "set below a value", in: input{yaml: "engine:\n  args: {a: 1}\n", args: []string{"--set", "engine.args.a.b=1"}}, keys: []string{"engine.args.a.b"}, kind: ErrConflict},
		{name: "set of nothing in particular", in: input{args: []string{"--set", "engine.args..b=1"}}, keys: []string{"engine.args..b"}, kind: ErrSyntax},
		{name: "set of engine arguments to a word", in: input{args: []string{"--set", "engine.args=fast"}}, keys: []string{"engine.args"}, kind: ErrValue},
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
		"DYN_ENGINE_CONV_AFFINITY":                   {{"1", values{"affinity.override": "true"}}, {"off", values{"affinity.override": "false"}}, {"YES", values{"affinity.override": "true"}}},
		"DYN_ENGINE_CONV_AFFINITY_DP_RANK_SOURCE":    {{"dynamo", values{"affinity.rank_source": "dynamo"}}},
		"DYN_ENGINE_REQUEST_LIMIT":                   {{"64", values{"admission.max_requests": "64"}}},
		"DYN_DYNAMO_REQUEST_QUEUE_LIMIT":             {{"0", values{"admission.queue": "0"}}},
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

func TestFlags(t *testing.T) {
	for _, tc := range []struct {
		args []string
		key  string
		want string
		flag string
	}{
		{[]string{"--namespace=x"}, "namespace", "x", "--namespace"},
		{[]string{"--endpoint", "dyn://a.b.c"}, "component", "b", "--endpoint"},
		{[]string{"--model-path", "/m"}, "model.path", "/m", "--model-path"},
		{[]string{"--served-model-name", "a b"}, "model.aliases", "[b]", "--served-model-name"},
		{[]string{"--dyn-endpoint-types", "chat"}, "model.endpoint_types", "[chat]", "--dyn-endpoint-types"},
		{[]string{"--conversation-affinity"}, "affinity.override", "true", "--conversation-affinity"},
		{[]string{"--conversation-affinity=no"}, "affinity.override", "false", "--conversation-affinity"},
		{[]string{"--no-conversation-affinity"}, "affinity.override", "false", "--no-conversation-affinity"},
		{[]string{"--conversation-affinity", "--no-conversation-affinity"}, "affinity.override", "false", "--no-conversation-affinity"},
		{[]string{"--no-conversation-affinity", "--conversation-affinity"}, "affinity.override", "true", "--conversation-affinity"},
		{[]string{"--conversation-affinity-dp-rank-source", "dynamo"}, "affinity.rank_source", "dynamo", "--conversation-affinity-dp-rank-source"},
		{[]string{"--engine-request-limit", "3"}, "admission.max_requests", "3", "--engine-request-limit"},
		{[]string{"--request-plane", "nats"}, "request_plane.kind", "nats", "--request-plane"},
		{[]string{"--response-plane", "tcp"}, "response_plane.kind", "tcp", "--response-plane"},
		{[]string{"--event-plane", "nats"}, "event_plane.kind", "nats", "--event-plane"},
		{[]string{"--discovery-backend", "etcd"}, "discovery.backend", "etcd", "--discovery-backend"},
		{[]string{"--tcp-tls-handshake-timeout", "2"}, "response_plane.tls.handshake_timeout", "2s", "--tcp-tls-handshake-timeout"},
		{[]string{"--nats-tls-insecure"}, "nats.tls.insecure", "true", "--nats-tls-insecure"},
		{[]string{"--log-level", "debug"}, "log.level", "debug", "--log-level"},
	} {
		_, r := input{args: tc.args}.must(t)
		s, ok := r.Lookup(tc.key)
		require.True(t, ok)
		require.Equal(t, tc.want, s.Value, "%v", tc.args)
		require.Equal(t, "flag "+tc.flag, s.Origin.String())
	}
}

func TestNegatedAffinityFlag(t *testing.T) {
	for _, tc := range []struct {
		in      input
		set, on bool
		warns   bool
	}{
		{in: input{}},
		{in: input{yaml: "affinity: {override: false}\n"}},
		{in: input{yaml: "affinity: {override: true}\n"}, set: true, on: true},
		{in: input{env: []string{"DYN_ENGINE_CONV_AFFINITY=0"}}, set: true},
		{in: input{env: []string{"DYN_ENGINE_CONV_AFFINITY=1"}, args: []string{"--no-conversation-affinity"}}, set: true, warns: true},
	} {
		c, r := tc.in.must(t)
		require.Equal(t, tc.on, c.Affinity.Override, "%+v", tc.in)
		require.Equal(t, tc.set, c.Affinity.OverrideSet, "%+v", tc.in)
		require.Equal(t, tc.warns, len(r.Warnings) == 1, "%+v", tc.in)
	}
}

func TestSet(t *testing.T) {
	c, r := input{
		yaml: "engine:\n  args:\n    KeepCase: {Inner: 1}\n    old: x\n",
		args: []string{
			"--set", "drain.budget=0", "--set", "etcd.endpoints=http://a:1,http://b:1", "--set", "engine.command=[python3, -m, 'a, b']",
			"--set", "engine.env=", "--set", "system.port=-1", "--set", "health_check.enabled=yes", "--set", "endpoint=dyn://a.b.c",
		},
	}.must(t)
	require.Zero(t, c.Drain.Budget)
	require.Equal(t, []string{"http://a:1", "http://b:1"}, c.Etcd.Endpoints)
	require.Equal(t, []string{"python3", "-m", "a, b"}, c.Engine.Command)
	require.Empty(t, c.Engine.Env)
	require.Equal(t, -1, c.System.Port)
	require.True(t, c.HealthCheck.Enabled)
	require.Equal(t, [3]string{"a", "b", "c"}, [3]string{c.Namespace, c.Component, c.Endpoint})
	require.Equal(t, map[string]any{"KeepCase": map[string]any{"Inner": int64(1)}, "old": "x"}, c.Engine.Args)
	s, _ := r.Lookup("engine.args.KeepCase.Inner")
	require.Equal(t, "conf/w.yaml:3", s.Origin.String())
}

func TestEngineArguments(t *testing.T) {
	const file = `
engine:
  args: &top
    NCCL_Debug: INFO
    kv_cache_config:
      free_gpu_memory_fraction: 0.8
      host_cache_size: 17179869184
      enable_block_reuse: false
      dtype: null
    big: 18446744073709551615
    tiny: 1e-5
    sizes: [1, 2, {Deep: yes}]
    when: 2024-01-01
    quoted: "08"
    empty: {}
    8: eight
    same: &a [1]
    again: *a
`
	c, r := input{yaml: file, args: []string{"--set", "engine.args.kv_cache_config.free_gpu_memory_fraction=0.5", "--set", "engine.args.new.path=[a, 1]", "--set", "engine.args.empty.x=true"}}.must(t)
	require.Equal(t, map[string]any{
		"NCCL_Debug": "INFO",
		"kv_cache_config": map[string]any{
			"free_gpu_memory_fraction": 0.5, "host_cache_size": int64(17179869184), "enable_block_reuse": false, "dtype": nil,
		},
		"big":    uint64(18446744073709551615),
		"tiny":   1e-5,
		"sizes":  []any{int64(1), int64(2), map[string]any{"Deep": "yes"}},
		"when":   "2024-01-01",
		"quoted": "08",
		"empty":  map[string]any{"x": true},
		"8":      "eight",
		"same":   []any{int64(1)},
		"again":  []any{int64(1)},
		"new":    map[string]any{"path": []any{"a", int64(1)}},
	}, c.Engine.Args)
	for key, want := range map[string]string{
		"engine.args.kv_cache_config.free_gpu_memory_fraction": "--set",
		"engine.args.kv_cache_config.host_cache_size":          "conf/w.yaml:7",
		"engine.args.new.path":                                 "--set",
		"engine.args.NCCL_Debug":                               "conf/w.yaml:4",
	} {
		s, ok := r.Lookup(key)
		require.True(t, ok, key)
		require.Equal(t, want, s.Origin.String(), key)
	}

	c, _ = input{yaml: file, args: []string{"--set", `engine.args={"A": 1}`}}.must(t)
	require.Equal(t, map[string]any{"A": int64(1)}, c.Engine.Args, "a whole mapping replaces, it does not merge")

	for _, text := range []string{"engine:\n  args:\n", "engine:\n", "engine: {args: {}}\n"} {
		c, _ = input{yaml: text}.must(t)
		require.Equal(t, map[string]any{}, c.Engine.Args)
	}
}

func TestAliasesCannotGrowWithoutEnd(t *testing.T) {
	bomb := "engine:\n  args:\n    a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
	for i := 1; i <= 9; i++ {
		bomb += fmt.Sprintf("    a%d: &a%d [%s]\n", i, i, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d, ", i-1), 10), ", "))
	}
	_, _, err := input{yaml: bomb}.load()
	require.ErrorContains(t, err, "more than 50000 values")

	for _, loop := range []string{"engine:\n  args: &x\n    a: {b: *x}\n", "engine: &x\n  sim: *x\n", "engine:\n  args:\n    a: &x [*x]\n"} {
		_, _, err = input{yaml: loop}.load()
		require.Error(t, err, loop)
	}
}

func TestFilesAreRelativeToTheConfigurationFile(t *testing.T) {
	c, _ := input{yaml: `
model:
  path: ../testdata/model
  custom_jinja_template: t.jinja
engine:
  command: [./engine, ./data]
  sim: {calls_log: calls.jsonl}
nats: {credentials_file: /abs/creds}
etcd:
  endpoints: [https://e:1]
  ca: |
    -----BEGIN CERTIFICATE-----
    MIIB
    -----END CERTIFICATE-----
health_check: {payload: '@p.json'}
`, files: map[string]string{"conf/p.json": ` {"token_ids": [1]} `}, noModel: true}.must(t)
	require.Equal(t, "testdata/model", c.Model.Path)
	require.Equal(t, "conf/t.jinja", c.Model.CustomJinjaTemplate)
	require.Equal(t, []string{"conf/engine", "./data"}, c.Engine.Command, "only the program is a path for sure")
	require.Equal(t, "conf/calls.jsonl", c.Engine.Sim.CallsLog)
	require.Equal(t, "/abs/creds", c.NATS.CredentialsFile)
	require.True(t, IsPEM(c.Etcd.CA))
	require.Equal(t, `{"token_ids": [1]}`, c.HealthCheck.Payload)

	c, _ = input{yaml: "engine: {command: [python3, x.py]}\n", args: []string{"--model", "models/m", "--custom-jinja-template", "t.jinja"}}.must(t)
	require.Equal(t, "models/m", c.Model.Path, "options are about the current folder")
	require.Equal(t, "t.jinja", c.Model.CustomJinjaTemplate)
	require.Equal(t, "python3", c.Engine.Command[0], "a name without a slash is looked up in PATH")
}

func TestEmptyFilesAndSections(t *testing.T) {
	base, _ := input{}.must(t)
	for _, text := range []string{"# nothing\n", "---\n", "null\n", "drain:\netcd:\n", "---\ndrain: {}\n...\n", "\ufeffdrain: {}\n"} {
		c, _ := input{yaml: text}.must(t)
		require.Empty(t, cmp.Diff(base, c, sameConfig), text)
	}
}

func TestHelp(t *testing.T) {
	for _, flag := range []string{"--help", "-h"} {
		_, _, err := Load([]string{flag}, nil, nil)
		require.ErrorIs(t, err, ErrHelp)
	}
	text := Usage()
	for _, b := range bindings {
		for _, f := range b.flags {
			require.Contains(t, text, f)
		}
	}
	require.Contains(t, text, "--no-conversation-affinity")
	require.Contains(t, text, "--set")
	require.Contains(t, text, "--config")
}

func TestAdvice(t *testing.T) {
	for name, tc := range map[string]struct {
		in   input
		want string
	}{
		"template nobody uses":      {input{args: []string{"--endpoint-types", "completions", "--custom-jinja-template", "t"}}, "model.custom_jinja_template"},
		"user and token":            {input{yaml: "nats: {username: u, password: p, token: t}\n"}, "nats.username"},
		"token and file":            {input{yaml: "nats: {token: t, credentials_file: f}\n"}, "nats.token"},
		"nkey and file":             {input{yaml: "nats: {nkey: t, credentials_file: f}\n"}, "nats.nkey"},
		"simulator not used":        {input{yaml: "engine: {sim: {vocab_size: 1000}}\n"}, "engine.sim.vocab_size"},
		"frontend unverified":       {input{args: []string{"--tcp-tls-insecure"}}, "response_plane.tls.insecure"},
		"server unverified":         {input{args: []string{"--nats-tls-insecure"}}, "nats.tls.insecure"},
		"simulator at its defaults": {input{yaml: "engine: {sim: {vocab_size: 355}}\n"}, ""},
	} {
		_, r := tc.in.must(t)
		if tc.want == "" {
			require.Empty(t, r.Warnings, name)
			continue
		}
		require.Len(t, r.Warnings, 1, name)
		require.Equal(t, tc.want, r.Warnings[0].Subject, name)
	}
}

func TestLogin(t *testing.T) {
	for _, tc := range []struct {
		yaml     string
		user, pw string
	}{
		{"log: {}\n", "user", "user"},
		{"nats: {username: u, password: p}\n", "u", "p"},
		{"nats: {token: t}\n", "", ""},
		{"nats: {nkey: t}\n", "", ""},
		{"nats: {credentials_file: t}\n", "", ""},
		{"nats: {server: 'nats://u:p@h'}\n", "", ""},
		{"nats: {server: 'nats://h1,nats://t@h2'}\n", "", ""},
	} {
		c, _ := input{yaml: tc.yaml}.must(t)
		user, pw := c.NATS.Login()
		require.Equal(t, [2]string{tc.user, tc.pw}, [2]string{user, string(pw)}, tc.yaml)
	}
}

func TestSmallQuestions(t *testing.T) {
	c := Default()
	require.False(t, c.System.Enabled())
	c.System.Port = 0
	require.True(t, c.System.Enabled())
	require.False(t, c.RequestPlane.TCP.TLS.Enabled() || c.ResponsePlane.TLS.Enabled() || c.NATS.TLS.Enabled())
	c.RequestPlane.TCP.TLS.CertFile, c.ResponsePlane.TLS.ServerName, c.NATS.TLS.Insecure = "c", "n", true
	require.True(t, c.RequestPlane.TCP.TLS.Enabled() && c.ResponsePlane.TLS.Enabled() && c.NATS.TLS.Enabled())
	c.Model.Path = "/m"
	require.Equal(t, "/m", c.Model.ServedName())
	c.Model.Name = "n"
	require.Equal(t, "n", c.Model.ServedName())
}

func TestSimArgs(t *testing.T) {
	c, _ := input{yaml: "engine: {kind: sim, sim: {token_delay: 20ms, calls_log: /c, conversation_affinity: true}}\n"}.must(t)
	args := c.Engine.Sim.Args()
	require.Equal(t, 355, args["vocab_size"])
	require.Equal(t, "20ms", args["token_delay"])
	require.Equal(t, "/c", args["calls_log"])
	require.Equal(t, true, args["conversation_affinity"])
	n := 0
	for _, k := range Keys() {
		if strings.HasPrefix(k, simPrefix) {
			n++
		}
	}
	require.Len(t, args, n)
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

func TestCheckFiles(t *testing.T) {
	dir := t.TempDir()
	write := func(name string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte("x"), 0o644))
		return path
	}
	write("good/config.json")
	write("good/tokenizer.json")
	write("bare/config.json")
	write("blind/tiktoken.model")
	file := write("file")

	good := func() *Config {
		c := Default()
		c.Model.Path = filepath.Join(dir, "good")
		c.Engine.Sim.CallsLog = filepath.Join(dir, "calls.jsonl")
		c.NATS.CredentialsFile = file
		return c
	}
	require.NoError(t, good().CheckFiles(nil))
	for name, tc := range map[string]struct {
		change func(*Config)
		key    string
		says   string
	}{
		"no folder":      {func(c *Config) { c.Model.Path = filepath.Join(dir, "gone") }, "model.path", filepath.Join(dir, "gone")},
		"a file":         {func(c *Config) { c.Model.Path = file }, "model.path", "not a folder"},
		"no tokenizer":   {func(c *Config) { c.Model.Path = filepath.Join(dir, "bare") }, "model.path", "tokenizer.json"},
		"no config.json": {func(c *Config) { c.Model.Path = filepath.Join(dir, "blind") }, "model.path", "config.json"},
		"no template":    {func(c *Config) { c.Model.CustomJinjaTemplate = filepath.Join(dir, "t") }, "model.custom_jinja_template", "does not exist"},
		"a folder":       {func(c *Config) { c.NATS.TLS.CAFile = dir }, "nats.tls.ca_file", "is a folder"},
		"no log folder":  {func(c *Config) { c.Engine.Sim.CallsLog = filepath.Join(dir, "gone", "x") }, "engine.sim.calls_log", "does not exist"},
		"no CA":          {func(c *Config) { c.Etcd.CA = "gone.pem" }, "etcd.ca", "gone.pem"},
		"key in no form": {func(c *Config) { c.Etcd.ClientKey = "MIIBhush" }, "etcd.client_key", "neither PEM"},
	} {
		c := good()
		tc.change(c)
		var errs Errors
		err := c.CheckFiles(nil)
		require.ErrorAs(t, err, &errs, name)
		require.Equal(t, []string{tc.key}, errs.Keys(), name)
		require.ErrorIs(t, err, ErrFile, name)
		require.ErrorContains(t, err, tc.says, name)
		require.NotContains(t, err.Error(), "hush")
	}

	c := good()
	c.Etcd.CA = "-----BEGIN CERTIFICATE-----\n"
	c.Etcd.ClientKey = "-----BEGIN PRIVATE KEY-----\n"
	require.NoError(t, c.CheckFiles(nil))

	broken := errors.New("the disk is on fire")
	c = good()
	err := c.CheckFiles(func(string) (fs.FileInfo, error) { return nil, broken })
	require.ErrorIs(t, err, broken)

	// Problems name the place that set the path.
	c, _ = input{yaml: "model:\n  path: gone\n", noModel: true}.must(t)
	require.ErrorContains(t, c.CheckFiles(nil), "conf/w.yaml:2")
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

func TestDurationsAreReadable(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0s", time.Millisecond: "1ms", 90 * time.Second: "1m30s", 10 * time.Minute: "10m", 2 * time.Hour: "2h", time.Hour + time.Second: "1h0m1s", 20 * time.Second: "20s",
	} {
		require.Equal(t, want, formatDuration(d))
		back, err := parseDuration(want)
		require.NoError(t, err)
		require.Equal(t, d, back)
	}
}
