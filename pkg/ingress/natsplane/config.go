package natsplane

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
)

// defaultLogin is user and password when no other credentials are configured. Dynamo's own processes do the same, so servers are set up for it.
const defaultLogin = "user"

// ConnConfig says how to reach the NATS server. Zero durations mean the defaults.
type ConnConfig struct {
	// URL begins with nats:// or tls://. Several may be given, separated by commas.
	URL string
	// Name is shown in the server's list of connections.
	Name string

	// The first kind of credentials that is complete is used, in this order: Username with Password, Token, NKeySeed, CredentialsFile.
	// Without any of them user and password are both "user".
	Username, Password string
	Token              string
	NKeySeed           string // the seed itself, "SU..."
	CredentialsFile    string // path of a .creds file

	// CACert, ClientCert and ClientKey are paths of PEM files. Any of them, Insecure, or a tls:// URL turns TLS on.
	CACert, ClientCert, ClientKey string
	// Insecure accepts any server certificate.
	Insecure bool

	// StartupTimeout bounds the whole of Dial, default 120 s. AttemptTimeout bounds one attempt of it, and each later reconnect attempt, default 5 s.
	StartupTimeout, AttemptTimeout time.Duration
	// RetryMin and RetryMax bound the pauses between attempts, which grow and are jittered; defaults 1 s and 5 s at start-up, and 100 ms and 5 s for reconnects.
	RetryMin, RetryMax time.Duration
	// PingInterval is how often a silent server is asked for a sign of life, default 10 s. After two pings without an answer it counts as gone.
	PingInterval time.Duration
}

const (
	defaultStartupTimeout = 120 * time.Second
	defaultAttemptTimeout = 5 * time.Second
	defaultStartupRetry   = time.Second
	defaultReconnectRetry = 100 * time.Millisecond
	defaultRetryMax       = 5 * time.Second
)

func orDefault(d, def time.Duration) time.Duration {
	if d > 0 {
		return d
	}
	return def
}

// servers checks the URLs and returns them as nats.go wants them.
func (c *ConnConfig) servers() (string, error) {
	if strings.TrimSpace(c.URL) == "" {
		return "", errors.New("nats server url is empty")
	}
	parts := strings.Split(c.URL, ",")
	for i, p := range parts {
		p = strings.TrimSpace(p)
		u, err := url.Parse(p)
		if err != nil {
			// The error of url.Parse repeats the text, password and all.
			return "", errors.New("nats server url cannot be parsed")
		}
		if (u.Scheme != "nats" && u.Scheme != "tls") || u.Host == "" {
			return "", fmt.Errorf("nats server url %q must have the form nats://host:port or tls://host:port", u.Redacted())
		}
		parts[i] = p
	}
	return strings.Join(parts, ","), nil
}

// redacted is URL for messages.
func (c *ConnConfig) redacted() string {
	parts := strings.Split(c.URL, ",")
	for i, p := range parts {
		if u, err := url.Parse(strings.TrimSpace(p)); err == nil {
			parts[i] = u.Redacted()
		}
	}
	return strings.Join(parts, ",")
}

// credentials picks the login. Each kind is read here once, so that a bad file is an error at start and not an endless reconnect.
func (c *ConnConfig) credentials() (nats.Option, error) {
	switch {
	case c.Username != "" && c.Password != "":
		return nats.UserInfo(c.Username, c.Password), nil
	case c.Token != "":
		return nats.Token(c.Token), nil
	case c.NKeySeed != "":
		return nkeyOption(c.NKeySeed)
	case c.CredentialsFile != "":
		raw, err := os.ReadFile(c.CredentialsFile)
		if err != nil {
			return nil, fmt.Errorf("read nats credentials file: %w", err)
		}
		if _, err := nkeys.ParseDecoratedUserNKey(raw); err != nil {
			return nil, fmt.Errorf("read nats credentials file %s: %w", c.CredentialsFile, err)
		}
		// The library reads the file again at each connect, so credentials can be renewed in place.
		return nats.UserCredentials(c.CredentialsFile), nil
	default:
		return nats.UserInfo(defaultLogin, defaultLogin), nil
	}
}

func nkeyOption(seed string) (nats.Option, error) {
	pair, err := nkeys.FromSeed([]byte(strings.TrimSpace(seed)))
	if err != nil {
		return nil, fmt.Errorf("read nats nkey seed: %w", err)
	}
	public, err := pair.PublicKey()
	if err != nil {
		return nil, fmt.Errorf("read nats nkey seed: %w", err)
	}
	return nats.Nkey(public, pair.Sign), nil
}

// secure returns the TLS option, none when TLS is left to the URL and the server.
func (c *ConnConfig) secure() ([]nats.Option, error) {
	if c.CACert == "" && c.ClientCert == "" && c.ClientKey == "" && !c.Insecure {
		return nil, nil
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: c.Insecure}
	if c.CACert != "" {
		pem, err := os.ReadFile(c.CACert)
		if err != nil {
			return nil, fmt.Errorf("read nats ca certificate: %w", err)
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("read nats ca certificate: no certificate in %s", c.CACert)
		}
	}
	if (c.ClientCert == "") != (c.ClientKey == "") {
		return nil, errors.New("nats client certificate and client key must be given together")
	}
	if c.ClientCert != "" {
		pair, err := tls.LoadX509KeyPair(c.ClientCert, c.ClientKey)
		if err != nil {
			return nil, fmt.Errorf("read nats client certificate: %w", err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	return []nats.Option{nats.Secure(cfg)}, nil
}
