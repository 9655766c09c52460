// Package vitals tells a living engine from one that only looks alive.
//
// An engine can be there as a process, keep its channel and all its streams open, and never produce a token again: a rank that was stopped, a collective that waits for a dead peer, a cache that every request fails on. Each detector
// here looks at one sign of that and gives its finding as a *Failure that carries the detector's name, which is the word that the log, health and the metrics use. What ends an engine's process by itself is not found here; it is only
// given a name.
//
// The package knows neither processes nor requests, and decides nothing: it is told of streams and answers, and it reports. All of its time comes from ticks of a running worker, so that an engine is never blamed for the seconds in
// which the worker itself was stopped, suspended or starved.
package vitals

// Detector names what found out that an engine failed.
type Detector string

// The detectors there are.
const (
	// Exit: the engine's process ended, or closed its channel.
	Exit Detector = "exit"
	// Rank: a process of the engine other than its first ended by itself.
	Rank Detector = "rank"
	// Fatal: the engine said that it cannot go on.
	Fatal Detector = "fatal"
	// Protocol: what the engine wrote makes no sense.
	Protocol Detector = "protocol"
	// Failures: too large a share of requests failed in the engine.
	Failures Detector = "failures"
	// Stall: requests are in flight and none of them gets anything.
	Stall Detector = "stall"
	// Health: the engine says that it is ill, or does not answer when asked.
	Health Detector = "health"
	// Canary: the worker's own requests are not answered.
	Canary Detector = "canary"
	// Load: a starting engine made no progress or took too long.
	Load Detector = "load"
	// Mismatch: an engine that was started again is not what the worker registered with.
	Mismatch Detector = "mismatch"
)

// Detectors lists them all, for metrics that should exist before anything happens.
func Detectors() []Detector {
	return []Detector{Exit, Rank, Fatal, Protocol, Failures, Stall, Health, Canary, Load, Mismatch}
}

// Failure says that an engine has failed and how that showed.
type Failure struct {
	Detector Detector
	// Reason is for people.
	Reason string
	// Cause is the error behind it, nil when there is none but the reason.
	Cause error
}

// Failed makes a Failure of an error.
func Failed(d Detector, err error) *Failure {
	return &Failure{Detector: d, Reason: err.Error(), Cause: err}
}

func (f *Failure) Error() string { return string(f.Detector) + ": " + f.Reason }

// Unwrap returns the cause.
func (f *Failure) Unwrap() error { return f.Cause }
