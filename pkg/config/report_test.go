package config

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

var update = flag.Bool("update", false, "write configs/worker.yaml")

const referenceFile = "../../configs/worker.yaml"

func TestReferenceFile(t *testing.T) {
	if *update {
		require.NoError(t, os.WriteFile(referenceFile, []byte(Reference()), 0o644))
	}
	b, err := os.ReadFile(referenceFile)
	require.NoError(t, err)
	require.Equal(t, Reference(), string(b), "run the test with -update after changing a key")
}

// TestReferenceFileIsTheDefaults reads the file back: it sets every key, each
// has one line of comment, and nothing changes.
func TestReferenceFileIsTheDefaults(t *testing.T) {
	c, r, err := Load([]string{"--config", referenceFile, "--set", "model.path=/m"}, nil, nil)
	require.NoError(t, err)
	require.Empty(t, r.Warnings)
	want := Default()
	want.Model.Path = "/m"
	require.Empty(t, cmp.Diff(want, c, sameConfig))
	b, err := os.ReadFile(referenceFile)
	require.NoError(t, err)
	lines := strings.Split(string(b), "\n")
	for _, s := range r.Settings {
		if s.Key == "model.path" {
			continue
		}
		require.Equal(t, FromFile, s.Origin.Kind, s.Key)
		above := strings.TrimSpace(lines[s.Origin.Line-2])
		require.True(t, strings.HasPrefix(above, "# "+byName[s.Key].doc), "%s: %s", s.Key, above)
	}

	// By itself it lacks the one thing that has no default.
	require.NoError(t, c.CheckServing())
	c, _, err = Load([]string{"--config", referenceFile}, nil, nil)
	require.NoError(t, err)
	var errs Errors
	require.ErrorAs(t, c.CheckServing(), &errs)
	require.Equal(t, []string{"model.path"}, errs.Keys())
}

func TestSimFile(t *testing.T) {
	c, r, err := Load([]string{"--config", "../../configs/worker.sim.yaml"}, nil, nil)
	require.NoError(t, err)
	require.Empty(t, r.Warnings)
	require.NoError(t, c.CheckFiles(nil))
	require.Equal(t, EngineSim, c.Engine.Kind)
	require.Equal(t, PlaneNATS, c.RequestPlane.Kind)

	require.NoError(t, c.CheckServing())

	// What the simulator makes up has to fit the model beside it.
	b, err := os.ReadFile(c.Model.Path + "/config.json")
	require.NoError(t, err)
	var model struct {
		VocabSize int `json:"vocab_size"`
		EOS       int `json:"eos_token_id"`
		Context   int `json:"max_position_embeddings"`
	}
	require.NoError(t, json.Unmarshal(b, &model))
	require.Equal(t, model.VocabSize, c.Engine.Sim.VocabSize)
	require.Equal(t, model.EOS, c.Engine.Sim.EOSTokenID)
	require.Equal(t, model.Context, c.Engine.Sim.MaxSeqLen)
}

// TestKeysAndFieldsAgree: a field without a key could not be set, a key
// without a field would set nothing.
func TestKeysAndFieldsAgree(t *testing.T) {
	seen := map[string]bool{}
	for _, k := range keys {
		require.False(t, seen[k.name], k.name)
		seen[k.name] = true
		require.NotEmpty(t, k.index, "%s has no field", k.name)
		require.NotEmpty(t, k.doc, k.name)
		require.NotContains(t, k.doc, "\n", k.name)
		require.True(t, strings.HasSuffix(k.doc, "."), k.name)
		if k.name != "model.path" {
			require.NoError(t, checkValue(k, k.def), "default of %s", k.name)
		}
	}
	require.Equal(t, len(keys), countFields(t, Default().YAML()))
	require.Equal(t, Keys()[0], "namespace")
}

// countFields counts the leaves of a document, mappings of engine.args aside.
func countFields(t *testing.T, text string) int {
	t.Helper()
	var n yaml.Node
	require.NoError(t, yaml.Unmarshal([]byte(text), &n))
	var count func(n *yaml.Node) int
	count = func(n *yaml.Node) int {
		if n.Kind != yaml.MappingNode || len(n.Content) == 0 {
			return 1
		}
		total := 0
		for i := 1; i < len(n.Content); i += 2 {
			total += count(n.Content[i])
		}
		return total
	}
	return count(n.Content[0])
}

func TestRoundTrip(t *testing.T) {
	for name, in := range map[string]input{
		"defaults": {},
		"all kinds": {
			yaml: `
namespace: "007"
namespace_suffix: "true"
model: {name: "null", aliases: ["a#b", "1e3", "Qwen/Qwen3-0.6B"], endpoint_types: [completions]}
engine:
  kind: trtllm
  command: [python3, "-c", "print('a, b: {c}')", "", "- x"]
  env: ["A=b c", "B=", 'C=x=y "z"']
  start_timeout: 1h30m
  args: {Upper: {case: [1, 1.5, 1e100, 3.0, "3.0", null, true, "yes", {}]}, "a b": "x\ny", "c:": -0.0, big: 18446744073709551615}
  trtllm: {free_gpu_memory_fraction: 0.85, max_batch_size: 7, override_engine_args: {kv_cache_config: {dtype: fp8, x: 2.0}}}
lora: [{name: "a: b", path: "x y"}, {name: sql, path: /adapters/sql}]
role: prefill
affinity: {override: true, rank_source: dynamo}
drain: {grace: 0s, budget: 1500ms}
etcd: {endpoints: ["https://a:1", "https://b"], keepalive_interval: 0s, ca: "-----BEGIN CERTIFICATE-----\nMII\n-----END CERTIFICATE-----\n"}
health_check: {enabled: true, payload: '{"token_ids": [1, 2]}'}
system: {port: 0, host: "::"}
`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			one, _ := in.must(t)
			text := one.YAML()
			two, r, err := Load([]string{"--config", "again.yaml"}, nil, func(string) ([]byte, error) { return []byte(text), nil })
			require.NoError(t, err, text)
			require.Empty(t, r.Warnings)
			require.Empty(t, cmp.Diff(one, two, sameConfig))
			require.Equal(t, text, two.YAML())
		})
	}
}

// TestSecretsAreElided puts one word wherever a secret can be, and looks for
// it in everything that can be printed.
func TestSecretsAreElided(t *testing.T) {
	const hush = "hush"
	in := input{
		yaml: `
etcd:
  endpoints: ["https://e:1"]
  username: root
  password: hush
  client_cert: c.pem
  client_key: "-----BEGIN PRIVATE KEY-----\nhush\n-----END PRIVATE KEY-----"
nats:
  server: "nats://me:hush@a:1,tls://hush@b:2"
  username: u
  password: hush
  token: hush
  nkey: hush
engine:
  command: [run, --token, hush, --password=hush, "http://u:hush@h/"]
  env: [HF_TOKEN=hush, "URL=https://u:hush@h", PLAIN=yes]
  trtllm: {override_engine_args: {auth_token: hush}}
  args: {hub: {api_key: hush, hf_token: hush, url: "http://u:hush@h"}, list: [{password: hush}], max_num_tokens: 5}
`,
		args: []string{"--set", "engine.args.other.secret=hush"},
	}
	c, r := in.must(t)
	require.Equal(t, hush, string(c.Etcd.Password), "the value itself is kept")

	var report strings.Builder
	_, err := r.WriteTo(&report)
	require.NoError(t, err)
	encoded, err := json.Marshal(r)
	require.NoError(t, err)
	for _, text := range []string{report.String(), c.YAML(), string(encoded), fmt.Sprint(r.Warnings)} {
		require.NotContains(t, text, hush)
	}
	require.Equal(t, 17, strings.Count(report.String(), "<secret>"), "nothing else is hidden:\n%s", &report)
	for _, s := range r.Settings {
		if s.Secret {
			require.Contains(t, []string{`""`, "<secret>"}, s.Value, s.Key)
		}
	}
	require.Contains(t, report.String(), "max_num_tokens: 5")
	require.Contains(t, report.String(), "PLAIN=yes")

	// The type protects itself where no report is involved.
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		require.NotContains(t, fmt.Sprintf(verb, c.NATS.Password), hush, verb)
		require.NotContains(t, fmt.Sprintf(verb, c.Etcd), hush, verb)
	}
	asJSON, err := json.Marshal(c.Etcd)
	require.NoError(t, err)
	require.NotContains(t, string(asJSON), hush)
	asYAML, err := yaml.Marshal(c.Etcd)
	require.NoError(t, err)
	require.NotContains(t, string(asYAML), hush)
	require.Empty(t, Secret("").String())

	// Neither do mistakes tell.
	for name, in := range map[string]input{
		"list for a password":     {yaml: "nats: {password: [hush]}\n"},
		"password on its own":     {yaml: "nats: {password: hush}\n"},
		"address of a wrong kind": {yaml: "nats: {server: 'http://u:hush@h'}\n"},
		"address of no kind":      {yaml: "nats: {server: 'u:hush@h'}\n"},
		"comma in a password":     {yaml: "nats: {server: 'nats://u:hush,x@h'}\n"},
		"set with a colon":        {args: []string{"--set", "nats.password:hush"}},
		"unreadable address":      {yaml: "nats: {server: 'nats://u:hu%sh@h'}\n"},
		"user of etcd":            {yaml: "etcd: {endpoints: ['http://u:hush@h']}\n"},
		"variable of a list":      {yaml: "engine: {env: ['hush']}\n"},
		"key of no form":          {yaml: "etcd: {client_key: \"hush\\nhush\"}\n"},
		"files address":           {yaml: "model: {files_address: 'u:hush@h'}\n"},
		"override of engine":      {env: []string{"DYN_TRTLLM_OVERRIDE_ENGINE_ARGS={\"token\": \"hush\""}},
		"override that is a list": {env: []string{"DYN_TRTLLM_OVERRIDE_ENGINE_ARGS=[\"hush\"]"}},
		"flags across a secret":   {args: []string{"--trtllm.token", "hush", "--trtllm.token.x", "1"}},
		"loader":                  {args: []string{"--model-loader-extra-config", "{\"token\": \"hush\"}"}},
	} {
		_, _, err := in.load()
		require.Error(t, err, name)
		require.NotContains(t, err.Error(), "hush", name)
	}
}

func TestReportLines(t *testing.T) {
	_, r := input{yaml: "namespace: lab\n"}.must(t)
	var b strings.Builder
	n, err := r.WriteTo(&b)
	require.NoError(t, err)
	require.EqualValues(t, b.Len(), n)
	lines := strings.Split(strings.TrimSpace(b.String()), "\n")
	require.Len(t, lines, len(keys))
	require.Regexp(t, `^namespace: lab +# conf/w.yaml:1$`, lines[0])
	require.Regexp(t, `^namespace_suffix: "" +# default$`, lines[1])
	_, ok := r.Lookup("gone")
	require.False(t, ok)
}

// TestReportInSpiteOfProblems: `worker check` shows what is there beside what
// is wrong.
func TestReportInSpiteOfProblems(t *testing.T) {
	_, r, err := input{yaml: "namespace: lab\nnamespce: x\n"}.load()
	require.Error(t, err)
	s, ok := r.Lookup("namespace")
	require.True(t, ok)
	require.Equal(t, "lab", s.Value)
}

func TestProblemsCanBeToldApart(t *testing.T) {
	_, _, err := input{yaml: "a: 1\nnamespace: [x]\n"}.load()
	require.ErrorIs(t, err, ErrUnknownKey)
	require.ErrorIs(t, err, ErrValue)
	require.NotErrorIs(t, err, ErrDuplicateKey)
	var p *Problem
	require.ErrorAs(t, err, &p)
	require.Equal(t, "a", p.Key)
	require.Equal(t, 1, p.Origin.Line)
	require.Len(t, strings.Split(err.Error(), "\n"), 2)
}

func FuzzLoad(f *testing.F) {
	f.Add("namespace: a\n", "DYN_NAMESPACE=b", "drain.budget=1s")
	f.Add(Reference(), "DYN_ENDPOINT=dyn://a.b.c", "engine.args.a.b={c: [1]}")
	f.Add("engine: &x\n  args: {a: *x}\n", "ETCD_LEASE_TTL=1e9", "etcd.endpoints=[a")
	f.Add("lora: [{name: a, path: b}]\nrole: decode\nengine: {trtllm: {override_engine_args: {a: 1.0}}}\n", "DYN_TRTLLM_OVERRIDE_ENGINE_ARGS={\"a\": 1e3}", "lora=[{name: x, path: y}]")
	f.Add("a: &a [*a]\n? [b]\n: c\n<<: {x: y}\n", "DYN_LOG=a,b=c", "engine.args=1")
	f.Add("engine: {args: {a: !!int x, b: .nan, c: 0x1F, d: 1_000}}\n---\nb\n", "NATS_SERVER=nats://%", "=")
	f.Fuzz(func(t *testing.T, text, env, set string) {
		c, r, err := Load([]string{"--config", "w.yaml", "--set", set, "--set", "model.path=/m"}, []string{env},
			func(name string) ([]byte, error) {
				if name == "w.yaml" {
					return []byte(text), nil
				}
				return nil, os.ErrNotExist
			})
		require.NotNil(t, r)
		if err != nil {
			var errs Errors
			require.ErrorAs(t, err, &errs)
			for _, p := range errs {
				require.NotEmpty(t, p.Reason)
				require.Error(t, p.Kind)
			}
			return
		}
		require.NoError(t, c.Validate())
		if strings.Contains(c.YAML(), "<secret>") {
			return
		}
		again, _, err := Load([]string{"--config", "again.yaml"}, nil, func(string) ([]byte, error) { return []byte(c.YAML()), nil })
		require.NoError(t, err, c.YAML())
		require.Equal(t, c.YAML(), again.YAML())
	})
}
