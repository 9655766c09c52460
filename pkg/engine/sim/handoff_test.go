package sim_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/engine"
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/engine/sim"
)

// terms are the disaggregation parameters of a request, as they travel.
type terms map[string]any

func (d terms) raw(t *testing.T) json.RawMessage {
	b, err := json.Marshal(d)
	require.NoError(t, err)
	return b
}

// collectTerms is collect, and what the request left for another engine.
func collectTerms(t *testing.T, s *engine.Stream) (answer, terms) {
	t.Helper()
	a := answer{tokens: map[uint16][]uint32{}, probs: map[uint16][]ipc.TokenLogProb{}, finish: map[uint16]string{}, stop: map[uint16]any{}}
	var left terms
	for {
		outs, err := s.Next(bounded(t))
		if err != nil {
			return a, left
		}
		for _, o := range outs {
			a.add(o)
			if o.Meta != nil && o.Meta.Disaggregated != nil {
				d := json.NewDecoder(strings.NewReader(string(o.Meta.Disaggregated)))
				d.UseNumber() // ids have 64 bits
				require.NoError(t, d.Decode(&left))
			}
		}
	}
}

var contextOnly = terms{"request_type": "context_only"}

// prefill runs a prompt as a prefill worker does.
func prefill(t *testing.T, p *engine.Process, start []int32, g ipc.Generate, d terms) (answer, terms) {
	t.Helper()
	g.Streaming = false
	g.Sampling.MaxTokens = ptr(int64(1))
	g.Disaggregated = d.raw(t)
	return collectTerms(t, send(t, p, start, g))
}

// decode sends what goes on from a prefill.
func decode(t *testing.T, p *engine.Process, start []int32, g ipc.Generate, left terms) *engine.Stream {
	t.Helper()
	d := terms{}
	for k, v := range left {
		d[k] = v
	}
	d["request_type"] = "generation_only"
	g.Disaggregated = d.raw(t)
	return send(t, p, start, g)
}

type heldKV struct{ Requests, Blocks, Receiving, Dangling, Expired int }

func heldBy(t *testing.T, p *engine.Process) (h heldKV) {
	t.Helper()
	body, err := p.Query(bounded(t), ipc.QueryHeldKV)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(body, &h))
	return h
}

// holdsSoon waits until an engine's figures are the wanted ones: what changes
// them comes over another connection than the question.
func holdsSoon(t *testing.T, p *engine.Process, want heldKV) {
	t.Helper()
	require.Eventually(t, func() bool { return heldBy(t, p) == want }, patience, time.Millisecond, "%+v, the last figures are %+v", want, heldBy(t, p))
}

func TestHandoffGoesOnWithTheText(t *testing.T) {
	args := sim.Args{EOSEvery: 20, AttentionDPSize: 4}
	one, two, whole := attach(t, args), attach(t, args), attach(t, args)
	ended, went := 0, 0
	for n := range 60 {
		start := prompt(1 + 5*n)
		g := streaming(int64(1 + n%30))
		g.Streaming = n%2 == 0
		g.Sampling.Seed = ptr(int64(n))
		if n%3 == 0 {
			g.Sampling.LogProbs = ptr(int64(1 + n%4))
		}
		want := ask(t, whole, start, g)
		first, left := prefill(t, one, start, g, terms{"request_type": "context_only", "disagg_request_id": 1<<62 + n})
		require.Equal(t, want.tokens[0][:1], first.tokens[0])
		if first.finish[0] == "stop" {
			require.Nil(t, left, "nothing to go on with")
			require.Equal(t, want.tokens, first.tokens)
			ended++
			continue
		}
		require.Equal(t, "length", first.finish[0])
		require.Equal(t, "context_only", left["request_type"])
		require.Equal(t, json.Number(fmt.Sprint(1<<62+n)), left["disagg_request_id"])
		got := collect(t, decode(t, two, start, g, left))
		require.Nil(t, got.err)
		require.Equal(t, want.tokens, got.tokens, "the first token again, and on from it")
		require.Equal(t, want.probs, got.probs)
		require.Equal(t, want.finish, got.finish)
		require.Equal(t, want.stop, got.stop)
		went++
	}
	require.Positive(t, ended)
	require.Positive(t, went)
	holdsSoon(t, one, heldKV{})
	holdsSoon(t, two, heldKV{})
}

// A prefill that was not told to stop after its token says that it is not
// finished, and hands on all the same.
func TestPrefillThatIsNotFinished(t *testing.T) {
	p := attach(t, sim.Args{BlockSize: 8})
	g := streaming(50)
	g.Disaggregated = contextOnly.raw(t)
	a, left := collectTerms(t, send(t, p, prompt(20), g))
	require.Len(t, a.tokens[0], 1)
	require.Equal(t, "not_finished", a.finish[0])
	require.NotNil(t, left["ctx_request_id"])
	require.Nil(t, left["disagg_request_id"])
	require.Equal(t, heldKV{Requests: 1, Blocks: 3}, heldBy(t, p))
	rows := p.Stats
	require.Eventually(t, func() bool {
		r := rows().Rows
		return len(r) == 1 && strings.Contains(string(r[0]), `"handoff":{"requests":1,"blocks":3}`) && strings.Contains(string(r[0]), `"numActiveRequests":1`)
	}, patience, time.Millisecond)
	got := collect(t, decode(t, p, prompt(20), streaming(50), left))
	require.Equal(t, sim.Continue(sim.Args{}.Text(), prompt(20), 0, 50), got.tokens[0], "an engine may take its own")
	holdsSoon(t, p, heldKV{})
}

func TestTransfersThatGoWrong(t *testing.T) {
	for salt, reason := range map[string]string{
		"sim:transfer-lost":     "the connection ended early",
		"sim:transfer-corrupt":  "not those that were announced",
		"sim:transfer-mismatch": "the sender offers context",
	} {
		t.Run(salt, func(t *testing.T) {
			one, two := attach(t, sim.Args{}), attach(t, sim.Args{})
			_, left := prefill(t, one, prompt(40), withSalt(salt, 1), contextOnly)
			got := collect(t, decode(t, two, prompt(40), withSalt(salt, 9), left))
			require.NotNil(t, got.err)
			require.Equal(t, ipc.ErrorRequest, got.err.Kind)
			require.Contains(t, got.err.Message, "KV transfer: context ")
			require.Contains(t, got.err.Message, reason)
			require.Empty(t, got.tokens[0])
			require.Equal(t, heldKV{Requests: 1, Blocks: 2}, heldBy(t, one), "nobody has acknowledged it")
			require.Equal(t, heldKV{}, heldBy(t, two))
		})
	}
	t.Run("one in three", func(t *testing.T) {
		one, two := attach(t, sim.Args{KVTransferLoseEvery: 3}), attach(t, sim.Args{})
		var lost []int
		for n := range 6 {
			_, left := prefill(t, one, prompt(40), streaming(1), contextOnly)
			if collect(t, decode(t, two, prompt(40), streaming(9), left)).err != nil {
				lost = append(lost, n)
			}
		}
		require.Equal(t, []int{2, 5}, lost)
	})
	t.Run("sim:transfer-stall", func(t *testing.T) {
		one, two := attach(t, sim.Args{}), attach(t, sim.Args{KVTransferTimeout: sim.Duration(20 * time.Millisecond)})
		_, left := prefill(t, one, prompt(40), withSalt("sim:transfer-stall", 1), contextOnly)
		got := collect(t, decode(t, two, prompt(40), withSalt("sim:transfer-stall", 9), left))
		require.Contains(t, got.err.Message, "not complete within 20ms")
	})
}

// A hand-off that is not the request's own is refused before anything is
// fetched, or by the sender; never is there a text from it.
func TestHandoffsThatDoNotFit(t *testing.T) {
	one, two := attach(t, sim.Args{}), attach(t, sim.Args{})
	g := streaming(9)
	_, mine := prefill(t, one, prompt(40), g, contextOnly)
	_, other := prefill(t, one, prompt(50), g, contextOnly)
	with := func(change terms) terms {
		d := terms{}
		for _, from := range []terms{mine, change} {
			for k, v := range from {
				d[k] = v
			}
		}
		return d
	}
	logged := streaming(9)
	logged.Sampling.LogProbs = ptr(int64(2))
	several := streaming(9)
	several.Sampling.N = ptr(int64(2))
	for name, tc := range map[string]struct {
		left   terms
		g      ipc.Generate
		kind   ipc.ErrorKind
		reason string
	}{
		"another context's state":  {with(terms{"opaque_state": other["opaque_state"]}), g, ipc.ErrorRequest, "KV transfer: the request is about context"},
		"another prompt's KV":      {other, g, ipc.ErrorRequest, "the KV is that of another prompt"},
		"an id of both":            {with(terms{"disagg_request_id": 77}), g, ipc.ErrorRequest, "KV transfer: the request is about context 77"},
		"no ids":                   {with(terms{"ctx_request_id": nil}), g, ipc.ErrorRequest, "ctx_request_id is missing"},
		"no state":                 {with(terms{"opaque_state": nil}), g, ipc.ErrorRequest, "KV transfer: opaque state"},
		"state of another engine":  {with(terms{"opaque_state": "c3RhbmRpbi0x"}), g, ipc.ErrorRequest, "KV transfer: opaque state"},
		"state that is no base64":  {with(terms{"opaque_state": "%"}), g, ipc.ErrorParams, "opaque_state is not base64"},
		"no first token":           {with(terms{"first_gen_tokens": []int{}}), g, ipc.ErrorRequest, "first_gen_tokens"},
		"a token of no vocabulary": {with(terms{"first_gen_tokens": []int{355}}), g, ipc.ErrorRequest, "first_gen_tokens"},
		"no log probabilities":     {mine, logged, ipc.ErrorRequest, "first_gen_log_probs"},
		"several choices":          {mine, several, ipc.ErrorValue, "n is not 1"},
		"wrong type":               {with(terms{"ctx_request_id": "x"}), g, ipc.ErrorType, "ctx_request_id"},
	} {
		t.Run(name, func(t *testing.T) {
			got := collect(t, decode(t, two, prompt(40), tc.g, tc.left))
			require.NotNil(t, got.err)
			require.Equal(t, tc.kind, got.err.Kind)
			require.Contains(t, got.err.Message, tc.reason)
			require.Empty(t, got.tokens[0])
		})
	}
	require.Equal(t, 2, heldBy(t, one).Requests)
	for start, left := range map[int]terms{40: mine, 50: other} {
		require.Nil(t, collect(t, decode(t, two, prompt(start), g, left)).err, "what was refused has cost nothing")
	}
	holdsSoon(t, one, heldKV{})
	got := collect(t, decode(t, two, prompt(40), g, mine))
	require.Contains(t, got.err.Message, "is not here", "KV can be taken once")

	for _, d := range []terms{{"request_type": "prefill"}, {}} {
		bad, _ := prefill(t, one, prompt(3), g, d)
		require.Equal(t, ipc.ErrorValue, bad.err.Kind)
	}
	twice := terms{"request_type": "context_only", "disagg_request_id": 5}
	_, left := prefill(t, one, prompt(3), g, twice)
	require.NotNil(t, left)
	bad, left := prefill(t, one, prompt(3), g, twice)
	require.Contains(t, bad.err.Message, "context 5 is held already")
	require.Nil(t, left)
}

// A request that is cancelled before it has its KV leaves the other engine's
// blocks behind, until their time is over.
func TestCancelBeforeTheKVIsHere(t *testing.T) {
	clock := &handClock{now: time.Unix(1000, 0), timers: make(map[chan time.Time]time.Time)}
	conn, ended := sim.InProcess(context.Background(), sim.Options{Clock: clock})
	one, err := engine.Attach(bounded(t), conn, configure(t, sim.Args{}))
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, one.Stop(context.Background()))
		<-ended
	})
	two := attach(t, sim.Args{MaxBatchSize: 1, KVTransferDelay: sim.Duration(time.Hour), KVTransferTimeout: sim.Duration(2 * time.Hour)})
	_, a := prefill(t, one, prompt(40), streaming(1), contextOnly)
	_, b := prefill(t, one, prompt(41), streaming(1), contextOnly)
	fetching := decode(t, two, prompt(40), streaming(9), a)
	queued := decode(t, two, prompt(41), streaming(9), b)
	holdsSoon(t, two, heldKV{Receiving: 1})
	for _, s := range []*engine.Stream{queued, fetching} {
		s.Cancel()
		require.Equal(t, "cancelled", collect(t, s).finish[0])
	}
	holdsSoon(t, two, heldKV{Dangling: 2})
	require.Equal(t, heldKV{Requests: 2, Blocks: 4}, heldBy(t, one))
	clock.advance(59 * time.Second)
	require.Equal(t, heldKV{Requests: 2, Blocks: 4}, heldBy(t, one))
	clock.advance(time.Second)
	holdsSoon(t, one, heldKV{Expired: 2})
	require.Equal(t, heldKV{Dangling: 2}, heldBy(t, two))
}

// Once it has its KV, a request that is cancelled leaves nothing behind.
func TestCancelAfterTheFirstToken(t *testing.T) {
	one, two := attach(t, sim.Args{}), attach(t, sim.Args{TokenDelay: sim.Duration(time.Hour)})
	_, left := prefill(t, one, prompt(40), streaming(1), contextOnly)
	s := decode(t, two, prompt(40), streaming(9), left)
	_, err := s.Next(bounded(t))
	require.NoError(t, err)
	s.Cancel()
	collect(t, s)
	holdsSoon(t, one, heldKV{})
	require.Equal(t, heldKV{}, heldBy(t, two))
}

// KV that is held takes room: a prefill that does not fit waits, and goes on
// when somebody has taken what is in its way.
func TestHeldKVTakesRoom(t *testing.T) {
	one, two := attach(t, sim.Args{BlockSize: 10, TotalBlocks: 4}), attach(t, sim.Args{})
	_, left := prefill(t, one, prompt(30), streaming(1), contextOnly)
	g := streaming(1)
	g.Disaggregated = contextOnly.raw(t)
	waits := send(t, one, prompt(20), g)
	_, fits := prefill(t, one, prompt(10), streaming(1), contextOnly)
	require.NotNil(t, fits, "a smaller one passes it")
	require.Equal(t, heldKV{Requests: 2, Blocks: 4}, heldBy(t, one))
	require.Nil(t, collect(t, decode(t, two, prompt(30), streaming(3), left)).err)
	_, waited := collectTerms(t, waits)
	require.NotNil(t, waited)
	bad, _ := prefill(t, one, prompt(41), streaming(1), contextOnly)
	require.Contains(t, bad.err.Message, "fills 5 blocks")
}

// A conversation keeps its rank in both engines.
func TestConversationsStayInBothPhases(t *testing.T) {
	args := sim.Args{AttentionDPSize: 4, ConversationAffinity: true}
	one, two := attach(t, args), attach(t, args)
	homes := map[string][2]int{}
	for turn := range 5 {
		for conv := range 8 {
			id := fmt.Sprint("conv", conv)
			g := streaming(3)
			g.Conversation = &ipc.Conversation{ID: &id}
			start := prompt(10 + conv + 20*turn)
			first, left := prefill(t, one, start, g, contextOnly)
			require.EqualValues(t, fmt.Sprint(*first.first.Rank), left["ctx_dp_rank"])
			second := collect(t, decode(t, two, start, g, left))
			ranks := [2]int{*first.first.Rank, *second.first.Rank}
			if turn == 0 {
				homes[id] = ranks
			}
			require.Equal(t, homes[id], ranks)
		}
	}
}

// The hand-off between two processes, and what becomes of it when one of them
// dies in the middle.
func TestHandoffBetweenProcesses(t *testing.T) {
	exe, err := os.Executable()
	require.NoError(t, err)
	start := func(t *testing.T) *engine.Process {
		cfg := configure(t, sim.Args{})
		cfg.Command, cfg.Env, cfg.TermTimeout = []string{exe}, []string{childEnv + "=1"}, patience
		p, err := engine.Start(bounded(t), cfg)
		require.NoError(t, err)
		t.Cleanup(func() { _ = p.Stop(context.Background()) })
		return p
	}
	one, two := start(t), start(t)
	_, left := prefill(t, one, prompt(100), streaming(1), contextOnly)
	got := collect(t, decode(t, two, prompt(100), streaming(50), left))
	require.Equal(t, sim.Continue(sim.Args{}.Text(), prompt(100), 0, 50), got.tokens[0])
	holdsSoon(t, one, heldKV{})

	_, left = prefill(t, one, prompt(100), withSalt("sim:receive-crash", 1), contextOnly)
	s := decode(t, two, prompt(100), withSalt("sim:receive-crash", 9), left)
	_, err = s.Next(bounded(t))
	require.Error(t, err)
	<-two.Done()
	require.Equal(t, heldKV{Requests: 1, Blocks: 4}, heldBy(t, one), "until its time is over, or somebody else takes it")
	three := start(t)
	require.Nil(t, collect(t, decode(t, three, prompt(100), streaming(9), left)).err)
	holdsSoon(t, one, heldKV{})

	_, left = prefill(t, one, prompt(100), withSalt("sim:transfer-crash", 1), contextOnly)
	_, gone := prefill(t, one, prompt(101), streaming(1), contextOnly)
	got = collect(t, decode(t, three, prompt(100), withSalt("sim:transfer-crash", 9), left))
	require.Contains(t, got.err.Message, "KV transfer: context ")
	<-one.Done()
	got = collect(t, decode(t, three, prompt(101), streaming(9), gone))
	require.Contains(t, got.err.Message, "reach the sender")
	require.Equal(t, heldKV{}, heldBy(t, three))
}
