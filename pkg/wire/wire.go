// Package wire reads and writes the bytes that travel between a Dynamo 1.6.1
// frontend and a worker: two-part frames, the control header of a request, the
// call-home handshake, the prologue, control words, refusal replies and the
// frames of the TCP request plane.
//
// It knows nothing about the bodies inside the frames (see pkg/protocol) and
// does no networking of its own. Every length that comes from the other side is
// compared with a limit, and with the bytes at hand, before memory is taken for
// it. Functions named Append write to the end of a caller's slice and do not
// allocate when it is large enough; functions named Parse return views into
// their input. Nothing here may be used by two goroutines at once, except the
// pure functions.
//
// The layouts were read off recorded traffic of the real programs; the
// recordings are in testdata.
package wire
