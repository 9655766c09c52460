package modelcard

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const recordedModel = "testdata/model"

// modelDir copies the recorded model to a folder of its own and changes it:
// a nil value removes the file, anything else becomes its content.
func modelDir(t *testing.T, changes map[string]string, remove ...string) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.CopyFS(dir, os.DirFS(recordedModel)))
	for name, content := range changes {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	for _, name := range remove {
		require.NoError(t, os.Remove(filepath.Join(dir, name)))
	}
	return dir
}

func load(t *testing.T, dir string, o Options) *Model {
	t.Helper()
	m, err := Load(dir, o)
	require.NoError(t, err)
	return m
}

func ptr[T any](v T) *T { return &v }
