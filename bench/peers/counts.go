package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"dynworker/bench/load"
	"dynworker/bench/meter"
	"dynworker/internal/caller"
)

// count runs a load twice, once under each tool: counts do not depend on how busy the machine is, but counting slows everything, so no time of these runs is worth anything.
func count(ctx context.Context, c *contender, pid int, client *caller.Caller, plan load.Plan, s shape, b *board) error {
	pids := []int{pid}
	if c.tree {
		pids = meter.Descendants(pid)
	}
	var words []string
	for _, p := range pids {
		words = append(words, strconv.Itoa(p))
	}
	calls, tokens, err := under(ctx, client, plan, append([]string{"strace", "-f", "-c", "-S", "calls", "-p"}, strings.Join(words, ",")), totalCalls)
	if err != nil {
		return err
	}
	got := sample{syscalls: calls / tokens}
	instructions, tokens, err := under(ctx, client, plan, append([]string{"perf", "stat", "-x", ",", "-e", "instructions", "-p"}, strings.Join(words, ",")), totalInstructions)
	// Virtual machines often have no counters; that is no reason to give up the rest.
	if err == nil {
		got.instrs = instructions / tokens
	}
	b.add(c.name, s.name, got)
	return nil
}

// under runs a load while a tool looks at the processes, and reads the tool's report.
func under(ctx context.Context, client *caller.Caller, plan load.Plan, argv []string, read func(report string) (float64, error)) (figure, tokens float64, err error) {
	tool := exec.CommandContext(ctx, argv[0], argv[1:]...)
	var report bytes.Buffer
	tool.Stdout, tool.Stderr = &report, &report
	if err := tool.Start(); err != nil {
		return 0, 0, err
	}
	// Neither tool says when it has attached. What is missed of a load of seconds is far below its own variation.
	select {
	case <-time.After(time.Second):
	case <-ctx.Done():
		return 0, 0, context.Cause(ctx)
	}
	seen, err := load.Run(ctx, client, plan)
	if stop := tool.Process.Signal(syscall.SIGINT); stop != nil {
		err = errors.Join(err, stop)
	}
	_ = tool.Wait() // ends by our signal, which is no failure
	if err != nil {
		return 0, 0, err
	}
	figure, err = read(report.String())
	if err != nil {
		return 0, 0, fmt.Errorf("%s: %w", argv[0], err)
	}
	return figure, float64(seen.Tokens), nil
}

// totalCalls reads the last line of strace's table: percent, seconds, µs a call, calls, and errors if there were any.
func totalCalls(report string) (float64, error) {
	for line := range strings.Lines(report) {
		fields := strings.Fields(line)
		if len(fields) >= 4 && fields[len(fields)-1] == "total" {
			return strconv.ParseFloat(fields[3], 64)
		}
	}
	return 0, errors.New("no total in its report")
}

// totalInstructions adds up perf's lines "number,,instructions…".
func totalInstructions(report string) (sum float64, err error) {
	found := false
	for line := range strings.Lines(report) {
		number, rest, _ := strings.Cut(line, ",")
		if !strings.Contains(rest, "instructions") {
			continue
		}
		n, err := strconv.ParseFloat(number, 64)
		if err != nil {
			return 0, err
		}
		sum, found = sum+n, true
	}
	if !found {
		return 0, errors.New("no instructions in its report")
	}
	return sum, nil
}
