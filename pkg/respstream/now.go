package respstream

import (
	"net"
	"syscall"
)

// nowWriter writes to a connection as much as the kernel takes at once. It goes to the descriptor itself, since the network library has no write that does not wait.
type nowWriter struct {
	raw syscall.RawConn // nil when the connection is no plain TCP connection

	// The call's argument and result are here so that a write allocates nothing.
	attempt func(fd uintptr) bool
	data    []byte
	n       int
}

func (w *nowWriter) attach(conn net.Conn) {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return // under TLS a write is more than one to the socket
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return
	}
	w.raw = raw
	w.attempt = func(fd uintptr) bool {
		n, err := syscall.Write(int(fd), w.data)
		if err == nil {
			w.n = n
		}
		return true // whatever came of it: there is no second attempt
	}
}

// write returns how many bytes were taken. An error is found again by the next ordinary write, which knows what to make of it.
func (w *nowWriter) write(b []byte) int {
	w.data, w.n = b, 0
	err := w.raw.Write(w.attempt)
	w.data = nil
	if err != nil {
		return 0 // closed, or its deadline has passed
	}
	return w.n
}
