package bridge_test

import (
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/engine/bridge/bridgetest"
)

func TestPythonUnits(t *testing.T) {
	l := bridgetest.New(t, bridgetest.Setup{})
	cmd := exec.Command(l.Command[0], "-m", "unittest", "discover", "-s", bridgetest.Dir("unit"))
	cmd.Env = append(l.Env, "PYTHONPATH="+bridgetest.Dir("../python")+":"+bridgetest.Dir("standin"))
	text, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", text)
	require.Contains(t, string(text), "OK")
}
