package config

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzCommandLine: whatever the options are, the answer is a configuration, the
// help, or problems that say something.
func FuzzCommandLine(f *testing.F) {
	for _, line := range []string{
		"--model\n/m\n--trtllm.a.b\n1\n--max-batch\n7", "--trtllm.a\n--trtllm.b=1", "--connector\nnone\nx\n--", "--max\n8\n-x\nstray", "--publish-events-and-metrics=maybe\n--no-publish", "--set\nlora=[{name: a, path: b}]\n--set\nengine.args.a=1",
		"--override-engine-args\n{\"a\": 1}\n--trtllm.a\n2", "--=\n---\n--trtllm.\n1\n-h", "--config=\n--model=a=b\n--modality\nvideo",
	} {
		f.Add(line)
	}
	f.Fuzz(func(t *testing.T, line string) {
		c, r, err := Load(strings.Split(line, "\n"), nil, func(string) ([]byte, error) { return nil, errors.New("no files here") })
		require.NotNil(t, r)
		if err == nil {
			require.NoError(t, c.Validate())
			return
		}
		if errors.Is(err, ErrHelp) {
			return
		}
		var errs Errors
		require.ErrorAs(t, err, &errs)
		for _, p := range errs {
			require.NotEmpty(t, p.Reason)
			require.Error(t, p.Kind)
		}
	})
}
