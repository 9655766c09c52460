// Package deploytest holds what is handed to Kubernetes, configs/k8s and the Dockerfile's images, to what the worker's code says: ports, probe paths, variables, configuration and the time that a stop may take.
//
// It has tests alone, since a worker must not link the Kubernetes API.
package deploytest
