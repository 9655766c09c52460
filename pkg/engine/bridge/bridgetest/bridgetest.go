// Package bridgetest starts the TensorRT-LLM bridge on the stand-in for the
// tensorrt_llm package, for tests of the bridge and of everything above it. It
// needs python3 in the PATH and no GPU; a missing interpreter fails the test.
package bridgetest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/engine/bridge"
)

// Setup says which build the stand-in shall play and what it shall do wrong.
type Setup struct {
	API string   // rc19, hybrid, rc21, rc29 or 1.4; empty: rc21
	Env []string // more STANDIN_… variables, see testdata/standin/tensorrt_llm/_switch.py
}

// Launch is what a test needs to start one bridge.
type Launch struct {
	Command []string
	Env     []string // complete
	Model   string   // a model folder; the engine argument "model"
	Log     Log      // what the stand-in was asked to do
}

// New installs the bridge in a temporary directory of the test.
func New(tb testing.TB, s Setup) Launch {
	tb.Helper()
	python, err := exec.LookPath("python3")
	require.NoError(tb, err, "the bridge's tests need python3")
	program, err := bridge.Install(tb.TempDir())
	require.NoError(tb, err)
	log := filepath.Join(tb.TempDir(), "calls.jsonl")
	env := []string{
		"PATH=" + os.Getenv("PATH"),
		"PYTHONPATH=" + Dir("standin"),
		"PYTHONDONTWRITEBYTECODE=1",
		"STANDIN_LOG=" + log,
	}
	if s.API != "" {
		env = append(env, "STANDIN_API="+s.API)
	}
	return Launch{
		Command: bridge.Command(python, program),
		Env:     append(env, s.Env...),
		Model:   Dir("model"),
		Log:     Log(log),
	}
}

// Dir is the absolute path of a folder in the bridge's test data.
func Dir(name string) string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "..", "testdata", name)
}

// Log is the path of the stand-in's log.
type Log string

// Call is one line of the log: its kind is under "event".
type Call map[string]any

// Event is the call's kind: llm_init, generate_async, placed, abort, finish,
// workers or shutdown.
func (c Call) Event() string { name, _ := c["event"].(string); return name }

// Int is a whole number of the call.
func (c Call) Int(key string) int { n, _ := c[key].(float64); return int(n) }

// Calls returns the calls of the given kinds so far, all kinds without one. A
// call is in the log before the stand-in lets its effect be seen.
func (l Log) Calls(tb testing.TB, kinds ...string) []Call {
	tb.Helper()
	text, err := os.ReadFile(string(l))
	if os.IsNotExist(err) {
		return nil
	}
	require.NoError(tb, err)
	var calls []Call
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var call Call
		require.NoError(tb, json.Unmarshal(lines.Bytes(), &call))
		for _, kind := range kinds {
			if call.Event() == kind {
				calls = append(calls, call)
			}
		}
		if len(kinds) == 0 {
			calls = append(calls, call)
		}
	}
	require.NoError(tb, lines.Err())
	return calls
}
