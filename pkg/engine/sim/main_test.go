package sim

import (
	"os"
	"strconv"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/engine/ipc"
)

// Run from a shell the engine says what it is and does nothing.
func TestMainByHand(t *testing.T) {
	unset := func() {
		require.NoError(t, os.Unsetenv(ipc.EnvFD))
	}
	t.Setenv(ipc.EnvFD, "")
	unset()
	_, err := channel()
	require.Equal(t, errByHand, err)
	require.Equal(t, 2, Main())

	t.Setenv(ipc.EnvFD, "three")
	_, err = channel()
	require.ErrorContains(t, err, "no file descriptor")

	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer w.Close()
	t.Setenv(ipc.EnvFD, strconv.Itoa(dup(t, r)))
	_, err = channel()
	require.ErrorContains(t, err, "not the engine's channel")
}

// dup returns a descriptor of r that channel may close.
func dup(t *testing.T, r *os.File) int {
	defer r.Close()
	fd, err := syscall.Dup(int(r.Fd()))
	require.NoError(t, err)
	return fd
}
