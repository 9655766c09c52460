package metrics

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the tables of docs/metrics.md anew")

const docs = "../../docs/metrics.md"

// table renders the families whose names begin with prefix.
func table(prefix string) string {
	var b strings.Builder
	b.WriteString("| name | type | labels | meaning |\n|---|---|---|---|\n")
	for _, f := range Families() {
		if !strings.HasPrefix(f.Name, prefix) {
			continue
		}
		labels := strings.Join(f.Labels, ", ")
		if slices.Contains(f.Labels, labelNamespace) {
			labels = "*"
			for _, l := range f.vars[3:] {
				labels += ", " + l
			}
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", f.Name, f.Type, labels, f.Help)
	}
	return b.String()
}

// docs/metrics.md lists exactly the families that there are.
func TestDocsListEveryFamily(t *testing.T) {
	raw, err := os.ReadFile(docs)
	require.NoError(t, err)
	want := string(raw)
	for _, prefix := range []string{"dynamo_", "dynworker_"} {
		begin, end := fmt.Sprintf("<!-- families %s -->\n", prefix), fmt.Sprintf("<!-- end %s -->", prefix)
		head, rest, ok := strings.Cut(want, begin)
		require.True(t, ok, "%s has no line %q", docs, begin)
		_, tail, ok := strings.Cut(rest, end)
		require.True(t, ok, "%s has no line %q", docs, end)
		want = head + begin + table(prefix) + end + tail
	}
	if *update {
		require.NoError(t, os.WriteFile(docs, []byte(want), 0o644))
		return
	}
	require.Empty(t, cmp.Diff(want, string(raw)), "run: go test ./pkg/metrics -run TestDocsListEveryFamily -update")
}

// What the list says of type, labels and meaning is what a scrape shows, and
// every family of the list can be fed.
func TestListAgreesWithScrape(t *testing.T) {
	w := newWorkerAt(&clock{})
	useAll(w)
	got := scrape(t, w)
	listed := make(map[string]bool)
	for _, f := range Families() {
		require.False(t, listed[f.Name], f.Name)
		listed[f.Name] = true
		have := got[f.Name]
		require.NotNil(t, have, "%s is listed and nothing feeds it", f.Name)
		require.Equal(t, strings.ToUpper(f.Type), have.GetType().String(), f.Name)
		require.Equal(t, f.Help, have.GetHelp())
		for _, m := range have.Metric {
			names := labelNames(m)
			slices.Sort(names)
			require.Empty(t, cmp.Diff(f.Labels, names), f.Name)
		}
	}
	for name := range got {
		if !strings.HasPrefix(name, "go_") && !strings.HasPrefix(name, "process_") {
			require.True(t, listed[name], "%s is not listed", name)
		}
	}
}

func TestNamesFollowTheConventions(t *testing.T) {
	for _, f := range Families() {
		require.NotEmpty(t, f.Help, f.Name)
		require.NotContains(t, f.Help, "|", f.Name)
		if strings.HasPrefix(f.Name, "dynworker_") {
			require.Equal(t, f.Type == typeCounter, strings.HasSuffix(f.Name, "_total"), f.Name)
		}
	}
}
