package respstream

import "errors"

// Causes of the end of a stream, as found by context.Cause on Stream.Context and returned by the methods of Stream. Check with errors.Is.
var (
	// ErrStop is the client's wish to end the generation.
	ErrStop = errors.New("client asked to stop")
	// ErrKill is the client's wish to end the generation at once.
	ErrKill = errors.New("client asked to kill")
	// ErrReset is a connection that broke: reset by the client or its machine, or given up by the network.
	ErrReset = errors.New("connection to the client was reset")
	// ErrProtocol is something that a client never sends: data, an end mark, an unknown control word, half a frame.
	ErrProtocol = errors.New("client broke the response protocol")
	// ErrWrite is a write that failed or took too long: the client has closed, or does not read.
	ErrWrite = errors.New("client does not take the response")
	// ErrFinished is a stream that was ended by Finish, Refuse or Abort.
	ErrFinished = errors.New("response stream is finished")
	// ErrDialerClosed is a stream that was cut by Dialer.Close, or a Dial after it.
	ErrDialerClosed = errors.New("response dialer is closed")
)

// ByClient tells whether a cause is a cancellation by the client: stop, kill, reset or a broken protocol. A failed write is none, because it may as well be the
// late sign of a client that has closed.
func ByClient(cause error) bool {
	for _, c := range []error{ErrStop, ErrKill, ErrReset, ErrProtocol} {
		if errors.Is(cause, c) {
			return true
		}
	}
	return false
}
