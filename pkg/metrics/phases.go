package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// phaseMetrics are those of one phase of requests.
type phaseMetrics struct {
	took  prometheus.Observer
	in    prometheus.Gauge
	stuck prometheus.Counter
}

func newPhases(b *builder, names []string) []phaseMetrics {
	took, in, stuck := b.histogramVec(famPhaseTook), b.gaugeVec(famPhaseIn), b.counterVec(famPhaseStuck)
	var all []phaseMetrics
	for _, name := range names {
		all = append(all, phaseMetrics{took.WithLabelValues(name), in.WithLabelValues(name), stuck.WithLabelValues(name)})
	}
	return all
}

// PhaseEntered counts a request into a phase.
func (w *Worker) PhaseEntered(phase int) { w.phases[phase].in.Inc() }

// PhaseLeft takes a request out of a phase in which it was for so long.
func (w *Worker) PhaseLeft(phase int, d time.Duration) {
	w.phases[phase].in.Dec()
	w.phases[phase].took.Observe(max(d, 0).Seconds())
}

// PhaseStuck counts a request that makes no progress in a phase.
func (w *Worker) PhaseStuck(phase int) { w.phases[phase].stuck.Inc() }
