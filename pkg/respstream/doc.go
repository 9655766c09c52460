// Package respstream carries the answer of one request to the frontend that asked: the worker connects to the address in the request ("calls home"), says which
// stream it answers, and writes prologue, items and end mark. There is one TCP connection for each request.
//
// A Dialer makes Streams and keeps count of them. A Stream is used by one goroutine, the one that handles the request; a second goroutine inside reads what the
// frontend has to say. Everything that ends a stream early ends its Context with a cause that tells what happened: the client asked to stop or kill, the connection
// was reset, the client sent something that has no place there, or it did not take what was written. A client that only closes its sending direction cancels
// nothing. After any of these causes not another byte is written and the connection is closed.
//
// An answer is complete only with its end mark, which Finish writes. Abort leaves it out, and the frontend then knows that something is missing. After Finish the
// connection stays open until the frontend has closed it, since closing first could cost it data that it has not read; this happens in the background, and
// Dialer.Close waits for it.
//
// Written data is collected until Flush, so that several items can travel together. The buffer is borrowed from a pool for that time only: a stream that waits
// for its next token holds little more than a socket.
package respstream
