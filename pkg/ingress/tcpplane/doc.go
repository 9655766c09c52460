// Package tcpplane receives requests over the TCP request plane, the frontend's default: one listener for the process, persistent connections, many requests on
// each without waiting for answers, and an endpoint chosen by the path in the request.
//
// Replies carry no id, so they must leave in the order of the requests. Each connection is therefore served by one goroutine that reads, asks the Admitter and
// replies; as Admit does not block, nothing is lost by that. A message that is merely wrong (unknown path, headers that are no JSON, over the size limit) is
// answered and the connection goes on, because the frontend has other requests on it. Only when the position of the next message is unknown is it closed.
//
// A message over the limit still begins with its control header. It goes to the Admitter without its body, so that the caller is told the reason over the
// response stream; a refusal would only send the same message to the next worker.
//
// Closing is in two steps. Drain stops accepting and serves each connection until it has been quiet for a moment; Close cuts. All methods may be called from
// several goroutines.
package tcpplane
