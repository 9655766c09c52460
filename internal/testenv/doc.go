// Package testenv gives tests the surroundings of the worker: servers, broken networks and certificates, each cleaned up by the test that asked for it.
//
// The servers themselves are in the sub-package embedded, which does not import package testing. Production code imports neither.
// Nothing here skips a test: what cannot be started fails it.
package testenv
