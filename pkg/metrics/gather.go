package metrics

import (
	"slices"
	"strings"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// gatherer adds the labels that say which worker this is when metrics are
// read, not when they are made: counting starts before the worker has an id.
type gatherer struct {
	all                  prometheus.Gatherers
	namespace, component string
	worker               atomic.Pointer[string]
}

func newGatherer(b *builder, namespace, component string) *gatherer {
	g := &gatherer{namespace: namespace, component: component}
	g.setWorker("")
	g.all = prometheus.Gatherers{
		b.plain,
		labelled{b.component, func() []*dto.LabelPair {
			return []*dto.LabelPair{pair(labelNamespace, g.namespace), pair(labelComponent, g.component), pair(labelWorker, *g.worker.Load())}
		}},
		labelled{b.instance, func() []*dto.LabelPair {
			return []*dto.LabelPair{pair(labelWorker, *g.worker.Load())}
		}},
	}
	return g
}

func (g *gatherer) setWorker(id string) { g.worker.Store(&id) }

// Gather implements prometheus.Gatherer.
func (g *gatherer) Gather() ([]*dto.MetricFamily, error) { return g.all.Gather() }

// labelled adds labels to all metrics of a gatherer and drops those without a
// value, which to Prometheus are the same as absent.
type labelled struct {
	from   prometheus.Gatherer
	labels func() []*dto.LabelPair
}

func (l labelled) Gather() ([]*dto.MetricFamily, error) {
	families, err := l.from.Gather()
	more := l.labels()
	for _, f := range families {
		for _, m := range f.Metric {
			// A new list: the registry shares the old one with the next reader.
			all := make([]*dto.LabelPair, 0, len(m.Label)+len(more))
			for _, p := range slices.Concat(m.Label, more) {
				if p.GetValue() != "" {
					all = append(all, p)
				}
			}
			slices.SortFunc(all, func(x, y *dto.LabelPair) int { return strings.Compare(x.GetName(), y.GetName()) })
			m.Label = all
		}
	}
	return families, err
}

func pair(name, value string) *dto.LabelPair { return &dto.LabelPair{Name: &name, Value: &value} }
