package main

import (
	"bytes"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
)

// The number at the end of a name is GOMAXPROCS.
var line = regexp.MustCompile(`^Benchmark(\S+?)(-\d+)?\s.*\s(\d+) allocs/op`)

// parse returns the fewest allocations of one operation by package and name of the benchmark.
func parse(text []byte) (map[string]int, error) {
	fewest, pkg := map[string]int{}, ""
	for _, l := range bytes.Split(text, []byte("\n")) {
		if name, ok := bytes.CutPrefix(l, []byte("pkg: ")); ok {
			pkg = string(name)
		}
		m := line.FindSubmatch(l)
		if m == nil {
			continue
		}
		n, err := strconv.Atoi(string(m[3]))
		if err != nil {
			return nil, fmt.Errorf("line %q: %w", l, err)
		}
		name := pkg + "." + string(m[1])
		if old, ok := fewest[name]; !ok || n < old {
			fewest[name] = n
		}
	}
	if len(fewest) == 0 {
		return nil, fmt.Errorf("there is no benchmark with allocations in it")
	}
	return fewest, nil
}

// compare says what is wrong with got, a line for each benchmark: more allocations than wanted, or that only one side knows it. A benchmark that fell out of the run would guard nothing any more. Large counts may be off by a hundredth, as
// pools are emptied now and then.
func compare(want, got map[string]int) (worse []string) {
	for _, name := range slices.Sorted(maps.Keys(want)) {
		n, ok := got[name]
		switch {
		case !ok:
			worse = append(worse, name+": is in the file but was not run")
		case n > want[name]+want[name]/100:
			worse = append(worse, fmt.Sprintf("%s: %d allocations, were %d", name, n, want[name]))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(got)) {
		if _, ok := want[name]; !ok {
			worse = append(worse, name+": is not in the file")
		}
	}
	return worse
}
