package heldport

import (
	"net"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPortIsTakenByNobodyElse(t *testing.T) {
	p, err := Hold()
	require.NoError(t, err)
	defer p.Release()
	for range 200 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		require.NotEqual(t, p.Address(), l.Addr().String())
		require.NoError(t, l.Close())
	}
}

func TestOwnerListensAgainAndAgain(t *testing.T) {
	p, err := Hold()
	require.NoError(t, err)
	defer p.Release()
	for range 3 {
		_, err := net.Dial("tcp", p.Address())
		require.ErrorIs(t, err, syscall.ECONNREFUSED)

		l, err := net.Listen("tcp", p.Address())
		require.NoError(t, err)
		require.Equal(t, p.Number(), l.Addr().(*net.TCPAddr).Port)
		out, err := net.Dial("tcp", p.Address())
		require.NoError(t, err)
		in, err := l.Accept()
		require.NoError(t, err)
		// The server closes first, so that its side of the connection stays behind in TIME_WAIT.
		require.NoError(t, l.Close())
		require.NoError(t, in.Close())
		require.NoError(t, out.Close())
	}
}
