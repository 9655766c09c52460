package metrics

import "github.com/prometheus/client_golang/prometheus"

// builder makes metrics out of families, puts them into the registry that
// gives them the right labels, and keeps account of the families.
type builder struct {
	plain     *prometheus.Registry // labels as they are
	component *prometheus.Registry // gets namespace, component and worker
	instance  *prometheus.Registry // gets worker
	families  []Family
}

func newBuilder() *builder {
	return &builder{plain: prometheus.NewRegistry(), component: prometheus.NewRegistry(), instance: prometheus.NewRegistry()}
}

// add registers the collector of a family. A family that is made twice or
// malformed is a mistake in this package, which every test would run into.
func (b *builder) add(f Family, c prometheus.Collector) {
	registry := b.plain
	if len(f.Labels) > len(f.vars) {
		registry = b.component
	}
	registry.MustRegister(c)
	b.families = append(b.families, f)
}

func (b *builder) counterVec(f Family) *prometheus.CounterVec {
	v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: f.Name, Help: f.Help}, f.vars)
	b.add(f, v)
	return v
}

func (b *builder) gaugeVec(f Family) *prometheus.GaugeVec {
	v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: f.Name, Help: f.Help}, f.vars)
	b.add(f, v)
	return v
}

func (b *builder) histogramVec(f Family) *prometheus.HistogramVec {
	v := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: f.Name, Help: f.Help, Buckets: f.buckets}, f.vars)
	b.add(f, v)
	return v
}

func (b *builder) counter(f Family) prometheus.Counter { return b.counterVec(f).WithLabelValues() }

func (b *builder) gauge(f Family) prometheus.Gauge { return b.gaugeVec(f).WithLabelValues() }

func (b *builder) histogram(f Family) prometheus.Observer { return b.histogramVec(f).WithLabelValues() }

func (b *builder) counterFunc(f Family, value func() float64) {
	b.add(f, prometheus.NewCounterFunc(prometheus.CounterOpts{Name: f.Name, Help: f.Help}, value))
}

func (b *builder) gaugeFunc(f Family, value func() float64) {
	b.add(f, prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: f.Name, Help: f.Help}, value))
}

func (b *builder) tokenHistogram(f Family) *tokenHistogram {
	h := &tokenHistogram{desc: prometheus.NewDesc(f.Name, f.Help, nil, nil)}
	b.add(f, h)
	return h
}

// uptime is the one family that has the worker's id and nothing else.
func (b *builder) uptime(value func() float64) {
	b.instance.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: famUptime.Name, Help: famUptime.Help}, value))
	b.families = append(b.families, famUptime)
}
