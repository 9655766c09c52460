package natsplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
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
	// defaultPendingMessages is more than a thousand clients that all ask at the same moment. A message beyond it is lost without a word to its sender, so the bytes are what bounds memory.
	defaultPendingMessages = 16 << 10
	defaultPendingBytes    = 64 << 20
	// minPendingPayloads keeps the byte limit above a few of the largest messages, else a single one could be more than is allowed to wait.
	minPendingPayloads = 4
	// closeFlushTimeout bounds how long Close waits for the last replies to leave.
	closeFlushTimeout = 2 * time.Second
	// confirmPause is the pause before the server is asked again about a subscription after the connection was lost.
	confirmPause = 10 * time.Millisecond
	// defaultFlushTimeout bounds the round trip to the server when the caller's context has no deadline.
	defaultFlushTimeout = 10 * time.Second
)

// ErrClosed is returned after Close.
var ErrClosed = errors.New("nats plane is closed")

// ErrSubjectServed is returned when a subject is served twice.
var ErrSubjectServed = errors.New("subject is served already")

// Config configures a Plane. Only Conn.URL is required.
type Config struct {
	Conn ConnConfig
	// PendingMessages and PendingBytes bound what may wait for an endpoint's goroutine; defaults 16384 and 64 MiB. The bytes are raised to four times the server's
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
	// For lines that can come with every message or every attempt.
	logLoss, logReply, logServer, logOutage, logMalformed zerolog.Logger

	ctx  context.Context // ends with Close
	stop context.CancelFunc
	done sync.WaitGroup
	kick chan struct{} // tells the supervisor to look at link

	// Both belong to the supervisor: the epoch that was proven, and the number of the latest proof.
	proven, nonce uint64

	// subscribing is held while subscriptions are made, which may wait for the library; mu never is held over a call into the library, because that holds its own
	// lock while it connects.
	subscribing sync.Mutex

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
		logLoss: ingress.Limited(cfg.Logger), logReply: ingress.Limited(cfg.Logger), logServer: ingress.Limited(cfg.Logger),
		logOutage: ingress.Limited(cfg.Logger), logMalformed: ingress.Limited(cfg.Logger),
		ctx: own, stop: stop,
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
		intake: ingress.Intake{Plane: ingress.NATS, Admitter: admitter, Observer: p.cfg.Observer, Logger: p.logMalformed},
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
	p.subscribing.Lock()
	defer p.subscribing.Unlock()
	p.mu.Lock()
	conn, closed, served := p.conn, p.closed, p.endpoints[e.subject] != nil
	p.mu.Unlock()
	if closed {
		return ErrClosed
	}
	if served {
		return ErrSubjectServed
	}
	if err := p.subscribe(conn, e); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endpoints[e.subject] = e
	return nil
}

// subscribe starts a reader of e on a connection. The caller holds subscribing.
func (p *Plane) subscribe(conn *Conn, e *endpoint) error {
	sub, err := conn.QueueSubscribeSync(e.subject, queueGroup)
	if err != nil {
		return fmt.Errorf("subscribe: %w", err)
	}
	if err := sub.SetPendingLimits(p.pendingLimits(conn)); err != nil {
		return errors.Join(fmt.Errorf("set pending limits: %w", err), sub.Unsubscribe())
	}
	if !e.attach(sub) {
		return errors.Join(ErrClosed, sub.Unsubscribe())
	}
	return nil
}

// spawn runs a goroutine that Close waits for, unless the plane is closed already.
func (p *Plane) spawn(f func()) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.done.Go(f)
	return true
}

func (p *Plane) pendingLimits(conn *Conn) (messages, bytes int) {
	messages, bytes = p.cfg.PendingMessages, p.cfg.PendingBytes
	if messages <= 0 {
		messages = defaultPendingMessages
	}
	if bytes <= 0 {
		bytes = defaultPendingBytes
	}
	return messages, max(bytes, minPendingPayloads*int(conn.MaxPayload()))
}

// confirm waits until the server has processed the subscription, and tells when it did not allow it.
func (p *Plane) confirm(ctx context.Context, e *endpoint) error {
	ctx, cancel := context.WithTimeout(ctx, defaultFlushTimeout)
	defer cancel()
	for {
		err := p.flush(ctx)
		if err == nil {
			// A denial precedes the answer to the flush, so it is known by now.
			if err := e.denied(); err != nil {
				return err
			}
			e.confirmed.Store(true)
			return nil
		}
		// A lost connection fails the flush, and the subscription is made again on the next one.
		if !errors.Is(err, nats.ErrConnectionClosed) || sleep(ctx, confirmPause) != nil || p.ctx.Err() != nil {
			return fmt.Errorf("wait for the subscription: %w", err)
		}
	}
}

func (p *Plane) flush(ctx context.Context) error {
	p.mu.Lock()
	conn := p.conn
	p.mu.Unlock()
	return conn.FlushWithContext(ctx)
}

func (p *Plane) connected() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.link.up
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
	endpoints := slices.Collect(maps.Values(p.endpoints))
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

// Close ends the subscriptions and the connection. Replies that were given are sent first, as far as ctx allows. An error means that an Admitter has not returned.
// It is safe to call twice.
func (p *Plane) Close(ctx context.Context) error {
	p.mu.Lock()
	first := !p.closed
	p.closed = true
	conn, up := p.conn, p.link.up
	p.mu.Unlock()
	if first && up {
		flushReplies(ctx, conn)
	}
	p.stop()
	// The supervisor may be about to replace the connection, so it is the one that closes it.
	ended := make(chan struct{})
	go func() {
		p.done.Wait()
		close(ended)
	}()
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("close the nats plane: %w", context.Cause(ctx))
	}
}

// flushReplies sends what the library has collected. The result does not matter: the connection ends either way, and whoever lost a reply asks another worker.
func flushReplies(ctx context.Context, conn *Conn) {
	ctx, cancel := context.WithTimeout(ctx, closeFlushTimeout)
	defer cancel()
	flushed := make(chan struct{})
	// If the library is just connecting it does not look at the context; closing the connection, which comes next, ends this goroutine then.
	go func() {
		defer close(flushed)
		_ = conn.FlushWithContext(ctx)
	}()
	select {
	case <-flushed:
	case <-ctx.Done():
	}
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
