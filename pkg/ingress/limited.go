package ingress

import (
	"time"

	"github.com/rs/zerolog"
)

// limitPeriod is how often a line is logged that could come with every message.
const limitPeriod = 5 * time.Second

// Limited returns a logger that passes one line in five seconds. Each kind of line needs its own, else one kind silences the others.
func Limited(log zerolog.Logger) zerolog.Logger {
	return log.Sample(&zerolog.BurstSampler{Burst: 1, Period: limitPeriod})
}
