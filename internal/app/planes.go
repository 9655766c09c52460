package app

import (
	"context"
	"fmt"

	"dynworker/pkg/ingress"
	"dynworker/pkg/ingress/natsplane"
	"dynworker/pkg/ingress/tcpplane"
	"dynworker/pkg/protocol"
	"dynworker/pkg/respstream"
	"dynworker/pkg/wire"
)

// requestPlane is the way requests come in, whichever it is.
type requestPlane interface {
	// open serves an endpoint; when it returns, requests for it are taken. The transport is what the instance record says.
	open(ctx context.Context, id identity, to ingress.Admitter) (protocol.Transport, error)
	// drain ends the intake and hands over what was received.
	drain(ctx context.Context) error
	close(ctx context.Context) error
}

// identity is what an endpoint of this worker is called.
type identity struct {
	namespace, component, endpoint string
	instance                       uint64
}

// natsRequests is the NATS request plane.
type natsRequests struct{ *natsplane.Plane }

func (n natsRequests) open(ctx context.Context, id identity, to ingress.Admitter) (protocol.Transport, error) {
	subject := wire.Subject(id.instance, id.namespace, id.component, id.endpoint)
	return protocol.Transport{Kind: protocol.TransportNATS, Address: subject}, n.Serve(ctx, subject, to)
}
func (n natsRequests) drain(ctx context.Context) error { return n.Drain(ctx) }
func (n natsRequests) close(ctx context.Context) error { return n.Close(ctx) }

// connectNATS connects the NATS request plane and keeps health and metrics told of it.
func (w *worker) connectNATS(ctx context.Context) (requestPlane, error) {
	c := &w.cfg.NATS
	user, password := c.Login()
	condition := w.health.Condition("nats")
	plane, err := natsplane.Connect(ctx, natsplane.Config{
		Conn: natsplane.ConnConfig{
			URL: c.Server, Name: "dynworker " + w.opts.Version, Username: user, Password: string(password), Token: string(c.Token), NKeySeed: string(c.NKey), CredentialsFile: c.CredentialsFile,
			CACert: c.TLS.CAFile, ClientCert: c.TLS.CertFile, ClientKey: c.TLS.KeyFile, Insecure: c.TLS.Insecure, StartupTimeout: c.StartupTimeout,
		},
		OnState: func(s natsplane.State) {
			if s.Healthy {
				condition.OK()
			} else {
				condition.Fail(s.Reason)
			}
			w.metrics.NATSState(s.Healthy, s.Reconnects)
		},
		Observer: w.observeIngress,
		Logger:   w.component("nats"),
	})
	if err != nil {
		return nil, err
	}
	condition.OK()
	// About four bytes a token is what a prompt takes in msgpack with ids below 2^24 and some; the limit matters to whoever sends long prompts.
	limit := plane.MaxPayload()
	w.log.Info().Str("server", plane.State().Server).Int64("max_payload_bytes", limit).Int64("about_max_prompt_tokens", limit/5).Msg("NATS connected; a request above the payload limit fails in the frontend")
	return natsRequests{plane}, nil
}

// tcpRequests is the TCP request plane.
type tcpRequests struct{ *tcpplane.Plane }

func (t tcpRequests) open(_ context.Context, id identity, to ingress.Admitter) (protocol.Transport, error) {
	path := wire.PlanePath(id.instance, id.namespace, id.component, id.endpoint)
	return protocol.Transport{Kind: protocol.TransportTCP, Address: t.Address(path)}, t.Serve(path, to)
}
func (t tcpRequests) drain(ctx context.Context) error { return t.Drain(ctx) }
func (t tcpRequests) close(context.Context) error     { return t.Close() }

// observeIngress counts what no dispatcher sees.
func (w *worker) observeIngress(e ingress.Event) {
	w.metrics.IngressEvent(string(e.Plane), e.Kind.String(), e.Count)
}

// newDialer makes the response plane.
func (w *worker) newDialer() (*respstream.Dialer, error) {
	c := &w.cfg.ResponsePlane
	conf := respstream.Config{DialTimeout: c.DialTimeout, WriteTimeout: c.WriteTimeout, TLSTimeout: c.TLS.HandshakeTimeout, Logger: w.component("response")}
	if c.TLS.Enabled() {
		t, err := respstream.ClientTLS(respstream.TLSFiles{CA: c.TLS.CAFile, Cert: c.TLS.CertFile, Key: c.TLS.KeyFile, ServerName: c.TLS.ServerName, Insecure: c.TLS.Insecure})
		if err != nil {
			return nil, fmt.Errorf("response_plane.tls: %w", err)
		}
		conf.TLS = t
	}
	return respstream.NewDialer(conf), nil
}
