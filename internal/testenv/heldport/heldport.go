// Package heldport reserves loopback TCP ports for servers of tests and of the demo that come and go on one address.
//
// Choosing a free port and listening on it later is a race that is lost now and then on a busy machine. A Port is ours from the moment it is chosen until Release, also while nothing listens on it.
// It relies on how Linux treats SO_REUSEADDR.
package heldport

import (
	"fmt"
	"net"
	"strconv"
	"syscall"
)

// Port is a TCP port on 127.0.0.1 that no other process gets, neither for a listener on port 0 nor for an outgoing connection.
//
// Behind it is a socket that is bound and never listens: the kernel answers a connection attempt with a reset, just as for a closed port.
// A listener that sets SO_REUSEADDR, as those of package net do, can bind the port besides it.
type Port struct {
	fd     int
	number int
}

// Hold reserves a free port.
func Hold() (*Port, error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("hold loopback port: socket: %w", err)
	}
	p := &Port{fd: fd}
	if err := p.bind(); err != nil {
		p.Release()
		return nil, fmt.Errorf("hold loopback port: %w", err)
	}
	return p, nil
}

func (p *Port) bind() error {
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
	p.number = in4.Port
	return nil
}

// Number is the port number.
func (p *Port) Number() int { return p.number }

// Address is "127.0.0.1:port".
func (p *Port) Address() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(p.number)) }

// Release gives the port up. Call it once.
func (p *Port) Release() {
	// Nothing can be done about a failing close, and the port is given up either way.
	_ = syscall.Close(p.fd)
}
