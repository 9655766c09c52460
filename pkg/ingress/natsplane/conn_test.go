package natsplane

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"
	"github.com/stretchr/testify/require"

	"dynworker/internal/testenv"
	"dynworker/internal/testenv/embedded"
)

func TestStartupTimeoutNamesTheAddress(t *testing.T) {
	srv := plainNATS(t)
	srv.Stop()
	cfg := quick(srv.URL())
	cfg.StartupTimeout = 2 * time.Second
	_, err := Connect(testenv.Context(t), Config{Conn: cfg})
	require.ErrorIs(t, err, ErrStartupTimeout)
	require.ErrorContains(t, err, srv.URL())
	require.ErrorContains(t, err, "2s")
	require.ErrorContains(t, err, "connection refused")

	// A server that accepts and says nothing.
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, ln.Close()) }()
	cfg.URL, cfg.StartupTimeout = "nats://"+ln.Addr().String(), 50*time.Millisecond
	_, err = Connect(testenv.Context(t), Config{Conn: cfg})
	require.ErrorIs(t, err, ErrStartupTimeout)
	require.ErrorContains(t, err, ln.Addr().String())
}

func TestEndOfTheContextEndsTheWait(t *testing.T) {
	srv := plainNATS(t)
	proxy := testenv.NewProxy(t, srv.Address())
	proxy.Pause()
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	result := make(chan error, 1)
	go func() {
		_, err := Connect(ctx, Config{Conn: ConnConfig{URL: "nats://" + proxy.Address(), AttemptTimeout: testenv.Patience}})
		result <- err
	}()
	require.Eventually(t, func() bool { return proxy.Accepted() > 0 }, testenv.Patience, time.Millisecond)
	cancel(cause)
	select {
	case err := <-result:
		require.ErrorIs(t, err, cause)
	case <-time.After(testenv.Patience / 2):
		require.FailNow(t, "the attempt went on")
	}
}

func TestServerThatComesLate(t *testing.T) {
	srv := plainNATS(t)
	srv.Stop()
	result := make(chan error, 1)
	go func() {
		p, err := Connect(testenv.Context(t), Config{Conn: quick(srv.URL())})
		if err == nil {
			closePlane(t, p)
		}
		result <- err
	}()
	require.NoError(t, srv.Start())
	require.NoError(t, <-result)
}

func TestCredentials(t *testing.T) {
	user, err := nkeys.CreateUser()
	require.NoError(t, err)
	public, err := user.PublicKey()
	require.NoError(t, err)
	seed, err := user.Seed()
	require.NoError(t, err)
	operatorURL, credentials := operatorServer(t)

	login := testenv.StartNATS(t, embedded.NATSOptions{Username: "u", Password: "p"}).URL()
	token := testenv.StartNATS(t, embedded.NATSOptions{Token: "secret"}).URL()
	nkey := natsServer(t, server.Options{Nkeys: []*server.NkeyUser{{Nkey: public}}})
	fallback := plainNATS(t).URL()
	for _, c := range []struct {
		name string
		cfg  ConnConfig
		ok   bool
	}{
		{"user and password", ConnConfig{URL: login, Username: "u", Password: "p"}, true},
		{"user and password before token", ConnConfig{URL: login, Username: "u", Password: "p", Token: "t", NKeySeed: string(seed), CredentialsFile: credentials}, true},
		{"wrong password", ConnConfig{URL: login, Username: "u", Password: "q"}, false},
		{"user alone does not count", ConnConfig{URL: fallback, Username: "u"}, true},
		{"token", ConnConfig{URL: token, Token: "secret"}, true},
		{"token before nkey", ConnConfig{URL: token, Token: "secret", NKeySeed: string(seed)}, true},
		{"wrong token", ConnConfig{URL: token, Token: "guess"}, false},
		{"nkey", ConnConfig{URL: nkey, NKeySeed: string(seed)}, true},
		{"nkey before credentials file", ConnConfig{URL: nkey, NKeySeed: string(seed), CredentialsFile: credentials}, true},
		{"credentials file", ConnConfig{URL: operatorURL, CredentialsFile: credentials}, true},
		{"default", ConnConfig{URL: fallback}, true},
		{"default against another login", ConnConfig{URL: login}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.cfg.StartupTimeout = 10 * testenv.Patience
			conn, err := Dial(testenv.Context(t), c.cfg)
			if c.ok {
				require.NoError(t, err)
				conn.Close()
				return
			}
			require.ErrorIs(t, err, ErrAuthorization, "and without trying for the whole start-up time")
			require.ErrorContains(t, err, c.cfg.URL)
		})
	}
}

// operatorServer runs a server that knows its users by signed claims, and returns a credentials file for it.
func operatorServer(t *testing.T) (url, credentials string) {
	t.Helper()
	operator, err := nkeys.CreateOperator()
	require.NoError(t, err)
	operatorKey, err := operator.PublicKey()
	require.NoError(t, err)
	account, err := nkeys.CreateAccount()
	require.NoError(t, err)
	accountKey, err := account.PublicKey()
	require.NoError(t, err)
	accountJWT, err := jwt.NewAccountClaims(accountKey).Encode(operator)
	require.NoError(t, err)
	user, err := nkeys.CreateUser()
	require.NoError(t, err)
	userKey, err := user.PublicKey()
	require.NoError(t, err)
	userJWT, err := jwt.NewUserClaims(userKey).Encode(account)
	require.NoError(t, err)
	userSeed, err := user.Seed()
	require.NoError(t, err)

	resolver := &server.MemAccResolver{}
	require.NoError(t, resolver.Store(accountKey, accountJWT))
	url = natsServer(t, server.Options{TrustedKeys: []string{operatorKey}, AccountResolver: resolver})
	text, err := jwt.FormatUserConfig(userJWT, userSeed)
	require.NoError(t, err)
	credentials = filepath.Join(t.TempDir(), "worker.creds")
	require.NoError(t, os.WriteFile(credentials, text, 0o600))
	return url, credentials
}

func TestTLS(t *testing.T) {
	ca, other := testenv.NewCA(t), testenv.NewCA(t)
	cert, client := ca.Issue("nats"), ca.Issue("worker")
	url := testenv.StartNATS(t, embedded.NATSOptions{TLS: &tls.Config{Certificates: []tls.Certificate{cert.TLS(t)}}}).URL()
	mutual := testenv.StartNATS(t, embedded.NATSOptions{TLS: &tls.Config{
		Certificates: []tls.Certificate{cert.TLS(t)}, ClientCAs: ca.Pool(), ClientAuth: tls.RequireAndVerifyClientCert,
	}}).URL()
	plain := plainNATS(t).URL()
	for _, c := range []struct {
		name string
		cfg  ConnConfig
		ok   bool
	}{
		{"ca", ConnConfig{URL: url, CACert: ca.File}, true},
		{"ca with a nats url", ConnConfig{URL: "nats" + url[len("tls"):], CACert: ca.File}, true},
		{"insecure", ConnConfig{URL: url, Insecure: true}, true},
		{"system roots", ConnConfig{URL: url}, false},
		{"wrong ca", ConnConfig{URL: url, CACert: other.File}, false},
		{"client certificate", ConnConfig{URL: mutual, CACert: ca.File, ClientCert: client.CertFile, ClientKey: client.KeyFile}, true},
		{"server without tls", ConnConfig{URL: plain, CACert: ca.File}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.cfg.StartupTimeout = 10 * testenv.Patience
			conn, err := Dial(testenv.Context(t), c.cfg)
			if c.ok {
				require.NoError(t, err)
				conn.Close()
				return
			}
			require.Error(t, err)
			require.NotErrorIs(t, err, ErrStartupTimeout)
			require.NotErrorIs(t, err, context.DeadlineExceeded, "another attempt would end the same way")
			require.ErrorContains(t, err, c.cfg.URL)
		})
	}
}

// Whether the server's complaint is read before its reset destroys it is a matter of luck, so this may take another attempt.
func TestServerThatWantsAClientCertificate(t *testing.T) {
	ca := testenv.NewCA(t)
	url := testenv.StartNATS(t, embedded.NATSOptions{TLS: &tls.Config{
		Certificates: []tls.Certificate{ca.Issue("nats").TLS(t)}, ClientCAs: ca.Pool(), ClientAuth: tls.RequireAndVerifyClientCert,
	}}).URL()
	cfg := quick(url)
	cfg.CACert, cfg.StartupTimeout = ca.File, 200*time.Millisecond
	_, err := Dial(testenv.Context(t), cfg)
	require.ErrorContains(t, err, url)
}

func TestSettingsThatCannotWork(t *testing.T) {
	ca := testenv.NewCA(t)
	cert := ca.Issue("worker")
	nothing := filepath.Join(t.TempDir(), "empty")
	require.NoError(t, os.WriteFile(nothing, nil, 0o600))
	const url = "nats://127.0.0.1:1"
	for name, cfg := range map[string]ConnConfig{
		"no url":              {},
		"http":                {URL: "http://127.0.0.1:4222"},
		"no scheme":           {URL: "127.0.0.1:4222"},
		"second url":          {URL: url + ",redis://x"},
		"no host":             {URL: "nats://"},
		"nkey":                {URL: url, NKeySeed: "SUNOTASEED"},
		"no credentials file": {URL: url, CredentialsFile: "/nowhere"},
		"empty credentials":   {URL: url, CredentialsFile: nothing},
		"no ca":               {URL: url, CACert: "/nowhere"},
		"empty ca":            {URL: url, CACert: nothing},
		"cert without key":    {URL: url, ClientCert: cert.CertFile},
		"key for a cert":      {URL: url, ClientCert: cert.KeyFile, ClientKey: cert.KeyFile},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Dial(testenv.Context(t), cfg)
			require.Error(t, err)
			require.NotErrorIs(t, err, context.DeadlineExceeded)
		})
	}
}

func TestPasswordsStayOutOfErrors(t *testing.T) {
	srv := plainNATS(t)
	srv.Stop()
	cfg := quick("nats://user:hunter2@" + srv.Address())
	cfg.StartupTimeout = time.Millisecond
	_, err := Dial(testenv.Context(t), cfg)
	require.ErrorContains(t, err, srv.Address())
	require.NotContains(t, err.Error(), "hunter2")
	_, err = Dial(testenv.Context(t), ConnConfig{URL: "http://user:hunter2@host"})
	require.NotContains(t, err.Error(), "hunter2")
	_, err = Dial(testenv.Context(t), ConnConfig{URL: "nats://user:hunter2@host:notaport"})
	require.NotContains(t, err.Error(), "hunter2")
}
