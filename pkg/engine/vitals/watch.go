package vitals

import (
	"context"
	"time"
)

// lookEvery is the time between two looks at an engine's requests.
const lookEvery = time.Second

// Looker finds failures in what it was told.
type Looker interface {
	// Look is called once in a while with the running time since the last call.
	Look(elapsed time.Duration) *Failure
}

// Look lets the lookers look, one after the other, until one of them finds something, which it returns. It returns nil when ctx ends.
func Look(ctx context.Context, lookers ...Looker) *Failure {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for last := time.Now(); ; {
		var now time.Time
		select {
		case <-ctx.Done():
			return nil
		case now = <-tick.C:
		}
		elapsed := witnessed(now.Sub(last), lookEvery)
		last = now
		for _, l := range lookers {
			if f := l.Look(elapsed); f != nil {
				return f
			}
		}
	}
}
