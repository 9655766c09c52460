package cli

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"dynworker/internal/app"
	"dynworker/pkg/engineargs"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
)

// The folders in testdata/launches are ways in which python3 -m dynamo.trtllm is really started, with what Dynamo 1.6.1 made of them. TestLaunches starts "worker check" in the same way.

// launch is a launch.json.
type launch struct {
	Argv   []string
	Env    map[string]string
	Mounts map[string]string
}

// outcome is an expect.json, or a variant in one.
type outcome struct {
	Name    string
	Outcome string
	Assume  struct {
		VisibleGPUs int `json:"visible_gpus"`
	}
	Resolved   map[string]any
	EngineArgs map[string]any `json:"engine_args"`
	Logs       []struct{ Level, Contains string }
	EnvPassed  []string `json:"env_passthrough"`
	Variants   []outcome

	Argv        []string
	EnvChanges  map[string]*string `json:"env_changes"`
	Differs     map[string]any
	ArgsDiffer  map[string]any `json:"engine_args_differ"`
	ArgsAbsent  []string       `json:"engine_args_absent"`
	MustMention []string       `json:"must_mention"`
}

// facts are what a warning has to say, by a part of upstream's wording.
var facts = map[string][]string{
	"override_engine_args will replace kv_cache_config":                                                                    {"kv_cache_config: ", "free_gpu_memory_fraction 0.8 (flag --free-gpu-memory-fraction)", "replaced as a whole", "lost"},
	"override_engine_args will replace attention_dp_config":                                                                {"attention_dp_config: ", "enable_balance true", "timeout_iters 60", "batching_wait_iters 0", "replaced as a whole", "--trtllm.attention_dp_config.kv_cache_routing_conversation_affinity"},
	"override_engine_args will replace enable_attention_dp: True -> False":                                                 {"enable_attention_dp: true (", "is replaced by false (flag --override-engine-args)"},
	"num_postprocess_workers=4 was set in engine config but will be ignored":                                               {"num_postprocess_workers: 4 (", "is left out"},
	"--publish-events-and-metrics is deprecated; use both --publish-kv-events and --publish-metrics":                       {"publish-events-and-metrics: is deprecated; use both --publish-kv-events and --publish-metrics"},
	"DYN_TRTLLM_PUBLISH_EVENTS_AND_METRICS is deprecated; use DYN_TRTLLM_PUBLISH_KV_EVENTS and DYN_TRTLLM_PUBLISH_METRICS": {"DYN_TRTLLM_PUBLISH_EVENTS_AND_METRICS: is deprecated; use DYN_TRTLLM_PUBLISH_KV_EVENTS and DYN_TRTLLM_PUBLISH_METRICS"},
}

// fixed are facts that nothing sets here. They have one value, which no launch may change.
var fixed = map[string]any{
	"connector": []any{},
	"structural_tag": map[string]any{
		"scope": "always", "schema": "auto", "allow_tool_calls_with_structured_output": false, "reasoning_boundary": "auto", "tool_arguments_any_order": false,
	},
}

// stricter are variants that run upstream and are refused here on purpose; the name must be in the message.
var stricter = map[string]string{
	// Upstream checks the choice on the command line only; the value then counts as "engine".
	"10-conversation-affinity-flags/bad rank source by environment is not checked in 1.6.1": "DYN_ENGINE_CONV_AFFINITY_DP_RANK_SOURCE",
}

func read(t *testing.T, path string, into any) {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(b, into))
}

func TestLaunches(t *testing.T) {
	folders, err := filepath.Glob("testdata/launches/*")
	require.NoError(t, err)
	require.Len(t, folders, 10)
	left := maps.Clone(stricter)
	count := 0
	for _, folder := range folders {
		folder, err := filepath.Abs(folder)
		require.NoError(t, err)
		var l launch
		var expect outcome
		read(t, filepath.Join(folder, "launch.json"), &l)
		read(t, filepath.Join(folder, "expect.json"), &expect)
		name := filepath.Base(folder)
		t.Run(name, func(t *testing.T) { l.run(t, folder, expect) })
		count++
		for _, v := range expect.Variants {
			t.Run(name+"/"+v.Name, func(t *testing.T) {
				variant := l.variant(v)
				full := expect.variant(v)
				if mention, ok := left[name+"/"+v.Name]; ok {
					delete(left, name+"/"+v.Name)
					require.Equal(t, "run", full.Outcome, "no longer a difference")
					full.Outcome, full.MustMention = "refuse", []string{mention}
				}
				variant.run(t, folder, full)
			})
			count++
		}
	}
	require.Empty(t, left, "differences that nothing shows")
	require.Equal(t, 59, count)
}

// variant is the launch with other options and variables.
func (l launch) variant(v outcome) launch {
	l.Argv, l.Env = v.Argv, maps.Clone(l.Env)
	for name, value := range v.EnvChanges {
		if value == nil {
			delete(l.Env, name)
		} else {
			l.Env[name] = *value
		}
	}
	return l
}

// variant is what is expected of a variant.
func (o outcome) variant(v outcome) outcome {
	o.Outcome, o.MustMention, o.Logs = v.Outcome, v.MustMention, v.Logs
	if o.Resolved == nil || v.Outcome != "run" {
		return o
	}
	o.Resolved, o.EngineArgs = maps.Clone(o.Resolved), maps.Clone(o.EngineArgs)
	maps.Copy(o.Resolved, v.Differs)
	maps.Copy(o.EngineArgs, v.ArgsDiffer)
	for _, name := range v.ArgsAbsent {
		delete(o.EngineArgs, name)
	}
	return o
}

// run starts worker check in the folder, and compares.
func (l launch) run(t *testing.T, folder string, want outcome) {
	t.Chdir(folder)
	mounted := func(s string) string {
		for from := range l.Mounts {
			if strings.HasPrefix(s, from+"/") {
				return folder + strings.TrimPrefix(s, from)
			}
		}
		return s
	}
	args := []string{"check"}
	for _, a := range l.Argv {
		args = append(args, mounted(a))
	}
	environ := []string{"PATH=/bin", "CUDA_VISIBLE_DEVICES=" + strings.TrimSuffix(strings.Repeat("0,", max(want.Assume.VisibleGPUs, 1)), ",")}
	for _, name := range slices.Sorted(maps.Keys(l.Env)) {
		environ = append(environ, name+"="+mounted(l.Env[name]))
	}
	var stdout, stderr bytes.Buffer
	p := &Process{Args: args, Environ: environ, Stdout: &stdout, Stderr: &stderr, Exit: func(int) { t.Error("nothing here ends the process") }}
	code := p.Run()
	if want.Outcome == "refuse" {
		require.Equal(t, ExitConfig, code, stdout.String())
		for _, part := range want.MustMention {
			require.Contains(t, stderr.String(), part)
		}
		require.NotContains(t, stderr.String(), "goroutine")
		p.Args[0] = "serve"
		require.Equal(t, ExitConfig, p.Run(), "nothing was started or registered")
		return
	}
	require.Equal(t, ExitOK, code, stderr.String())
	for _, line := range want.Logs {
		require.NotEmpty(t, facts[line.Contains], "a new warning: %s", line.Contains)
		for _, part := range facts[line.Contains] {
			require.Contains(t, stderr.String(), part)
		}
	}
	if want.Resolved == nil {
		return
	}

	loaded, err := p.load(args[1:])
	require.NoError(t, err)
	require.Empty(t, cmp.Diff(want.Resolved, loaded.summary(t)))
	got := map[string]any{}
	text, err := json.Marshal(loaded.resolved.Engine.Args)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &got))
	require.Empty(t, cmp.Diff(want.EngineArgs, got))

	// The same is printed, with an origin for every value.
	loaded.resolved.Engine.Args.Walk(func(path []string, _ *engineargs.Tree) {
		require.Regexp(t, `(?m)^`+strings.Join(path, `\.`)+`: .*  # (default|worker|(flag|env) \S+|\S+:[0-9]+)$`, stdout.String())
	})
	for _, f := range loaded.resolved.Summary {
		require.Contains(t, stdout.String(), "\n"+f.Name+": ")
	}
	passed := app.EngineEnviron(environ, loaded.cfg.Engine.Env)
	for _, name := range want.EnvPassed {
		if value, ok := l.Env[name]; ok { // a variant may take it away
			require.Contains(t, passed, name+"="+mounted(value))
		}
	}
	require.Contains(t, passed, "PYTHONHASHSEED=0")
}

// summary is the summary with its nested parts nested.
func (l *loaded) summary(t *testing.T) map[string]any {
	out := maps.Clone(fixed)
	for _, f := range l.resolved.Summary {
		v := f.Value
		if n, ok := v.(int64); ok {
			v = float64(n) // as JSON is read
		}
		section, name, nested := strings.Cut(f.Name, ".")
		if !nested {
			out[f.Name] = v
			continue
		}
		if out[section] == nil {
			out[section] = map[string]any{}
		}
		out[section].(map[string]any)[name] = v
	}
	return out
}
