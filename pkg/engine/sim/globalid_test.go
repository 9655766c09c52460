package sim_test

import (
	"encoding/json"
	"strconv"
	"testing"

	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/engine/sim"

	"github.com/stretchr/testify/require"
)

// Ids of two machines differ, and so do two of one machine.
func TestGlobalIDs(t *testing.T) {
	p := attach(t, sim.Args{})
	require.Equal(t, 1024, p.Ready().Bounds.MachineIDs)
	seen := map[string]bool{}
	for _, machine := range []int{0, 0, 1, 1023} {
		a, left := prefill(t, p, prompt(3), streaming(1), terms{"request_type": "context_only", "machine_id": machine})
		require.Nil(t, a.err)
		id := string(left["disagg_request_id"].(json.Number))
		require.False(t, seen[id])
		seen[id] = true
		n, err := strconv.ParseUint(id, 10, 64)
		require.NoError(t, err)
		require.EqualValues(t, machine, n>>12&1023)
		require.NotContains(t, left, "machine_id")
	}
	for _, machine := range []any{1024, -1, "x"} {
		a, _ := prefill(t, p, prompt(3), streaming(1), terms{"request_type": "context_only", "machine_id": machine})
		require.NotNil(t, a.err, machine)
		require.Contains(t, []ipc.ErrorKind{ipc.ErrorValue, ipc.ErrorType}, a.err.Kind)
	}
}
