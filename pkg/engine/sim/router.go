package sim

import (
	"cmp"
	"container/heap"
	"container/list"
	"math"
	"slices"
)

// candidate is a waiting request as admission and routers see it.
type candidate struct {
	cost   int    // sequences: 1 and one for each further choice
	tokens int    // prompt length
	rank   int    // explicit rank, or noRank
	relax  bool   // the explicit rank is a wish; true without one
	conv   string // conversation id; empty is none
}

// noRank is the rank of a request that names none.
const noRank = -1

// rankLoad is what runs on each rank, by rank.
type rankLoad struct {
	active []int // sequences
	tokens []int // prompt tokens
}

func (l rankLoad) clone() rankLoad {
	return rankLoad{active: slices.Clone(l.active), tokens: slices.Clone(l.tokens)}
}

// admit chooses which of the waiting requests may be routed now: in order,
// until the engine's slots are used up. A request bound strictly to a full rank
// is passed over and keeps its place. TensorRT-LLM puts those it passed over
// back in reverse order; this engine keeps them in order.
func admit(active []int, perRank int, waiting []candidate) (chosen []int) {
	budget := perRank * len(active)
	for _, n := range active {
		budget -= n
	}
	strict := slices.Clone(active)
	for i, c := range waiting {
		if c.cost > budget {
			break
		}
		if c.rank != noRank && !c.relax {
			if strict[c.rank] >= perRank {
				continue
			}
			strict[c.rank]++
		}
		budget -= c.cost
		chosen = append(chosen, i)
	}
	return chosen
}

// router places admitted requests on ranks.
type router interface {
	// route returns the candidates' indices for each rank, in the order in which
	// they were placed. A candidate that is on no list stays in the queue.
	route(load rankLoad, perRank int, batch []candidate) (byRank [][]int)
}

// fairShare is the number of sequences up to which a rank is filled before
// another one's turn.
func fairShare(active []int, unplaced int, mult float64, limit int) int {
	sum := unplaced
	for _, n := range active {
		sum += n
	}
	perRank := (sum + len(active) - 1) / len(active)
	share := int(math.Ceil(mult * float64(perRank)))
	return min(max(share, slices.Max(active)), limit)
}

// strictFirst returns the batch's indices with strictly bound requests first,
// otherwise in order.
func strictFirst(batch []candidate) []int {
	order := make([]int, len(batch))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Compare(relaxed(batch[a]), relaxed(batch[b]))
	})
	return order
}

func relaxed(c candidate) int {
	if c.relax || c.rank == noRank {
		return 1
	}
	return 0
}

// balancer is TensorRT-LLM's default router: explicit ranks while they have
// room, the rest to the rank with the fewest prompt tokens, longest first.
type balancer struct{}

func (balancer) route(load rankLoad, perRank int, batch []candidate) [][]int {
	load = load.clone()
	byRank := make([][]int, len(load.active))
	place := func(i, rank int) {
		byRank[rank] = append(byRank[rank], i)
		load.active[rank] += batch[i].cost
		load.tokens[rank] += batch[i].tokens
	}
	var rest []int
	for _, i := range strictFirst(batch) {
		if r := batch[i].rank; r != noRank && load.active[r] < perRank {
			place(i, r)
		} else {
			rest = append(rest, i)
		}
	}
	share := fairShare(load.active, len(rest), 1, perRank)
	slices.SortStableFunc(rest, func(a, b int) int { return cmp.Compare(batch[b].tokens, batch[a].tokens) })
	free := &rankHeap{load: load}
	for r, n := range load.active {
		if n < share {
			free.ranks = append(free.ranks, r)
		}
	}
	heap.Init(free)
	for _, i := range rest {
		if free.Len() == 0 {
			break
		}
		r := free.ranks[0]
		place(i, r)
		if load.active[r] < share {
			heap.Fix(free, 0)
		} else {
			heap.Pop(free)
		}
	}
	return byRank
}

// rankHeap orders ranks by prompt tokens, sequences and number.
type rankHeap struct {
	load  rankLoad
	ranks []int
}

func (h *rankHeap) Len() int { return len(h.ranks) }
func (h *rankHeap) Less(i, j int) bool {
	a, b := h.ranks[i], h.ranks[j]
	return cmp.Or(
		cmp.Compare(h.load.tokens[a], h.load.tokens[b]),
		cmp.Compare(h.load.active[a], h.load.active[b]),
		cmp.Compare(a, b)) < 0
}
func (h *rankHeap) Swap(i, j int) { h.ranks[i], h.ranks[j] = h.ranks[j], h.ranks[i] }
func (h *rankHeap) Push(x any)    { h.ranks = append(h.ranks, x.(int)) }
func (h *rankHeap) Pop() any {
	last := h.ranks[len(h.ranks)-1]
	h.ranks = h.ranks[:len(h.ranks)-1]
	return last
}

// conversations is TensorRT-LLM's conversation router: a conversation's turns
// go to the rank of its first one while that has room; new conversations and
// requests without one are spread by number of sequences.
type conversations struct {
	bindsExplicit bool // TensorRT-LLM #16815 and later; see route
	leastQueued   bool
	mult          float64
	homes         sessions
	cursor        int // next rank of the round robin
}

func newConversations(a *Args, build Build) *conversations {
	return &conversations{
		bindsExplicit: build.BindsExplicitRank, leastQueued: a.Placement == LeastQueued,
		mult: max(1, a.FairShare), homes: newSessions(a.MaxSessions),
	}
}

func (c *conversations) route(load rankLoad, perRank int, batch []candidate) [][]int {
	load = load.clone()
	byRank := make([][]int, len(load.active))
	place := func(i, rank int) {
		byRank[rank] = append(byRank[rank], i)
		load.active[rank] += batch[i].cost
	}
	var rest []int
	for _, i := range strictFirst(batch) {
		if c.takesExplicitRank(batch[i]) && load.active[batch[i].rank] < perRank {
			place(i, batch[i].rank)
			if c.bindsExplicit {
				c.homes.bind(batch[i].conv, batch[i].rank)
			}
		} else {
			rest = append(rest, i)
		}
	}
	share := fairShare(load.active, len(rest), c.mult, perRank)
	for _, i := range rest {
		conv := batch[i].conv
		home, bound := c.homes.home(conv)
		if bound && load.active[home] < perRank {
			c.homes.bind(conv, home)
			place(i, home)
			continue
		}
		rank := c.choose(load.active, share)
		if !bound {
			c.homes.bind(conv, rank)
		}
		place(i, rank)
	}
	return byRank
}

// takesExplicitRank says whether a request's own rank counts. Older builds
// honour it on every turn and remember nothing; newer ones let a binding win.
func (c *conversations) takesExplicitRank(r candidate) bool {
	if r.rank == noRank {
		return false
	}
	if !c.bindsExplicit {
		return true
	}
	_, bound := c.homes.home(r.conv)
	return !bound
}

// choose picks a rank by the placement policy.
func (c *conversations) choose(active []int, share int) int {
	if !c.leastQueued {
		for range active {
			r := c.cursor
			c.cursor = (c.cursor + 1) % len(active)
			if active[r] < share {
				return r
			}
		}
	}
	best := noRank
	for _, limited := range []bool{true, false} {
		for r, n := range active {
			if (!limited || n < share) && (best == noRank || n < active[best]) {
				best = r
			}
		}
		if best != noRank {
			break
		}
	}
	return best
}

// sessions remembers the home rank of the conversations used last.
type sessions struct {
	limit int
	byID  map[string]*list.Element
	order *list.List // of session, least recently used first
}

type session struct {
	id   string
	rank int
}

func newSessions(limit int) sessions {
	return sessions{limit: limit, byID: make(map[string]*list.Element), order: list.New()}
}

func (s *sessions) home(id string) (rank int, bound bool) {
	if e, ok := s.byID[id]; ok && id != "" {
		return e.Value.(session).rank, true
	}
	return noRank, false
}

// bind makes rank the home of a conversation and the conversation the one used
// last. Without an id it does nothing.
func (s *sessions) bind(id string, rank int) {
	if id == "" {
		return
	}
	if e, ok := s.byID[id]; ok {
		e.Value = session{id, rank}
		s.order.MoveToBack(e)
		return
	}
	s.byID[id] = s.order.PushBack(session{id, rank})
	for s.order.Len() > s.limit {
		oldest := s.order.Front()
		delete(s.byID, oldest.Value.(session).id)
		s.order.Remove(oldest)
	}
}
