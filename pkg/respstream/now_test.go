package respstream

import (
	"context"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/protocol"
)

func TestFlushNowWritesWithoutWaiting(t *testing.T) {
	d := NewDialer(Config{})
	s, f := start(t, d)
	require.False(t, s.Idle(), "the handshake waits")
	require.NoError(t, s.Accept())
	require.True(t, s.Idle())
	require.True(t, s.FlushNow(), "nothing to write")
	before := s.BytesOut()
	require.NoError(t, s.Send(tokens(7)))
	require.False(t, s.Idle())
	require.True(t, s.FlushNow())
	require.True(t, s.Idle())
	require.Greater(t, s.BytesOut(), before)
	f.shakeHands(t)
	require.Equal(t, []uint32{7}, f.item(t, protocol.CodecJSON).Chunk.TokenIDs)
	require.NoError(t, s.Finish())
	require.False(t, func() bool { _ = s.Send(tokens(8)); return !s.Idle() }(), "nothing is collected after the end")
	f.reset(t)
	closeDialer(t, d)
}

// A frontend that does not read costs FlushNow nothing, and what it left behind is the beginning of what Flush writes.
func TestFlushNowLeavesTheRestToFlush(t *testing.T) {
	d := NewDialer(Config{})
	s, f := start(t, d)
	require.NoError(t, s.Accept())
	item := tokens(make([]uint32, 1000)...)
	sent := 0
	for whole := true; whole; sent++ {
		require.NoError(t, s.Send(item))
		whole = s.FlushNow()
	}
	require.False(t, s.Idle(), "no other item may go before the rest")
	require.False(t, s.FlushNow())
	done := make(chan error, 1)
	go func() { done <- s.Flush() }()
	f.shakeHands(t)
	for range sent {
		require.Len(t, f.item(t, protocol.CodecJSON).Chunk.TokenIDs, 1000)
	}
	require.NoError(t, <-done)
	require.True(t, s.Idle())
	require.NoError(t, s.Finish())
	f.reset(t)
	closeDialer(t, d)
}

func TestFlushNowLeavesTroubleToFlush(t *testing.T) {
	d := NewDialer(Config{})
	s, f := start(t, d)
	require.NoError(t, s.Accept())
	require.NoError(t, s.Send(tokens(1)))
	f.reset(t)
	require.ErrorIs(t, waitDone(t, s), ErrReset)
	require.False(t, s.FlushNow())
	require.ErrorIs(t, s.Flush(), ErrReset)
	closeDialer(t, d)
}

func TestNoDirectWayThroughOtherConnections(t *testing.T) {
	d := NewDialer(Config{Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, address)
		return countingConn{c, new(int)}, err
	}})
	s, f := start(t, d)
	require.NoError(t, s.Accept())
	require.False(t, s.Idle())
	s.Abort()
	f.reset(t)
	closeDialer(t, d)
}
