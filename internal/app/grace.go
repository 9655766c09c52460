package app

import (
	"time"

	"dynworker/pkg/config"
)

// LongestStop is the longest time that a worker with this configuration takes from the signal to the end of its process, if every step uses up its bound. A supervisor that kills after a grace period, as the kubelet does, has to
// leave it this long. Usually it is much less: a drain ends with the last request.
func LongestStop(cfg *config.Config) time.Duration {
	total := cfg.Drain.Budget + withdrawTimeout + intakeTimeout + cutTimeout
	// The engine counts once: either there is one to stop, or the drain waits for the end of one that was about to be started.
	for _, part := range []time.Duration{
		stopServer,                         // canary
		stopSession,                        // etcd session
		stopPlane,                          // request plane
		stopSession,                        // etcd client
		lingerTimeout,                      // response plane
		stopPhases,                         // slow requests
		cfg.Engine.StopTimeout + stopSlack, // engine
		stopServer,                         // engine program
		stopServer,                         // model file server
		stopServer,                         // system server
	} {
		total += part
	}
	return total
}
