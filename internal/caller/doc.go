// Package caller plays the frontend for one request at a time: it sends a request over a request plane, waits for the worker to call home, and reads the answer.
// `worker ask`, cmd/demo, load generation and the tests of the worker's own side use it.
//
// A Caller has one listener for all call-homes and may have any number of calls under way. Do sends a request and returns its Stream; Next yields the items.
// A Stream is read by one goroutine; the methods that act on the worker (Stop, Kill, Reset, HalfClose, SendRaw) may be called by others.
// What a request ends in is told by typed errors, the same that matter to the frontend: refused, nobody there, over the payload limit, an error prologue,
// an answer without its end mark.
//
// Finding a worker in etcd is left to the user of the package, who brings a transport from an instance record.
package caller
