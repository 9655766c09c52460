package vitals

import (
	"fmt"
	"sync"
	"time"
)

// Tolerance says how many requests may fail in an engine before the engine itself counts as failed. Share of 0 turns the check off.
type Tolerance struct {
	// Window is how far back requests count.
	Window time.Duration
	// Share of the requests that ended in the window, from 0 to 1.
	Share float64
	// Count is the least number of failures; a share of few requests says nothing.
	Count int
}

// slots is into how many parts a window is divided; it slides by one at a time.
const slots = 20

// Outcomes counts how requests ended, in a window that slides with running time.
type Outcomes struct {
	tolerance Tolerance

	mu    sync.Mutex
	parts [slots]struct{ ended, failed int }
	now   int           // the part that counts
	used  time.Duration // of it
	last  string        // what the latest failure said
}

// NewOutcomes makes an empty count.
func NewOutcomes(t Tolerance) *Outcomes { return &Outcomes{tolerance: t} }

// Ended counts a request that the engine ended. failure is empty for a good one, and what the engine said for one that failed in the engine; a request that the engine refused for what it asked is a good one.
func (o *Outcomes) Ended(failure string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	p := &o.parts[o.now]
	p.ended++
	if failure != "" {
		p.failed++
		o.last = failure
	}
}

// Look lets time pass and gives its finding: a *Failure of Failures when there were too many, which are forgotten then.
func (o *Outcomes) Look(elapsed time.Duration) *Failure {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.tolerance.Share <= 0 || o.tolerance.Window <= 0 {
		return nil
	}
	ended, failed := 0, 0
	for _, p := range o.parts {
		ended, failed = ended+p.ended, failed+p.failed
	}
	if failed >= max(o.tolerance.Count, 1) && float64(failed) >= o.tolerance.Share*float64(ended) {
		o.parts = [slots]struct{ ended, failed int }{}
		return &Failure{Detector: Failures, Reason: fmt.Sprintf("%d of %d requests failed in the engine within %v, the last with: %s", failed, ended, o.tolerance.Window, o.last)}
	}
	o.slide(elapsed)
	return nil
}

func (o *Outcomes) slide(elapsed time.Duration) {
	part := max(o.tolerance.Window/slots, 1)
	o.used += elapsed
	for n := 0; o.used >= part && n < slots; n++ {
		o.used -= part
		o.now = (o.now + 1) % slots
		o.parts[o.now] = struct{ ended, failed int }{}
	}
	o.used = min(o.used, part)
}
