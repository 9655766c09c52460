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
	"dynworker/testdata"

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
		{[]string{"--model", dir, "--disaggregation-mode", "prefill"}, "role: prefill workers cannot serve yet"},
		{[]string{"--model", dir, "--disaggregation-mode", "decode"}, "role: decode workers cannot serve yet"},
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
}
