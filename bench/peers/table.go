package main

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	"dynworker/bench/meter"
)

// sample is one measurement of one contender under one load.
type sample struct {
	perToken, perRequest float64 // CPU in µs
	rate                 float64 // tokens a second
	perFrame             float64 // tokens
	switches             float64 // voluntary, a token
	resident             float64 // MiB at the end
	started              time.Duration
	first, gap           time.Duration // median time to the first chunk, 99th percentile between chunks
	syscalls, instrs     float64       // a token; only with -counts
}

func newSample(after, before meter.Cost, tokens, frames, requests int, took time.Duration) sample {
	spent, n := after.Sub(before), float64(max(tokens, 1))
	micros := float64(spent.CPU) / float64(time.Microsecond)
	return sample{
		perToken: micros / n, perRequest: micros / float64(max(requests, 1)), rate: n / took.Seconds(), perFrame: n / float64(max(frames, 1)),
		switches: float64(spent.Voluntary) / n, resident: float64(after.Resident) / (1 << 20),
	}
}

// board keeps what was measured, in the order in which names first came up.
type board struct {
	loads, names []string
	samples      map[[2]string][]sample // by load and contender
}

func (b *board) add(name, load string, s sample) {
	if b.samples == nil {
		b.samples = map[[2]string][]sample{}
	}
	if !slices.Contains(b.loads, load) {
		b.loads = append(b.loads, load)
	}
	if !slices.Contains(b.names, name) {
		b.names = append(b.names, name)
	}
	key := [2]string{load, name}
	b.samples[key] = append(b.samples[key], s)
}

// spread is the lowest, middle and highest of some figures.
func spread(samples []sample, of func(sample) float64) (lowest, middle, highest float64) {
	values := make([]float64, len(samples))
	for i, s := range samples {
		values[i] = of(s)
	}
	slices.Sort(values)
	return values[0], values[len(values)/2], values[len(values)-1]
}

// ratio is the middle of the ratios within the rounds, or a dash when there is nothing to compare with.
func (b *board) ratio(load, name, to string) string {
	mine, theirs := b.samples[[2]string{load, name}], b.samples[[2]string{load, to}]
	if len(theirs) < len(mine) || name == to {
		return "-"
	}
	var list []float64
	for i, s := range mine {
		if theirs[i].perToken <= 0 {
			return "-"
		}
		list = append(list, s.perToken/theirs[i].perToken)
	}
	slices.Sort(list)
	return fmt.Sprintf("%.2f", list[len(list)/2])
}

func (b *board) print(out io.Writer, o options) error {
	w := tabwriter.NewWriter(out, 2, 0, 2, ' ', 0)
	for _, load := range b.loads {
		if o.counts {
			fmt.Fprintf(w, "\n%s\tsystem calls/token\tinstructions/token\n", load)
		} else {
			fmt.Fprintf(w, "\n%s\tµs CPU/token\t(lowest to highest)\tµs CPU/request\ttokens/s\ttokens/frame\tswitches/token\tof trtllm worker\tof floor\tMiB\tstart\tfirst chunk\tgap p99\n", load)
		}
		for _, name := range b.names {
			list := b.samples[[2]string{load, name}]
			if len(list) == 0 {
				continue
			}
			mid := func(of func(sample) float64) float64 { _, m, _ := spread(list, of); return m }
			if o.counts {
				instructions := "not to be had on this machine"
				if n := mid(func(s sample) float64 { return s.instrs }); n > 0 {
					instructions = fmt.Sprintf("%.0f", n)
				}
				fmt.Fprintf(w, "%s\t%.2f\t%s\n", name, mid(func(s sample) float64 { return s.syscalls }), instructions)
				continue
			}
			low, middle, high := spread(list, func(s sample) float64 { return s.perToken })
			millis := func(of func(sample) time.Duration) string {
				return time.Duration(mid(func(s sample) float64 { return float64(of(s)) })).Round(100 * time.Microsecond).String()
			}
			fmt.Fprintf(w, "%s\t%.1f\t%.1f to %.1f\t%.0f\t%.0f\t%.2f\t%.2f\t%s\t%s\t%.0f\t%s\t%s\t%s\n", name, middle, low, high, mid(func(s sample) float64 { return s.perRequest }), mid(func(s sample) float64 { return s.rate }),
				mid(func(s sample) float64 { return s.perFrame }), mid(func(s sample) float64 { return s.switches }), b.ratio(load, name, "trtllm worker"), b.ratio(load, name, "floor"),
				mid(func(s sample) float64 { return s.resident }), millis(func(s sample) time.Duration { return s.started }), millis(func(s sample) time.Duration { return s.first }), millis(func(s sample) time.Duration { return s.gap }))
		}
	}
	return w.Flush()
}
