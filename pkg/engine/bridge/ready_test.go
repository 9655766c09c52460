package bridge_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"dynworker/pkg/engine/bridge"
	"dynworker/pkg/engine/bridge/bridgetest"
	"dynworker/pkg/engine/ipc"
)

func TestProbes(t *testing.T) {
	base := ipc.Capabilities{
		SchedulingParams: true, CacheSalt: true, Priority: true, GuidedDecoding: true,
		KVCacheCapacity: true, AbortBeforeFirstToken: true,
	}
	with := func(c ipc.Capabilities, f func(*ipc.Capabilities)) ipc.Capabilities { f(&c); return c }
	conversation := with(base, func(c *ipc.Capabilities) { c.ConversationParams = true })
	later := with(conversation, func(c *ipc.Capabilities) { c.BindsExplicitRank, c.EngineDeadError = true, true })
	tests := []struct {
		api, hide, version string
		numpy              bool
		want               ipc.Capabilities
	}{
		{api: "rc19", version: "1.3.0rc19", want: base},
		{api: "hybrid", version: "1.3.0rc20", want: base},
		{api: "rc21", version: "1.3.0rc21", want: conversation},
		{api: "rc29", version: "1.3.0rc29", want: later},
		{api: "1.4", version: "1.4.0rc4", want: later}, // without numpy there are no arrays to pass
		{
			api: "1.4", version: "1.4.0rc4", numpy: true,
			want: with(later, func(c *ipc.Capabilities) { c.ArrayPrompts = true }),
		},
		{api: "rc29", version: "1.3.0rc29", numpy: true, want: later},
		{
			api: "rc29", version: "1.3.0rc29", hide: "adp_router,EngineDeadError,get_kv_cache_capacity",
			want: with(conversation, func(c *ipc.Capabilities) { c.KVCacheCapacity = false }),
		},
	}
	for _, tt := range tests {
		t.Run(strings.TrimSuffix(tt.api+" "+tt.hide, " "), func(t *testing.T) {
			l := bridgetest.New(t, bridgetest.Setup{API: tt.api, Env: []string{"STANDIN_HIDE=" + tt.hide}})
			if tt.numpy {
				for i, kv := range l.Env {
					if strings.HasPrefix(kv, "PYTHONPATH=") {
						l.Env[i] += ":" + bridgetest.Dir("arrays")
					}
				}
			}
			c := spawnLaunch(t, l)
			c.configure(nil, bridge.Options{})
			r := c.ready()
			require.Equal(t, tt.version, r.Version)
			require.Empty(t, cmp.Diff(tt.want, r.Capabilities))

			// What was probed is what works: the same request on every build.
			c.generate(1, []int32{5, 6, 7}, order(2, func(g *ipc.Generate) { g.CacheSalt = ptr("s") }))
			require.Equal(t, []uint32{18, 25}, c.answer(1).tokens[0])
			call := c.log.Calls(t, "generate_async")[0]
			if tt.want.ArrayPrompts {
				require.Equal(t, "PreprocessedInputs", call["_inputs_type"])
			} else {
				require.Equal(t, "list", call["_inputs_type"])
			}
		})
	}
}

func TestReadyTellsTheResolvedConfiguration(t *testing.T) {
	c := spawn(t, bridgetest.Setup{API: "rc29", Env: []string{"STANDIN_VOCAB=100000"}})
	c.configure(args{
		"tensor_parallel_size": 4, "enable_attention_dp": true, "max_seq_len": 8192, "max_batch_size": 16,
		"attention_dp_config": args{"kv_cache_routing_conversation_affinity": true},
		"kv_cache_config":     args{"tokens_per_block": 64},
		"scheduler_config":    args{"capacity_scheduler_policy": "MAX_UTILIZATION"},
	}, bridge.Options{})
	r := c.ready()
	require.Equal(t, "tensorrt_llm", r.Engine)
	require.True(t, r.ConfigReadable)
	require.Equal(t, 4, r.AttentionDPSize)
	require.Equal(t, ipc.KV{TotalBlocks: 1024, BlockSize: 64}, r.KV)
	require.Equal(t, ipc.Bounds{VocabSize: 100000, MaxSeqLen: 8192, MaxNumTokens: 8192, MaxBatchSize: 16, MaxBeamWidth: 1, MachineIDs: 1021}, r.Bounds)
	flag, ok := r.Config("attention_dp_config", "kv_cache_routing_conversation_affinity")
	require.True(t, ok)
	require.JSONEq(t, `true`, string(flag))
	sessions, ok := r.Config("attention_dp_config", "kv_cache_routing_max_sessions")
	require.True(t, ok, "what nobody set is there with its default")
	require.JSONEq(t, `65536`, string(sessions))
	// An unknown key of a section that keeps such keys is passed on as well.
	policy, ok := r.Config("scheduler_config")
	require.True(t, ok)
	require.JSONEq(t, `{"capacity_scheduler_policy": "MAX_UTILIZATION"}`, string(policy))
}

func TestReadyWhenLittleCanBeRead(t *testing.T) {
	c := spawn(t, bridgetest.Setup{Env: []string{"STANDIN_HIDE=args,get_kv_cache_capacity,_check_health"}})
	c.configure(args{"tensor_parallel_size": 4, "enable_attention_dp": true}, bridge.Options{})
	r := c.ready()
	require.False(t, r.ConfigReadable)
	require.Empty(t, r.ResolvedConfig)
	require.Equal(t, 1, r.AttentionDPSize)
	require.Equal(t, ipc.KV{}, r.KV)
	require.Equal(t, ipc.Bounds{VocabSize: 355, MachineIDs: 1021}, r.Bounds, "a bound that is not known is not reported")
}

func TestHelloComesBeforeAnythingSlow(t *testing.T) {
	c := spawn(t, bridgetest.Setup{Env: []string{"STANDIN_API=nonsense"}}) // the import would fail
	hello := c.hello()
	require.Equal(t, ipc.Version, hello.Protocol)
	require.Equal(t, "tensorrt_llm", hello.Engine)
	require.Equal(t, c.cmd.Process.Pid, hello.PID)
}

func TestProgressNamesThePhases(t *testing.T) {
	c := spawn(t, bridgetest.Setup{})
	c.configure(nil, bridge.Options{})
	var phases []string
	for {
		kind, payload := c.next()
		if kind != ipc.KindProgress {
			require.Equal(t, ipc.KindReady, kind)
			break
		}
		p, err := ipc.ParseProgress(payload)
		require.NoError(t, err)
		phases = append(phases, p.Phase)
	}
	require.Equal(t, []string{"import", "load", "describe"}, phases)
}

func TestLoadFailures(t *testing.T) {
	noPackage := func(l *bridgetest.Launch) {
		for i, kv := range l.Env {
			if strings.HasPrefix(kv, "PYTHONPATH=") {
				l.Env[i] = "PYTHONPATH=" + t.TempDir()
			}
		}
	}
	tests := []struct {
		name      string
		setup     bridgetest.Setup
		change    func(*bridgetest.Launch)
		args      args
		configure []byte // instead of the ordinary message
		errorType string
		message   string
	}{
		{
			name: "the package is not installed", change: noPackage,
			errorType: "ModuleNotFoundError", message: "tensorrt_llm",
		},
		{
			name: "a setting this build does not have", setup: bridgetest.Setup{API: "rc19"},
			args:      args{"attention_dp_config": args{"kv_cache_routing_conversation_affinity": true}},
			errorType: "ValueError", message: "kv_cache_routing_conversation_affinity",
		},
		{
			name: "a setting of the wrong type", args: args{"enable_attention_dp": "perhaps"},
			errorType: "ValueError", message: "enable_attention_dp",
		},
		{
			name: "no such model", args: args{"model": "/nonexistent/model"},
			errorType: "FileNotFoundError", message: "/nonexistent/model",
		},
		{
			name: "too few GPUs", setup: bridgetest.Setup{Env: []string{"STANDIN_GPUS=0"}},
			errorType: "RuntimeError", message: "only 0 GPUs",
		},
		{
			name: "anything else", setup: bridgetest.Setup{Env: []string{"STANDIN_LOAD_FAIL=out of memory"}},
			errorType: "RuntimeError", message: "out of memory",
		},
		{
			name: "an option of ours that does not exist", configure: []byte(`{"protocol": 1, "options": {"abortt": "detach"}}`),
			errorType: "TypeError", message: "abortt",
		},
		{
			name: "another protocol", configure: []byte(`{"protocol": 2}`),
			errorType: "ProtocolError", message: "protocol 2",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			l := bridgetest.New(t, tt.setup)
			if tt.change != nil {
				tt.change(&l)
			}
			c := spawnLaunch(t, l)
			if tt.configure != nil {
				c.hello()
				c.write(ipc.AppendFrame(nil, ipc.KindConfigure, tt.configure))
			} else {
				c.configure(tt.args, bridge.Options{})
			}
			f := c.fatal()
			require.Equal(t, tt.errorType, f.ErrorType)
			require.Contains(t, f.Message, tt.message)
			require.False(t, f.Recoverable)
			c.requireEOF()
			require.Equal(t, bridge.ExitLoadFailed, c.wait())
		})
	}
}

func TestNotStartedByAWorker(t *testing.T) {
	l := bridgetest.New(t, bridgetest.Setup{})
	for _, env := range []string{"OTHER=1", ipc.EnvFD + "=x", ipc.EnvFD + "=999"} {
		cmd := exec.Command(l.Command[0], l.Command[1:]...)
		cmd.Env = append(l.Env, env)
		text, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit)
		require.Equal(t, bridge.ExitNoChannel, exit.ExitCode())
		require.Contains(t, string(text), ipc.EnvFD)
		require.NotContains(t, string(text), "Traceback")
	}
}

// A rank imports the main file under another name, and must not start an engine.
func TestMainFileCanBeImportedAgain(t *testing.T) {
	l := bridgetest.New(t, bridgetest.Setup{})
	cmd := exec.Command(l.Command[0], "-c",
		`import runpy, sys; print(sorted(runpy.run_path(sys.argv[1], run_name="__worker__")))`, l.Command[2])
	cmd.Env = append(l.Env, ipc.EnvFD+"=999")
	text, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", text)
	require.NotContains(t, string(text), "Error")
	require.Empty(t, l.Log.Calls(t))
}

// The stand-in's workers are spawned the way multiprocessing does it, which
// imports the main file again; they may not hold the channel either, or the
// worker would never see its end.
func TestRanksAreSpawnedWithoutTheChannel(t *testing.T) {
	c := start(t, bridgetest.Setup{Env: []string{"STANDIN_WORKERS=2"}}, nil, bridge.Options{})
	channel, err := os.Readlink(filepath.Join("/proc", itoa(c.cmd.Process.Pid), "fd", "3"))
	require.NoError(t, err)
	pids := workers(t, c.log)
	require.Len(t, pids, 2)
	for _, pid := range pids {
		dir := filepath.Join("/proc", itoa(pid), "fd")
		entries, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.NotEmpty(t, entries)
		for _, e := range entries {
			target, _ := os.Readlink(filepath.Join(dir, e.Name()))
			require.NotEqual(t, channel, target)
		}
		env, err := os.ReadFile(filepath.Join("/proc", itoa(pid), "environ"))
		require.NoError(t, err)
		require.NotContains(t, string(env), ipc.EnvFD)
	}

	a := c.query(7, ipc.QueryDescendants)
	require.True(t, a.OK, a.Error)
	var body struct {
		Descendants []struct {
			PID       int
			StartTime uint64 `json:"start_time"`
		}
	}
	require.NoError(t, json.Unmarshal(a.Body, &body))
	found := map[int]bool{}
	for _, d := range body.Descendants {
		require.NotZero(t, d.StartTime)
		found[d.PID] = true
	}
	for _, pid := range pids {
		require.True(t, found[pid], "worker %d is not among the descendants", pid)
	}
	require.False(t, found[c.cmd.Process.Pid])

	c.send(ipc.Shutdown{DeadlineMillis: 20_000})
	c.expect(ipc.KindGoodbye)
	require.Equal(t, bridge.ExitStopped, c.wait())
}

// PYTHONSAFEPATH keeps a program's own folder out of its module search path.
func TestStartsUnderASafePath(t *testing.T) {
	c := start(t, bridgetest.Setup{Env: []string{"PYTHONSAFEPATH=1"}}, nil, bridge.Options{})
	c.generate(1, []int32{5, 6, 7}, order(2))
	require.Equal(t, []uint32{18, 25}, c.answer(1).tokens[0])
}

func TestInstall(t *testing.T) {
	dir := t.TempDir()
	first, err := bridge.Install(dir)
	require.NoError(t, err)
	second, err := bridge.Install(dir)
	require.NoError(t, err)
	require.NotEqual(t, filepath.Dir(first), filepath.Dir(second))

	var files int
	require.NoError(t, filepath.WalkDir(filepath.Dir(first), func(path string, e os.DirEntry, err error) error {
		require.NoError(t, err)
		info, err := e.Info()
		require.NoError(t, err)
		require.Zero(t, info.Mode().Perm()&0o077, "%s is open to others", path)
		if !e.IsDir() {
			files++
		}
		return nil
	}))
	source, err := filepath.Glob("python/dynworker_bridge/*.py")
	require.NoError(t, err)
	require.Equal(t, len(source)+1, files)

	_, err = bridge.Install(filepath.Join(dir, "no", "such", "dir"))
	require.ErrorContains(t, err, "install the engine program")
}
