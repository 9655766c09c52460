package main

import (
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
)

// The measurement reaches into the bridge, so it has to keep up with it: it fails itself where a token is missing. What it measures is no concern here.
func TestTheBridgesShareIsMeasured(t *testing.T) {
	for _, way := range [][]string{nil, {"--stepped"}} {
		cmd := exec.CommandContext(t.Context(), "python3", append([]string{"bridge_share.py", "--rounds", "1", "--streams", "2", "--tokens", "5", "--delay-ms", "1"}, way...)...)
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Regexp(t, `(?m)^median: engine \d+\.\d, with the bridge \d+\.\d, the bridge's share of a pair -?\d+\.\d us CPU/token$`, string(out))
	}
}
