package sim

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// place runs a queue through admission and a router and returns which ids (the
// positions in the queue) ended up on which rank, as "0:[0 1] 1:[2]".
func place(r router, load rankLoad, perRank int, queue []candidate) string {
	chosen := admit(load.active, perRank, queue)
	batch := make([]candidate, len(chosen))
	for i, at := range chosen {
		batch[i] = queue[at]
	}
	var parts []string
	for rank, ids := range r.route(load, perRank, batch) {
		for i, id := range ids {
			ids[i] = chosen[id]
		}
		if len(ids) > 0 {
			parts = append(parts, fmt.Sprintf("%d:%v", rank, ids))
		}
	}
	return strings.Join(parts, " ")
}

func unpinned(n int) []candidate {
	return slices.Repeat([]candidate{{cost: 1, tokens: 3, rank: noRank, relax: true}}, n)
}

func pinned(rank int, relax bool) candidate {
	return candidate{cost: 1, tokens: 3, rank: rank, relax: relax}
}

// The numbers are those of TensorRT-LLM's own router tests
// (tests/unittest/_torch/executor/test_adp_router.py): four ranks of three
// slots, requests of three tokens.
func TestBalancerAgreesWithTensorRTLLM(t *testing.T) {
	for _, tc := range []struct {
		active []int
		queue  []candidate
		want   string
	}{
		{[]int{0, 0, 0, 0}, nil, ""},
		{[]int{0, 0, 0, 0}, unpinned(7), "0:[0 1] 1:[2 3] 2:[4 5] 3:[6]"},
		{[]int{1, 2, 3, 0}, unpinned(13), "0:[0 1] 1:[2] 3:[3 4 5]"},
		{[]int{0, 0, 0, 0}, unpinned(13), "0:[0 1 3] 1:[2 4 6] 2:[5 7 9] 3:[8 10 11]"},
		{[]int{3, 1, 3, 0}, []candidate{pinned(0, false), pinned(0, true)}, "1:[1]"},
		{[]int{3, 2, 3, 3}, []candidate{pinned(0, false), pinned(0, true)}, "1:[1]"},
		{[]int{2, 1, 3, 0}, []candidate{pinned(1, false), pinned(3, false)}, "1:[0] 3:[1]"},
		{[]int{3, 3, 3, 1}, []candidate{pinned(0, true), pinned(1, true), pinned(2, true)}, "3:[0 1]"},
		{[]int{3, 3, 3, 0}, []candidate{pinned(0, false), pinned(1, true), pinned(3, false)}, "3:[2 1]"},
	} {
		load := rankLoad{active: tc.active, tokens: []int{10, 15, 20, 25}}
		require.Equal(t, tc.want, place(balancer{}, load, 3, tc.queue), "active %v, %d waiting", tc.active, len(tc.queue))
	}
}

func turns(ids ...string) []candidate {
	var q []candidate
	for _, id := range ids {
		if id == "-" {
			id = ""
		}
		q = append(q, candidate{cost: 1, tokens: 3, rank: noRank, relax: true, conv: id})
	}
	return q
}

func idle(ranks int) rankLoad {
	return rankLoad{active: make([]int, ranks), tokens: make([]int, ranks)}
}

func busy(active ...int) rankLoad {
	return rankLoad{active: active, tokens: make([]int, len(active))}
}

func conversationRouter(change func(*Args)) *conversations {
	a := Args{}
	a.setDefaults()
	if change != nil {
		change(&a)
	}
	return newConversations(&a, Builds["rc29"])
}

func bindings(c *conversations) map[string]int {
	m := make(map[string]int)
	for id, e := range c.homes.byID {
		m[id] = e.Value.(session).rank
	}
	return m
}

// The first group are the cases of TensorRT-LLM's own tests, the second was
// derived from a restatement of its router.
func TestConversationRouterAgreesWithTensorRTLLM(t *testing.T) {
	t.Run("new conversations are spread and then stay", func(t *testing.T) {
		c := conversationRouter(nil)
		first := place(c, idle(4), 8, turns("a", "b", "c", "d"))
		require.Equal(t, "0:[0] 1:[1] 2:[2] 3:[3]", first)
		require.Equal(t, first, place(c, idle(4), 8, turns("a", "b", "c", "d")))
	})
	t.Run("requests without an id are spread and not remembered", func(t *testing.T) {
		c := conversationRouter(nil)
		require.Equal(t, "0:[0 4] 1:[1 5] 2:[2 6] 3:[3 7]", place(c, idle(4), 8, turns("-", "-", "-", "-", "-", "-", "-", "-")))
		require.Empty(t, bindings(c))
	})
	t.Run("the oldest conversations are forgotten", func(t *testing.T) {
		c := conversationRouter(func(a *Args) { a.MaxSessions = 2 })
		place(c, idle(2), 8, turns("c0", "c1", "c2", "c3", "c4"))
		require.ElementsMatch(t, []string{"c3", "c4"}, slices.Collect(maps.Keys(bindings(c))))
	})
	t.Run("an explicit first rank binds", func(t *testing.T) {
		c := conversationRouter(nil)
		first := candidate{cost: 1, rank: 2, conv: "a"}
		require.Equal(t, "2:[0]", place(c, idle(4), 8, []candidate{first}))
		require.Equal(t, "2:[0]", place(c, idle(4), 8, turns("a")))
		second := candidate{cost: 1, rank: 1, conv: "a"}
		require.Equal(t, "2:[0]", place(c, idle(4), 8, []candidate{second}), "the binding wins over a later rank")
		require.Equal(t, map[string]int{"a": 2}, bindings(c))
	})
	t.Run("a full home overflows without moving", func(t *testing.T) {
		c := conversationRouter(nil)
		place(c, idle(4), 5, turns("x", "a"))
		require.Equal(t, map[string]int{"x": 0, "a": 1}, bindings(c))
		require.NotContains(t, place(c, busy(0, 5, 0, 0), 5, turns("a")), "1:")
		require.Equal(t, 1, bindings(c)["a"])
		require.Equal(t, "1:[0]", place(c, busy(0, 4, 0, 0), 5, turns("a")))
	})
	t.Run("least queued", func(t *testing.T) {
		least := func(a *Args) { a.Placement = LeastQueued }
		c := conversationRouter(least)
		require.Equal(t, "1:[0]", place(c, busy(5, 1, 3, 4), 100, turns("a")))
		require.Equal(t, map[string]int{"a": 1}, bindings(c))
		require.Equal(t, "1:[0]", place(c, busy(0, 50, 0, 0), 100, turns("a")), "home however busy it is")
		require.Equal(t, "1:[0 1 2] 2:[3]", place(conversationRouter(least), busy(3, 0, 2, 3), 100, turns("a", "b", "c", "d")))
	})
	t.Run("many turns of one conversation", func(t *testing.T) {
		c := conversationRouter(nil)
		ids := slices.Repeat([]string{"a"}, 40)
		got := c.route(idle(8), 256, turns(ids...))
		require.Len(t, got[0], 40)
	})
	t.Run("nobody is filled beyond its slots", func(t *testing.T) {
		c := conversationRouter(nil)
		got := c.route(busy(40, 40, 40, 64), 64, turns("-", "-", "-", "-", "-", "-", "-", "-"))
		require.Empty(t, got[3])
		require.Equal(t, 8, len(got[0])+len(got[1])+len(got[2]))
	})

	t.Run("mixed, round robin", func(t *testing.T) {
		c := conversationRouter(nil)
		require.Equal(t, "0:[0 4 6] 1:[1 5 7] 2:[2 8] 3:[3]", place(c, idle(4), 100, turns("A", "B", "C", "-", "A", "B", "E", "-", "C")))
		require.Equal(t, 2, c.cursor)
	})
	t.Run("mixed, least queued", func(t *testing.T) {
		c := conversationRouter(func(a *Args) { a.Placement = LeastQueued })
		require.Equal(t, "0:[4] 2:[0 1 3 6] 3:[2 5]", place(c, busy(2, 5, 0, 1), 100, turns("A", "B", "-", "A", "C", "-", "B")))
	})
	t.Run("a relaxed first rank that is full", func(t *testing.T) {
		c := conversationRouter(nil)
		require.Equal(t, "0:[0]", place(c, busy(0, 0, 4, 0), 4, []candidate{{cost: 1, rank: 2, relax: true, conv: "a"}}))
		require.Equal(t, map[string]int{"a": 0}, bindings(c))
	})
}

// Before TensorRT-LLM #16815 a rank was honoured on each turn and remembered
// on none.
func TestOlderConversationRouterForgetsExplicitRanks(t *testing.T) {
	a := Args{}
	a.setDefaults()
	c := newConversations(&a, Builds["rc21"])
	require.Equal(t, "2:[0]", place(c, idle(4), 8, []candidate{{cost: 1, rank: 2, conv: "a"}}))
	require.Empty(t, bindings(c))
	require.Equal(t, "0:[0]", place(c, idle(4), 8, turns("a")))
	require.Equal(t, "3:[0]", place(c, idle(4), 8, []candidate{{cost: 1, rank: 3, conv: "a"}}), "although it is bound to 0 now")
	require.Equal(t, map[string]int{"a": 0}, bindings(c))
}

func TestAdmission(t *testing.T) {
	wide := candidate{cost: 3, rank: noRank, relax: true}
	queue := append([]candidate{wide}, unpinned(2)...)
	require.Equal(t, []int{0, 1}, admit([]int{0, 0}, 2, queue), "choices count one by one")
	require.Empty(t, admit([]int{1, 1}, 2, queue), "what does not fit holds up the rest")
	strict := []candidate{pinned(0, false), pinned(0, false), pinned(1, false)}
	require.Equal(t, []int{0, 2}, admit([]int{0, 0}, 1, strict), "a full rank is passed over")
}
