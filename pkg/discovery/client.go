package discovery

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/rs/zerolog"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
)

// probeKey is read to see whether etcd answers. Nothing is ever stored under it.
const probeKey = "v1/instances/"

// Client is a connection to etcd.
type Client struct {
	cfg    Config
	log    zerolog.Logger
	etcd   *clientv3.Client
	dialer *dialer
	cancel context.CancelFunc
}

// Connect connects to etcd, waiting up to Config.StartupTimeout until it answers. It gives up at once when ctx ends, when the configuration is wrong
// and when etcd refuses the credentials (ErrAuthentication). Errors name the endpoints and the cause.
func Connect(ctx context.Context, cfg Config) (*Client, error) {
	cfg, tlsConfig, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	where := strings.Join(cfg.Endpoints, ", ")
	ctx, cancel := context.WithTimeout(ctx, cfg.StartupTimeout)
	defer cancel()
	start := time.Now()
	pause := newBackOff()
	// One for all tries: the last one may be too short to find out what is wrong, and then tells what the one before found.
	d := newDialer()
	for tries := 1; ; tries++ {
		c, err := open(ctx, cfg, tlsConfig, d)
		switch {
		case err == nil:
			cfg.Logger.Info().Str("endpoints", where).Dur("after", time.Since(start)).Msg("connected to etcd")
			return c, nil
		case refusesCredentials(err):
			return nil, fmt.Errorf("connect to etcd at %s: %w: %w", where, ErrAuthentication, err)
		case errors.Is(ctx.Err(), context.Canceled):
			return nil, fmt.Errorf("connect to etcd at %s: %w", where, context.Cause(ctx))
		}
		if ctx.Err() == nil {
			if tries == 1 {
				cfg.Logger.Info().Str("endpoints", where).Dur("timeout", cfg.StartupTimeout).Err(err).Msg("waiting for etcd")
			}
			wait(ctx, pause.NextBackOff())
		}
		switch {
		case errors.Is(ctx.Err(), context.Canceled):
			return nil, fmt.Errorf("connect to etcd at %s: %w", where, context.Cause(ctx))
		case ctx.Err() != nil:
			return nil, fmt.Errorf("connect to etcd at %s: no answer for %s: %w", where, cfg.StartupTimeout, err)
		}
	}
}

// open makes a client and sees whether etcd answers it.
func open(ctx context.Context, cfg Config, tlsConfig *tls.Config, d *dialer) (*Client, error) {
	base, cancel := context.WithCancel(context.Background())
	// Making a client includes the login, which knows no context but the one of the client's whole life.
	base, why := d.withCause(base)
	stop := context.AfterFunc(ctx, cancel)
	etcd, err := clientv3.New(clientv3.Config{
		Endpoints:            cfg.Endpoints,
		Username:             cfg.Username,
		Password:             cfg.Password,
		TLS:                  tlsConfig,
		DialTimeout:          cfg.CallTimeout,
		DialKeepAliveTime:    cfg.PingInterval,
		DialKeepAliveTimeout: cfg.PingTimeout,
		Context:              base,
		// The client logs every failed try. What matters of that is in the errors that it returns.
		Logger: zap.NewNop(),
		DialOptions: append(causeOptions(),
			grpc.WithContextDialer(d.dial),
			// gRPC's own pauses grow to two minutes, which is how late a restarted etcd would be found.
			grpc.WithConnectParams(grpc.ConnectParams{
				Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
				MinConnectTimeout: 5 * time.Second,
			}),
		),
	})
	if err != nil {
		stop()
		cancel()
		return nil, why.explain(err)
	}
	c := &Client{cfg: cfg, log: cfg.Logger, etcd: etcd, dialer: d, cancel: cancel}
	err = c.probe(ctx)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// probe returns nil when etcd answers a read.
func (c *Client) probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.CallTimeout)
	defer cancel()
	ctx, why := c.dialer.withCause(ctx)
	_, err := c.etcd.Get(ctx, probeKey, clientv3.WithKeysOnly())
	if errors.Is(err, rpctypes.ErrPermissionDenied) {
		// etcd knows us, and may well allow what we are going to do.
		return nil
	}
	return why.explain(err)
}

// Session takes a lease, trying until ctx ends, and starts to keep it alive. Close it before the client.
func (c *Client) Session(ctx context.Context) (*Session, error) {
	return newSession(ctx, &etcdStore{etcd: c.etcd, dialer: c.dialer}, c.cfg)
}

// Close ends the connection and every List and Watch.
func (c *Client) Close() {
	// The error says only that the client was cancelled, which is what closing is.
	_ = c.etcd.Close()
	c.cancel()
}
