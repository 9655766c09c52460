package embedded

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/url"
	"os"
	"sync"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"dynworker/internal/testenv/heldport"
)

const loopback = "127.0.0.1"

// startTimeout bounds how long a server may take until it serves. It only decides when a start is given up, so it is generous.
const startTimeout = 60 * time.Second

// errClosed is what Start answers after Close.
var errClosed = errors.New("server handle is closed")

// EtcdOptions configures an embedded etcd. The zero value is a server without authentication and TLS.
type EtcdOptions struct {
	// Password of the user root. When it is set, authentication is on and every client has to log in.
	Password string
	// CertFile and KeyFile make the server speak TLS. CAFile, when set, makes it demand a client certificate signed by that CA.
	CertFile, KeyFile, CAFile string
}

// Etcd is one etcd server, a cluster of its own.
type Etcd struct {
	opts EtcdOptions
	port *heldport.Port

	mu      sync.Mutex
	dir     string // data directory, kept over Stop and Start
	server  *embed.Etcd
	kill    chan struct{} // closed to end the streams of server
	closed  bool
	closing error
}

// NewEtcd starts an etcd with an empty store on a free loopback port and returns when it serves.
// The shortest lease that the server grants is one second; with the timing of a production etcd it would be two.
func NewEtcd(opts EtcdOptions) (*Etcd, error) {
	port, err := heldport.Hold()
	if err != nil {
		return nil, fmt.Errorf("start etcd: %w", err)
	}
	e := &Etcd{opts: opts, port: port}
	if err := e.StartEmpty(); err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return e, nil
}

// Endpoint is the URL for clients. It never changes.
func (e *Etcd) Endpoint() string { return e.scheme() + "://" + e.port.Address() }

// Address is host and port of Endpoint.
func (e *Etcd) Address() string { return e.port.Address() }

// Stop ends the server at once, as a kill would: running streams are cut and leases are not given back. The data stays.
func (e *Etcd) Stop() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.stop()
}

// Start runs a stopped server again with the data that it had. It does nothing when the server is running.
// Every lease that was alive when the server stopped has its full time again, whatever was left of it; that is how etcd behaves.
func (e *Etcd) Start() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.start()
}

// StartEmpty runs the server, which is stopped first if need be, with an empty store.
func (e *Etcd) StartEmpty() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return fmt.Errorf("start etcd: %w", errClosed)
	}
	e.stop()
	if err := os.RemoveAll(e.dir); err != nil {
		return fmt.Errorf("remove etcd data: %w", err)
	}
	dir, err := os.MkdirTemp("", "dynworker-etcd-")
	if err != nil {
		return fmt.Errorf("make etcd data directory: %w", err)
	}
	e.dir = dir
	return e.start()
}

// Close stops the server, removes its data and gives the port free.
func (e *Etcd) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return e.closing
	}
	e.closed = true
	e.stop()
	e.port.Release()
	if err := os.RemoveAll(e.dir); err != nil {
		e.closing = fmt.Errorf("remove etcd data: %w", err)
	}
	return e.closing
}

func (e *Etcd) scheme() string {
	if e.opts.CertFile != "" {
		return "https"
	}
	return "http"
}

func (e *Etcd) start() error {
	if e.closed {
		return fmt.Errorf("start etcd: %w", errClosed)
	}
	if e.server != nil {
		return nil
	}
	if e.opts.CertFile != "" {
		// etcd itself reads the files only when it is up, and then fails where nobody sees it.
		if _, err := tls.LoadX509KeyPair(e.opts.CertFile, e.opts.KeyFile); err != nil {
			return fmt.Errorf("start etcd: %w", err)
		}
	}
	e.kill = make(chan struct{})
	server, err := embed.StartEtcd(e.config())
	if err != nil {
		return fmt.Errorf("start etcd on %s: %w", e.port.Address(), err)
	}
	e.server = server
	timeout := time.NewTimer(startTimeout)
	defer timeout.Stop()
	select {
	case <-server.Server.ReadyNotify():
	case err := <-server.Err():
		e.stop()
		return fmt.Errorf("start etcd on %s: %w", e.port.Address(), err)
	case <-timeout.C:
		e.stop()
		return fmt.Errorf("start etcd on %s: not ready after %s", e.port.Address(), startTimeout)
	}
	if err := e.enableAuth(); err != nil {
		e.stop()
		return fmt.Errorf("start etcd on %s: %w", e.port.Address(), err)
	}
	return nil
}

func (e *Etcd) stop() {
	if e.server == nil {
		return
	}
	// embed closes gracefully: it waits for seconds until the clients have ended their watches, which they never do.
	close(e.kill)
	e.server.Close()
	e.server = nil
}

func (e *Etcd) config() *embed.Config {
	client := url.URL{Scheme: e.scheme(), Host: e.port.Address()}
	// A cluster of one never talks to peers, but etcd insists on a listener for them.
	peer := url.URL{Scheme: "http", Host: loopback + ":0"}
	cfg := embed.NewConfig()
	cfg.Name = "embedded"
	cfg.Dir = e.dir
	cfg.ListenClientUrls = []url.URL{client}
	cfg.AdvertiseClientUrls = []url.URL{client}
	cfg.ListenPeerUrls = []url.URL{peer}
	cfg.AdvertisePeerUrls = []url.URL{peer}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	cfg.ClientTLSInfo = transport.TLSInfo{
		CertFile: e.opts.CertFile, KeyFile: e.opts.KeyFile,
		TrustedCAFile: e.opts.CAFile, ClientCertAuth: e.opts.CAFile != "",
	}
	// The data need not outlive a crash of the machine, and a slow disk must not make tests slow.
	cfg.UnsafeNoFsync = true
	cfg.TickMs, cfg.ElectionMs = 50, 500
	cfg.BcryptCost = 4
	cfg.EnableGRPCGateway = false
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	cfg.GRPCAdditionalServerOptions = []grpc.ServerOption{grpc.ChainStreamInterceptor(cutStreams(e.kill))}
	return cfg
}

// enableAuth makes the user root, who may do everything, and turns authentication on. With data of an earlier run that has been done already.
func (e *Etcd) enableAuth() error {
	if e.opts.Password == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	// This client calls the server's methods without a connection, hence without the checks for a login.
	c := v3client.New(e.server.Server)
	defer func() { _ = c.Close() }()
	st, err := c.AuthStatus(ctx)
	if err != nil {
		return fmt.Errorf("read authentication status: %w", err)
	}
	if st.Enabled {
		return nil
	}
	const root = "root" // the name is fixed by etcd
	if _, err := c.UserAdd(ctx, root, e.opts.Password); err != nil {
		return fmt.Errorf("add user %s: %w", root, err)
	}
	if _, err := c.UserGrantRole(ctx, root, root); err != nil {
		return fmt.Errorf("grant role %s: %w", root, err)
	}
	if _, err := c.AuthEnable(ctx); err != nil {
		return fmt.Errorf("enable authentication: %w", err)
	}
	return nil
}

// cutStreams ends every stream (watches, lease keep-alives) when kill is closed.
func cutStreams(kill <-chan struct{}) grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		ctx, cancel := context.WithCancel(ss.Context())
		defer cancel()
		ended := make(chan struct{})
		var watcher sync.WaitGroup
		watcher.Go(func() {
			select {
			case <-kill:
				cancel()
			case <-ended:
			}
		})
		err := handler(srv, &cutStream{ServerStream: ss, ctx: ctx})
		close(ended)
		watcher.Wait()
		select {
		case <-kill:
			return status.Error(codes.Unavailable, "server is gone")
		default:
			return err
		}
	}
}

// cutStream is a stream whose context ends with its server.
type cutStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *cutStream) Context() context.Context { return s.ctx }
