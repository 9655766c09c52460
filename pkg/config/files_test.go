package config

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

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
