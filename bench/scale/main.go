// Command scale shows how the worker's cost grows with the work: with the number of streams, the length of prompts, the number of attention-DP ranks and the number of choices. What should be linear has the same cost a unit in every row.
//
//	go run ./bench/scale                    # all tables; about three minutes
//	go run ./bench/scale -only prompts
//
// CPU is that of the daemon alone; the simulated engine is a process of its own, and servers and reader are in this one.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"dynworker/bench/load"
	"dynworker/bench/meter"
	"dynworker/bench/rig"
	"dynworker/internal/caller"
	"dynworker/pkg/ingress/natsplane"

	"github.com/rs/zerolog"
)

// row is one size of one table.
type row struct {
	size     int
	settings []string
	plan     load.Plan
}

// table is one dimension.
type table struct {
	name, unit string
	rows       []row
}

func tables() []table {
	streams := table{name: "streams", unit: "streams at once, 20 tokens each at 250 ms a token"}
	for _, n := range []int{10, 100, 1000, 3000, 10_000} {
		streams.rows = append(streams.rows, row{n, []string{"engine.sim.token_delay=250ms"}, load.Plan{Streams: n, Requests: n, Prompt: 32, Tokens: 20}})
	}
	prompts := table{name: "prompts", unit: "tokens in the prompt, one in the answer, 4 streams"}
	for _, n := range []int{100, 1000, 8000, 32_000, 128_000} {
		prompts.rows = append(prompts.rows, row{n, nil, load.Plan{Streams: 4, Requests: max(40, min(400, 2_000_000/n)), Prompt: n, Tokens: 1}})
	}
	ranks := table{name: "ranks", unit: "attention-DP ranks, 64 streams at 10 ms a token"}
	for _, n := range []int{1, 2, 4, 8, 16} {
		ranks.rows = append(ranks.rows, row{n, []string{"engine.sim.token_delay=10ms", fmt.Sprintf("engine.sim.attention_dp_size=%d", n)}, load.Plan{Streams: 64, Requests: 128, Prompt: 32, Tokens: 200}})
	}
	choices := table{name: "choices", unit: "choices of each request, 16 streams at 10 ms a token"}
	for _, n := range []int{1, 2, 4, 8} {
		choices.rows = append(choices.rows, row{n, []string{"engine.sim.token_delay=10ms"}, load.Plan{Streams: 16, Requests: 32, Prompt: 32, Tokens: 200, Choices: n}})
	}
	return []table{streams, prompts, ranks, choices}
}

func main() {
	only := flag.String("only", "", "one table: streams, prompts, ranks or choices")
	flag.Parse()
	if err := run(*only); err != nil {
		fmt.Fprintln(os.Stderr, "scale:", err)
		os.Exit(1)
	}
}

func run(only string) (err error) {
	r, err := rig.New()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	for _, t := range tables() {
		if only != "" && only != t.name {
			continue
		}
		fmt.Printf("\n%s: %s\n%8s  %12s  %14s  %12s  %9s  %13s  %11s\n", t.name, t.unit, "size", "µs CPU/token", "µs CPU/request", "ns CPU/unit", "tokens/s", "KiB/stream", "median first")
		for _, row := range t.rows {
			if err := row.measure(r, t.name); err != nil {
				return fmt.Errorf("%s %d: %w", t.name, row.size, err)
			}
		}
	}
	return nil
}

func (t row) measure(r *rig.Rig, name string) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	w, err := r.Start(ctx, os.Stderr, append([]string{
		"model.path=" + r.Model, "model.name=tiny", "engine.kind=sim", "engine.sim.max_batch_size=16384", "engine.sim.total_blocks=2000000", "engine.sim.max_seq_len=200000", "engine.sim.max_num_tokens=200000",
		"log.level=error", "response_plane.merge_tokens=false",
	}, t.settings...), nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Stop()) }()
	c, err := caller.New(ctx, caller.Config{NATS: &natsplane.ConnConfig{URL: r.NATS()}, Logger: zerolog.Nop()})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	plan := t.plan
	plan.Target = w.Target
	if _, err := load.Run(ctx, c, load.Plan{Target: w.Target, Streams: 1, Requests: 2, Prompt: 32, Tokens: 2}); err != nil {
		return err
	}
	before, err := meter.One(w.PID)
	if err != nil {
		return err
	}
	peak := watchPeak(w.PID, before.Resident)
	seen, err := load.Run(ctx, c, plan)
	most := peak()
	if err != nil {
		return err
	}
	after, err := meter.One(w.PID)
	if err != nil {
		return err
	}
	spent := float64(after.Sub(before).CPU)
	units := float64(plan.Requests * plan.Prompt)
	if name != "prompts" {
		units = float64(seen.Tokens)
	}
	_, err = fmt.Printf("%8d  %12.2f  %14.0f  %12.1f  %9.0f  %13.1f  %11v\n", t.size, spent/1e3/float64(seen.Tokens), spent/1e3/float64(plan.Requests), spent/units, float64(seen.Tokens)/seen.Took.Seconds(),
		float64(most-before.Resident)/1024/float64(plan.Streams), load.Quantile(seen.First, .5).Round(10*time.Microsecond))
	return err
}

// watchPeak looks at a process's memory until the returned function is called, which gives the most that was seen.
func watchPeak(pid int, least uint64) func() uint64 {
	stop, result := make(chan struct{}), make(chan uint64)
	go func() {
		most := least
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				result <- most
				return
			case <-tick.C:
				if c, err := meter.One(pid); err == nil {
					most = max(most, c.Resident)
				}
			}
		}
	}()
	return func() uint64 { close(stop); return <-result }
}
