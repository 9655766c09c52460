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
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

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

const header = "delay  streams  requests  tokens/s  µs CPU/token  µs CPU/request  tokens/frame  RSS idle MiB  RSS after MiB  start to first answer"

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

// tally is what the streams of a measurement saw.
type tally struct {
	mu             sync.Mutex
	tokens, frames int
	err            error
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
	var warm tally
	warm.one(ctx, c, target, 1)
	if warm.err != nil {
		return warm.err
	}
	first := time.Since(started)
	idle, err := p.rss(pid)
	if err != nil {
		return err
	}
	before, err := p.cpu(pid)
	if err != nil {
		return err
	}
	begin := time.Now()
	var t tally
	var work sync.WaitGroup
	queue := make(chan struct{}, p.requests)
	for range p.requests {
		queue <- struct{}{}
	}
	close(queue)
	for range streams {
		work.Go(func() {
			for range queue {
				t.one(ctx, c, target, p.tokens)
			}
		})
	}
	work.Wait()
	took := time.Since(begin)
	after, err := p.cpu(pid)
	if err != nil || t.err != nil {
		return errors.Join(err, t.err)
	}
	full, err := p.rss(pid)
	if err != nil {
		return err
	}
	spent := after - before
	_, err = fmt.Printf("%-6v %7d  %8d  %8.0f  %12.2f  %14.0f  %12.2f  %12.1f  %13.1f  %v\n", delay, streams, p.requests, float64(t.tokens)/took.Seconds(), micros(spent)/float64(t.tokens), micros(spent)/float64(p.requests),
		float64(t.tokens)/float64(t.frames), idle, full, first.Round(time.Millisecond))
	return err
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// one sends a request and reads its answer to the end.
func (t *tally) one(ctx context.Context, c *caller.Caller, target protocol.Instance, tokens int) {
	codec, err := protocol.ParseCodec(target.Codec)
	if err != nil {
		t.add(0, 0, err)
		return
	}
	prompt := make([]int32, 32)
	for i := range prompt {
		prompt[i] = int32(10 + i)
	}
	s, err := c.Do(ctx, caller.Call{Transport: target.Transport, Codec: codec, Request: &protocol.Request{TokenIDs: prompt, TokensState: protocol.TokensList, Fields: protocol.Map{
		"stop_conditions": protocol.Map{"max_tokens": int64(tokens), "ignore_eos": true}, "sampling_options": protocol.Map{}, "output_options": protocol.Map{}, "routing": protocol.Map{},
	}}})
	if err != nil {
		t.add(0, 0, err)
		return
	}
	got, frames := 0, 0
	for {
		item, err := s.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil && item.Err != nil {
			err = item.Err
		}
		if err != nil {
			t.add(0, 0, err)
			return
		}
		if item.Chunk != nil {
			got += len(item.Chunk.TokenIDs)
			frames++
		}
	}
	if got != tokens {
		err = fmt.Errorf("%d tokens, want %d", got, tokens)
	}
	t.add(got, frames, errors.Join(err, s.Close()))
}

func (t *tally) add(tokens, frames int, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.tokens += tokens
	t.frames += frames
	if t.err == nil {
		t.err = err
	}
}

// clockTick is the unit of CPU time in /proc, which is 10 ms on every Linux that Go runs on.
const clockTick = 10 * time.Millisecond

// pids are the processes that count: the worker, and with -tree its descendants.
func (p *plan) pids(root int) []int {
	all := []int{root}
	for i := 0; p.tree && i < len(all); i++ {
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", all[i]))
		for _, name := range threads {
			raw, err := os.ReadFile(name)
			if err != nil {
				continue // the thread has ended
			}
			for word := range strings.FieldsSeq(string(raw)) {
				if pid, err := strconv.Atoi(word); err == nil {
					all = append(all, pid)
				}
			}
		}
	}
	return all
}

func (p *plan) cpu(root int) (sum time.Duration, err error) {
	for _, pid := range p.pids(root) {
		d, err := cpu(pid)
		if err != nil {
			return 0, err
		}
		sum += d
	}
	return sum, nil
}

func (p *plan) rss(root int) (sum float64, err error) {
	for _, pid := range p.pids(root) {
		m, err := rss(pid)
		if err != nil {
			return 0, err
		}
		sum += m
	}
	return sum, nil
}

// cpu is the user and system time that a process has used.
func cpu(pid int) (time.Duration, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The name in the second field may hold spaces; what follows its closing parenthesis does not.
	_, rest, _ := strings.Cut(string(raw), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 13 {
		return 0, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	var sum int64
	for _, f := range fields[11:13] {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return time.Duration(sum) * clockTick, nil
}

// rss is the resident memory of a process in MiB.
func rss(pid int) (float64, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }()
	for s := bufio.NewScanner(f); s.Scan(); {
		if value, ok := strings.CutPrefix(s.Text(), "VmRSS:"); ok {
			kib, err := strconv.ParseFloat(strings.Fields(value)[0], 64)
			return kib / 1024, err
		}
	}
	return 0, fmt.Errorf("/proc/%d/status has no VmRSS", pid)
}
