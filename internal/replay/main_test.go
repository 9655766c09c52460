package replay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"dynworker/internal/app"
	"dynworker/internal/caller"
	"dynworker/internal/testenv/embedded"
	"dynworker/pkg/discovery"
	"dynworker/pkg/engine/sim"
	"dynworker/pkg/ingress/natsplane"
	"dynworker/testdata"

	"github.com/rs/zerolog"
	"go.uber.org/goleak"
)

// TestMain makes the test program the simulated engine when a worker starts it as such, as the worker's binary is, and otherwise runs the tests between servers that they share.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == app.EngineCommand {
		os.Exit(sim.Main())
	}
	goleak.VerifyTestMain(inWorld{m})
}

// patience bounds every wait; reaching it means that the thing does not happen at all.
const patience = 90 * time.Second

// world is what all workers and tests share: etcd, NATS, a model folder, and a client for each.
var world struct {
	etcd    *embedded.Etcd
	nats    *embedded.NATS
	model   string
	python  string
	records *discovery.Client
	witness *witness
	caller  *caller.Caller
}

// inWorld runs tests with a world around them.
type inWorld struct{ m *testing.M }

// Run implements goleak.TestingM.
func (w inWorld) Run() (code int) {
	end, err := makeWorld()
	if err != nil {
		fmt.Fprintln(os.Stderr, "replay:", errors.Join(err, end()))
		return 1
	}
	code = w.m.Run()
	if err := errors.Join(end(), orphans()); err != nil {
		fmt.Fprintln(os.Stderr, "replay:", err)
		return 1
	}
	return code
}

// makeWorld starts everything and returns how to end what was started.
func makeWorld() (end func() error, err error) {
	var ends []func() error
	end = func() error {
		var all error
		for i := len(ends) - 1; i >= 0; i-- {
			all = errors.Join(all, ends[i]())
		}
		return all
	}
	dir, err := os.MkdirTemp("", "dynworker-replay-")
	if err != nil {
		return end, err
	}
	ends = append(ends, func() error { return os.RemoveAll(dir) })
	world.model = filepath.Join(dir, "model")
	if err := errors.Join(os.Mkdir(world.model, 0o700), testdata.WriteModel(world.model)); err != nil {
		return end, err
	}
	if world.python, err = interpreter(); err != nil {
		return end, err
	}
	if world.etcd, err = embedded.NewEtcd(embedded.EtcdOptions{}); err != nil {
		return end, err
	}
	ends = append(ends, world.etcd.Close)
	if world.nats, err = embedded.NewNATS(embedded.NATSOptions{}); err != nil {
		return end, err
	}
	ends = append(ends, world.nats.Close)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if world.records, err = discovery.Connect(ctx, discovery.Config{Endpoints: []string{world.etcd.Endpoint()}, Logger: zerolog.Nop()}); err != nil {
		return end, err
	}
	ends = append(ends, func() error { world.records.Close(); return nil })
	if world.witness, err = newWitness(ctx, world.records); err != nil {
		return end, err
	}
	ends = append(ends, world.witness.close)
	if world.caller, err = caller.New(ctx, caller.Config{NATS: &natsplane.ConnConfig{URL: world.nats.URL()}, Logger: zerolog.Nop()}); err != nil {
		return end, err
	}
	ends = append(ends, world.caller.Close)
	return end, nil
}

// interpreter is the path of Python itself: what PATH has may be a launcher that takes longer than the whole engine.
func interpreter() (string, error) {
	out, err := exec.Command("python3", "-c", "import sys; print(sys.executable)").Output()
	return strings.TrimSpace(string(out)), err
}

// mark is in the environment of every engine of this test run, and so in that of everything that an engine starts.
var mark = "DYNWORKER_REPLAY=" + strconv.Itoa(os.Getpid())

// orphans fails when a process of an engine has outlived the tests.
func orphans() error {
	environs, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		return err
	}
	var left error
	for _, file := range environs {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // gone, or somebody else's
		}
		for variable := range bytes.SplitSeq(text, []byte{0}) {
			if string(variable) == mark {
				left = errors.Join(left, fmt.Errorf("a process of an engine is left: %s", filepath.Dir(file)))
			}
		}
	}
	return left
}
