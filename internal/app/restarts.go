package app

import (
	"math"
	"math/rand/v2"
	"time"
)

// restartBudget says whether and when a failed engine is started again. Each start costs one; each span of window/max in which an engine served earns one back, so that an engine that fails once a week can do so for ever, and one that
// fails at once is given up after max starts.
type restartBudget struct {
	max          int
	window       time.Duration
	backoff, cap time.Duration
	// spent is what was used and not earned back.
	spent float64
	// jitter gives a number in [0,1).
	jitter func() float64
}

// served earns back what a life that served for so long has earned.
func (b *restartBudget) served(d time.Duration) {
	if b.window <= 0 {
		return
	}
	b.spent = max(0, b.spent-float64(b.max)*float64(d)/float64(b.window))
}

// next is how long to wait before the next start; ok is false when there is none. The pause doubles with what was spent before, up to the cap, and is cut by up to a half so that workers that lost something in common do not come back in
// step.
func (b *restartBudget) next() (pause time.Duration, ok bool) {
	if b.spent+1 > float64(b.max) {
		return 0, false
	}
	pause = time.Duration(math.Min(float64(b.cap), float64(b.backoff)*math.Pow(2, math.Round(b.spent))))
	b.spent++
	return pause - time.Duration(float64(pause)/2*b.jitter()), true
}

func randomJitter() float64 { return rand.Float64() }
