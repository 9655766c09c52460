package discovery

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/rs/zerolog"
)

const (
	defaultLeaseTTL        = 30 * time.Second
	defaultStartupTimeout  = 120 * time.Second
	defaultWithdrawTimeout = 3 * time.Second
)

// Config says where etcd is and how long to wait for it.
type Config struct {
	// Endpoints are URLs (http or https, all alike) or host:port pairs. At least one is needed. Proxies in the environment are not used.
	Endpoints []string

	// LeaseTTL is how long the records outlive a worker that dies without a word; default 30 s, at least 1 s, rounded up to whole seconds. etcd may grant more than asked for.
	LeaseTTL time.Duration
	// StartupTimeout is how long Connect waits for etcd; default 120 s.
	StartupTimeout time.Duration
	// CallTimeout bounds a single request to etcd; default a third of LeaseTTL, but 1 s to 3 s.
	CallTimeout time.Duration
	// WithdrawTimeout bounds Session.Withdraw and Session.Close; default 3 s.
	WithdrawTimeout time.Duration
	// PingInterval is the time after which a connection in use is probed when nothing arrives, PingTimeout how long the answer may take. 0 means no probes. gRPC pings every 10 s at most.
	PingInterval, PingTimeout time.Duration

	// Username and Password log in to etcd. Both or neither.
	Username, Password string
	// CA, ClientCert and ClientKey are PEM text, or the path of a file with it: upstream reads the variables as text and documents them as paths. They need https endpoints.
	// Without CA the system's authorities are trusted.
	CA, ClientCert, ClientKey string

	// Logger gets one line per change of state. It never sees record values.
	Logger zerolog.Logger
	// OnState, when set, is called after every change of State, one call at a time and in order. It must return soon and may use only State and InstanceID of the session.
	OnState func(State)
}

// withDefaults checks the configuration and returns it with every default filled in, and the TLS configuration if there is one.
func (c Config) withDefaults() (Config, *tls.Config, error) {
	if len(c.Endpoints) == 0 {
		return c, nil, errors.New("no etcd endpoint is given")
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{
		{"lease TTL", c.LeaseTTL}, {"start-up timeout", c.StartupTimeout}, {"call timeout", c.CallTimeout}, {"withdraw timeout", c.WithdrawTimeout},
		{"ping interval", c.PingInterval}, {"ping timeout", c.PingTimeout},
	} {
		if d.value < 0 {
			return c, nil, fmt.Errorf("etcd %s is negative: %s", d.name, d.value)
		}
	}
	if c.LeaseTTL == 0 {
		c.LeaseTTL = defaultLeaseTTL
	}
	if c.LeaseTTL < time.Second {
		return c, nil, fmt.Errorf("etcd lease TTL is %s, the shortest possible is 1s", c.LeaseTTL)
	}
	c.LeaseTTL = (c.LeaseTTL + time.Second - 1).Truncate(time.Second)
	if c.StartupTimeout == 0 {
		c.StartupTimeout = defaultStartupTimeout
	}
	if c.CallTimeout == 0 {
		c.CallTimeout = min(max(c.LeaseTTL/3, time.Second), 3*time.Second)
	}
	if c.WithdrawTimeout == 0 {
		c.WithdrawTimeout = defaultWithdrawTimeout
	}
	if (c.Username == "") != (c.Password == "") {
		return c, nil, errors.New("etcd user name and password have to be given together")
	}
	https, err := checkEndpoints(c.Endpoints)
	if err != nil {
		return c, nil, err
	}
	tlsConfig, err := c.tls()
	if err != nil {
		return c, nil, err
	}
	if tlsConfig != nil && !https {
		return c, nil, fmt.Errorf("etcd TLS files are given, but %s is not an https endpoint", c.Endpoints[0])
	}
	return c, tlsConfig, nil
}

// checkEndpoints tells whether the endpoints are https ones. The etcd client decides by the first endpoint for all of them, so a mixture would be treated wrongly in silence.
func checkEndpoints(endpoints []string) (https bool, err error) {
	for i, e := range endpoints {
		if strings.Contains(e, "@") {
			// It is not repeated: it may hold a password.
			return false, fmt.Errorf("etcd endpoint %d holds user information, which belongs into the settings for user name and password", i+1)
		}
		scheme, host := "http", e
		if strings.Contains(e, "://") {
			u, err := url.Parse(e)
			if err != nil {
				return false, fmt.Errorf("etcd endpoint %d: %w", i+1, err)
			}
			scheme, host = u.Scheme, u.Host
		}
		if _, port, err := net.SplitHostPort(host); err != nil || port == "" || (scheme != "http" && scheme != "https") {
			return false, fmt.Errorf("etcd endpoint %q is not of the form http://host:port or https://host:port", e)
		}
		if i == 0 {
			https = scheme == "https"
		} else if https != (scheme == "https") {
			return false, fmt.Errorf("etcd endpoints mix http and https: %s and %s", endpoints[0], e)
		}
	}
	return https, nil
}

func (c Config) tls() (*tls.Config, error) {
	if c.CA == "" && c.ClientCert == "" && c.ClientKey == "" {
		return nil, nil
	}
	if (c.ClientCert == "") != (c.ClientKey == "") {
		return nil, errors.New("etcd client certificate and client key have to be given together")
	}
	t := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.CA != "" {
		pem, err := pemText(c.CA)
		if err != nil {
			return nil, fmt.Errorf("read etcd CA: %w", err)
		}
		t.RootCAs = x509.NewCertPool()
		if !t.RootCAs.AppendCertsFromPEM(pem) {
			return nil, errors.New("read etcd CA: no certificate in it")
		}
	}
	if c.ClientCert != "" {
		cert, err := pemText(c.ClientCert)
		if err != nil {
			return nil, fmt.Errorf("read etcd client certificate: %w", err)
		}
		key, err := pemText(c.ClientKey)
		if err != nil {
			return nil, fmt.Errorf("read etcd client key: %w", err)
		}
		pair, err := tls.X509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("read etcd client certificate and key: %w", err)
		}
		t.Certificates = []tls.Certificate{pair}
	}
	return t, nil
}

// pemText returns s itself when it is PEM, else what is in the file s.
func pemText(s string) ([]byte, error) {
	if strings.Contains(s, "-----BEGIN") {
		return []byte(s), nil
	}
	return os.ReadFile(s)
}
