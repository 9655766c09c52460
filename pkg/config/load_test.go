package config

import (
	"io/fs"
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

func TestEmptyFilesAndSections(t *testing.T) {
	base, _ := input{}.must(t)
	for _, text := range []string{"# nothing\n", "---\n", "null\n", "drain:\netcd:\n", "---\ndrain: {}\n...\n", "\ufeffdrain: {}\n"} {
		c, _ := input{yaml: text}.must(t)
		require.Empty(t, cmp.Diff(base, c, sameConfig), text)
	}
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
