package testenv

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// CA is a certificate authority of one test.
type CA struct {
	// PEM is the certificate of the authority.
	PEM []byte
	// File is a file with PEM.
	File string

	tb   testing.TB
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// Cert is a certificate with its key, as PEM text and as files.
type Cert struct {
	CertPEM, KeyPEM   []byte
	CertFile, KeyFile string
}

// NewCA makes an authority that is trusted by nobody yet.
func NewCA(tb testing.TB) *CA {
	tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(tb, err)
	template := &x509.Certificate{
		SerialNumber: serial(tb), Subject: pkix.Name{CommonName: "testenv CA"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(tb, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(tb, err)
	ca := &CA{PEM: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), tb: tb, cert: cert, key: key}
	ca.File = write(tb, tb.TempDir(), "ca.pem", ca.PEM)
	return ca
}

// Issue makes a certificate that serves both as a server's, for 127.0.0.1, ::1 and localhost, and as the client certificate of name.
func (ca *CA) Issue(name string) Cert {
	ca.tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(ca.tb, err)
	template := &x509.Certificate{
		SerialNumber: serial(ca.tb), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:    []string{"localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, &key.PublicKey, ca.key)
	require.NoError(ca.tb, err)
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(ca.tb, err)
	c := Cert{
		CertPEM: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		KeyPEM:  pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}),
	}
	dir := ca.tb.TempDir()
	c.CertFile = write(ca.tb, dir, "cert.pem", c.CertPEM)
	c.KeyFile = write(ca.tb, dir, "key.pem", c.KeyPEM)
	return c
}

// Pool holds the authority alone.
func (ca *CA) Pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(ca.cert)
	return pool
}

// TLS is the certificate in the form that crypto/tls wants.
func (c Cert) TLS(tb testing.TB) tls.Certificate {
	tb.Helper()
	pair, err := tls.X509KeyPair(c.CertPEM, c.KeyPEM)
	require.NoError(tb, err)
	return pair
}

func serial(tb testing.TB) *big.Int {
	n, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	require.NoError(tb, err)
	return n
}

func write(tb testing.TB, dir, name string, data []byte) string {
	path := filepath.Join(dir, name)
	require.NoError(tb, os.WriteFile(path, data, 0o600))
	return path
}
