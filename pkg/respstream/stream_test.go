package respstream

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/protocol"
	"dynworker/pkg/wire"
)

func TestStreamFromHandshakeToSentinel(t *testing.T) {
	for _, codec := range []protocol.Codec{protocol.CodecMsgpack, protocol.CodecJSON} {
		t.Run(codec.String(), func(t *testing.T) {
			d := NewDialer(Config{})
			s, f := start(t, d)
			s.SetCodec(codec)
			require.NoError(t, s.Accept())
			require.NoError(t, s.Accept(), "accepting twice says it once")
			f.shakeHands(t)

			require.NoError(t, s.Send(tokens(5, 6)))
			require.NoError(t, s.Flush())
			item := f.item(t, codec)
			require.Equal(t, []uint32{5, 6}, item.Chunk.TokenIDs)

			require.NoError(t, s.Fail(protocol.EngineShutdown("drain")))
			require.NoError(t, s.Finish())
			item = f.item(t, codec)
			require.Equal(t, protocol.ReasonBackendEngineShutdown, item.Err.Reason)
			require.True(t, f.item(t, codec).Final)
			word, err := wire.ParseControl(f.header(t))
			require.NoError(t, err)
			require.Equal(t, wire.ControlSentinel, word)

			require.ErrorIs(t, waitDone(t, s), ErrFinished)
			require.ErrorIs(t, s.Send(tokens(7)), ErrFinished)
			require.ErrorIs(t, s.Finish(), ErrFinished)
			require.Equal(t, 1, d.Open(), "the connection waits for the frontend")
			// The frontend closes hard.
			f.reset(t)
			closeDialer(t, d)
		})
	}
}

func TestBytesOutCountsItemBodies(t *testing.T) {
	d := NewDialer(Config{})
	s, f := start(t, d)
	want := int64(0)
	for _, b := range [][]byte{
		protocol.AppendChunk(nil, protocol.CodecJSON, tokens(1)),
		protocol.AppendErrorItem(nil, protocol.CodecJSON, protocol.Internal("x")),
		protocol.AppendFinal(nil, protocol.CodecJSON),
	} {
		want += int64(len(b))
	}
	require.NoError(t, s.Send(tokens(1)))
	require.Zero(t, s.BytesOut(), "nothing is out before a flush")
	require.NoError(t, s.Fail(protocol.Internal("x")))
	require.NoError(t, s.Finish())
	require.Equal(t, want, s.BytesOut())
	f.reset(t)
	closeDialer(t, d)
}

func TestWritesAreCollected(t *testing.T) {
	writes := 0
	d := NewDialer(Config{Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, address)
		return countingConn{c, &writes}, err
	}})
	s, f := start(t, d)
	require.Zero(t, writes, "the handshake waits for the prologue")
	require.NoError(t, s.Accept())
	require.Equal(t, 1, writes)
	for i := range 8 {
		require.NoError(t, s.Send(tokens(uint32(i))))
	}
	require.Equal(t, 1, writes)
	require.NoError(t, s.Flush())
	require.NoError(t, s.Flush(), "nothing to flush")
	require.Equal(t, 2, writes)
	f.shakeHands(t)
	for i := range 8 {
		require.Equal(t, []uint32{uint32(i)}, f.item(t, protocol.CodecJSON).Chunk.TokenIDs)
	}

	// Much is not kept back for a flush.
	big := make([]uint32, flushSize/2)
	require.NoError(t, s.Send(tokens(big...)))
	require.Equal(t, 3, writes)
	require.Equal(t, big, f.item(t, protocol.CodecJSON).Chunk.TokenIDs)
	require.NoError(t, s.Finish())
	require.Equal(t, 4, writes, "last items, end mark and sentinel travel together")
	f.reset(t)
	closeDialer(t, d)
}

func TestFlushAloneSendsTheHandshake(t *testing.T) {
	d := NewDialer(Config{})
	s, f := start(t, d)
	require.NoError(t, s.Flush())
	hs, err := wire.ParseHandshake(f.header(t))
	require.NoError(t, err)
	require.Equal(t, subject, hs.Subject)
	s.Abort()
	f.ends(t)
	closeDialer(t, d)
}

func TestRefuse(t *testing.T) {
	d := NewDialer(Config{})
	s, f := start(t, d)
	require.NoError(t, s.Refuse(protocol.Overloaded("no room")))
	f.header(t)
	p, err := wire.ParsePrologue(f.header(t))
	require.NoError(t, err)
	require.Contains(t, *p.Error, "no room")
	typed, err := protocol.ParseErrorJSON(p.TypedError)
	require.NoError(t, err)
	require.Equal(t, protocol.ReasonCapacityWorkerOverloaded, typed.Reason)
	require.True(t, json.Valid(p.TypedError))
	require.ErrorIs(t, s.Accept(), ErrFinished)
	require.Equal(t, 1, d.Open(), "the frontend must have time to read it")
	require.NoError(t, f.Close())
	closeDialer(t, d)

	d = NewDialer(Config{})
	s, f = start(t, d)
	require.NoError(t, s.Accept())
	require.ErrorIs(t, s.Refuse(protocol.Overloaded("too late")), ErrAccepted)
	s.Abort()
	f.shakeHands(t)
	f.ends(t)
	closeDialer(t, d)
}

func TestAbortLeavesTheEndMarkOut(t *testing.T) {
	d := NewDialer(Config{})
	s, f := start(t, d)
	require.NoError(t, s.Send(tokens(1)))
	require.NoError(t, s.Flush())
	require.NoError(t, s.Send(tokens(2)))
	s.Abort()
	s.Abort()
	require.ErrorIs(t, waitDone(t, s), ErrFinished)
	f.shakeHands(t)
	require.Equal(t, []uint32{1}, f.item(t, protocol.CodecJSON).Chunk.TokenIDs)
	f.ends(t)
	require.ErrorIs(t, s.Flush(), ErrFinished)
	closeDialer(t, d)
}

func TestWhatTheClientDoesIsToldApart(t *testing.T) {
	for _, c := range []struct {
		name string
		did  func(*testing.T, *frontend)
		want error
	}{
		{"stop", func(t *testing.T, f *frontend) { f.send(t, wire.AppendControl(nil, wire.ControlStop)) }, ErrStop},
		{"kill", func(t *testing.T, f *frontend) { f.send(t, wire.AppendControl(nil, wire.ControlKill)) }, ErrKill},
		{"stop in pieces", func(t *testing.T, f *frontend) {
			for _, b := range wire.AppendControl(nil, wire.ControlStop) {
				f.send(t, []byte{b})
			}
		}, ErrStop},
		{"kill and end of sending", func(t *testing.T, f *frontend) {
			f.send(t, wire.AppendControl(nil, wire.ControlKill))
			require.NoError(t, f.Conn.(*net.TCPConn).CloseWrite())
		}, ErrKill},
		{"sentinel", func(t *testing.T, f *frontend) { f.send(t, wire.AppendControl(nil, wire.ControlSentinel)) }, ErrProtocol},
		{"unknown word", func(t *testing.T, f *frontend) { f.send(t, wire.AppendFrame(nil, []byte(`"pause"`), nil)) }, ErrProtocol},
		{"no json", func(t *testing.T, f *frontend) { f.send(t, wire.AppendFrame(nil, []byte(`stop`), nil)) }, ErrProtocol},
		{"empty frame", func(t *testing.T, f *frontend) { f.send(t, wire.AppendFrame(nil, nil, nil)) }, ErrProtocol},
		{"data", func(t *testing.T, f *frontend) { f.send(t, wire.AppendFrame(nil, nil, []byte("x"))) }, ErrProtocol},
		{"garbage", func(t *testing.T, f *frontend) { f.send(t, bytes.Repeat([]byte{0xff}, 100)) }, ErrProtocol},
		{"half a frame", func(t *testing.T, f *frontend) {
			f.send(t, wire.AppendControl(nil, wire.ControlStop)[:27])
			require.NoError(t, f.Conn.(*net.TCPConn).CloseWrite())
		}, ErrProtocol},
		{"reset", func(t *testing.T, f *frontend) { f.reset(t) }, ErrReset},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := NewDialer(Config{})
			s, f := start(t, d)
			require.NoError(t, s.Send(tokens(1)))
			require.NoError(t, s.Flush())
			f.shakeHands(t)
			f.item(t, protocol.CodecJSON)
			require.NoError(t, s.Send(tokens(2)), "collected, and never sent")
			c.did(t, f)
			cause := waitDone(t, s)
			require.ErrorIs(t, cause, c.want)
			require.True(t, ByClient(cause))
			require.ErrorIs(t, s.Flush(), c.want)
			require.ErrorIs(t, s.Send(tokens(3)), c.want)
			require.ErrorIs(t, s.Fail(protocol.Internal("x")), c.want)
			require.ErrorIs(t, s.Accept(), c.want)
			require.ErrorIs(t, s.Refuse(protocol.Internal("x")), c.want)
			require.ErrorIs(t, s.Finish(), c.want)
			s.Abort()
			require.ErrorIs(t, context.Cause(s.Context()), c.want, "the first cause stays")
			if !errors.Is(c.want, ErrReset) {
				_, err := io.Copy(io.Discard, f.Conn)
				if err != nil {
					// Closing with unread bytes, of the garbage here, resets.
					require.ErrorIs(t, err, syscall.ECONNRESET)
				}
			}
			closeDialer(t, d)
		})
	}
}

func TestStopBeforeTheProloguePreventsIt(t *testing.T) {
	d := NewDialer(Config{})
	s, f := start(t, d)
	require.NoError(t, s.Flush())
	f.header(t)
	f.send(t, wire.AppendControl(nil, wire.ControlKill))
	require.ErrorIs(t, waitDone(t, s), ErrKill)
	require.ErrorIs(t, s.Accept(), ErrKill)
	f.ends(t)
	closeDialer(t, d)
}

func TestHalfCloseCancelsNothing(t *testing.T) {
	d := NewDialer(Config{})
	s, f := start(t, d)
	require.NoError(t, s.Accept())
	f.shakeHands(t)
	require.NoError(t, f.Conn.(*net.TCPConn).CloseWrite())
	<-s.readDone
	require.NoError(t, s.Context().Err())
	require.NoError(t, s.Send(tokens(1)))
	require.NoError(t, s.Finish())
	require.Equal(t, []uint32{1}, f.item(t, protocol.CodecJSON).Chunk.TokenIDs)
	require.True(t, f.item(t, protocol.CodecJSON).Final)
	f.header(t)
	// There is nothing to wait for: the frontend has said that it says no more.
	f.ends(t)
	closeDialer(t, d)
}

func TestFullCloseIsNoticedByWrites(t *testing.T) {
	d := NewDialer(Config{})
	s, f := start(t, d)
	require.NoError(t, s.Accept())
	f.shakeHands(t)
	require.NoError(t, f.Close())
	<-s.readDone
	require.NoError(t, s.Context().Err(), "a plain close looks like a half-close at first")
	deadline := time.Now().Add(patience)
	var err error
	for err == nil && time.Now().Before(deadline) {
		if err = s.Send(tokens(1)); err == nil {
			err = s.Flush()
		}
	}
	require.ErrorIs(t, err, ErrWrite)
	require.False(t, ByClient(err))
	require.ErrorIs(t, waitDone(t, s), ErrWrite)
	closeDialer(t, d)
}

func TestStopAfterTheEndIsHarmless(t *testing.T) {
	d := NewDialer(Config{})
	s, f := start(t, d)
	require.NoError(t, s.Finish())
	f.send(t, wire.AppendControl(nil, wire.ControlStop))
	f.send(t, wire.AppendControl(nil, wire.ControlKill))
	f.shakeHands(t)
	require.True(t, f.item(t, protocol.CodecJSON).Final)
	f.header(t)
	require.ErrorIs(t, context.Cause(s.Context()), ErrFinished)
	require.NoError(t, f.Close())
	closeDialer(t, d)
}

func TestEndOfTheParentLeavesTheRightToSpeak(t *testing.T) {
	d := NewDialer(Config{})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, ln.Close()) }()
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errTest)
	s, err := d.Dial(ctx, info(ln.Addr().String()))
	require.NoError(t, err)
	c, err := ln.Accept()
	require.NoError(t, err)
	f := newFrontend(c)
	require.NoError(t, s.Accept())
	require.ErrorIs(t, waitDone(t, s), errTest)
	require.NoError(t, s.Fail(protocol.EngineShutdown("shutdown")))
	require.NoError(t, s.Finish())
	f.shakeHands(t)
	require.NotNil(t, f.item(t, protocol.CodecJSON).Err)
	require.True(t, f.item(t, protocol.CodecJSON).Final)
	require.NoError(t, f.Close())
	closeDialer(t, d)
}

func TestClientThatDoesNotRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var network pipes
		d := NewDialer(Config{Dial: network.dial, WriteTimeout: 30 * time.Second})
		s, err := d.Dial(t.Context(), info("127.0.0.1:1"))
		require.NoError(t, err)
		begin := time.Now()
		require.ErrorIs(t, s.Accept(), ErrWrite)
		require.Equal(t, 30*time.Second, time.Since(begin))
		require.ErrorIs(t, context.Cause(s.Context()), ErrWrite)
		network.peer(0).ends(t)
		closeDialer(t, d)
	})
}

func TestClientThatDoesNotReadLeavesNothingBehindInTheKernel(t *testing.T) {
	d := NewDialer(Config{WriteTimeout: 20 * time.Millisecond})
	s, f := start(t, d)
	chunk := tokens(make([]uint32, flushSize)...)
	var err error
	for err == nil {
		err = s.Send(chunk)
	}
	require.ErrorIs(t, err, ErrWrite)
	_, err = io.Copy(io.Discard, f.Conn)
	require.ErrorIs(t, err, syscall.ECONNRESET, "the connection is thrown away, not flushed for as long as the client likes")
	closeDialer(t, d)
}

func TestStopWhileAWriteHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var network pipes
		d := NewDialer(Config{Dial: network.dial})
		s, err := d.Dial(t.Context(), info("127.0.0.1:1"))
		require.NoError(t, err)
		result := make(chan error, 1)
		go func() { result <- s.Accept() }()
		synctest.Wait()
		network.peer(0).send(t, wire.AppendControl(nil, wire.ControlStop))
		require.ErrorIs(t, <-result, ErrStop)
		closeDialer(t, d)
	})
}

// readAll reads from a peer until the connection ends and returns how long that took.
func readAll(f *frontend) <-chan time.Duration {
	took := make(chan time.Duration, 1)
	begin := time.Now()
	go func() {
		_, _ = io.Copy(io.Discard, f.Conn)
		took <- time.Since(begin)
	}()
	return took
}

func TestFinishLingersForTheFrontend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var network pipes
		d := NewDialer(Config{Dial: network.dial})
		s, err := d.Dial(t.Context(), info("127.0.0.1:1"))
		require.NoError(t, err)
		f := network.peer(0)
		took := readAll(f)
		begin := time.Now()
		require.NoError(t, s.Finish())
		require.Zero(t, time.Since(begin), "the handler does not wait")
		require.Equal(t, 1, d.Open())
		require.Equal(t, defaultLinger, <-took, "then the worker closes")
		closeDialer(t, d)
	})
}

func TestCloseWaitsForLingeringStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var network pipes
		d := NewDialer(Config{Dial: network.dial})
		s, err := d.Dial(t.Context(), info("127.0.0.1:1"))
		require.NoError(t, err)
		f := network.peer(0)
		readAll(f)
		require.NoError(t, s.Finish())
		time.AfterFunc(3*time.Second, func() { _ = f.Close() })
		begin := time.Now()
		closeDialer(t, d)
		require.Equal(t, 3*time.Second, time.Since(begin))
		_, err = d.Dial(t.Context(), info("127.0.0.1:1"))
		require.ErrorIs(t, err, ErrDialerClosed)
	})
}

func TestCloseCutsWhatIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var network pipes
		d := NewDialer(Config{Dial: network.dial})
		finished, err := d.Dial(t.Context(), info("127.0.0.1:1"))
		require.NoError(t, err)
		active, err := d.Dial(t.Context(), info("127.0.0.1:1"))
		require.NoError(t, err)
		one, two := readAll(network.peer(0)), readAll(network.peer(1))
		require.NoError(t, finished.Finish())
		require.NoError(t, active.Accept())
		ctx, cancel := context.WithTimeoutCause(t.Context(), 2*time.Second, errTest)
		defer cancel()
		err = d.Close(ctx)
		require.ErrorIs(t, err, errTest)
		require.ErrorContains(t, err, "2 response streams cut")
		require.Equal(t, 2*time.Second, <-one)
		require.Equal(t, 2*time.Second, <-two)
		require.ErrorIs(t, context.Cause(active.Context()), ErrDialerClosed)
		require.ErrorIs(t, active.Send(tokens(1)), ErrDialerClosed)
		require.ErrorIs(t, context.Cause(finished.Context()), ErrFinished)
		require.NoError(t, d.Close(t.Context()), "closing twice")
	})
}

// A quick frontend has read the end and reset the connection before the worker's last write has returned.
func TestResetBeforeTheLastWriteReturns(t *testing.T) {
	for name, last := range map[string]func(*Stream) error{
		"finish": (*Stream).Finish,
		"refuse": func(s *Stream) error { return s.Refuse(protocol.Overloaded("no room")) },
	} {
		t.Run(name, func(t *testing.T) {
			release := make(chan struct{})
			d := NewDialer(Config{Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
				c, err := new(net.Dialer).DialContext(ctx, network, address)
				return slowConn{c, release}, err
			}})
			s, f := start(t, d)
			result := make(chan error, 1)
			go func() { result <- last(s) }()
			f.header(t)
			f.header(t)
			f.reset(t)
			<-s.readDone
			require.NoError(t, s.Context().Err())
			close(release)
			require.NoError(t, <-result)
			require.ErrorIs(t, context.Cause(s.Context()), ErrFinished)
			closeDialer(t, d)
		})
	}
}

func TestStopWhileTheLastWriteHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var network pipes
		d := NewDialer(Config{Dial: network.dial})
		s, err := d.Dial(t.Context(), info("127.0.0.1:1"))
		require.NoError(t, err)
		result := make(chan error, 1)
		go func() { result <- s.Finish() }()
		synctest.Wait()
		network.peer(0).send(t, wire.AppendControl(nil, wire.ControlStop))
		require.ErrorIs(t, <-result, ErrStop)
		require.ErrorIs(t, context.Cause(s.Context()), ErrStop)
		closeDialer(t, d)
	})
}

// The kernel tells of a reset once, to whoever asks first; the writer must not take it for a client that has closed.
func TestResetWhileWriting(t *testing.T) {
	d := NewDialer(Config{})
	for range 200 {
		s, f := start(t, d)
		require.NoError(t, s.Accept())
		f.shakeHands(t)
		resets := make(chan struct{})
		go func() {
			defer close(resets)
			_ = f.Conn.(*net.TCPConn).SetLinger(0)
			_ = f.Close()
		}()
		var err error
		for err == nil {
			if err = s.Send(tokens(1)); err == nil {
				err = s.Flush()
			}
		}
		require.ErrorIs(t, err, ErrReset)
		<-resets
	}
	closeDialer(t, d)
}
