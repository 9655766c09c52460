package natsplane

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"dynworker/pkg/ingress"
)

// queueGroup is the group that Dynamo's own workers subscribe in. Subjects carry the instance id, so that it has one member.
const queueGroup = "q"

const (
	defaultPendingMessages = 512
	defaultPendingBytes    = 32 << 20
	// minPendingPayloads keeps the byte limit above a few of the largest messages, else a single one could be more than is allowed to wait.
	minPendingPayloads = 4
	// defaultFlushTimeout bounds the round trip to the server when the caller's context has no deadline.
	defaultFlushTimeout = 10 * time.Second
	// logPeriod is how often a condition that repeats with each message is logged.
	logPeriod = 5 * time.Second
)

// ErrClosed is returned after Close.
var ErrClosed = errors.New("nats plane is closed")

// ErrSubjectServed is returned when a subject is served twice.
var ErrSubjectServed = errors.New("subject is served already")

// Config configures a Plane. Only Conn.URL is required.
type Config struct {
	Conn ConnConfig
	// PendingMessages and PendingBytes bound what may wait for an endpoint's goroutine; defaults 512 and 32 MiB. The bytes are raised to four times the server's
	// payload limit when that is more.
	PendingMessages, PendingBytes int
	// ProofTimeout is how long a proof of life may take before it is tried again, default 2 s.
	ProofTimeout time.Duration
	// OnState is called with every change, from one goroutine, in order. It must not call Close.
	OnState  func(State)
	Observer ingress.Observer
	Logger   zerolog.Logger
}

// Plane is the NATS request plane of a worker.
type Plane struct {
	cfg Config
	log zerolog.Logger
	// noisy is log for what can come with every message.
	noisy zerolog.Logger

	ctx  context.Context // ends with Close
	stop context.CancelFunc
	done sync.WaitGroup
	kick chan struct{} // tells the supervisor to look at link

	// Both belong to the supervisor: the epoch that was proven, and the number of the latest proof.
	proven, nonce uint64

	mu        sync.Mutex
	conn      *Conn
	link      link
	endpoints map[string]*endpoint
	state     State
	closed    bool
}

// Connect connects, proves that messages come back, and from then on keeps the connection. See Dial for errors and retries.
// The context bounds only the call.
func Connect(ctx context.Context, cfg Config) (*Plane, error) {
	own, stop := context.WithCancel(context.WithoutCancel(ctx))
	p := &Plane{
		cfg: cfg, log: cfg.Logger,
		noisy: cfg.Logger.Sample(&zerolog.BurstSampler{Burst: 1, Period: logPeriod}),
		ctx:   own, stop: stop,
		kick:      make(chan struct{}, 1),
		endpoints: map[string]*endpoint{},
		state:     State{Reason: "connecting", Since: time.Now()},
	}
	conn, err := p.open(ctx)
	if err != nil {
		stop()
		return nil, err
	}
	if err := p.proveFirst(ctx, conn); err != nil {
		stop()
		conn.Close()
		return nil, fmt.Errorf("connect to nats at %s: %w", cfg.Conn.redacted(), err)
	}
	p.done.Go(p.supervise)
	return p, nil
}

// Serve subscribes to the subject and returns when the server knows about it, so that the instance record may be written then.
// Without a deadline in ctx it waits at most ten seconds.
func (p *Plane) Serve(ctx context.Context, subject string, admitter ingress.Admitter) error {
	e := &endpoint{
		plane: p, subject: subject,
		intake: ingress.Intake{Plane: ingress.NATS, Admitter: admitter, Observer: p.cfg.Observer, Logger: p.noisy},
	}
	if err := p.add(e); err != nil {
		return fmt.Errorf("serve %s: %w", subject, err)
	}
	if err := p.confirm(ctx, e); err != nil {
		p.remove(e)
		return fmt.Errorf("serve %s: %w", subject, err)
	}
	return nil
}

func (p *Plane) add(e *endpoint) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return ErrClosed
	}
	if p.endpoints[e.subject] != nil {
		return ErrSubjectServed
	}
	if err := p.subscribe(e); err != nil {
		return err
	}
	p.endpoints[e.subject] = e
	return nil
}

// subscribe starts a reader of e on the present connection. The caller holds mu.
func (p *Plane) subscribe(e *endpoint) error {
	sub, err := p.conn.QueueSubscribeSync(e.subject, queueGroup)
	if err != nil {
		return fmt.Errorf("subscribe: %w", err)
	}
	if err := sub.SetPendingLimits(p.pendingLimits()); err != nil {
		return errors.Join(fmt.Errorf("set pending limits: %w", err), sub.Unsubscribe())
	}
	e.attach(sub)
	return nil
}

func (p *Plane) pendingLimits() (messages, bytes int) {
	messages, bytes = p.cfg.PendingMessages, p.cfg.PendingBytes
	if messages <= 0 {
		messages = defaultPendingMessages
	}
	if bytes <= 0 {
		bytes = defaultPendingBytes
	}
	return messages, max(bytes, minPendingPayloads*int(p.conn.MaxPayload()))
}

// confirm waits until the server has processed the subscription, and tells when it did not allow it.
func (p *Plane) confirm(ctx context.Context, e *endpoint) error {
	if err := p.flush(ctx); err != nil {
		return fmt.Errorf("wait for the subscription: %w", err)
	}
	// A denial precedes the answer to the flush, so it is known by now.
	return e.denied()
}

func (p *Plane) flush(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, defaultFlushTimeout)
	defer cancel()
	p.mu.Lock()
	conn := p.conn
	p.mu.Unlock()
	return conn.FlushWithContext(ctx)
}

func (p *Plane) connected() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.conn.IsConnected()
}

func (p *Plane) remove(e *endpoint) {
	p.mu.Lock()
	if p.endpoints[e.subject] == e {
		delete(p.endpoints, e.subject)
	}
	p.mu.Unlock()
	e.detach()
}

// MaxPayload is the largest message in bytes that the server takes; a prompt that makes a larger request never arrives.
func (p *Plane) MaxPayload() int64 { return p.State().MaxPayload }

// State returns the present state.
func (p *Plane) State() State {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state
}

// Drain ends the intake of all endpoints. What had been received by then still goes to the Admitter, which may refuse it. When ctx ends first, the rest is dropped
// and the cause is returned. The connection stays, so replies and Serve still work.
func (p *Plane) Drain(ctx context.Context) error {
	p.mu.Lock()
	endpoints := make([]*endpoint, 0, len(p.endpoints))
	for _, e := range p.endpoints {
		endpoints = append(endpoints, e)
	}
	clear(p.endpoints)
	p.mu.Unlock()
	var errs []error
	for _, e := range endpoints {
		e.beginDrain()
	}
	for _, e := range endpoints {
		if err := e.drained(ctx); err != nil {
			errs = append(errs, fmt.Errorf("drain %s: %w", e.subject, err))
		}
	}
	return errors.Join(errs...)
}

// Close ends the subscriptions and the connection. Replies that were given are sent first, as far as ctx allows. It is safe to call twice.
func (p *Plane) Close(ctx context.Context) error {
	p.mu.Lock()
	first := !p.closed
	p.closed = true
	conn := p.conn
	p.mu.Unlock()
	if first && conn.IsConnected() {
		ctx, cancel := context.WithTimeout(ctx, writeTimeout)
		// The result does not matter: the connection ends either way, and whoever lost a reply asks another worker.
		_ = conn.FlushWithContext(ctx)
		cancel()
	}
	p.stop()
	// The supervisor may be about to replace the connection, so it is the one that closes it.
	p.done.Wait()
	return nil
}

// header makes the plane's headers independent of how their names are written. The first value of each counts.
func header(h nats.Header) map[string]string {
	if len(h) == 0 {
		return nil
	}
	m := make(map[string]string, len(h))
	for name, values := range h {
		if len(values) > 0 {
			m[strings.ToLower(name)] = values[0]
		}
	}
	return m
}
