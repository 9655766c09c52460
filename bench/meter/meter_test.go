package meter

import (
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAProcessAndItsChildrenAreCounted(t *testing.T) {
	before, err := One(os.Getpid())
	require.NoError(t, err)
	require.Positive(t, before.Resident)
	require.Positive(t, before.Threads)
	require.GreaterOrEqual(t, before.Descriptors, 3)
	for spent := before; spent.CPU-before.CPU < 50*time.Millisecond; {
		spent, err = One(os.Getpid())
		require.NoError(t, err)
	}

	child := exec.Command("cat")
	in, err := child.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, child.Start())
	require.Contains(t, Descendants(os.Getpid()), child.Process.Pid)
	one, err := One(os.Getpid())
	require.NoError(t, err)
	tree, err := Tree(os.Getpid())
	require.NoError(t, err)
	require.Greater(t, tree.Descriptors, one.Descriptors)
	require.NoError(t, in.Close())
	require.NoError(t, child.Wait())
	_, err = One(child.Process.Pid)
	require.True(t, gone(err), "%v", err)

	after, err := One(os.Getpid())
	require.NoError(t, err)
	require.GreaterOrEqual(t, after.Sub(before).CPU, 50*time.Millisecond)
}
