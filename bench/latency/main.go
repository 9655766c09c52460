// Command latency measures how long a token is under way inside the worker: from the moment at which the engine process writes it to the moment at which the frontend's side has read and decoded its frame. It can also show from how many
// streams on the worker falls behind, which is when the time under way grows without end.
//
//	go run ./bench/latency                                  # 64 streams at 10 ms, and growing numbers at 50 ms a token
//	go run ./bench/latency -streams 5000 -step 50ms -groups 16
//
// The engine is a program whose tokens say when they were written; worker, engine and reader share the machine, and the reader's own waking up and decoding is in the figures.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"dynworker/bench/load"
	"dynworker/bench/meter"
	"dynworker/bench/rig"
	"dynworker/internal/caller"
	"dynworker/pkg/ingress/natsplane"
	"dynworker/pkg/protocol"

	"github.com/rs/zerolog"
)

// trial is one measurement.
type trial struct {
	streams, groups int
	step            time.Duration
}

func main() {
	if len(os.Args) == 4 && os.Args[1] == engineCommand {
		if err := runEngine(os.Args[2:]); err != nil && !errors.Is(err, io.EOF) {
			fmt.Fprintln(os.Stderr, "latency engine:", err)
			os.Exit(1)
		}
		return
	}
	streams := flag.String("streams", "", "numbers of streams (default: a series)")
	step := flag.Duration("step", 10*time.Millisecond, "time of an engine step")
	groups := flag.Int("groups", 1, "groups of requests that step apart from each other")
	seconds := flag.Float64("seconds", 6, "length of each measurement")
	flag.Parse()
	trials := []trial{{64, 1, 10 * time.Millisecond}}
	for _, n := range []int{500, 1000, 2000, 3000, 5000, 7000} {
		trials = append(trials, trial{n, 16, 50 * time.Millisecond})
	}
	if *streams != "" {
		trials = nil
		for word := range strings.SplitSeq(*streams, ",") {
			n, err := strconv.Atoi(word)
			if err != nil || n < 1 {
				fmt.Fprintf(os.Stderr, "latency: -streams: %q is no number of streams\n", word)
				os.Exit(2)
			}
			trials = append(trials, trial{n, *groups, *step})
		}
	}
	if err := run(trials, *seconds); err != nil {
		fmt.Fprintln(os.Stderr, "latency:", err)
		os.Exit(1)
	}
}

func run(trials []trial, seconds float64) (err error) {
	r, err := rig.New()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	fmt.Println("step   streams  groups  tokens/s  of wanted  under way p50  p99      p99.9    last tenth p99  µs CPU/token  KiB/stream  worker idle")
	for _, t := range trials {
		if err := t.run(r, seconds); err != nil {
			return fmt.Errorf("%d streams: %w", t.streams, err)
		}
	}
	return nil
}

func (t trial) run(r *rig.Rig, seconds float64) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	self, err := os.Executable()
	if err != nil {
		return err
	}
	w, err := r.Start(ctx, os.Stderr, []string{
		"model.path=" + r.Model, "model.name=tiny", "engine.kind=sim", fmt.Sprintf("engine.command=[%s,%s,%s,%d]", self, engineCommand, t.step, t.groups), "log.level=error", "response_plane.merge_tokens=false",
	}, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Stop()) }()
	c, err := caller.New(ctx, caller.Config{NATS: &natsplane.ConnConfig{URL: r.NATS()}, Logger: zerolog.Nop()})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	idle, err := meter.One(w.PID)
	if err != nil {
		return err
	}
	s := &session{caller: c, target: w.Target, opened: make(chan struct{}, t.streams)}
	var streams sync.WaitGroup
	for range t.streams {
		// One after another: the set-up of thousands of streams at once is another question.
		if err := s.open(ctx, &streams); err != nil {
			return err
		}
	}
	for range t.streams {
		<-s.opened
	}
	before, err := meter.One(w.PID)
	if err != nil {
		return err
	}
	begin := time.Now()
	s.record(true)
	time.Sleep(time.Duration(seconds * float64(time.Second)))
	s.record(false)
	took := time.Since(begin)
	after, err := meter.One(w.PID)
	if err != nil {
		return err
	}
	s.stop()
	streams.Wait()
	if s.err != nil {
		return s.err
	}
	late := slices.Clone(s.ages[len(s.ages)*9/10:])
	slices.Sort(late)
	all := s.ages
	slices.Sort(all)
	spent := after.Sub(before)
	n := float64(len(all))
	wanted := float64(t.streams) * took.Seconds() / t.step.Seconds()
	q := func(of []time.Duration, at float64) time.Duration { return load.Quantile(of, at) }
	_, err = fmt.Printf("%-6v %7d  %6d  %8.0f  %9.3f  %-13v  %-7v  %-7v  %-14v  %12.2f  %10.1f  %.1f MiB\n", t.step, t.streams, t.groups, n/took.Seconds(), n/wanted, q(all, .5), q(all, .99), q(all, .999), q(late, .99),
		float64(spent.CPU)/float64(time.Microsecond)/n, (float64(after.Resident)-float64(idle.Resident))/1024/float64(t.streams), float64(idle.Resident)/(1<<20))
	return err
}

// session holds the streams of one trial.
type session struct {
	caller *caller.Caller
	target protocol.Instance
	opened chan struct{}

	mu        sync.Mutex
	recording bool
	stopping  bool
	streams   []*caller.Stream
	ages      []time.Duration
	err       error
}

// endless is more tokens than any measurement takes; the streams are ended by their reader.
const endless = 1_000_000

func (s *session) open(ctx context.Context, running *sync.WaitGroup) error {
	codec, err := protocol.ParseCodec(s.target.Codec)
	if err != nil {
		return err
	}
	stream, err := s.caller.Do(ctx, caller.Call{Transport: s.target.Transport, Codec: codec, Request: &protocol.Request{
		TokenIDs: []int32{1, 2, 3}, TokensState: protocol.TokensList,
		Fields: protocol.Map{"stop_conditions": protocol.Map{"max_tokens": int64(endless), "ignore_eos": true}, "sampling_options": protocol.Map{}, "output_options": protocol.Map{}},
	}})
	if err != nil {
		return err
	}
	s.streams = append(s.streams, stream)
	running.Go(func() { s.read(stream) })
	return nil
}

func (s *session) read(stream *caller.Stream) {
	first := true
	for {
		item, err := stream.Next()
		if err == nil && item.Err != nil {
			err = item.Err
		}
		if err != nil {
			s.failed(err)
			return
		}
		now, err := stamp()
		if err != nil {
			s.failed(err)
			return
		}
		if first {
			first = false
			s.opened <- struct{}{}
		}
		if item.Chunk != nil {
			s.saw(now, item.Chunk.TokenIDs)
		}
	}
}

func (s *session) saw(now uint32, tokens []uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.recording {
		return
	}
	for _, t := range tokens {
		s.ages = append(s.ages, age(now, t))
	}
}

// failed notes an error that is not the end which stop brings about.
func (s *session) failed(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil && !s.stopping {
		s.err = err
	}
}

func (s *session) record(on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recording = on
}

func (s *session) stop() {
	s.mu.Lock()
	s.stopping = true
	s.mu.Unlock()
	for _, stream := range s.streams {
		_ = stream.Kill()
		_ = stream.Close()
	}
}
