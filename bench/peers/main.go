// Command peers compares what a token costs in our worker and in others: Dynamo's TensorRT-LLM worker and our bridge on one stand-in engine, Dynamo's mocker and sample worker, and a bare loop that only writes frames. All of them run under
// the same generator, at the same pace, on the same cores, one after another, in several rounds that alternate.
//
//	go run ./bench/peers                                   # everything; about ten minutes
//	go run ./bench/peers -only daemon,floor -rounds 5      # some of it
//	go run ./bench/peers -counts                           # system calls and instructions instead of times
//
// What of "daemon+bridge" is the stand-in engine's own Python and what the bridge adds to it is measured by bench/peers/bridge_share.py.
//
// Dynamo is installed from PyPI into the environment that scripts/interop uses. CPU is what the kernel accounts to the processes of a contender, user and system, the engine in it included except for "daemon", whose simulated engine is a
// process of its own. Times on a shared machine vary from minute to minute: only figures of one round can be compared, so ratios are taken within rounds.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"dynworker/bench/load"
	"dynworker/bench/rig"
	"dynworker/internal/caller"
	"dynworker/pkg/ingress/natsplane"

	"github.com/rs/zerolog"
)

// shape is one kind of load.
type shape struct {
	name                      string
	delay                     time.Duration
	streams, requests, tokens int
}

// shapes are the loads of the comparison. How long a request is decides how much of the cost is its set-up.
var shapes = []shape{
	{"10 ms a token, 64 streams", 10 * time.Millisecond, 64, 192, 256},
	{"10 ms a token, 16 streams", 10 * time.Millisecond, 16, 32, 256},
	{"no delay, 64 streams", 0, 64, 512, 256},
	{"no delay, 1 stream", 0, 1, 24, 256},
	{"one token, 16 streams", 0, 16, 2000, 1},
}

func main() {
	if len(os.Args) == 6 && os.Args[1] == floorCommand {
		if err := floor(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "floor:", err)
			os.Exit(1)
		}
		return
	}
	var o options
	flag.IntVar(&o.rounds, "rounds", 3, "rounds")
	only := flag.String("only", "", "contenders, with commas between them (default: all)")
	match := flag.String("shape", "", "only loads whose name contains this")
	flag.StringVar(&o.python, "python", "", "Python with ai-dynamo (default: install it)")
	flag.BoolVar(&o.counts, "counts", false, "count system calls (strace) and instructions (perf) instead of measuring times")
	flag.StringVar(&o.log, "log", "", "file for the workers' own output (default: none is kept)")
	flag.Parse()
	if *only != "" {
		o.only = strings.Split(*only, ",")
	}
	for _, s := range shapes {
		if strings.Contains(s.name, *match) {
			o.shapes = append(o.shapes, s)
		}
	}
	if err := run(o); err != nil {
		fmt.Fprintln(os.Stderr, "peers:", err)
		os.Exit(1)
	}
}

type options struct {
	rounds      int
	only        []string
	shapes      []shape
	python, log string
	counts      bool
}

func run(o options) (err error) {
	log := io.Writer(io.Discard)
	if o.log != "" {
		file, err := os.Create(o.log)
		if err != nil {
			return err
		}
		defer func() { _ = file.Close() }()
		log = file
	}
	r, err := rig.New()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	dir, err := os.MkdirTemp("", "dynworker-peers-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	f, err := newField(r, dir, o.python, log)
	if err != nil {
		return err
	}
	b := &board{}
	for round := range o.rounds {
		for _, delay := range delays(o.shapes) {
			if o.wants("floor") {
				for _, s := range at(o.shapes, delay) {
					got, err := measureFloor(s)
					if err != nil {
						return err
					}
					b.add("floor", s.name, got)
				}
			}
			for _, c := range f.contenders() {
				if !o.wants(c.name) || !c.paced(delay) {
					continue
				}
				fmt.Fprintf(os.Stderr, "round %d: %s at %v a token\n", round+1, c.name, delay)
				if err := o.turn(f, c, delay, b); err != nil {
					return fmt.Errorf("%s at %v a token: %w", c.name, delay, err)
				}
			}
		}
	}
	return b.print(os.Stdout, o)
}

func (o *options) wants(name string) bool { return len(o.only) == 0 || slices.Contains(o.only, name) }

func delays(all []shape) (list []time.Duration) {
	for _, s := range all {
		if !slices.Contains(list, s.delay) {
			list = append(list, s.delay)
		}
	}
	return list
}

func at(all []shape, delay time.Duration) (list []shape) {
	for _, s := range all {
		if s.delay == delay {
			list = append(list, s)
		}
	}
	return list
}

// turn starts a contender at a pace and measures all loads of that pace.
func (o *options) turn(f *field, c *contender, delay time.Duration, b *board) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	w, err := c.start(ctx, delay)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Stop()) }()
	client, err := caller.New(ctx, caller.Config{NATS: &natsplane.ConnConfig{URL: f.rig.NATS()}, Logger: zerolog.Nop()})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	plan := load.Plan{Target: w.Target, Streams: 1, Requests: 3, Prompt: promptTokens, Tokens: 2}
	if _, err := load.Run(ctx, client, plan); err != nil {
		return err
	}
	for _, s := range at(o.shapes, delay) {
		plan := load.Plan{Target: w.Target, Streams: s.streams, Requests: s.requests, Prompt: promptTokens, Tokens: s.tokens}
		if o.counts {
			if err := count(ctx, c, w.PID, client, plan, s, b); err != nil {
				return err
			}
			continue
		}
		before, err := c.cost(w.PID)
		if err != nil {
			return err
		}
		seen, err := load.Run(ctx, client, plan)
		if err != nil {
			return err
		}
		after, err := c.cost(w.PID)
		if err != nil {
			return err
		}
		got := newSample(after, before, seen.Tokens, seen.Frames, s.requests, seen.Took)
		got.started, got.first, got.gap = w.Started, load.Quantile(seen.First, 0.5), load.Quantile(seen.Gap, 0.99)
		b.add(c.name, s.name, got)
	}
	return nil
}

const promptTokens = 32
