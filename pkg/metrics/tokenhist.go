package metrics

import (
	"math/bits"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// tokenBuckets is the number of finite buckets of tokenHistogram.
const tokenBuckets = 8

// tokenBounds are the upper bounds of its buckets: powers of two.
var tokenBounds = func() (b [tokenBuckets]float64) {
	for i := range b {
		b[i] = float64(uint(1) << i)
	}
	return b
}()

// tokenHistogram is a histogram of small whole numbers. It is observed once a
// chunk, where the library's own, which has to cope with any number, costs
// several times as much as everything else that is counted there.
type tokenHistogram struct {
	desc   *prometheus.Desc
	counts [tokenBuckets + 1]atomic.Uint64
	sum    atomic.Uint64
}

// observe takes a number of at least 1.
func (h *tokenHistogram) observe(n int) {
	h.counts[min(bits.Len(uint(n-1)), tokenBuckets)].Add(1)
	h.sum.Add(uint64(n))
}

// Describe implements prometheus.Collector.
func (h *tokenHistogram) Describe(ch chan<- *prometheus.Desc) { ch <- h.desc }

// Collect implements prometheus.Collector. What is observed meanwhile shows now
// or at the next scrape.
func (h *tokenHistogram) Collect(ch chan<- prometheus.Metric) {
	sum := h.sum.Load()
	buckets := make(map[float64]uint64, tokenBuckets)
	var count uint64
	for i, bound := range tokenBounds {
		count += h.counts[i].Load()
		buckets[bound] = count
	}
	count += h.counts[tokenBuckets].Load()
	ch <- prometheus.MustNewConstHistogram(h.desc, count, float64(sum), buckets)
}
