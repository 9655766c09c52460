// Command allocs holds the benchmarks of every stage of a request to the allocations of the last release: it fails when one of them takes memory more often than bench/baseline.txt says, and never because of a time.
//
//	go run ./bench/allocs            # compares
//	go run ./bench/allocs -update    # writes the file anew, after a change that is meant or at a release
//
// The file is in the format of Go's benchmarks, times included, so that benchstat compares them with a run on the same machine:
//
//	go run golang.org/x/perf/cmd/benchstat@latest bench/baseline.txt new.txt
//
// Run it from the top of the repository.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"os/exec"
)

// stages are the packages that a request and its tokens go through, and their benchmarks that say the same at every run. Each is run three times: now and then the runtime takes memory of its own.
var stages = []struct{ pkg, match string }{
	{"./pkg/wire", "."},
	{"./pkg/protocol", "."},
	{"./pkg/handlers", "."},
	{"./pkg/engine", "^BenchmarkDemux$"},
	{"./pkg/engine/ipc", "."},
	{"./pkg/respstream", "^BenchmarkFrames$"},
	{"./pkg/metrics", "."},
}

const (
	baseline   = "bench/baseline.txt"
	iterations = "1000x"
	runs       = "3"
)

func main() {
	update := flag.Bool("update", false, "write "+baseline+" instead of comparing with it")
	flag.Parse()
	if err := run(*update); err != nil {
		fmt.Fprintln(os.Stderr, "allocs:", err)
		os.Exit(1)
	}
}

func run(update bool) error {
	now, err := measure()
	if err != nil {
		return err
	}
	if update {
		return os.WriteFile(baseline, now, 0o644)
	}
	before, err := os.ReadFile(baseline)
	if err != nil {
		return err
	}
	want, err := parse(before)
	if err != nil {
		return fmt.Errorf("%s: %w", baseline, err)
	}
	got, err := parse(now)
	if err != nil {
		return fmt.Errorf("this run: %w", err)
	}
	if worse := compare(want, got); len(worse) > 0 {
		for _, line := range worse {
			fmt.Println(line)
		}
		return fmt.Errorf("%d of %d benchmarks do not fit %s; if that is meant, run this with -update", len(worse), len(got), baseline)
	}
	fmt.Printf("%d benchmarks allocate no more than in %s\n", len(got), baseline)
	return nil
}

func measure() ([]byte, error) {
	var all bytes.Buffer
	for _, s := range stages {
		cmd := exec.Command("go", "test", "-run", "^$", "-bench", s.match, "-benchmem", "-benchtime", iterations, "-count", runs, s.pkg)
		out, err := cmd.CombinedOutput()
		if err != nil {
			return nil, fmt.Errorf("benchmarks of %s: %w\n%s", s.pkg, err, out)
		}
		all.Write(out)
	}
	return all.Bytes(), nil
}
