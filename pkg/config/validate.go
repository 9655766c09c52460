package config

import (
	"fmt"
	"net"
	"slices"
	"strconv"
)

// Validate checks every rule that needs no disk and no network: the range of
// each value, and settings that contradict each other. The error is an Errors.
func (c *Config) Validate() error {
	v := &validator{c: c}
	for _, k := range keys {
		if k.kind == kindMap {
			continue
		}
		if err := checkValue(k, k.value(c)); err != nil {
			l := &loader{}
			v.errs = append(v.errs, l.valueProblem(k.name, c.origins[k.name], err))
		}
	}
	// A value that is wrong by itself would only lead to confusing follow-ups.
	if len(v.errs) == 0 {
		v.model()
		v.etcd()
		v.pairs()
		v.ports()
		v.sim()
	}
	return v.errs.err()
}

type validator struct {
	c    *Config
	errs Errors
}

func (v *validator) conflict(key, format string, args ...any) {
	v.errs = append(v.errs, &Problem{Key: key, Origin: v.c.origins[key], Kind: ErrConflict, Reason: fmt.Sprintf(format, args...)})
}

func (v *validator) model() {
	m := &v.c.Model
	if m.Name != "" && slices.Contains(m.Aliases, m.Name) {
		v.conflict("model.aliases", "holds the model's own name %s", quote(m.Name))
	}
	if m.FilesAddress != "" && m.Files == FilesLocal {
		v.conflict("model.files_address", "has no meaning with model.files: local")
	}
}

func (v *validator) etcd() {
	e := &v.c.Etcd
	if isHTTPS(e.Endpoints[0]) {
		return
	}
	for _, p := range []struct{ key, value string }{{"etcd.ca", e.CA}, {"etcd.client_cert", e.ClientCert}} {
		if p.value != "" {
			v.conflict(p.key, "needs an https:// address in etcd.endpoints")
		}
	}
}

// pairs are settings of which one is worth nothing without the other.
func (v *validator) pairs() {
	for _, p := range []struct {
		key, other string
		set, needs bool
	}{
		{"etcd.password", "etcd.username", v.c.Etcd.Password != "", v.c.Etcd.Username != ""},
		{"etcd.username", "etcd.password", v.c.Etcd.Username != "", v.c.Etcd.Password != ""},
		{"etcd.client_cert", "etcd.client_key", v.c.Etcd.ClientCert != "", v.c.Etcd.ClientKey != ""},
		{"etcd.client_key", "etcd.client_cert", v.c.Etcd.ClientKey != "", v.c.Etcd.ClientCert != ""},
		{"nats.password", "nats.username", v.c.NATS.Password != "", v.c.NATS.Username != ""},
		{"nats.username", "nats.password", v.c.NATS.Username != "", v.c.NATS.Password != ""},
		{"nats.tls.cert_file", "nats.tls.key_file", v.c.NATS.TLS.CertFile != "", v.c.NATS.TLS.KeyFile != ""},
		{"nats.tls.key_file", "nats.tls.cert_file", v.c.NATS.TLS.KeyFile != "", v.c.NATS.TLS.CertFile != ""},
		{"request_plane.tcp.tls.cert_file", "request_plane.tcp.tls.key_file", v.c.RequestPlane.TCP.TLS.CertFile != "", v.c.RequestPlane.TCP.TLS.KeyFile != ""},
		{"request_plane.tcp.tls.key_file", "request_plane.tcp.tls.cert_file", v.c.RequestPlane.TCP.TLS.KeyFile != "", v.c.RequestPlane.TCP.TLS.CertFile != ""},
		{"request_plane.tcp.tls.client_ca_file", "request_plane.tcp.tls.cert_file", v.c.RequestPlane.TCP.TLS.ClientCAFile != "", v.c.RequestPlane.TCP.TLS.CertFile != ""},
		{"response_plane.tls.cert_file", "response_plane.tls.key_file", v.c.ResponsePlane.TLS.CertFile != "", v.c.ResponsePlane.TLS.KeyFile != ""},
		{"response_plane.tls.key_file", "response_plane.tls.cert_file", v.c.ResponsePlane.TLS.KeyFile != "", v.c.ResponsePlane.TLS.CertFile != ""},
	} {
		if p.set && !p.needs {
			v.conflict(p.key, "is set, but %s is not", p.other)
		}
	}
}

func (v *validator) ports() {
	s := &v.c.System
	if s.HealthPath == s.LivePath {
		v.conflict("system.live_path", "is the same as system.health_path")
	}
	for _, p := range []struct{ key, path string }{{"system.health_path", s.HealthPath}, {"system.live_path", s.LivePath}} {
		if p.path == "/metrics" {
			v.conflict(p.key, "is the path of the metrics")
		}
	}
	rp := &v.c.RequestPlane
	if rp.Kind == PlaneTCP && rp.TCP.Port > 0 && rp.TCP.Port == s.Port && sameHost(rp.TCP.Host, s.Host) {
		v.conflict("request_plane.tcp.port", "%d is also system.port", s.Port)
	}
	if v.c.Model.Files == FilesHTTP && !s.Enabled() && rp.Kind == PlaneTCP && rp.TCP.Port > 0 {
		host, port, err := net.SplitHostPort(v.c.Model.FilesListen)
		if err == nil && port == strconv.Itoa(rp.TCP.Port) && sameHost(rp.TCP.Host, host) {
			v.conflict("model.files_listen", "has the port of request_plane.tcp.port")
		}
	}
}

// sameHost reports whether listeners on the two hosts would collide.
func sameHost(a, b string) bool {
	any := func(h string) bool {
		ip := net.ParseIP(h)
		return h == "" || ip != nil && ip.IsUnspecified()
	}
	return a == b || any(a) || any(b)
}

func (v *validator) sim() {
	s := &v.c.Engine.Sim
	if v.c.Engine.Kind != EngineSim {
		return
	}
	if s.FirstTokenID >= s.VocabSize {
		v.conflict("engine.sim.first_token_id", "%d is not in a vocabulary of %d", s.FirstTokenID, s.VocabSize)
	}
	if s.LastTokenID >= s.VocabSize {
		v.conflict("engine.sim.last_token_id", "%d is not in a vocabulary of %d", s.LastTokenID, s.VocabSize)
	}
	if s.LastTokenID != 0 && s.LastTokenID < s.FirstTokenID {
		v.conflict("engine.sim.last_token_id", "%d is below engine.sim.first_token_id, %d", s.LastTokenID, s.FirstTokenID)
	}
	if s.EOSTokenID >= s.VocabSize {
		v.conflict("engine.sim.eos_token_id", "%d is not in a vocabulary of %d", s.EOSTokenID, s.VocabSize)
	}
	if len(v.c.Engine.Args) > 0 {
		v.conflict(argsKey, "has no meaning with engine.kind: sim; see engine.sim")
	}
}
