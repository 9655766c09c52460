package embedded

import (
	"fmt"
	"net"
	"strconv"
	"syscall"
)

const loopback = "127.0.0.1"

// heldPort is a loopback TCP port that stays ours while no server listens on it.
//
// The socket behind it is bound but never listens, so the kernel hands the port to nobody else, neither to a listener on port 0 nor to an outgoing connection,
// and answers a connection attempt with a reset, just as for a closed port. A listener that sets SO_REUSEADDR, as those of package net do, can bind the port besides it (Linux).
type heldPort struct {
	fd   int
	port int
}

func holdPort() (*heldPort, error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("hold loopback port: socket: %w", err)
	}
	p := &heldPort{fd: fd}
	if err := p.bind(); err != nil {
		p.release()
		return nil, fmt.Errorf("hold loopback port: %w", err)
	}
	return p, nil
}

func (p *heldPort) bind() error {
	if err := syscall.SetsockoptInt(p.fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1); err != nil {
		return fmt.Errorf("set SO_REUSEADDR: %w", err)
	}
	if err := syscall.Bind(p.fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return fmt.Errorf("bind: %w", err)
	}
	name, err := syscall.Getsockname(p.fd)
	if err != nil {
		return fmt.Errorf("getsockname: %w", err)
	}
	in4, ok := name.(*syscall.SockaddrInet4)
	if !ok {
		return fmt.Errorf("getsockname: unexpected address %T", name)
	}
	p.port = in4.Port
	return nil
}

func (p *heldPort) hostPort() string { return net.JoinHostPort(loopback, strconv.Itoa(p.port)) }

func (p *heldPort) release() {
	// Nothing can be done about a failing close, and the port is given up either way.
	_ = syscall.Close(p.fd)
}
