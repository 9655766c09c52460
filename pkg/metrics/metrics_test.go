package metrics

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"
)

func TestEverythingIsCounted(t *testing.T) {
	c := &clock{t: time.Unix(1000, 0)}
	w := newWorkerAt(c)
	c.advance(10 * time.Second)
	useAll(w)
	got := scrape(t, w)
	for _, want := range []struct {
		name   string
		value  float64
		labels []string
	}{
		{"dynamo_component_requests_total", 1, []string{"worker_id", "7d7ba22fa0696605", "model", "tiny", "model_name", "tiny", "dynamo_namespace", "oracle", "dynamo_component", "backend", "dynamo_endpoint", "generate"}},
		{"dynamo_component_request_duration_seconds", 1, nil},
		{"dynamo_component_inflight_requests", 0, nil},
		{"dynamo_component_request_bytes_total", 100, nil},
		{"dynamo_component_response_bytes_total", 50, nil},
		{"dynamo_component_errors_total", 1, []string{"error_type", "generate"}},
		{"dynamo_component_errors_total", 0, []string{"error_type", "deserialization"}},
		{"dynamo_component_cancellation_total", 1, nil},
		{"dynamo_component_uptime_seconds", 10, []string{"worker_id", "7d7ba22fa0696605"}},
		{"dynamo_component_model_load_time_seconds", 3, []string{"model", "tiny", "dynamo_component", "backend"}},
		{"dynamo_component_total_blocks", 1024, []string{"dp_rank", "1"}},
		{"dynamo_component_gpu_cache_usage_percent", 0.5, []string{"dp_rank", "1"}},
		{"dynamo_work_handler_network_transit_seconds", 1, nil},
		{"dynamo_work_handler_time_to_first_response_seconds", 1, nil},
		{"dynamo_work_handler_queue_capacity", 2, nil},
		{"dynamo_work_handler_pool_capacity", 4, nil},
		{"dynamo_work_handler_permit_wait_seconds", 1, nil},
		{"dynamo_rejection_request_total", 1, nil},
		{"dynamo_work_handler_enqueue_rejected_total", 0, nil},
		{"dynworker_build_info", 1, []string{"version", "1.2.3"}},
		{"dynworker_ready", 1, nil},
		{"dynworker_engine_up", 0, nil},
		{"dynworker_engine_starts_total", 1, nil},
		{"dynworker_engine_failures_total", 1, []string{"detector", "exit"}},
		{"dynworker_engine_restarts_total", 1, []string{"detector", "exit"}},
		{"dynworker_engine_serving_since_seconds", 0, nil},
		{"dynworker_engine_stream_stalls_total", 1, nil},
		{"dynworker_suspect_requests_total", 1, nil},
		{"dynworker_engine_overran_total", 1, nil},
		{"dynworker_tokens_total", 7, nil},
		{"dynworker_prompt_tokens_total", 10, nil},
		{"dynworker_cached_tokens_total", 4, nil},
		{"dynworker_frames_total", 1, nil},
		{"dynworker_tokens_per_frame", 1, nil},
		{"dynworker_time_to_first_token_seconds", 1, nil},
		{"dynworker_request_errors_total", 1, []string{"phase", "mid_stream", "error_type", "generate"}},
		{"dynworker_cancels_total", 1, []string{"cause", "stop"}},
		{"dynworker_refused_requests_total", 1, []string{"reason", "overloaded"}},
		{"dynworker_affinity_decisions_total", 1, []string{"reason", "strict_rank"}},
		{"dynworker_affinity_decisions_total", 0, []string{"reason", "conversation"}},
		{"dynworker_affinity_disagreement", 1, nil},
		{"dynworker_ingress_events_total", 2, []string{"plane", "nats", "event", "dropped"}},
		{"dynworker_etcd_registered", 1, nil},
		{"dynworker_etcd_lease_losses_total", 1, nil},
		{"dynworker_etcd_reregistrations_total", 2, nil},
		{"dynworker_nats_healthy", 1, nil},
		{"dynworker_nats_reconnects_total", 3, nil},
		{"dynworker_model_file_gets_total", 1, []string{"file", "config.json"}},
	} {
		require.Equal(t, want.value, value(t, got, want.name, want.labels...), "%s %v", want.name, want.labels)
	}
	require.Contains(t, got, "go_goroutines")
	require.Contains(t, got, "process_resident_memory_bytes")

	w.SetReady(false)
	w.DiscoveryState(false, 1, 2)
	w.NATSState(false, 3)
	w.EngineStarted()
	got = scrape(t, w)
	require.Zero(t, value(t, got, "dynworker_ready"))
	require.Zero(t, value(t, got, "dynworker_etcd_registered"))
	require.Zero(t, value(t, got, "dynworker_nats_healthy"))
	require.EqualValues(t, 1, value(t, got, "dynworker_engine_up"))
}

// The text of a scrape works from the first moment, only without the label
// that is not known yet.
func TestBeforeRegistration(t *testing.T) {
	w := newWorkerAt(&clock{t: time.Unix(1000, 0)})
	got := scrape(t, w)
	for _, name := range []string{"dynamo_component_requests_total", "dynamo_component_uptime_seconds"} {
		for _, m := range got[name].Metric {
			require.NotContains(t, labelNames(m), "worker_id", name)
		}
	}
	require.Zero(t, value(t, got, "dynamo_component_requests_total", "dynamo_namespace", "oracle"))
	w.Endpoint().Begin(1, 0)
	w.SetInstance(0xabc)
	got = scrape(t, w)
	require.EqualValues(t, 1, value(t, got, "dynamo_component_requests_total", "worker_id", "abc"), "what was counted before is not lost")
}

// Families that Dynamo has too look as a Dynamo 1.6.1 worker was recorded to
// show them: type, labels, buckets.
func TestFamiliesAreAsRecorded(t *testing.T) {
	f, err := os.Open("testdata/recorded.txt")
	require.NoError(t, err)
	defer f.Close()
	recorded := parse(t, f)

	w := newWorkerAt(&clock{t: time.Unix(1000, 0)})
	useAll(w)
	got := scrape(t, w)

	// What this worker has nothing to say about yet.
	missing := map[string]string{
		"dynamo_component_kv_publisher_engines_dropped_events_total": "no KV events yet",
		"dynamo_component_kv_cache_hit_rate":                         "never has a value there either",
	}
	for name, want := range recorded {
		if !strings.HasPrefix(name, "dynamo_") || missing[name] != "" {
			continue
		}
		have := got[name]
		require.NotNil(t, have, name)
		require.Equal(t, want.GetType(), have.GetType(), name)
		require.Equal(t, generateSeries(want), generateSeries(have), name)
	}
	for name := range got {
		if strings.HasPrefix(name, "dynamo_") && recorded[name] == nil {
			// The recorded worker has no error series before its first error.
			require.Equal(t, "dynamo_component_errors_total", name)
		}
	}
}

// generateSeries describes the labels and bounds of the first series of a
// family, leaving out those of endpoints that are not the generate endpoint.
func generateSeries(f *dto.MetricFamily) (labels []string) {
	for _, m := range f.Metric {
		generate := true
		for _, p := range m.Label {
			generate = generate && (p.GetName() != "dynamo_endpoint" || p.GetValue() == "generate")
		}
		if !generate {
			continue
		}
		labels = labelNames(m)
		slices.Sort(labels)
		for _, b := range m.GetHistogram().GetBucket() {
			labels = append(labels, fmt.Sprint("le ", b.GetUpperBound()))
		}
		return labels
	}
	return nil
}

// No early return can leave a gauge behind: whatever was and was not called,
// End puts everything back, once.
func TestGaugesCannotLeak(t *testing.T) {
	w := newWorkerAt(&clock{t: time.Unix(1000, 0)})
	e := w.Endpoint()
	malformed := func() {
		r := e.Begin(10, 0)
		defer r.End()
		r.Failed(ErrorDeserialization)
	}
	cancelled := func(early bool) {
		r := e.Begin(10, 0)
		defer r.End()
		r.Opened()
		r.Accepted()
		r.Waiting()
		if early {
			r.Cancelled(CancelKill)
			return // still waiting
		}
		r.Running()
		r.Waiting() // too late: it runs
		r.Cancelled(CancelStop)
	}
	good := func() {
		r := e.Begin(10, 0)
		defer r.End()
		r.Opened()
		r.Opened()
		r.Running()
		r.Running()
		r.FirstResponse()
		r.Frame(1)
		r.End()
		r.Opened() // nothing counts after the end
		r.Waiting()
		r.Running()
		r.Accepted()
		r.FirstResponse()
		r.Frame(1)
		r.ResponseBytes(1)
		r.Cancelled(CancelStop)
	}
	panics := func() {
		defer func() { require.NotNil(t, recover()) }()
		r := e.Begin(10, 0)
		defer r.End()
		r.Running()
		panic("handler")
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i := range 250 {
				malformed()
				cancelled(i%2 == 0)
				good()
				panics()
			}
		})
	}
	wg.Wait()
	got := scrape(t, w)
	for _, gauge := range []string{
		"dynamo_component_inflight_requests", "dynamo_work_handler_queue_depth", "dynamo_request_queue",
		"dynamo_work_handler_pool_active_tasks", "dynamo_engine_request", "dynworker_streams_open",
	} {
		require.Zero(t, value(t, got, gauge), gauge)
	}
	require.EqualValues(t, 4000, value(t, got, "dynamo_component_requests_total"))
	require.EqualValues(t, 4000, value(t, got, "dynamo_component_request_duration_seconds"))
	require.EqualValues(t, 1000, value(t, got, "dynamo_component_cancellation_total"))
	require.EqualValues(t, 1000, value(t, got, "dynamo_component_errors_total", "error_type", "deserialization"))
	require.EqualValues(t, 1000, value(t, got, "dynworker_frames_total"))
	require.EqualValues(t, 2500, value(t, got, "dynamo_work_handler_permit_wait_seconds"))
}

func TestGaugesWhileInProgress(t *testing.T) {
	c := &clock{t: time.Unix(1000, 0)}
	w := newWorkerAt(c)
	r := w.Endpoint().Begin(10, 0)
	r.Opened()
	r.Waiting()
	got := scrape(t, w)
	require.EqualValues(t, 1, value(t, got, "dynamo_component_inflight_requests"))
	require.EqualValues(t, 1, value(t, got, "dynamo_work_handler_queue_depth"))
	require.EqualValues(t, 1, value(t, got, "dynamo_request_queue"))
	require.EqualValues(t, 1, value(t, got, "dynworker_streams_open"))
	require.Zero(t, value(t, got, "dynamo_engine_request"))
	c.advance(2 * time.Second)
	r.Running()
	got = scrape(t, w)
	require.Zero(t, value(t, got, "dynamo_request_queue"))
	require.EqualValues(t, 1, value(t, got, "dynamo_engine_request"))
	require.EqualValues(t, 1, value(t, got, "dynamo_work_handler_pool_active_tasks"))
	require.InDelta(t, 2, got["dynamo_work_handler_permit_wait_seconds"].Metric[0].GetHistogram().GetSampleSum(), 1e-9)
	r.End()
	require.InDelta(t, 2, scrape(t, w)["dynamo_component_request_duration_seconds"].Metric[0].GetHistogram().GetSampleSum(), 1e-9)
}

// An engine that fails in the middle of an answer is an error like any other,
// and told apart from one that fails at once.
func TestErrorsByPhase(t *testing.T) {
	w := newWorkerAt(&clock{t: time.Unix(1000, 0)})
	for range 50 {
		r := w.Endpoint().Begin(1, 0)
		r.Accepted()
		r.FirstResponse()
		for range 10 {
			r.Frame(1)
		}
		r.Failed(ErrorGenerate)
		r.End()
	}
	r := w.Endpoint().Begin(1, 0)
	r.Failed(ErrorResponseStream)
	r.Accepted()
	r.Failed(ErrorGenerate)
	r.End()
	got := scrape(t, w)
	require.EqualValues(t, 50, value(t, got, "dynworker_request_errors_total", "phase", "mid_stream", "error_type", "generate"))
	require.EqualValues(t, 1, value(t, got, "dynworker_request_errors_total", "phase", "before_first_token", "error_type", "generate"))
	require.EqualValues(t, 1, value(t, got, "dynworker_request_errors_total", "phase", "before_accept", "error_type", "response_stream"))
	require.EqualValues(t, 51, value(t, got, "dynamo_component_errors_total", "error_type", "generate"))
}

func TestKindsAndTheirNames(t *testing.T) {
	w := newWorkerAt(&clock{t: time.Unix(1000, 0)})
	e := w.Endpoint()
	for i := range numErrorTypes {
		r := e.Begin(1, 0)
		r.Failed(i)
		r.End()
	}
	for i := range numCancels {
		r := e.Begin(1, 0)
		r.Cancelled(i)
		r.End()
	}
	for i := range numRefusals {
		e.Refused(i)
	}
	got := scrape(t, w)
	for _, name := range []string{"deserialization", "invalid_message", "response_stream", "generate", "serialization", "publish_response", "publish_final"} {
		require.EqualValues(t, 1, value(t, got, "dynamo_component_errors_total", "error_type", name))
	}
	for _, c := range []Cancel{CancelStop, CancelKill, CancelReset, CancelProtocol, CancelWrite, CancelShutdown} {
		require.EqualValues(t, 1, value(t, got, "dynworker_cancels_total", "cause", c.String()))
	}
	require.EqualValues(t, 5, value(t, got, "dynamo_component_cancellation_total"), "a shutdown is not the caller's doing")
	require.Equal(t, "generate", ErrorGenerate.String())
	require.Equal(t, "unavailable", RefusedUnavailable.String())
	require.EqualValues(t, 1, value(t, got, "dynamo_rejection_request_total"))
	require.EqualValues(t, 1, value(t, got, "dynamo_work_handler_enqueue_rejected_total"))
}

func TestTokensPerFrame(t *testing.T) {
	w := newWorkerAt(&clock{t: time.Unix(1000, 0)})
	r := w.Endpoint().Begin(1, 0)
	defer r.End()
	for _, n := range []int{1, 1, 2, 3, 4, 5, 128, 129, 1 << 40, 0} {
		r.Frame(n)
	}
	got := scrape(t, w)
	h := got["dynworker_tokens_per_frame"].Metric[0].GetHistogram()
	var buckets []string
	for _, b := range h.GetBucket() {
		buckets = append(buckets, fmt.Sprintf("%v:%d", b.GetUpperBound(), b.GetCumulativeCount()))
	}
	require.Equal(t, "1:2 2:3 4:5 8:6 16:6 32:6 64:6 128:7 +Inf:9", strings.Join(buckets, " "))
	require.EqualValues(t, 9, h.GetSampleCount(), "a chunk without tokens is none of these")
	require.EqualValues(t, 1<<40+1+1+2+3+4+5+128+129, h.GetSampleSum())
	require.EqualValues(t, 10, value(t, got, "dynworker_frames_total"))
}

// Hostile or broken numbers never make a counter panic.
func TestNegativeNumbers(t *testing.T) {
	w := newWorkerAt(&clock{t: time.Unix(1000, 0)})
	w.PromptTokens(-1, -1)
	w.GeneratedTokens(-1)
	w.IngressEvent("nats", "dropped", -1)
	r := w.Endpoint().Begin(-1, -time.Second)
	r.Frame(-1)
	r.ResponseBytes(-1)
	r.End()
	require.Zero(t, value(t, scrape(t, w), "dynworker_tokens_total"))
}

// Scrapes while everything counts: the race detector watches.
func TestConcurrentScrapes(t *testing.T) {
	w := newWorkerAt(&clock{t: time.Unix(1000, 0)})
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for range 50 {
				useAll(w)
			}
		})
		wg.Go(func() {
			for range 10 {
				_, err := w.gatherer.Gather()
				require.NoError(t, err)
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 150, value(t, scrape(t, w), "dynamo_component_requests_total"))
}

// The token path takes no memory.
func TestTokenPathDoesNotAllocate(t *testing.T) {
	w := newWorkerAt(&clock{t: time.Unix(1000, 0)})
	r := w.Endpoint().Begin(1, 0)
	defer r.End()
	require.Zero(t, testing.AllocsPerRun(100, func() {
		r.FirstResponse()
		r.Frame(3)
		w.GeneratedTokens(3)
	}))
}

func BenchmarkTokenPath(b *testing.B) {
	w := New(Options{})
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		r := w.Endpoint().Begin(1, 0)
		defer r.End()
		for pb.Next() {
			r.Frame(1)
			w.GeneratedTokens(1)
		}
	})
}
