package caller

// FrameKind is what a Frame is. The names are those of the recordings of Dynamo's own worker.
type FrameKind string

// The kinds.
const (
	FrameHandshake FrameKind = "handshake"
	FramePrologue  FrameKind = "prologue"
	FrameData      FrameKind = "data"
	FrameControl   FrameKind = "control"
	FrameEOF       FrameKind = "eof"
	FrameReset     FrameKind = "reset"
	FrameClient    FrameKind = "client" // something that this side did
)

// Frame is one event on a response connection.
type Frame struct {
	Kind FrameKind
	// Bytes is the header of handshake, prologue and control, and the body of data.
	Bytes []byte
	// Did is what the client did.
	Did string
}

func (s *Stream) record(kind FrameKind, b []byte) {
	if !s.traced {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.frames = append(s.frames, Frame{Kind: kind, Bytes: append([]byte(nil), b...)})
}

func (s *Stream) did(what string) {
	if !s.traced {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.frames = append(s.frames, Frame{Kind: FrameClient, Did: what})
}

// Frames returns what has happened so far, if Call.Trace was set.
func (s *Stream) Frames() []Frame {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Frame(nil), s.frames...)
}
