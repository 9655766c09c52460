package embedded

import (
	"crypto/tls"
	"errors"
	"fmt"
	"sync"

	"github.com/nats-io/nats-server/v2/server"

	"dynworker/internal/testenv/heldport"
)

// NATSOptions configures an embedded NATS server. The zero value has no authentication, no TLS and the server's own payload limit of 1 MiB.
type NATSOptions struct {
	// Username and Password, when set, are what every client has to give. Token likewise; the two exclude each other.
	Username, Password, Token string
	// MaxPayload is the largest message in bytes that the server takes; 0 means 1 MiB.
	MaxPayload int32
	// TLS makes the server speak TLS only. Set its ClientAuth to demand a client certificate.
	TLS *tls.Config
}

// NATS is one NATS server without JetStream, clustering or monitoring.
type NATS struct {
	opts NATSOptions
	port *heldport.Port

	mu     sync.Mutex
	server *server.Server
	closed bool
}

// NewNATS starts a NATS server on a free loopback port and returns when it accepts connections.
func NewNATS(opts NATSOptions) (*NATS, error) {
	port, err := heldport.Hold()
	if err != nil {
		return nil, fmt.Errorf("start nats: %w", err)
	}
	n := &NATS{opts: opts, port: port}
	if err := n.Start(); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

// URL is the address for clients, without user and password. It never changes.
func (n *NATS) URL() string {
	if n.opts.TLS != nil {
		return "tls://" + n.port.Address()
	}
	return "nats://" + n.port.Address()
}

// Address is host and port of URL.
func (n *NATS) Address() string { return n.port.Address() }

// Stop ends the server and cuts all its connections.
func (n *NATS) Stop() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.stop()
}

// Start runs a stopped server again on the same address. It does nothing when the server is running.
func (n *NATS) Start() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return fmt.Errorf("start nats: %w", errClosed)
	}
	if n.server != nil {
		return nil
	}
	s, err := server.NewServer(&server.Options{
		ServerName: "embedded",
		Host:       loopback, Port: n.port.Number(),
		NoLog: true, NoSigs: true,
		Username: n.opts.Username, Password: n.opts.Password, Authorization: n.opts.Token,
		MaxPayload: n.opts.MaxPayload,
		TLS:        n.opts.TLS != nil, TLSConfig: n.opts.TLS,
	})
	if err != nil {
		return fmt.Errorf("start nats on %s: %w", n.port.Address(), err)
	}
	// Start returns when the listener is there, or when it could not be had: then it has only been logged.
	s.Start()
	if !s.ReadyForConnections(startTimeout) {
		s.Shutdown()
		s.WaitForShutdown()
		return fmt.Errorf("start nats on %s: does not accept connections", n.port.Address())
	}
	n.server = s
	return nil
}

// NumClients is the number of clients that are connected, 0 when the server is stopped.
func (n *NATS) NumClients() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.server == nil {
		return 0
	}
	return n.server.NumClients()
}

// Close stops the server and gives the port free.
func (n *NATS) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil
	}
	n.closed = true
	n.stop()
	n.port.Release()
	return nil
}

func (n *NATS) stop() {
	if n.server == nil {
		return
	}
	n.server.Shutdown()
	n.server.WaitForShutdown()
	n.server = nil
}
