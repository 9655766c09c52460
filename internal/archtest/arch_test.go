// Package archtest holds the structure of the project to what docs/architecture.md says: which package may import which, and that every package introduces itself.
package archtest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"go/parser"
	"go/token"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// pkg is what "go list -json" tells of a package.
type pkg struct {
	ImportPath   string
	Dir          string
	GoFiles      []string
	Imports      []string
	TestImports  []string
	XTestImports []string
	Deps         []string
	Standard     bool
}

func list(t *testing.T, patterns ...string) []pkg {
	cmd := exec.CommandContext(t.Context(), "go", append([]string{"list", "-json=ImportPath,Dir,GoFiles,Imports,TestImports,XTestImports,Deps,Standard"}, patterns...)...)
	var problems bytes.Buffer
	cmd.Stderr = &problems
	out, err := cmd.Output()
	require.NoError(t, err, problems.String())
	var all []pkg
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		err := d.Decode(&p)
		if errors.Is(err, io.EOF) {
			return all
		}
		require.NoError(t, err)
		all = append(all, p)
	}
}

// within reports whether an import path is one of the given packages or below one of them.
func within(path string, packages ...string) bool {
	return slices.ContainsFunc(packages, func(p string) bool { return path == p || strings.HasPrefix(path, p+"/") })
}

// keptTo are heavy or dangerous libraries and the only packages that may import them.
var keptTo = []struct {
	library string
	only    []string
	reason  string
}{
	{"github.com/spf13/viper", []string{"dynworker/pkg/config"}, "one place knows how settings are layered"},
	{"github.com/spf13/pflag", []string{"dynworker/pkg/config"}, "one place knows flags"},
	{"go.etcd.io/etcd/client/v3", []string{"dynworker/pkg/discovery"}, "one place knows leases"},
	{"go.etcd.io/etcd/server/v3", []string{"dynworker/internal/testenv"}, "servers are for tests and the demo"},
	{"github.com/nats-io/nats-server/v2", []string{"dynworker/internal/testenv"}, "servers are for tests and the demo"},
	{"github.com/nats-io/nats.go", []string{"dynworker/pkg/ingress/natsplane", "dynworker/internal/caller"}, "one place knows the broker on each side"},
	{"github.com/NVIDIA/go-nvml", []string{"dynworker/pkg/gpu"}, "one place needs cgo"},
	{"github.com/prometheus/client_golang", []string{"dynworker/pkg/metrics"}, "names and labels of metrics are in one place"},
	{"lukechampine.com/blake3", []string{"dynworker/pkg/modelcard"}, "checksums of model files are made in one place"},
	{"os/exec", []string{"dynworker/pkg/engine", "dynworker/bench"}, "processes are started and reaped in one place"},
	{"dynworker/internal/app", []string{"dynworker/internal/cli", "dynworker/cmd"}, "parts do not know the whole"},
	{"dynworker/internal/testenv", []string{"dynworker/internal/testenv", "dynworker/cmd/demo", "dynworker/bench"}, "servers are for tests and the demo"},
}

func TestLibrariesStayWhereTheyBelong(t *testing.T) {
	for _, p := range list(t, "dynworker/...") {
		for _, path := range p.Imports {
			for _, rule := range keptTo {
				if within(path, rule.library) && !within(p.ImportPath, rule.only...) {
					t.Errorf("%s imports %s: %s (allowed: %v)", p.ImportPath, path, rule.reason, rule.only)
				}
			}
		}
	}
}

// mayImport are the packages of the project that low-level packages may use, directly or not. What is not listed here is free.
var mayImport = map[string][]string{
	"dynworker/pkg/wire":          {},
	"dynworker/pkg/protocol":      {"dynworker/pkg/wire"},
	"dynworker/pkg/affinity":      {},
	"dynworker/pkg/config/origin": {},
	"dynworker/pkg/engineargs":    {"dynworker/pkg/config/origin", "dynworker/internal/logging"},
	"dynworker/pkg/engine/ipc":    {},
	"dynworker/pkg/metrics":       {},
	"dynworker/pkg/phases":        {},
	"dynworker/pkg/status":        {},
	"dynworker/pkg/discovery":     {"dynworker/internal/logging"},
	"dynworker/pkg/handlers":      {"dynworker/pkg/protocol", "dynworker/pkg/wire", "dynworker/pkg/affinity", "dynworker/pkg/engine/ipc", "dynworker/pkg/handoff"},
	"dynworker/pkg/handoff":       {"dynworker/pkg/protocol", "dynworker/pkg/wire"},
	"dynworker/pkg/respstream":    {"dynworker/pkg/wire", "dynworker/pkg/protocol"},
	"dynworker/pkg/ingress":       {"dynworker/pkg/wire", "dynworker/pkg/protocol"},
	"dynworker/pkg/modelcard":     {"dynworker/pkg/protocol", "dynworker/pkg/wire"},
	"dynworker/pkg/engine":        {"dynworker/pkg/engine", "dynworker/pkg/protocol", "dynworker/pkg/wire"},
}

func TestDependenciesPointOneWay(t *testing.T) {
	for _, p := range list(t, "dynworker/pkg/...") {
		allowed, ruled := mayImport[p.ImportPath]
		if !ruled {
			continue
		}
		for _, path := range p.Deps {
			if strings.HasPrefix(path, "dynworker/") && !within(path, append(allowed, p.ImportPath)...) {
				t.Errorf("%s depends on %s; it may use %v", p.ImportPath, path, allowed)
			}
		}
	}
}

func TestBytesNeedNothingButTheStandardLibrary(t *testing.T) {
	standard := map[string]bool{}
	for _, p := range list(t, "std") {
		standard[p.ImportPath] = true
	}
	for _, p := range list(t, "dynworker/pkg/wire", "dynworker/pkg/protocol", "dynworker/pkg/engine/ipc", "dynworker/pkg/affinity") {
		for _, path := range p.Imports {
			require.True(t, standard[path] || path == "dynworker/pkg/wire", "%s imports %s", p.ImportPath, path)
		}
	}
}

// TestTheKubernetesAPIIsForTestsOfManifests keeps a large library out of every other package, its tests included.
func TestTheKubernetesAPIIsForTestsOfManifests(t *testing.T) {
	for _, p := range list(t, "dynworker/...") {
		tests := slices.Concat(p.TestImports, p.XTestImports)
		for _, path := range slices.Concat(p.Imports, tests) {
			if within(path, "k8s.io", "sigs.k8s.io") {
				require.Equal(t, "dynworker/internal/deploytest", p.ImportPath, "imports %s", path)
				require.NotContains(t, p.Imports, path, "only tests may import it")
			}
		}
	}
}

func TestTheWorkerLinksNoServer(t *testing.T) {
	for _, p := range list(t, "dynworker/cmd/worker") {
		for _, path := range p.Deps {
			require.False(t, within(path, "go.etcd.io/etcd/server/v3", "github.com/nats-io/nats-server/v2"), "cmd/worker links %s", path)
		}
	}
}

// TestEveryPackageIntroducesItself wants exactly one package comment in each package, which says what it is for.
func TestEveryPackageIntroducesItself(t *testing.T) {
	for _, p := range list(t, "dynworker/...") {
		if len(p.GoFiles) == 0 {
			continue
		}
		var with []string
		for _, name := range p.GoFiles {
			f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, name), nil, parser.ParseComments|parser.PackageClauseOnly)
			require.NoError(t, err)
			if f.Doc != nil {
				with = append(with, name)
				first, _ := bufio.NewReader(strings.NewReader(f.Doc.Text())).ReadString('\n')
				want := "Package " + f.Name.Name + " "
				if f.Name.Name == "main" {
					want = "Command " + filepath.Base(p.Dir) + " "
				}
				require.True(t, strings.HasPrefix(first, want), "%s/%s begins with %q, want %q", p.ImportPath, name, strings.TrimSpace(first), want)
			}
		}
		require.Len(t, with, 1, "%s needs one package comment, has them in %v", p.ImportPath, with)
	}
}

func TestNoPackageIsADrawer(t *testing.T) {
	for _, p := range list(t, "dynworker/...") {
		name := filepath.Base(p.ImportPath)
		require.NotContains(t, []string{"util", "utils", "common", "types", "helpers", "misc", "shared"}, name, p.ImportPath)
	}
}
