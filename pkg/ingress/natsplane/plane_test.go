package natsplane

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"

	"dynworker/internal/testenv"
	"dynworker/internal/testenv/embedded"
	"dynworker/pkg/ingress"
	"dynworker/pkg/wire"
)

func TestRecordedRequestIsDelivered(t *testing.T) {
	raw, err := os.ReadFile(filepath.Join("..", "testdata", "request-00.bin"))
	require.NoError(t, err)
	srv := plainNATS(t)
	p := connectPlane(t, Config{Conn: quick(srv.URL())})
	a := newAdmitter()
	require.NoError(t, p.Serve(testenv.Context(t), subject, a))
	require.ErrorIs(t, p.Serve(testenv.Context(t), subject, a), ErrSubjectServed)

	msg := &nats.Msg{Subject: subject, Data: raw, Header: nats.Header{"request-id": {"r"}, "X-Frontend-Send-TS-ns": {"1796094359178155060"}}}
	reply, err := frontend(t, srv.URL()).RequestMsgWithContext(testenv.Context(t), msg)
	require.NoError(t, err)
	require.Empty(t, reply.Data)
	d := take(t, a.started)
	require.Same(t, d, take(t, a.deliveries))
	require.NoError(t, d.BodyErr)
	require.Equal(t, "r", d.RequestID)
	require.Equal(t, "2e105465-862a-49a7-8725-d0f8a0fbe47c", d.Control.ID)
	require.Equal(t, uint64(1796094359178155060), d.SentNanos)
	require.Equal(t, len(raw), d.Size)
	require.NotEmpty(t, d.Body)
	require.False(t, d.Received.IsZero())
}

func TestEachSubjectHasItsAdmitter(t *testing.T) {
	srv := plainNATS(t)
	p := connectPlane(t, Config{Conn: quick(srv.URL())})
	refusal := &ingress.Refusal{Kind: ingress.Overloaded, Reason: "16 requests wait"}
	require.NoError(t, p.Serve(testenv.Context(t), subject, ingress.AdmitFunc(func(*ingress.Delivery) (func(), *ingress.Refusal) { return nil, refusal })))
	other := newAdmitter()
	require.NoError(t, p.Serve(testenv.Context(t), "other", other))
	nc := frontend(t, srv.URL())
	kind, reason := ask(t, nc, twoPart("a"))
	require.Equal(t, wire.ReplyOverloaded, kind)
	require.Equal(t, "16 requests wait", reason)

	// A message whose sender wants no reply is served like any other.
	require.NoError(t, nc.Publish("other", twoPart("b")))
	require.Equal(t, "b", take(t, other.started).Control.ID)

	_, err := nc.RequestMsgWithContext(testenv.Context(t), &nats.Msg{Subject: "stale.subject", Data: twoPart("c")})
	require.ErrorIs(t, err, nats.ErrNoResponders)
}

func TestMalformedMessagesAreRefusedAndHarmless(t *testing.T) {
	var seen events
	var log lockedLog
	srv := plainNATS(t)
	p := connectPlane(t, Config{Conn: quick(srv.URL()), Observer: seen.observe, Logger: log.logger()})
	a := newAdmitter()
	require.NoError(t, p.Serve(testenv.Context(t), subject, a))
	nc := frontend(t, srv.URL())
	whole := twoPart("x")
	const n = 500
	for i := range n {
		kind, reason := ask(t, nc, whole[:i%200])
		require.Equal(t, wire.ReplyUnavailable, kind)
		require.Contains(t, reason, "malformed request")
	}
	require.Equal(t, n, seen.count(ingress.Malformed))
	require.Less(t, log.count("control header cannot be read"), n/4, "the log limits its rate")
	require.Empty(t, a.deliveries)

	kind, _ := ask(t, nc, whole[:len(whole)-1])
	require.Equal(t, wire.ReplyAccepted, kind, "only the body is damaged")
	require.ErrorIs(t, take(t, a.started).BodyErr, wire.ErrTruncated)
	kind, _ = ask(t, nc, whole)
	require.Equal(t, wire.ReplyAccepted, kind)
	require.NoError(t, take(t, a.started).BodyErr)
}

// The library turns such a message into an error, which must not be taken for the end of the subscription.
func TestMessageThatLooksLikeTheServersWord(t *testing.T) {
	srv := plainNATS(t)
	var seen events
	p := connectPlane(t, Config{Conn: quick(srv.URL()), Observer: seen.observe})
	a := newAdmitter()
	require.NoError(t, p.Serve(testenv.Context(t), subject, a))
	nc := frontend(t, srv.URL())
	require.NoError(t, nc.PublishMsg(&nats.Msg{Subject: subject, Header: nats.Header{"Status": {"503"}}}))
	kind, _ := ask(t, nc, twoPart("x"))
	require.Equal(t, wire.ReplyAccepted, kind)
	require.Equal(t, 1, seen.count(ingress.Malformed))
	take(t, a.started)
}

func TestStateAndPayloadLimit(t *testing.T) {
	srv := testenv.StartNATS(t, embedded.NATSOptions{MaxPayload: 4096})
	seen := newStates()
	p := connectPlane(t, Config{Conn: quick(srv.URL()), OnState: seen.add})
	first, n := seen.waitFor(t, 0, "healthy", healthy)
	require.Equal(t, first, p.State())
	require.Equal(t, int64(4096), p.MaxPayload())
	require.Equal(t, int64(4096), first.MaxPayload)
	require.Equal(t, srv.URL(), first.Server)
	require.Empty(t, first.Reason)
	closePlane(t, p)
	last, _ := seen.waitFor(t, n, "closed", unhealthy)
	require.Equal(t, "closed", last.Reason)
	closePlane(t, p)
	require.ErrorIs(t, p.Serve(testenv.Context(t), subject, newAdmitter()), ErrClosed)
}

func TestServerThatIsRestarted(t *testing.T) {
	srv := plainNATS(t)
	seen := newStates()
	p := connectPlane(t, Config{Conn: quick(srv.URL()), OnState: seen.add})
	a := newAdmitter()
	require.NoError(t, p.Serve(testenv.Context(t), subject, a))
	nc := frontend(t, srv.URL())
	_, n := seen.waitFor(t, 0, "healthy", healthy)
	for round := range 3 {
		srv.Stop()
		var down, up State
		down, n = seen.waitFor(t, n, "down", unhealthy)
		require.Contains(t, down.Reason, "connection lost")
		require.False(t, p.State().Healthy)
		require.NoError(t, srv.Start())
		up, n = seen.waitFor(t, n, "healthy again", healthy)
		require.Equal(t, uint64(round+1), up.Reconnects)
		require.NoError(t, nc.FlushWithContext(testenv.Context(t)))
		kind, _ := ask(t, nc, twoPart("again"))
		require.Equal(t, wire.ReplyAccepted, kind)
		require.Equal(t, "again", take(t, a.started).Control.ID)
	}
}

func TestServerThatFreezes(t *testing.T) {
	srv := plainNATS(t)
	proxy := testenv.NewProxy(t, srv.Address())
	cfg := quick("nats://" + proxy.Address())
	cfg.PingInterval, cfg.AttemptTimeout = 20*time.Millisecond, 200*time.Millisecond
	seen := newStates()
	p := connectPlane(t, Config{Conn: cfg, OnState: seen.add})
	a := newAdmitter()
	require.NoError(t, p.Serve(testenv.Context(t), subject, a))
	_, n := seen.waitFor(t, 0, "healthy", healthy)
	proxy.Pause()
	_, n = seen.waitFor(t, n, "down", unhealthy)
	// New connections are made and say nothing; several attempts must not wear the client out.
	before := proxy.Accepted()
	require.Eventually(t, func() bool { return proxy.Accepted() > before+2 }, testenv.Patience, time.Millisecond)
	proxy.Resume()
	seen.waitFor(t, n, "healthy again", healthy)
	kind, _ := ask(t, frontend(t, srv.URL()), twoPart("x"))
	require.Equal(t, wire.ReplyAccepted, kind)
	take(t, a.started)
}

func TestHealthyOnlyWhenMessagesComeBack(t *testing.T) {
	srv := newBrokenServer(t)
	seen := newStates()
	p := connectPlane(t, Config{Conn: quick(srv.url()), OnState: seen.add, ProofTimeout: 50 * time.Millisecond})
	a := newAdmitter()
	require.NoError(t, p.Serve(testenv.Context(t), subject, a))
	_, n := seen.waitFor(t, 0, "healthy", healthy)

	// The server comes back, answers pings, and delivers nothing.
	srv.set(func() {
		srv.mute = true
		for c := range srv.conns {
			_ = c.Close()
		}
	})
	connected := srv.connections()
	_, n = seen.waitFor(t, n, "proof fails", func(s State) bool { return strings.Contains(s.Reason, "no proof of life") })
	require.Eventually(t, func() bool { return srv.connections() > connected+2 }, testenv.Patience, time.Millisecond,
		"a connection that proves nothing is thrown away, again and again")
	require.False(t, p.State().Healthy)

	srv.set(func() { srv.mute = false })
	up, _ := seen.waitFor(t, n, "healthy again", healthy)
	require.Equal(t, uint64(1), up.Reconnects)
}

func TestConnectNeedsAProofToo(t *testing.T) {
	srv := newBrokenServer(t)
	srv.set(func() { srv.mute = true })
	_, err := Connect(testenv.Context(t), Config{Conn: quick(srv.url()), ProofTimeout: 10 * time.Millisecond})
	require.ErrorContains(t, err, srv.url())
	require.ErrorContains(t, err, "message of our own")
}

// Some errors of the server make the library close the connection for good, without a reconnect.
func TestConnectionThatTheLibraryGivesUpIsOpenedAgain(t *testing.T) {
	srv := newBrokenServer(t)
	seen := newStates()
	var malformed events
	p := connectPlane(t, Config{Conn: quick(srv.url()), OnState: seen.add, Observer: malformed.observe})
	a := newAdmitter()
	require.NoError(t, p.Serve(testenv.Context(t), subject, a))
	require.NoError(t, p.Serve(testenv.Context(t), "other", a))
	_, n := seen.waitFor(t, 0, "healthy", healthy)
	first := present(p)
	srv.say("-ERR 'Unheard Of'")
	_, n = seen.waitFor(t, n, "down", unhealthy)
	seen.waitFor(t, n, "healthy again", healthy)
	require.True(t, first.IsClosed())

	// The endpoints came along.
	for _, subject := range []string{subject, "other"} {
		require.NoError(t, present(p).Publish(subject, []byte("x")))
	}
	require.Eventually(t, func() bool { return malformed.count(ingress.Malformed) == 2 }, testenv.Patience, time.Millisecond)
}

// present is the connection of the moment.
func present(p *Plane) *Conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.conn
}

func TestMessagesThatComeTooFastAreCounted(t *testing.T) {
	srv := plainNATS(t)
	var seen events
	var log lockedLog
	p := connectPlane(t, Config{Conn: quick(srv.URL()), PendingMessages: 4, Observer: seen.observe, Logger: log.logger()})
	release, entered := make(chan struct{}), make(chan struct{}, 100)
	require.NoError(t, p.Serve(testenv.Context(t), subject, ingress.AdmitFunc(func(*ingress.Delivery) (func(), *ingress.Refusal) {
		entered <- struct{}{}
		<-release // against the rules, to make the reader slow
		return nil, &ingress.Refusal{Kind: ingress.Overloaded}
	})))
	nc := frontend(t, srv.URL())
	require.NoError(t, nc.Publish(subject, twoPart("first")))
	<-entered
	const more = 50
	for range more {
		require.NoError(t, nc.Publish(subject, twoPart("x")))
	}
	require.NoError(t, nc.FlushWithContext(testenv.Context(t)))
	// The server has handed all of them to the plane's connection when it answers on that.
	require.NoError(t, p.flush(testenv.Context(t)))
	require.Eventually(t, func() bool { return seen.count(ingress.Dropped) > 0 }, testenv.Patience, time.Millisecond,
		"noticed while the reader is still stuck")
	close(release)
	require.NoError(t, p.Drain(testenv.Context(t)))
	require.Equal(t, more, seen.count(ingress.Dropped)+len(entered), "every message is either admitted or counted")
	require.Len(t, entered, 4)
	require.Equal(t, 1, log.count("requests lost"))
}

func TestABurstOfManyClientsIsTakenUpWhole(t *testing.T) {
	srv := plainNATS(t)
	var seen events
	p := connectPlane(t, Config{Conn: quick(srv.URL()), Observer: seen.observe})
	const burst = 10_000
	release, entered := make(chan struct{}), make(chan struct{}, burst+1)
	require.NoError(t, p.Serve(testenv.Context(t), subject, ingress.AdmitFunc(func(*ingress.Delivery) (func(), *ingress.Refusal) {
		entered <- struct{}{}
		<-release
		return nil, &ingress.Refusal{Kind: ingress.Overloaded}
	})))
	nc := frontend(t, srv.URL())
	for range burst {
		require.NoError(t, nc.Publish(subject, twoPart("x")))
	}
	require.NoError(t, nc.FlushWithContext(testenv.Context(t)))
	require.NoError(t, p.flush(testenv.Context(t)))
	close(release)
	require.NoError(t, p.Drain(testenv.Context(t)))
	require.Zero(t, seen.count(ingress.Dropped))
	require.Len(t, entered, burst)
}

func TestDrainDeliversWhatHadCome(t *testing.T) {
	srv := plainNATS(t)
	p := connectPlane(t, Config{Conn: quick(srv.URL())})
	release, entered := make(chan struct{}), make(chan struct{}, 100)
	require.NoError(t, p.Serve(testenv.Context(t), subject, ingress.AdmitFunc(func(*ingress.Delivery) (func(), *ingress.Refusal) {
		entered <- struct{}{}
		<-release
		return nil, &ingress.Refusal{Kind: ingress.Unavailable, Reason: "shutting down"}
	})))
	nc := frontend(t, srv.URL())
	const n = 20
	replies, err := nc.SubscribeSync(nats.NewInbox())
	require.NoError(t, err)
	for range n {
		require.NoError(t, nc.PublishRequest(subject, replies.Subject, twoPart("x")))
	}
	require.NoError(t, nc.FlushWithContext(testenv.Context(t)))
	require.NoError(t, p.flush(testenv.Context(t)))
	<-entered
	drained := make(chan error, 1)
	go func() { drained <- p.Drain(testenv.Context(t)) }()
	close(release)
	require.NoError(t, <-drained)
	require.Len(t, entered, n-1)
	for range n {
		msg, err := replies.NextMsgWithContext(testenv.Context(t))
		require.NoError(t, err)
		kind, _ := wire.ParseReply(msg.Data)
		require.Equal(t, wire.ReplyUnavailable, kind)
	}
	_, err = nc.RequestMsgWithContext(testenv.Context(t), &nats.Msg{Subject: subject, Data: twoPart("late")})
	require.ErrorIs(t, err, nats.ErrNoResponders)
	require.True(t, p.State().Healthy, "the connection stays")
	require.NoError(t, p.Drain(testenv.Context(t)), "again")
}

func TestDrainIsBounded(t *testing.T) {
	srv := plainNATS(t)
	p := connectPlane(t, Config{Conn: quick(srv.URL())})
	release, entered := make(chan struct{}), make(chan struct{}, 1)
	require.NoError(t, p.Serve(testenv.Context(t), subject, ingress.AdmitFunc(func(*ingress.Delivery) (func(), *ingress.Refusal) {
		entered <- struct{}{}
		<-release
		return nil, &ingress.Refusal{Kind: ingress.Unavailable}
	})))
	require.NoError(t, frontend(t, srv.URL()).Publish(subject, twoPart("x")))
	<-entered
	cause := errors.New("no time")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	require.ErrorIs(t, p.Drain(ctx), cause)
	require.ErrorIs(t, p.Close(ctx), cause)
	close(release)
}

func TestDrainAndCloseWithoutAServer(t *testing.T) {
	srv := plainNATS(t)
	seen := newStates()
	p := connectPlane(t, Config{Conn: quick(srv.URL()), OnState: seen.add})
	require.NoError(t, p.Serve(testenv.Context(t), subject, newAdmitter()))
	srv.Stop()
	seen.waitFor(t, 0, "down", unhealthy)
	require.NoError(t, p.Drain(testenv.Context(t)))
	closePlane(t, p)
}

func TestDrainWithoutAServerDeliversWhatHadCome(t *testing.T) {
	srv := plainNATS(t)
	seen := newStates()
	p := connectPlane(t, Config{Conn: quick(srv.URL()), OnState: seen.add})
	release, entered := make(chan struct{}), make(chan struct{}, 100)
	require.NoError(t, p.Serve(testenv.Context(t), subject, ingress.AdmitFunc(func(*ingress.Delivery) (func(), *ingress.Refusal) {
		entered <- struct{}{}
		<-release
		return nil, &ingress.Refusal{Kind: ingress.Unavailable}
	})))
	nc := frontend(t, srv.URL())
	const n = 20
	for range n {
		require.NoError(t, nc.Publish(subject, twoPart("x")))
	}
	require.NoError(t, nc.FlushWithContext(testenv.Context(t)))
	require.NoError(t, p.flush(testenv.Context(t)))
	<-entered
	srv.Stop()
	seen.waitFor(t, 0, "down", unhealthy)
	drained := make(chan error, 1)
	go func() { drained <- p.Drain(testenv.Context(t)) }()
	close(release)
	require.NoError(t, <-drained)
	require.Len(t, entered, n-1)
}

func TestCredentialsThatAreRefusedForAWhile(t *testing.T) {
	srv := newBrokenServer(t)
	seen := newStates()
	p := connectPlane(t, Config{Conn: quick(srv.url()), OnState: seen.add})
	a := newAdmitter()
	require.NoError(t, p.Serve(testenv.Context(t), subject, a))
	_, n := seen.waitFor(t, 0, "healthy", healthy)
	before := srv.connections()
	srv.set(func() {
		srv.farewell = "-ERR 'Authorization Violation'"
		for c := range srv.conns {
			_ = c.Close()
		}
	})
	_, n = seen.waitFor(t, n, "down", unhealthy)
	// The library would give up after the second refusal.
	require.Eventually(t, func() bool { return srv.connections() > before+5 }, testenv.Patience, time.Millisecond)
	srv.set(func() { srv.farewell = "" })
	seen.waitFor(t, n, "healthy again", healthy)
}

func TestCloseWhileAReconnectHangs(t *testing.T) {
	srv := plainNATS(t)
	proxy := testenv.NewProxy(t, srv.Address())
	cfg := quick("nats://" + proxy.Address())
	cfg.AttemptTimeout = 10 * testenv.Patience
	seen := newStates()
	p := connectPlane(t, Config{Conn: cfg, OnState: seen.add})
	proxy.Pause()
	before := proxy.Accepted()
	proxy.Drop()
	seen.waitFor(t, 0, "down", unhealthy)
	require.Eventually(t, func() bool { return proxy.Accepted() > before }, testenv.Patience, time.Millisecond)
	closePlane(t, p)
}

func TestReplyThatCannotBeSent(t *testing.T) {
	srv := plainNATS(t)
	var seen events
	p := connectPlane(t, Config{Conn: quick(srv.URL()), Observer: seen.observe})
	a := newAdmitter()
	require.NoError(t, p.Serve(testenv.Context(t), subject, ingress.AdmitFunc(func(d *ingress.Delivery) (func(), *ingress.Refusal) {
		present(p).Close()
		return a.Admit(d)
	})))
	require.NoError(t, frontend(t, srv.URL()).PublishRequest(subject, "reply", twoPart("x")))
	require.Equal(t, "x", take(t, a.started).Control.ID, "the permit comes back all the same")
	require.Equal(t, 1, seen.count(ingress.ReplyFailed))
}

// permissions is a server whose user may do only what is listed.
func permissions(t *testing.T, publish, subscribe *server.SubjectPermission) string {
	return natsServer(t, permitted(publish, subscribe))
}

func permitted(publish, subscribe *server.SubjectPermission) server.Options {
	return server.Options{Users: []*server.User{
		{Username: "user", Password: "user", Permissions: &server.Permissions{Publish: publish, Subscribe: subscribe}},
		{Username: "admin", Password: "admin"},
	}}
}

func TestSubjectThatIsForbiddenLater(t *testing.T) {
	all := &server.SubjectPermission{Allow: []string{">"}}
	s := runServer(t, permitted(nil, all))
	reload := func(subscribe *server.SubjectPermission) {
		opts := permitted(nil, subscribe)
		opts.Host, opts.Port, opts.NoLog, opts.NoSigs = "127.0.0.1", s.Addr().(*net.TCPAddr).Port, true, true
		require.NoError(t, s.ReloadOptions(&opts))
	}
	seen := newStates()
	p := connectPlane(t, Config{Conn: quick(s.ClientURL()), OnState: seen.add})
	a := newAdmitter()
	require.NoError(t, p.Serve(testenv.Context(t), subject, a))
	_, n := seen.waitFor(t, 0, "healthy", healthy)
	reload(&server.SubjectPermission{Allow: []string{">"}, Deny: []string{"dynamo_backend.>"}})
	_, n = seen.waitFor(t, n, "forbidden", func(st State) bool { return !st.Healthy && strings.Contains(st.Reason, subject) })
	reload(all)
	seen.waitFor(t, n, "allowed again", healthy)
	nc := frontend(t, s.ClientURL(), nats.UserInfo("admin", "admin"))
	kind, _ := ask(t, nc, twoPart("x"))
	require.Equal(t, wire.ReplyAccepted, kind)
	take(t, a.started)
}

func TestSubjectThatIsNotAllowed(t *testing.T) {
	url := permissions(t, nil, &server.SubjectPermission{Deny: []string{"dynamo_backend.>"}})
	p := connectPlane(t, Config{Conn: quick(url)})
	err := p.Serve(testenv.Context(t), subject, newAdmitter())
	require.ErrorIs(t, err, nats.ErrPermissionViolation)
	require.ErrorContains(t, err, subject)
	require.NoError(t, p.Serve(testenv.Context(t), "allowed", newAdmitter()))
}

func TestProofWithoutPrivateSubjects(t *testing.T) {
	for name, url := range map[string]string{
		"subscribe": permissions(t, nil, &server.SubjectPermission{Allow: []string{"dynamo_backend.>"}}),
		"publish":   permissions(t, &server.SubjectPermission{Deny: []string{">"}}, nil),
	} {
		t.Run(name, func(t *testing.T) {
			p := connectPlane(t, Config{Conn: quick(url), ProofTimeout: 100 * time.Millisecond})
			require.NoError(t, p.Serve(testenv.Context(t), subject, newAdmitter()))
			require.True(t, p.State().Healthy)
		})
	}
}
