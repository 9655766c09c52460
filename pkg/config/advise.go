package config

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// advise warns about what is allowed but probably not meant.
func (l *loader) advise(c *Config) {
	if ns := l.origins["namespace"]; l.whole != (Origin{}) && ns != l.whole {
		l.warn("namespace", fmt.Sprintf("the one of %s replaces the one in the endpoint of %s; Dynamo's own worker would keep the endpoint's", ns, l.whole))
	}
	if o := l.origins["affinity.override"]; !c.Affinity.Override && o.Kind == FromFlag {
		l.warn(o.Name, "does not turn conversation affinity off where the engine's configuration turns it on; the engine decides")
	}
	if c.Model.CustomJinjaTemplate != "" && !slices.Contains(c.Model.EndpointTypes, "chat") {
		l.warn("model.custom_jinja_template", "has no effect without the endpoint type chat")
	}
	if c.NATS.Username != "" && (c.NATS.Token != "" || c.NATS.NKey != "" || c.NATS.CredentialsFile != "") {
		l.warn("nats.username", "is used, so nats.token, nats.nkey and nats.credentials_file are not")
	} else if c.NATS.Token != "" && (c.NATS.NKey != "" || c.NATS.CredentialsFile != "") {
		l.warn("nats.token", "is used, so nats.nkey and nats.credentials_file are not")
	} else if c.NATS.NKey != "" && c.NATS.CredentialsFile != "" {
		l.warn("nats.nkey", "is used, so nats.credentials_file is not")
	}
	l.adviseOtherEngine(c)
	for _, p := range []struct {
		key string
		on  bool
	}{{"publish.kv_events", c.Publish.KVEvents}, {"publish.metrics", c.Publish.Metrics}} {
		if p.on {
			l.warn(p.key, fmt.Sprintf("the engine is set up for it, but this worker does not publish yet (%s)", l.origins[p.key]))
		}
	}
	if c.ResponsePlane.TLS.Insecure {
		l.warn("response_plane.tls.insecure", "frontends are not verified")
	}
	if c.NATS.TLS.Insecure {
		l.warn("nats.tls.insecure", "the NATS server is not verified")
	}
}

// adviseOtherEngine warns about settings of the engine that is not run.
func (l *loader) adviseOtherEngine(c *Config) {
	other := simPrefix
	if c.Engine.Kind == EngineSim {
		other = trtllmPrefix
	}
	for _, k := range keys {
		// A file that shows all keys sets these, too; only a change counts.
		if o, ok := l.origins[k.name]; ok && strings.HasPrefix(k.name, other) && !reflect.DeepEqual(k.value(c), k.def) {
			l.warn(k.name, fmt.Sprintf("has no effect with engine.kind %s (%s)", c.Engine.Kind, o))
		}
	}
}
