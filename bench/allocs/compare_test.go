package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

const output = `goos: linux
pkg: dynworker/pkg/wire
BenchmarkReader-2   	    1000	       185.5 ns/op	 927.10 MB/s	       1 B/op	       0 allocs/op
BenchmarkReader-2   	    1000	       180.5 ns/op	 927.10 MB/s	       1 B/op	       1 allocs/op
PASS
pkg: dynworker/pkg/protocol
BenchmarkParseRequest/json/8k 	    1000	  1 ns/op	   9 B/op	      14 allocs/op
BenchmarkParseRequest/json/8k 	    1000	  1 ns/op	   9 B/op	      12 allocs/op
ok  	dynworker/pkg/protocol	0.245s
`

func TestTheFewestAllocationsCount(t *testing.T) {
	got, err := parse([]byte(output))
	require.NoError(t, err)
	require.Equal(t, map[string]int{"dynworker/pkg/wire.Reader": 0, "dynworker/pkg/protocol.ParseRequest/json/8k": 12}, got)
	_, err = parse([]byte("PASS\n"))
	require.Error(t, err)
}

func TestWhatIsWorse(t *testing.T) {
	want := map[string]int{"same": 3, "none": 0, "less": 9, "large": 1000, "larger": 1000, "more": 3, "gone": 1}
	got := map[string]int{"same": 3, "none": 1, "less": 2, "large": 1010, "larger": 1011, "more": 4, "new": 0}
	require.Equal(t, []string{
		"gone: is in the file but was not run",
		"larger: 1011 allocations, were 1000",
		"more: 4 allocations, were 3",
		"none: 1 allocations, were 0",
		"new: is not in the file",
	}, compare(want, got))
}
