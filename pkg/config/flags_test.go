package config

import (
	"testing"

	"github.com/stretchr/testify/require"
)

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
