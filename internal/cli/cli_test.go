package cli

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"dynworker/internal/app"
	"dynworker/internal/testenv"
	"dynworker/internal/testenv/embedded"
	"dynworker/pkg/config"
	"dynworker/pkg/discovery"
	"dynworker/testdata"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
)

// TestMain lets the test program be a worker, so that exit codes and signals are those of a process.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && (os.Args[1] == "serve" || os.Args[1] == app.EngineCommand) {
		p, err := OSProcess()
		if err != nil {
			panic(err)
		}
		os.Exit(p.Run())
	}
	testenv.Main(m)
}

// command runs a command in this process.
func command(args ...string) (code int, stdout, stderr string) {
	var out, problems bytes.Buffer
	p := &Process{Args: args, Stdout: &out, Stderr: &problems, Exit: func(int) { panic("no command here ends the process") }}
	code = p.Run()
	return code, out.String(), problems.String()
}

func model(t *testing.T) string {
	dir := t.TempDir()
	require.NoError(t, testdata.WriteModel(dir))
	return dir
}

func TestVersionHelpAndUnknownCommands(t *testing.T) {
	code, out, _ := command("version")
	require.Equal(t, ExitOK, code)
	require.Equal(t, Version+"\n", out)
	for _, args := range [][]string{{"help"}, {"--help"}, {"serve", "--help"}, {"check", "-h"}} {
		_, out, _ = command(args...)
		require.Contains(t, out, "worker serve", args)
		require.Contains(t, out, "--set", args)
	}
	code, _, problems := command("dance")
	require.Equal(t, ExitConfig, code)
	require.Contains(t, problems, `unknown command "dance"`)
}

func TestCheckPrintsEverySettingWithItsOrigin(t *testing.T) {
	dir := model(t)
	file := filepath.Join(t.TempDir(), "w.yaml")
	require.NoError(t, os.WriteFile(file, []byte("model:\n  path: "+dir+"\netcd:\n  username: me\n  password: hunter2\nengine:\n  kind: sim\n"), 0o600))
	code, out, problems := command("check", "--config", file, "--set", "namespace=prod")
	require.Equal(t, ExitOK, code, problems)
	require.Regexp(t, `(?m)^namespace: prod +# --set$`, out)
	require.Regexp(t, `(?m)^model\.path: `+dir+` +# `+file+`:2$`, out)
	require.Regexp(t, `(?m)^component: backend +# default$`, out)
	require.NotContains(t, out, "hunter2")
}

func TestAWrongConfigurationNamesItsKey(t *testing.T) {
	dir := model(t)
	for _, c := range []struct {
		set, key string
	}{
		{"modle.path=x", "modle"}, {"namespace=a/b", "namespace"}, {"etcd.lease_ttl=30", "etcd.lease_ttl"}, {"response_plane.kind=quic", "response_plane.kind"}, {"handler=old", "handler"},
	} {
		for _, name := range []string{"check", "serve"} {
			code, _, problems := command(name, "--set", "model.path="+dir, "--set", "engine.kind=sim", "--set", c.set)
			require.Equal(t, ExitConfig, code, c.set)
			require.Contains(t, problems, c.key, c.set)
			require.Len(t, strings.Split(strings.TrimSpace(problems), "\n"), 1, "one line for one mistake: %s", problems)
		}
	}
}

// TestWhatIsMissingHere: a configuration that is fine but for this machine passes the check, with a warning, and is not served.
func TestWhatIsMissingHere(t *testing.T) {
	dir := model(t)
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"--model", filepath.Join(dir, "none")}, "model.path: "},
		{[]string{"--model", "Qwen/Qwen3-0.6B"}, "looks like a name on the Hugging Face hub, but nothing is downloaded"},
		{nil, "model.path: is required"},
		{[]string{"--model", dir, "--set", "lora=[{name: sql, path: /no/such/adapter}]"}, `lora: adapter "sql": "/no/such/adapter"`},
	} {
		args := append([]string{"--set", "engine.kind=sim"}, c.args...)
		code, out, problems := command(append([]string{"check"}, args...)...)
		require.Equal(t, ExitOK, code, problems)
		require.Contains(t, problems, "worker: warning: worker serve would end here: ")
		require.Contains(t, problems, c.says)
		require.Contains(t, out, "namespace: dynamo")
		code, _, problems = command(append([]string{"serve"}, args...)...)
		require.Equal(t, ExitConfig, code)
		require.Contains(t, problems, c.says)
		require.NotContains(t, problems, "warning")
	}
}

func TestServeAndAskAsProcesses(t *testing.T) {
	etcd, nats := testenv.StartEtcd(t, embedded.EtcdOptions{}), testenv.StartNATS(t, embedded.NATSOptions{MaxPayload: 4096})
	exe, err := os.Executable()
	require.NoError(t, err)
	places := []string{"--set", "etcd.endpoints=[" + etcd.Endpoint() + "]", "--set", "nats.server=" + nats.URL()}
	args := append([]string{"serve", "--set", "model.path=" + model(t), "--set", "engine.kind=sim", "--set", "request_plane.kind=nats", "--set", "drain.grace=0s"}, places...)
	worker := exec.CommandContext(t.Context(), exe, args...)
	var log bytes.Buffer
	worker.Stderr = &log
	require.NoError(t, worker.Start())
	question := func(more ...string) (int, string, string) {
		return command(append(append([]string{"ask"}, more...), places...)...)
	}
	require.Eventually(t, func() bool { code, _, _ := question("--tokens", "5,6,7"); return code == ExitOK }, patience, poll)

	code, out, problems := question("--tokens", "5,6,7", "--max-tokens=3", "--session", "me")
	require.Equal(t, ExitOK, code, problems)
	require.Contains(t, out, "finish: length\nusage: 3 prompt (0 cached), 3 generated\n")
	code, out, problems = question("--tokens", "5,6,7", "--max-tokens", "1", "--json")
	require.Equal(t, ExitOK, code, problems)
	require.Contains(t, out, `"finish_reason":"length"`)
	code, _, problems = question("--tokens", "5,400")
	require.Equal(t, ExitFailure, code)
	require.Contains(t, problems, "outside the vocabulary")
	code, _, problems = question("--tokens", strings.TrimSuffix(strings.Repeat("300,", 2000), ","))
	require.Equal(t, ExitFailure, code)
	require.Contains(t, problems, "4096", "the payload limit is named")
	code, _, problems = question("--tokens", "5", "--instance", "123abc")
	require.Equal(t, ExitFailure, code)
	require.Contains(t, problems, "instance 123abc is not registered under v1/instances/dynamo/backend/generate/")
	code, _, problems = question("--tokens", "5", "--set", "namespace=empty")
	require.Equal(t, ExitFailure, code)
	require.Contains(t, problems, "no worker is registered under v1/instances/empty/backend/generate/")
	for _, wrong := range [][]string{{}, {"--tokens", "a"}, {"--tokens"}, {"--tokens", "1", "--timeout", "5"}, {"--tokens", "1", "--no-such-flag"}} {
		code, _, _ = question(wrong...)
		require.Equal(t, ExitConfig, code, wrong)
	}

	require.NoError(t, worker.Process.Signal(syscall.SIGTERM))
	require.NoError(t, worker.Wait(), log.String())
}

func TestASecondSignalEndsAtOnce(t *testing.T) {
	etcd, nats := testenv.StartEtcd(t, embedded.EtcdOptions{}), testenv.StartNATS(t, embedded.NATSOptions{})
	exe, err := os.Executable()
	require.NoError(t, err)
	places := []string{"--set", "etcd.endpoints=[" + etcd.Endpoint() + "]", "--set", "nats.server=" + nats.URL()}
	worker := exec.CommandContext(t.Context(), exe, append([]string{"serve", "--set", "model.path=" + model(t), "--set", "engine.kind=sim", "--set", "engine.sim.token_delay=1s", "--set", "request_plane.kind=nats"}, places...)...)
	log, err := worker.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, worker.Start())
	seen := newWatcher(log)
	seen.until(t, `"message":"serving"`)
	go command(append([]string{"ask", "--tokens", "5", "--max-tokens", "1000", "--timeout", "10s"}, places...)...)
	seen.until(t, `"message":"request accepted"`)
	require.NoError(t, worker.Process.Signal(syscall.SIGTERM))
	seen.until(t, `"message":"draining"`)
	require.NoError(t, worker.Process.Signal(syscall.SIGTERM))
	seen.end()
	var exit *exec.ExitError
	require.ErrorAs(t, worker.Wait(), &exit)
	require.Equal(t, ExitForced, exit.ExitCode())
	require.Empty(t, records(t, etcd), "nothing is left until the lease is over")
}

// serving starts a worker in a process of its own and returns it, its log and the address of its system server.
func serving(t *testing.T, places []string, more ...string) (worker *exec.Cmd, seen *watcher, address string) {
	exe, err := os.Executable()
	require.NoError(t, err)
	args := append([]string{"serve", "--set", "model.path=" + model(t), "--set", "engine.kind=sim", "--set", "request_plane.kind=nats", "--set", "system.host=127.0.0.1", "--set", "system.port=0", "--set", "drain.grace=0s"}, places...)
	for _, s := range more {
		args = append(args, "--set", s)
	}
	worker = exec.CommandContext(t.Context(), exe, args...)
	log, err := worker.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, worker.Start())
	seen = newWatcher(log)
	seen.until(t, `"message":"serving"`)
	_, rest, ok := strings.Cut(seen.seen.String(), `"component":"system","address":"`)
	if !ok {
		_, rest, ok = strings.Cut(seen.seen.String(), `"address":"`)
	}
	require.True(t, ok)
	address, _, _ = strings.Cut(rest, `"`)
	return worker, seen, address
}

func TestDrain(t *testing.T) {
	etcd, nats := testenv.StartEtcd(t, embedded.EtcdOptions{}), testenv.StartNATS(t, embedded.NATSOptions{})
	places := []string{"--set", "etcd.endpoints=[" + etcd.Endpoint() + "]", "--set", "nats.server=" + nats.URL()}
	worker, seen, address := serving(t, places, "engine.sim.token_delay=10ms")
	asked := make(chan int, 1)
	go func() {
		code, _, _ := command(append([]string{"ask", "--tokens", "5", "--max-tokens", "200"}, places...)...)
		asked <- code
	}()
	seen.until(t, `"message":"request accepted"`)
	code, out, problems := command("drain", "--address", address)
	require.Equal(t, ExitOK, code, problems)
	require.Equal(t, "draining, 1 in flight\n", out)
	code, out, problems = command("drain", "--address="+address, "--wait", "--timeout", "1m")
	require.Equal(t, ExitOK, code, problems)
	require.Equal(t, "drained, 0 in flight\n", out)
	require.Equal(t, ExitOK, <-asked, "what was in flight was finished")
	code, _, problems = command("drain", "--address", address, "--wait", "--timeout", "1ns")
	require.Equal(t, ExitFailure, code)
	require.Contains(t, problems, "not drained within 1ns")
	require.NoError(t, worker.Process.Signal(syscall.SIGTERM))
	seen.end()
	require.NoError(t, worker.Wait(), "exit code 0")

	code, _, problems = command("drain", "--address", address)
	require.Equal(t, ExitFailure, code, "nobody is there")
	require.Contains(t, problems, address)
	for _, wrong := range [][]string{{}, {"--set", "system.port=0"}, {"--timeout", "5"}, {"--timeout", "-1s"}, {"--address"}, {"--no-such-flag"}} {
		code, _, _ = command(append([]string{"drain"}, wrong...)...)
		require.Equal(t, ExitConfig, code, wrong)
	}
}

func TestSystemAddress(t *testing.T) {
	for host, want := range map[string]string{"0.0.0.0": "127.0.0.1:9090", "::": "[::1]:9090", "[::]": "[::1]:9090", "10.0.0.7": "10.0.0.7:9090", "worker-0": "worker-0:9090"} {
		got, err := systemAddress(&config.System{Host: host, Port: 9090})
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
}

// records are the keys in etcd.
func records(t *testing.T, etcd *embedded.Etcd) []string {
	c, err := discovery.Connect(t.Context(), discovery.Config{Endpoints: []string{etcd.Endpoint()}, Logger: zerolog.Nop()})
	require.NoError(t, err)
	defer c.Close()
	all, err := c.List(t.Context(), "v1/")
	require.NoError(t, err)
	keys := []string{}
	for _, r := range all {
		keys = append(keys, r.Key)
	}
	return keys
}
