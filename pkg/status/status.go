// Package status tells the outside how the worker is: a health model that the
// parts of the worker report to, and the system HTTP server that answers
// Kubernetes probes, Prometheus and frontends that fetch model files.
//
// Liveness and readiness are kept apart on purpose. /live is 200 for as long
// as the process can answer at all; it takes no lock and asks nobody, so a
// worker that loads a model for an hour, or whose engine hangs, is not
// restarted by an impatient kubelet. /health is 200 only while requests can be
// served, and otherwise says which part objects, why, and since when. (In
// Dynamo 1.6.1 both paths share one handler; the paths, status codes and the
// three recorded fields of the body are the same here.)
//
// Everything in this package is safe for concurrent use.
package status
