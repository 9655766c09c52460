package engine_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"syscall"
	"testing"
	"time"

	"dynworker/pkg/engine"
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/engine/sim"
)

// simEnv makes the test binary the simulated engine; see init.
const simEnv = "ENGINE_BENCH_SIM"

// The engine has to be the child before the tests' own main runs, which knows
// nothing of this package's outside.
func init() {
	if os.Getenv(simEnv) != "" {
		os.Exit(sim.Main())
	}
}

// BenchmarkTokens is what a token costs this process between a real engine
// process without delay and the reader of its stream: one operation is one
// token. "worker-cpu-ns/token" leaves the engine's own work out.
func BenchmarkTokens(b *testing.B) {
	for _, streams := range []int{1, 16, 64} {
		b.Run(fmt.Sprintf("streams=%d", streams), func(b *testing.B) {
			args, err := json.Marshal(sim.Args{MaxSeqLen: 1 << 30, StatsInterval: sim.Duration(time.Hour)})
			if err != nil {
				b.Fatal(err)
			}
			exe, err := os.Executable()
			if err != nil {
				b.Fatal(err)
			}
			p, err := engine.Start(context.Background(), engine.Config{
				Command: []string{exe}, Env: []string{simEnv + "=1"}, Configure: ipc.Configure{Args: args},
			})
			if err != nil {
				b.Fatal(err)
			}
			each := b.N/streams + 1
			done := make(chan error, streams)
			b.ReportAllocs()
			b.ResetTimer()
			before := cpuTime()
			for range streams {
				go func() { done <- drain(p, each) }()
			}
			for range streams {
				if err := <-done; err != nil {
					b.Fatal(err)
				}
			}
			spent := cpuTime() - before
			b.StopTimer()
			b.ReportMetric(float64(spent.Nanoseconds())/float64(each*streams), "worker-cpu-ns/token")
			b.ReportMetric(float64(each*streams)/b.Elapsed().Seconds(), "tokens/s")
			if err := p.Stop(context.Background()); err != nil {
				b.Fatal(err)
			}
		})
	}
}

func drain(p *engine.Process, tokens int) error {
	max := int64(tokens)
	s, err := p.Generate(context.Background(), &ipc.Generate{Streaming: true, Sampling: ipc.Sampling{MaxTokens: &max}}, []int32{5, 6, 7})
	if err != nil {
		return err
	}
	got := 0
	for {
		outs, err := s.Next(context.Background())
		if err == io.EOF && got == tokens {
			return nil
		}
		if err != nil {
			return fmt.Errorf("after %d of %d tokens: %w", got, tokens, err)
		}
		for i := range outs {
			got += len(outs[i].Tokens)
		}
	}
}

// cpuTime is what this process has used so far.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
