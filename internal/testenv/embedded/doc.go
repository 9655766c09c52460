// Package embedded runs an etcd server and a NATS server inside the calling process, on loopback.
//
// It exists for two callers: cmd/demo, which has to work from a clean clone with nothing but Go, and the tests (through internal/testenv, which adds clean-up by testing.TB).
// It is therefore free of the testing package. The worker's own binary must never import it: both servers are large.
//
// Each server is a handle that owns its port for as long as the handle is open: a stopped server refuses connections, and no other process can take the port in the meantime,
// so that a server which is started again is found where it was. A handle may be used from several goroutines; Start, Stop and Close exclude each other.
// Close releases everything, also on disk, and may be called more than once.
package embedded
