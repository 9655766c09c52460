// Command cost measures what the worker costs: time from its start to the first served request, resident memory, and CPU per token of the daemon alone (its engine is another process) at several numbers of streams.
//
//	go run ./bench/cost                 # simulated engine, without delay and at 10 ms a token
//	go run ./bench/cost -streams 64 -delays 10ms -requests 256
//	go run ./bench/cost -tree …         # daemon and engine process together
//	go run ./bench/cost -attach PID -etcd URL -nats URL -namespace NS   # a worker that runs already, of whatever make
//
// etcd, NATS and the client run inside this program and take their share of the machine, but are not part of any figure. CPU is what the kernel accounts to the worker's process (user and system). Times on a shared machine vary; compare
// figures of one run.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"dynworker/bench/load"
	"dynworker/bench/meter"
	"dynworker/bench/rig"
	"dynworker/internal/caller"
	"dynworker/pkg/discovery"
	"dynworker/pkg/ingress/natsplane"
	"dynworker/pkg/protocol"

	"github.com/rs/zerolog"
)

// plan is what to measure.
type plan struct {
	streams  []int
	delays   []time.Duration
	requests int
	tokens   int
	merge    bool
	tree     bool
	settings []string
	// attach is the process of a worker that runs already, 0 to start our own.
	attach                int
	etcd, nats, namespace string
}

func main() {
	var p plan
	streams := flag.String("streams", "1,16,64", "numbers of streams at once")
	delays := flag.String("delays", "0s,10ms", "time a token of the simulated engine")
	flag.IntVar(&p.requests, "requests", 128, "requests of each measurement, shared by its streams")
	flag.IntVar(&p.tokens, "tokens", 256, "tokens of each request")
	flag.BoolVar(&p.tree, "tree", false, "count the worker's child processes too")
	flag.IntVar(&p.attach, "attach", 0, "measure this worker process instead of starting one")
	flag.StringVar(&p.etcd, "etcd", "http://localhost:2379", "etcd of the attached worker")
	flag.StringVar(&p.nats, "nats", "nats://localhost:4222", "NATS of the attached worker")
	flag.StringVar(&p.namespace, "namespace", "dynamo", "namespace of the attached worker")
	flag.BoolVar(&p.merge, "merge", false, "let the worker put several tokens into one frame")
	flag.Func("set", "a further setting of the worker, key=value", func(s string) error { p.settings = append(p.settings, s); return nil })
	flag.Parse()
	for word := range strings.SplitSeq(*streams, ",") {
		n, err := strconv.Atoi(word)
		if err != nil || n < 1 {
			fmt.Fprintf(os.Stderr, "cost: -streams: %q is no number of streams\n", word)
			os.Exit(2)
		}
		p.streams = append(p.streams, n)
	}
	for word := range strings.SplitSeq(*delays, ",") {
		d, err := time.ParseDuration(word)
		if err != nil {
			fmt.Fprintf(os.Stderr, "cost: -delays: %v\n", err)
			os.Exit(2)
		}
		p.delays = append(p.delays, d)
	}
	if err := p.run(); err != nil {
		fmt.Fprintln(os.Stderr, "cost:", err)
		os.Exit(1)
	}
}

const header = "delay  streams  requests  tokens/s  µs CPU/token  µs CPU/request  tokens/frame  switches/token  RSS idle MiB  RSS after MiB  start to first answer"

// runAttached measures a worker that somebody else started. Its pace is its own; the first delay is only printed.
func (p *plan) runAttached() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Minute)
	defer cancel()
	client, err := discovery.Connect(ctx, discovery.Config{Endpoints: []string{p.etcd}, Logger: zerolog.Nop()})
	if err != nil {
		return err
	}
	defer client.Close()
	records, err := client.List(ctx, protocol.InstancePrefix+p.namespace+"/")
	if err != nil {
		return err
	}
	for _, r := range records {
		target, err := protocol.ParseInstance(r.Value)
		if err != nil {
			return err
		}
		if target.Endpoint != "generate" {
			continue
		}
		fmt.Println(header)
		for _, n := range p.streams {
			if err := p.load(ctx, p.attach, target, p.nats, p.delays[0], n, time.Now()); err != nil {
				return err
			}
		}
		return nil
	}
	return fmt.Errorf("no worker in namespace %s", p.namespace)
}

func (p *plan) run() (err error) {
	if p.attach != 0 {
		return p.runAttached()
	}
	r, err := rig.New()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	fmt.Println(header)
	for _, delay := range p.delays {
		for _, n := range p.streams {
			if err := p.measure(r, delay, n); err != nil {
				return fmt.Errorf("%v a token, %d streams: %w", delay, n, err)
			}
		}
	}
	return nil
}

func (p *plan) measure(r *rig.Rig, delay time.Duration, streams int) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	started := time.Now()
	w, err := r.Start(ctx, os.Stderr, append([]string{
		"model.path=" + r.Model, "model.name=tiny", "engine.kind=sim", "engine.sim.token_delay=" + delay.String(), "engine.sim.max_batch_size=16384",
		"log.level=warn", "response_plane.merge_tokens=" + strconv.FormatBool(p.merge),
	}, p.settings...), nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Stop()) }()
	return p.load(ctx, w.PID, w.Target, r.NATS(), delay, streams, started)
}

// load drives a worker and prints what it cost.
func (p *plan) load(ctx context.Context, pid int, target protocol.Instance, nats string, delay time.Duration, streams int, started time.Time) (err error) {
	c, err := caller.New(ctx, caller.Config{NATS: &natsplane.ConnConfig{URL: nats}, Logger: zerolog.Nop()})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	if _, err := load.Run(ctx, c, load.Plan{Target: target, Streams: 1, Requests: 1, Prompt: promptTokens, Tokens: 1}); err != nil {
		return err
	}
	first := time.Since(started)
	cost := meter.One
	if p.tree {
		cost = meter.Tree
	}
	before, err := cost(pid)
	if err != nil {
		return err
	}
	seen, err := load.Run(ctx, c, load.Plan{Target: target, Streams: streams, Requests: p.requests, Prompt: promptTokens, Tokens: p.tokens})
	if err != nil {
		return err
	}
	after, err := cost(pid)
	if err != nil {
		return err
	}
	spent, tokens := after.Sub(before), float64(seen.Tokens)
	_, err = fmt.Printf("%-6v %7d  %8d  %8.0f  %12.2f  %14.0f  %12.2f  %14.2f  %12.1f  %13.1f  %v\n", delay, streams, p.requests, tokens/seen.Took.Seconds(), micros(spent.CPU)/tokens, micros(spent.CPU)/float64(p.requests),
		tokens/float64(seen.Frames), float64(spent.Voluntary)/tokens, mib(before.Resident), mib(after.Resident), first.Round(time.Millisecond))
	return err
}

const promptTokens = 32

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

func mib(bytes uint64) float64 { return float64(bytes) / (1 << 20) }
