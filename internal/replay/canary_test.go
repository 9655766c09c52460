package replay

import (
	"encoding/json"
	"io"
	"net/http"
	"testing"
	"time"

	"dynworker/pkg/protocol"

	"github.com/stretchr/testify/require"
)

// probe is what the system server said.
type probe struct {
	status int
	body   protocol.Map
}

func get(t *testing.T, address, path string) probe {
	t.Helper()
	status, text := request(t, address, path)
	return probe{status, object(t, []byte(text))}
}

// fetch is the text that the system server has at a path.
func fetch(t *testing.T, address, path string) string {
	t.Helper()
	status, text := request(t, address, path)
	require.Equal(t, http.StatusOK, status)
	return text
}

func request(t *testing.T, address, path string) (status int, text string) {
	t.Helper()
	request, err := http.NewRequestWithContext(limited(t), http.MethodGet, "http://"+address+path, nil)
	require.NoError(t, err)
	response, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(request)
	require.NoError(t, err)
	defer func() { require.NoError(t, response.Body.Close()) }()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return response.StatusCode, string(body)
}

// canonical is a probe's answer as far as it was recorded: status, word, and the endpoints' words.
func (p probe) canonical() protocol.Map {
	return protocol.Map{"status": int64(p.status), "body": protocol.Map{"status": p.body["status"], "endpoints": p.body["endpoints"]}}
}

func recordedProbe(v any) protocol.Map {
	p := v.(protocol.Map)
	return probe{int(p["status"].(int64)), p["body"].(protocol.Map)}.canonical()
}

// TestCanary replays the worker's own health checks: what they ask of the engine, and what health says before and after.
func TestCanary(t *testing.T) {
	for _, r := range recordings(t, "canary") {
		for _, handler := range []string{"legacy", "unified"} {
			t.Run(r.name+"/"+handler, func(t *testing.T) {
				t.Parallel()
				replayCanary(t, r, handler)
			})
		}
	}
}

// canarySetups are how the recorded workers were started.
var canarySetups = map[string]setup{
	"canary/agg":               {},
	"canary/agg-rc19-override": {api: "rc19", flags: []string{"--conversation-affinity"}},
	"canary/prefill":           {flags: []string{"--disaggregation-mode", "prefill"}},
}

func replayCanary(t *testing.T, r *recording, handler string) {
	s, known := canarySetups[r.name]
	require.True(t, known)
	s.settings = append(s.settings, "handler="+handler, "health_check.enabled=true", "health_check.wait=50ms", "system.port=0")
	atStart := make(chan protocol.Map, 1)
	s.onLog = func(line string) {
		var m struct{ Message, Address string }
		if json.Unmarshal([]byte(line), &m) == nil && m.Message == "system server open" {
			// The worker waits for its log, so this is before the engine was started.
			atStart <- get(t, m.Address, "/health").canonical()
		}
	}
	w := run(t, s)
	recorded, ours := protocol.Map{"serves": true}, protocol.Map{"serves": !w.ended}
	if w.ended {
		requireRefusedStart(t, w)
		settle(t, r.name, diff("", recorded, ours))
		return
	}
	const checks = 3
	w.await("three health checks", func(_ map[string]*engineSide, nameless []*engineSide) bool {
		return len(nameless) >= checks && len(nameless[checks-1].finishes) > 0
	})
	require.Eventually(t, func() bool { return get(t, w.serving.SystemAddress, "/health").status == http.StatusOK }, patience, 10*time.Millisecond)
	recorded["health_at_start"], ours["health_at_start"] = recordedProbe(r.fields["health_at_start"]), <-atStart
	recorded["health"], ours["health"] = recordedProbe(r.fields["health_after_3s"]), get(t, w.serving.SystemAddress, "/health").canonical()
	recorded["live"], ours["live"] = recordedProbe(r.fields["live"]), get(t, w.serving.SystemAddress, "/live").canonical()
	require.Zero(t, w.stop())
	_, nameless := sortByRequest(w.engineLog())
	recorded["engine"], ours["engine"] = canonicalSides(listOf(r.fields["engine"])), sidesOf(nameless[:checks])
	settle(t, r.name, diff("", recorded, ours))
}

func canonicalSides(lines []protocol.Map) []any {
	_, nameless := sortByRequest(lines)
	return sidesOf(nameless)
}

func sidesOf(sides []*engineSide) (all []any) {
	for _, s := range sides {
		all = append(all, s.canonical())
	}
	return all
}
