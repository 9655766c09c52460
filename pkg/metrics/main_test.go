package metrics

import (
	"io"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// clock is a hand-driven clock.
type clock struct{ t time.Time }

func (c *clock) now() time.Time          { return c.t }
func (c *clock) advance(d time.Duration) { c.t = c.t.Add(d) }

func newWorkerAt(c *clock) *Worker {
	return New(Options{Version: "1.2.3", Namespace: "oracle", Component: "backend", Endpoint: "generate", Model: "tiny",
		AffinityReasons: []string{"conversation"}, Phases: []string{"queue", "prefill"}, Now: c.now})
}

func parse(t *testing.T, r io.Reader) map[string]*dto.MetricFamily {
	t.Helper()
	p := expfmt.NewTextParser(model.LegacyValidation)
	families, err := p.TextToMetricFamilies(r)
	require.NoError(t, err)
	return families
}

// scrape reads everything as Prometheus would.
func scrape(t *testing.T, w *Worker) map[string]*dto.MetricFamily {
	t.Helper()
	rec := httptest.NewRecorder()
	w.Handler().ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
	require.Equal(t, 200, rec.Code, rec.Body.String())
	require.True(t, strings.HasPrefix(rec.Header().Get("Content-Type"), "text/plain"), rec.Header())
	return parse(t, rec.Body)
}

// value is the value of the one series of a family that has the labels, given
// as name, value, name, value; of a histogram it is the count.
func value(t *testing.T, families map[string]*dto.MetricFamily, name string, labels ...string) float64 {
	t.Helper()
	f := families[name]
	require.NotNil(t, f, name)
	var found []*dto.Metric
	for _, m := range f.Metric {
		has := make(map[string]string)
		for _, p := range m.Label {
			has[p.GetName()] = p.GetValue()
		}
		match := true
		for i := 0; i < len(labels); i += 2 {
			match = match && has[labels[i]] == labels[i+1]
		}
		if match {
			found = append(found, m)
		}
	}
	require.Len(t, found, 1, "%s %v", name, labels)
	switch m := found[0]; f.GetType() {
	case dto.MetricType_COUNTER:
		return m.GetCounter().GetValue()
	case dto.MetricType_GAUGE:
		return m.GetGauge().GetValue()
	default:
		return float64(m.GetHistogram().GetSampleCount())
	}
}

func labelNames(m *dto.Metric) []string {
	var names []string
	for _, p := range m.Label {
		names = append(names, p.GetName())
	}
	return names
}

// useAll calls every method of the package, so that every family has a series.
func useAll(w *Worker) {
	w.SetInstance(0x7d7ba22fa0696605)
	w.SetReady(true)
	w.Loaded(3 * time.Second)
	w.EngineStarted()
	w.EngineServing()
	w.EngineFailed("exit")
	w.EngineRestarted("exit")
	w.EngineHolds(2, 9)
	w.StreamStalled()
	w.RequestSuspected()
	w.EngineOverran()
	w.PhaseEntered(1)
	w.PhaseStuck(1)
	w.PhaseLeft(1, time.Second)
	w.HandedOver()
	w.AbortDeferred("in_time")
	w.SetKVCapacity(2, 1024)
	w.SetKVUsage(1, 0.5)
	w.PromptTokens(10, 4)
	w.GeneratedTokens(7)
	w.AffinityDecided("strict_rank")
	w.AffinityDisagreement()
	w.IngressEvent("nats", "dropped", 2)
	w.ModelFileServed("config.json")
	w.DiscoveryState(true, 1, 2)
	w.NATSState(true, 3)
	e := w.Endpoint()
	e.SetLimits(4, 2)
	e.Refused(RefusedOverloaded)
	r := e.Begin(100, time.Millisecond)
	r.Opened()
	r.Accepted()
	r.Waiting()
	r.Running()
	r.FirstResponse()
	r.Frame(3)
	r.ResponseBytes(50)
	r.Failed(ErrorGenerate)
	r.Cancelled(CancelStop)
	r.End()
}
