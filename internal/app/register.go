package app

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"dynworker/pkg/config"
	"dynworker/pkg/discovery"
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/modelcard"
	"dynworker/pkg/protocol"
	"dynworker/pkg/status"
)

// connectEtcd connects to etcd and keeps nothing there yet.
func (w *worker) connectEtcd(ctx context.Context) (*discovery.Client, error) {
	c := &w.cfg.Etcd
	return discovery.Connect(ctx, discovery.Config{
		Endpoints: c.Endpoints, LeaseTTL: c.LeaseTTL, StartupTimeout: c.StartupTimeout, PingInterval: c.KeepaliveInterval, PingTimeout: c.KeepaliveTimeout,
		Username: c.Username, Password: string(c.Password), CA: c.CA, ClientCert: c.ClientCert, ClientKey: string(c.ClientKey),
		OnState: w.observeDiscovery, Logger: w.component("etcd"),
	})
}

// observeDiscovery keeps health and metrics told of the lease.
func (w *worker) observeDiscovery(s discovery.State) {
	condition := w.health.Condition("etcd")
	if s.Registered {
		condition.OK()
	} else {
		condition.Fail(s.Reason)
	}
	w.metrics.DiscoveryState(s.Registered, s.Losses, s.Reregistrations)
}

// serveModelFiles makes the model's files reachable before anything names them, and returns where, or nil for local paths.
func (w *worker) serveModelFiles(ctx context.Context, m *modelcard.Model, id identity) (*modelcard.Hosting, error) {
	c := &w.cfg.Model
	if c.Files == config.FilesLocal {
		return nil, nil
	}
	server := w.system
	hosting := &modelcard.Hosting{Namespace: id.namespace, Component: id.component, Endpoint: id.endpoint}
	handler := m.Handler(*hosting, protocol.Slugify(c.ServedName()), w.observeModelFile)
	if server != nil {
		server.MountMetadata(handler)
	} else {
		host, port, err := splitListen(c.FilesListen)
		if err != nil {
			return nil, fmt.Errorf("model.files_listen: %w", err)
		}
		if server, err = status.ListenFiles(ctx, host, port, handler, w.component("files")); err != nil {
			return nil, err
		}
		w.onStop("model file server", stopServer, server.Close)
	}
	address, err := status.AdvertiseAddr(server.Addr(), c.FilesAddress)
	if err != nil {
		return nil, fmt.Errorf("model.files_address: %w", err)
	}
	hosting.Address = address
	w.log.Info().Str("address", address).Int("files", len(m.Files())).Msg("serving the model's files")
	return hosting, nil
}

func splitListen(address string) (host string, port int, err error) {
	host, text, err := net.SplitHostPort(address)
	if err != nil {
		return "", 0, err
	}
	port, err = strconv.Atoi(text)
	return host, port, err
}

func (w *worker) observeModelFile(name string) {
	w.metrics.ModelFileServed(name)
	w.log.Info().Str("file", name).Msg("model file fetched")
}

// cardSpec says what the card tells the frontend, most of it as the engine reported it.
func cardSpec(cfg *config.Config, r *ipc.Ready) (modelcard.Spec, error) {
	c := &cfg.Model
	endpoints, err := modelcard.ParseEndpointTypes(strings.Join(c.EndpointTypes, ","))
	if err != nil {
		return modelcard.Spec{}, fmt.Errorf("model.endpoint_types: %w", err)
	}
	s := modelcard.Spec{
		Name: c.ServedName(), Aliases: c.Aliases, Endpoints: endpoints, Role: modelcard.Role(cfg.Role),
		KVBlockSize: uint32(c.KVBlockSize), DataParallelSize: uint32(r.AttentionDPSize),
		ToolCallParser: c.ToolCallParser, ReasoningParser: c.ReasoningParser, StableRoutingID: c.StableRoutingID,
	}
	if r.KV.BlockSize > 0 {
		s.KVBlockSize = uint32(r.KV.BlockSize)
	}
	context := r.Bounds.MaxSeqLen
	if c.ContextLength > 0 {
		context = c.ContextLength
	}
	if context > 0 {
		v := uint32(context)
		s.ContextLength = &v
	}
	for _, n := range []struct {
		value int
		into  **uint64
	}{{r.KV.TotalBlocks, &s.TotalKVBlocks}, {r.Bounds.MaxBatchSize, &s.MaxNumSeqs}, {r.Bounds.MaxNumTokens, &s.MaxNumBatchedTokens}} {
		if n.value > 0 {
			v := uint64(n.value)
			*n.into = &v
		}
	}
	return s, nil
}

// register puts instance and card into discovery together, so that a frontend never sees one without the other.
func (w *worker) register(ctx context.Context, id identity, transport protocol.Transport, card protocol.Card) error {
	instance := protocol.Instance{Namespace: id.namespace, Component: id.component, Endpoint: id.endpoint, InstanceID: id.instance, Transport: transport, DeviceType: deviceType(w.opts.Environ), Codec: w.cfg.RequestPlane.Codec}
	model := protocol.ModelRecord{Namespace: id.namespace, Component: id.component, Endpoint: id.endpoint, InstanceID: id.instance, Card: card}
	ctx, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	w.records = []discovery.Record{{Key: model.Key(), Value: model.Value()}, {Key: instance.Key(), Value: instance.Value()}}
	if err := w.session.Register(ctx, w.records...); err != nil {
		return fmt.Errorf("register in etcd: %w", err)
	}
	w.instanceKey = instance.Key()
	w.log.Info().Str("instance", strconv.FormatUint(id.instance, 16)).Str("key", w.instanceKey).Str("transport", transport.Kind).Str("address", transport.Address).Str("model", card.DisplayName).Msg("registered")
	return nil
}

// deviceType is what Dynamo 1.6.1 writes for the process's environment: cpu when the visible devices are explicitly none, else cuda.
func deviceType(environ []string) string {
	none := map[string]map[string]bool{
		"CUDA_VISIBLE_DEVICES":   {"": true, "-1": true, "none": true, "void": true},
		"NVIDIA_VISIBLE_DEVICES": {"none": true, "void": true},
	}
	for _, kv := range environ {
		name, value, _ := strings.Cut(kv, "=")
		if none[name][value] {
			return "cpu"
		}
	}
	return "cuda"
}

// registerTimeout bounds the one transaction of a registration.
const registerTimeout = 30 * time.Second
