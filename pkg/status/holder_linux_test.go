package status

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// checkHolder expects this very process to be named.
func checkHolder(t *testing.T, e *BindError) {
	require.NotNil(t, e.Holder)
	require.Equal(t, os.Getpid(), e.Holder.PID)
	require.NotEmpty(t, e.Holder.Name)
	require.ErrorContains(t, e, e.Holder.Name)
}

func TestListeningInodes(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:2382 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 111 1 0000000000000000 100 0 0 10 0
   1: 0100007F:2382 0100007F:C000 01 00000000:00000000 00:00000000 00000000     0        0 222 1 0000000000000000 100 0 0 10 0
   2: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 333 1 0000000000000000 100 0 0 10 0
   3: short 0A
   4: nocolon 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 444 1 0
`
	got := make(map[string]bool)
	listeningInodes(strings.NewReader(table), 9090, got)
	require.Equal(t, map[string]bool{"111": true}, got, "listening on the port, not connected from it")
}

func TestNobodyHoldsPortZero(t *testing.T) {
	require.Nil(t, findHolder(0))
}
