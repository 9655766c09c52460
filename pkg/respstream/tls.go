package respstream

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
)

// TLSFiles says how to speak TLS with frontends. All paths are of PEM files.
type TLSFiles struct {
	// CA holds the certificates that a frontend's must be signed by; empty means those of the system.
	CA string
	// Insecure accepts any certificate.
	Insecure bool
	// ServerName is the name that the certificate must be for; empty means the address that is dialled.
	ServerName string
	// Cert and Key are shown to frontends that ask for a certificate.
	Cert, Key string
}

// ClientTLS loads the files. When nothing is set but perhaps the server name there is no TLS and the result is nil.
func ClientTLS(f TLSFiles) (*tls.Config, error) {
	if (f.Cert == "") != (f.Key == "") {
		return nil, errors.New("client certificate and key of the response plane must be given together")
	}
	if f.CA == "" && !f.Insecure && f.Cert == "" {
		return nil, nil
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: f.ServerName, InsecureSkipVerify: f.Insecure}
	if f.CA != "" {
		pem, err := os.ReadFile(f.CA)
		if err != nil {
			return nil, fmt.Errorf("load ca of the response plane: %w", err)
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("load ca of the response plane: no certificate in %s", f.CA)
		}
	}
	if f.Cert != "" {
		pair, err := tls.LoadX509KeyPair(f.Cert, f.Key)
		if err != nil {
			return nil, fmt.Errorf("load client certificate of the response plane: %w", err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	return cfg, nil
}
