package dockerfile

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"dynworker/tools/dockerlint"

	"github.com/stretchr/testify/require"
)

const repository = "../.."

func ours(t *testing.T) (string, []string) {
	text, err := os.ReadFile(filepath.Join(repository, "Dockerfile"))
	require.NoError(t, err)
	context, err := Context(repository)
	require.NoError(t, err)
	return string(text), context
}

func TestDockerfileKeepsTheRules(t *testing.T) {
	text, context := ours(t)
	broken, err := Check([]byte(text), context)
	require.NoError(t, err)
	require.Empty(t, broken)
}

func TestBuildKitHasNothingToSay(t *testing.T) {
	text, _ := ours(t)
	warnings, err := dockerlint.Lint(t.Context(), []byte(text))
	require.NoError(t, err)
	require.Empty(t, warnings)
}

func TestContextHasWhatIsBuiltAndNoMore(t *testing.T) {
	_, context := ours(t)
	for _, f := range []string{"go.mod", "go.sum", "cmd/worker/main.go", "internal/cli/cli.go", "pkg/engine/bridge/python/dynworker_engine.py", "configs/worker.sim.yaml", "testdata/model/tokenizer.json"} {
		require.Contains(t, context, f)
	}
	for _, f := range context {
		for _, prefix := range []string{".git", ".ci", "docs/", "scripts/", "bench/", "tools/", "configs/k8s", "cmd/demo"} {
			require.False(t, strings.HasPrefix(f, prefix), f)
		}
		require.False(t, strings.HasSuffix(f, "_test.go"), f)
	}
}

// TestRulesSeeMistakes holds the rules and the linter to what they are for.
func TestRulesSeeMistakes(t *testing.T) {
	text, context := ours(t)
	const entry = `ENTRYPOINT ["/usr/bin/tini", "--", "/usr/local/bin/worker"]`
	for name, m := range map[string]struct{ from, to, complaint string }{
		"shell form":          {entry, `ENTRYPOINT /usr/bin/tini -- /usr/local/bin/worker`, "shell PID 1"},
		"signals to a group":  {entry, `ENTRYPOINT ["/usr/bin/tini", "-g", "--", "/usr/local/bin/worker"]`, "signals the worker alone"},
		"no init":             {entry, `ENTRYPOINT ["/usr/local/bin/worker"]`, "under tini"},
		"shell as PID 1":      {entry, `ENTRYPOINT ["/bin/sh", "-c", "worker"]`, "under tini"},
		"command in a shell":  {`CMD ["serve", "--config", "/etc/dynworker/worker.yaml"]`, `CMD serve --config /etc/dynworker/worker.yaml`, "CMD in shell form"},
		"other command":       {`CMD ["serve", "--config", "/etc/dynworker/worker.yaml"]`, `CMD ["version"]`, "does not serve"},
		"root":                {"USER 10001:10001\nENTRYPOINT", "USER 0:0\nENTRYPOINT", "USER"},
		"named user":          {"USER 10001:10001\n" + entry + "\nCMD", "USER worker\n" + entry + "\nCMD", "USER"},
		"no user":             {"USER 10001:10001\n# tini", "# tini", "USER"},
		"latest":              {"golang:1.26-bookworm", "golang:latest", "not pinned"},
		"no tag":              {"debian:bookworm-slim", "debian", "not pinned"},
		"port of a registry":  {"debian:bookworm-slim", "registry.test:5000/debian", "not pinned"},
		"ADD":                 {"COPY configs/worker.sim.yaml", "ADD https://example.com/worker.sim.yaml", "ADD"},
		"lists left behind":   {" \\\n    && rm -rf /var/lib/apt/lists/*", "", "without rm -rf"},
		"recommended":         {"--no-install-recommends ", "", "without --no-install-recommends"},
		"packages in image":   {"COPY --from=build /out/worker /usr/local/bin/worker\nCOPY configs", "RUN apt-get update && apt-get install --yes --no-install-recommends jq && rm -rf /var/lib/apt/lists/*\nCOPY --from=build /out/worker /usr/local/bin/worker\nCOPY configs", "its base does not have"},
		"download":            {"WORKDIR /src", "RUN curl -o /usr/bin/tini https://example.com/tini\nWORKDIR /src", "curl"},
		"more than binaries":  {"COPY configs/worker.sim.yaml", "COPY --from=build /src /src\nCOPY configs/worker.sim.yaml", "only the binary"},
		"binary elsewhere":    {"/out/worker /usr/local/bin/worker\nCOPY", "/out/worker /opt/worker\nCOPY", "only the binary"},
		"not in the context":  {"COPY testdata/model", "COPY docs", "not in the build's context"},
		"bound at start":      {`-ldflags "-s`, `-ldflags "-extldflags=-Wl,-z,now -s`, "-z now"},
		"paths of the build":  {"go build -trimpath", "go build", "-trimpath"},
		"other signal":        {"EXPOSE 9090 9091\nUSER 10001:10001\n# tini", "STOPSIGNAL SIGKILL\nEXPOSE 9090 9091\nUSER 10001:10001\n# tini", "STOPSIGNAL"},
		"no version":          {`org.opencontainers.image.version="${VERSION}"` + "\nENV HOME=/home/worker USER=worker\nWORKDIR /home/worker\n# The system", `org.opencontainers.image.authors="${VERSION}"` + "\nENV HOME=/home/worker USER=worker\nWORKDIR /home/worker\n# The system", "no label for its version"},
		"health check":        {"EXPOSE 9090 9091\nUSER 10001:10001\n# tini", "HEALTHCHECK CMD true\nEXPOSE 9090 9091\nUSER 10001:10001\n# tini", "HEALTHCHECK"},
		"lint: as":            {"AS sim", "as sim", "FromAsCasing"},
		"lint: variable":      {"WORKDIR /src", "WORKDIR /src/${FOLDER}", "UndefinedVar"},
		"lint: secret":        {"ARG VERSION=dev\n# Names", "ARG VERSION=dev\nENV NATS_PASSWORD=x\n# Names", "SecretsUsedInArgOrEnv"},
		"lint: relative":      {"WORKDIR /src", "WORKDIR src", "WorkdirRelativePath"},
		"lint: no such stage": {"COPY --from=build /out/worker", "COPY --from=builds /out/worker", "builds"},
	} {
		t.Run(name, func(t *testing.T) {
			require.True(t, strings.Contains(text, m.from), "the Dockerfile has no %q", m.from)
			changed := []byte(strings.Replace(text, m.from, m.to, 1))
			broken, err := Check(changed, context)
			if err != nil {
				broken = append(broken, err.Error())
			}
			warnings, err := dockerlint.Lint(t.Context(), changed)
			require.NoError(t, err)
			require.Contains(t, strings.Join(append(broken, warnings...), "\n"), m.complaint)
		})
	}
}

func TestPlanOfTheSlimTarget(t *testing.T) {
	text, _ := ours(t)
	plan, err := MakePlan([]byte(text), "sim", map[string]string{"VERSION": "1.2.3", "SLIM_IMAGE": "debian:trixie-slim"})
	require.NoError(t, err)
	require.Len(t, plan.Stages, 2)
	build, sim := plan.Stages[0], plan.Stages[1]
	require.Equal(t, []string{"build", "golang:1.26-bookworm"}, []string{build.Name, build.Base})
	require.Equal(t, []string{"sim", "debian:trixie-slim"}, []string{sim.Name, sim.Base})
	i := slices.IndexFunc(build.Steps, func(s Step) bool { return s.Run != nil && strings.Contains(s.Run.Argv[2], "go build") })
	require.Positive(t, i)
	run := build.Steps[i].Run
	require.Equal(t, []string{"/go/pkg/mod", "/root/.cache/go-build"}, run.Caches)
	require.Equal(t, "/src", run.Workdir)
	require.Contains(t, run.Env, "VERSION=1.2.3")
	require.Contains(t, run.Env, "CGO_ENABLED=1")
	require.Equal(t, &Copy{Sources: []string{"."}, Dest: "/src/"}, build.Steps[i-1].Copy)
	require.Contains(t, sim.Steps, Step{Line: sim.Steps[1].Line, Copy: &Copy{From: "build", Sources: []string{"/usr/bin/tini-static"}, Dest: "/usr/bin/tini"}})
	require.Equal(t, "1.2.3", sim.Image.Labels["org.opencontainers.image.version"])
	require.Equal(t, []string{"HOME=/home/worker", "USER=worker"}, sim.Image.Env)
	require.Equal(t, []string{"9090", "9091"}, sim.Image.Exposed)

	_, err = MakePlan([]byte(text), "simulated", nil)
	require.ErrorContains(t, err, `no stage is named "simulated"`)
	for from, to := range map[string]string{
		"COPY testdata/model":            "COPY --chown=worker testdata/model",
		"--mount=type=cache,target=/go/": "--mount=type=bind,target=/go/",
		"WORKDIR /home/worker\n# The":    "VOLUME /data\n# The",
		"FROM ${SLIM_IMAGE}":             "FROM build",
		"FROM ${GO_IMAGE} AS build":      "FROM ${GO_IMAGE}",
	} {
		require.True(t, strings.Contains(text, from), from)
		_, err = MakePlan([]byte(strings.Replace(text, from, to, 1)), "sim", nil)
		require.Error(t, err, to)
	}
}
