package app

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"testing"
	"time"

	"dynworker/internal/caller"
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/handlers"
	"dynworker/pkg/metrics"
	"dynworker/pkg/phases"
	"dynworker/pkg/protocol"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
)

// slowLine is what the log says of a request that is stuck.
type slowLine struct {
	Message string             `json:"message"`
	ID      string             `json:"request_id"`
	Phase   string             `json:"phase"`
	Silent  float64            `json:"silent"`
	Outputs int                `json:"outputs"`
	Took    map[string]float64 `json:"took"`
	Prefill string             `json:"prefill_worker"`
}

func slowLines(t *testing.T, log, message string) (found []slowLine) {
	t.Helper()
	for line := range strings.Lines(log) {
		var l slowLine
		require.NoError(t, json.Unmarshal([]byte(line), &l))
		if l.Message == message {
			found = append(found, l)
		}
	}
	return found
}

// Of three requests one hangs in the engine before its first token, one after it, and the third gets no slot because of them.
func TestTheLogSaysWhereRequestsAreStuck(t *testing.T) {
	w := newWorld(t)
	r := w.start("log.slow_request=200ms", "admission.max_requests=2", "admission.queue=1", "engine.watch.no_progress=0", "engine.watch.stream_inactivity=0")
	c, i := w.caller(), r.instance()
	var streams []*caller.Stream
	for _, ask := range []caller.Call{
		{ID: "before", Request: ask(5, salt("sim:stall"))},
		{ID: "after", Request: ask(5, salt("sim:stall:3"))},
		{ID: "waits", Request: ask(5, nil)},
	} {
		ask.Transport, ask.Codec = i.Transport, protocol.CodecMsgpack
		s, err := c.Do(timeout(t), ask)
		require.NoError(t, err)
		streams = append(streams, s)
		if ask.ID != "waits" {
			// The slots are theirs before the third comes.
			require.Eventually(t, func() bool { return strings.Contains(r.log.String(), `"request_id":"`+ask.ID+`"`) }, patience, 5*time.Millisecond)
		}
	}
	stuckIn := func() map[string]string {
		where := map[string]string{}
		for _, l := range slowLines(t, r.log.String(), "the request makes no progress") {
			where[l.ID] = l.Phase
		}
		return where
	}
	// On a busy machine they may be slow on their way there, too.
	expected := map[string]string{"before": "prefill", "after": "decode", "waits": "queue"}
	require.Eventually(t, func() bool { return maps.Equal(expected, stuckIn()) }, patience, 10*time.Millisecond)
	for _, l := range slowLines(t, r.log.String(), "the request makes no progress") {
		require.GreaterOrEqual(t, l.Silent, 200.0, "milliseconds")
		if l.Phase == expected[l.ID] {
			require.Equal(t, l.ID == "after", l.Outputs > 0)
			require.Contains(t, l.Took, "accept")
		}
	}
	_, text := get(t, r, "/metrics")
	for _, phase := range []string{"prefill", "decode", "queue"} {
		require.Contains(t, text, fmt.Sprintf("dynworker_requests_in_phase{phase=%q} 1\n", phase))
		require.NotContains(t, text, fmt.Sprintf("dynworker_slow_requests_total{phase=%q} 0\n", phase))
	}
	for _, s := range streams {
		require.NoError(t, s.Close())
	}
	require.Eventually(t, func() bool {
		return len(slowLines(t, r.log.String(), "a request that had made no progress has ended")) >= 2
	}, patience, 10*time.Millisecond)
	status, text := get(t, r, "/metrics")
	require.Equal(t, http.StatusOK, status)
	require.NoError(t, r.stop())
	require.Contains(t, text, "dynworker_request_phase_seconds_count{phase=\"prefill\"}")
}

func TestRequestsInTheEngineWaitForAPromptOrForAnotherEngine(t *testing.T) {
	for _, tc := range []struct {
		order string
		id    any
		phase phases.Phase
		peer  uint64
	}{
		{"", int64(7), phases.Prefill, 0},
		{`{"request_type":"context_only"}`, int64(7), phases.Prefill, 0},
		{`{"request_type":"context_and_generation"}`, int64(7), phases.Prefill, 0},
		{`{"request_type":"generation_only"}`, int64(7), phases.Transfer, 7},
		{`{"request_type":"generation_only"}`, uint64(1 << 63), phases.Transfer, 1 << 63},
		{`{"request_type":"generation_only"}`, int64(-1), phases.Transfer, 0},
		{`{"request_type":"generation_only"}`, "7", phases.Transfer, 0},
		{`{"request_type":"generation_only"}`, nil, phases.Transfer, 0},
	} {
		var found []phases.Slow
		now := time.Unix(0, 0)
		tracker := phases.New(phases.Config{After: time.Second, Observer: phaseObserver{metrics.New(metrics.Options{Phases: phases.Names()})}, Report: func(s []phases.Slow) { found = s }, Now: func() time.Time { return now }})
		track := tracker.Begin("a")
		call := &handlers.Call{Request: ask(1, func(m protocol.Map) { m["routing"] = protocol.Map{"prefill_worker_id": tc.id} })}
		handOn(track, call)(&ipc.Generate{Disaggregated: []byte(tc.order)})
		now = now.Add(time.Minute)
		tracker.Look()
		require.Len(t, found, 1)
		require.Equal(t, tc.phase, found[0].Phase, tc.order)
		require.Equal(t, tc.peer, found[0].Peer)
		track.End()
	}
}

// An engine that hangs makes all of its requests slow at the same time; the log stays readable.
func TestManyStuckRequestsMakeFewLines(t *testing.T) {
	var log bytes.Buffer
	m := metrics.New(metrics.Options{Phases: phases.Names()})
	var many []phases.Slow
	for i := range 1000 {
		many = append(many, phases.Slow{ID: fmt.Sprint(i), Phase: phases.Phase(i % 2 * 3), Silent: time.Minute, First: true, Peer: 0xabc})
	}
	slowReport{log: zerolog.New(&log), metrics: m}.report(many)
	require.Len(t, slowLines(t, log.String(), "the request makes no progress"), slowLineLimit)
	require.Contains(t, log.String(), `"requests_by_phase":{"accept":490,"transfer":490}`)
	require.Equal(t, "abc", slowLines(t, log.String(), "the request makes no progress")[0].Prefill)
}
