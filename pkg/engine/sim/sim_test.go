package sim_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dynworker/pkg/engine"
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/engine/sim"
)

// childEnv makes the test binary a simulated engine.
const childEnv = "SIM_TEST_CHILD"

const patience = 60 * time.Second

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		os.Exit(sim.Main())
	}
	goleak.VerifyTestMain(m)
}

func ptr[T any](v T) *T { return &v }

func bounded(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

func configure(t *testing.T, args sim.Args) engine.Config {
	b, err := json.Marshal(args)
	require.NoError(t, err)
	return engine.Config{Configure: ipc.Configure{Args: b}}
}

// attach starts an engine in this process.
func attach(t *testing.T, args sim.Args) *engine.Process {
	t.Helper()
	conn, ended := sim.InProcess(context.Background(), sim.Options{})
	p, err := engine.Attach(bounded(t), conn, configure(t, args))
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, p.Stop(context.Background()))
		<-ended
	})
	return p
}

// answer is everything that one request was answered with.
type answer struct {
	tokens    map[uint16][]uint32
	probs     map[uint16][]ipc.TokenLogProb
	finish    map[uint16]string
	stop      map[uint16]any
	first     *ipc.Meta
	total     *int64
	err       *ipc.RequestError
	noOutputs bool
}

func collect(t *testing.T, s *engine.Stream) answer {
	t.Helper()
	a := answer{tokens: map[uint16][]uint32{}, probs: map[uint16][]ipc.TokenLogProb{}, finish: map[uint16]string{}, stop: map[uint16]any{}}
	for {
		outs, err := s.Next(bounded(t))
		if err == io.EOF {
			return a
		}
		require.NoError(t, err)
		for _, o := range outs {
			a.add(o)
		}
	}
}

func (a *answer) add(o ipc.Output) {
	a.tokens[o.Index] = append(a.tokens[o.Index], o.Tokens...)
	for _, p := range o.LogProbs {
		p.Top = slices.Clone(p.Top)
		a.probs[o.Index] = append(a.probs[o.Index], p)
	}
	if o.Meta == nil {
		return
	}
	if a.first == nil {
		a.first = o.Meta
	}
	if o.Meta.FinishReason != "" {
		a.finish[o.Index], a.stop[o.Index] = o.Meta.FinishReason, o.Meta.StopReason
		a.total = o.Meta.CompletionTokens
	}
	if o.Meta.Error != nil {
		a.err = o.Meta.Error
	}
	a.noOutputs = a.noOutputs || o.Meta.NoOutputs
}

func ask(t *testing.T, p *engine.Process, prompt []int32, g ipc.Generate) answer {
	t.Helper()
	return collect(t, send(t, p, prompt, g))
}

func send(t *testing.T, p *engine.Process, prompt []int32, g ipc.Generate) *engine.Stream {
	t.Helper()
	s, err := p.Generate(bounded(t), &g, prompt)
	require.NoError(t, err)
	return s
}

// streaming returns the parameters of an ordinary request.
func streaming(maxTokens int64) ipc.Generate {
	return ipc.Generate{Streaming: true, Sampling: ipc.Sampling{MaxTokens: &maxTokens}}
}

func prompt(n int) []int32 {
	p := make([]int32, n)
	for i := range p {
		p[i] = int32(i*7%340) + 6
	}
	return p
}

func asPrompt(p []int32, more []uint32) []int32 {
	p = slices.Clone(p)
	for _, t := range more {
		p = append(p, int32(t))
	}
	return p
}

func TestTextAndItsContinuation(t *testing.T) {
	args := sim.Args{EOSEvery: 40}
	one, two := attach(t, args), attach(t, args)
	for n := range 20 {
		start := prompt(3 + n)
		want := sim.Continue(args.Text(), start, 0, 200)
		whole := ask(t, one, start, streaming(200))
		require.Equal(t, want, whole.tokens[0])
		if want[len(want)-1] == 2 {
			require.Equal(t, "stop", whole.finish[0], "the end token ends the text, and stays in it")
			require.Nil(t, whole.stop[0])
		} else {
			require.Equal(t, "length", whole.finish[0])
		}
		cut := len(want) / 2
		if cut == 0 {
			continue
		}
		head := ask(t, one, start, streaming(int64(cut))).tokens[0]
		tail := ask(t, two, asPrompt(start, head), streaming(int64(200-cut))).tokens[0]
		require.Equal(t, want, append(head, tail...))
	}
}

func TestSampling(t *testing.T) {
	args := sim.Args{EOSEvery: 10}
	p := attach(t, args)
	text := args.Text()
	start := prompt(5)
	natural := sim.Continue(text, start, 0, 1000)
	endless := text
	endless.EOSEvery = 0
	require.Less(t, len(natural), 100)

	g := streaming(100)
	g.Sampling.IgnoreEOS = ptr(true)
	require.Equal(t, sim.Continue(endless, start, 0, 100), ask(t, p, start, g).tokens[0])

	g = streaming(100)
	g.Sampling.MinTokens = ptr(int64(len(natural) + 1))
	got := ask(t, p, start, g).tokens[0]
	require.Greater(t, len(got), len(natural))
	require.Equal(t, natural[:len(natural)-1], got[:len(natural)-1])
	require.NotEqual(t, uint32(2), got[len(natural)-1], "no end below min_tokens")

	g = streaming(100)
	g.Sampling.StopTokenIDs = []int64{2, int64(natural[2])}
	a := ask(t, p, start, g)
	at := slices.Index(natural, natural[2])
	require.Equal(t, natural[:at], a.tokens[0], "a stop word is trimmed")
	require.Equal(t, "stop", a.finish[0])
	require.Equal(t, int64(natural[2]), a.stop[0])

	g = streaming(10)
	g.Sampling.Seed = ptr(int64(7))
	seeded := text
	seeded.Seed = 7
	require.Equal(t, sim.Continue(seeded, start, 0, 10), ask(t, p, start, g).tokens[0])

	g = ipc.Generate{Sampling: ipc.Sampling{IgnoreEOS: ptr(true)}}
	a = ask(t, p, start, g)
	require.Len(t, a.tokens[0], 32, "without max_tokens the engine's own default counts")
	require.Equal(t, "length", a.finish[0])
}

func TestChoicesAndLogProbs(t *testing.T) {
	args := sim.Args{EOSEvery: 8}
	p := attach(t, args)
	start := prompt(4)
	g := streaming(12)
	g.Sampling.N = ptr(int64(3))
	g.Sampling.LogProbs = ptr(int64(2))
	g.Sampling.PromptLogProbs = ptr(int64(1))
	a := ask(t, p, start, g)
	var total int64
	for c := range uint16(3) {
		want := sim.Continue(args.Text(), start, int(c), 12)
		require.Equal(t, want, a.tokens[c])
		require.NotEmpty(t, a.finish[c])
		require.Len(t, a.probs[c], len(want))
		for i, probs := range a.probs[c] {
			require.Len(t, probs.Top, 2)
			require.Equal(t, ipc.TopLogProb{TokenID: want[i], Rank: 1, LogProb: probs.LogProb}, probs.Top[0])
			require.Less(t, probs.Top[1].LogProb, probs.LogProb)
		}
		total += int64(len(want))
	}
	require.Equal(t, total, *a.total)
	var positions []map[string]struct {
		LogProb float64
		Rank    int
	}
	require.NoError(t, json.Unmarshal(a.first.PromptLogProbs, &positions))
	require.Len(t, positions, len(start))
	require.Nil(t, positions[0])
	require.Contains(t, positions[1], "13")

	g.Streaming = false
	whole := ask(t, p, start, g)
	require.Equal(t, a.tokens, whole.tokens)
	require.Equal(t, a.probs, whole.probs)
}

func TestPrefixesAreReused(t *testing.T) {
	p := attach(t, sim.Args{})
	first := prompt(100)
	a := ask(t, p, first, streaming(60))
	require.Zero(t, *a.first.CachedTokens)
	second := append(asPrompt(first, a.tokens[0]), 30, 31, 32)
	a = ask(t, p, second, streaming(1))
	require.EqualValues(t, 128, *a.first.CachedTokens, "159 tokens were written: four full blocks")
	a = ask(t, p, second, streaming(1))
	require.EqualValues(t, 160, *a.first.CachedTokens)
	exact := prompt(64)
	ask(t, p, exact, streaming(1))
	a = ask(t, p, exact, streaming(1))
	require.EqualValues(t, 63, *a.first.CachedTokens, "the last token is computed anew")
	g := streaming(1)
	g.CacheSalt = ptr("other tenant")
	require.Zero(t, *ask(t, p, second, g).first.CachedTokens)
}

func TestRefusals(t *testing.T) {
	p := attach(t, sim.Args{MaxSeqLen: 100, MaxNumTokens: 90, MaxBatchSize: 4})
	for name, tc := range map[string]struct {
		prompt []int32
		change func(*ipc.Generate)
		kind   ipc.ErrorKind
	}{
		"empty prompt":         {nil, nil, ipc.ErrorRequest},
		"over max_num_tokens":  {prompt(91), nil, ipc.ErrorRequest},
		"outside vocabulary":   {[]int32{355}, nil, ipc.ErrorRequest},
		"negative token":       {[]int32{-1}, nil, ipc.ErrorRequest},
		"max_tokens 0":         {prompt(1), func(g *ipc.Generate) { g.Sampling.MaxTokens = ptr(int64(0)) }, ipc.ErrorValue},
		"n 0":                  {prompt(1), func(g *ipc.Generate) { g.Sampling.N = ptr(int64(0)) }, ipc.ErrorValue},
		"n over the slots":     {prompt(1), func(g *ipc.Generate) { g.Sampling.N = ptr(int64(5)) }, ipc.ErrorValue},
		"huge n":               {prompt(1), func(g *ipc.Generate) { g.Sampling.N = ptr(int64(math.MaxInt64)) }, ipc.ErrorValue},
		"negative logprobs":    {prompt(1), func(g *ipc.Generate) { g.Sampling.LogProbs = ptr(int64(-1)) }, ipc.ErrorValue},
		"huge logprobs":        {prompt(1), func(g *ipc.Generate) { g.Sampling.LogProbs = ptr(int64(math.MaxInt64)) }, ipc.ErrorValue},
		"huge prompt logprobs": {prompt(1), func(g *ipc.Generate) { g.Sampling.PromptLogProbs = ptr(int64(math.MaxInt64)) }, ipc.ErrorValue},
		"priority":             {prompt(1), func(g *ipc.Generate) { g.Priority = ptr(1.5) }, ipc.ErrorValue},
		"guided":               {prompt(1), func(g *ipc.Generate) { g.Guided = &ipc.Guided{} }, ipc.ErrorNotImplemented},
		"beam search":          {prompt(1), func(g *ipc.Generate) { g.Sampling.UseBeamSearch = ptr(true) }, ipc.ErrorNotImplemented},
		"request type":         {prompt(1), func(g *ipc.Generate) { g.Disaggregated = json.RawMessage(`{"request_type":"prefill"}`) }, ipc.ErrorValue},
	} {
		t.Run(name, func(t *testing.T) {
			g := streaming(4)
			if tc.change != nil {
				tc.change(&g)
			}
			a := ask(t, p, tc.prompt, g)
			require.NotNil(t, a.err)
			require.Equal(t, tc.kind, a.err.Kind)
		})
	}
	g := streaming(1000)
	g.Disaggregated = json.RawMessage(`{"request_type":"context_and_generation"}`)
	a := ask(t, p, prompt(90), g)
	require.Nil(t, a.err)
	require.Len(t, a.tokens[0], 10, "max_seq_len bounds prompt and output together")
	require.Equal(t, "length", a.finish[0])

	old := attach(t, sim.Args{Build: "hybrid"})
	g = streaming(1)
	g.Conversation = &ipc.Conversation{}
	require.Equal(t, ipc.ErrorType, ask(t, old, prompt(1), g).err.Kind, "the build does not know the argument")
}

func withSalt(salt string, maxTokens int64) ipc.Generate {
	g := streaming(maxTokens)
	g.CacheSalt = &salt
	return g
}

func TestTriggers(t *testing.T) {
	p := attach(t, sim.Args{VocabSize: 100000, LastTokenID: 354})
	byToken := func(id int32) answer { return ask(t, p, []int32{id}, streaming(8)) }

	require.Equal(t, &ipc.RequestError{Kind: ipc.ErrorRequest, Type: "RequestError", Message: "simulated request error after 0 tokens"},
		ask(t, p, prompt(3), withSalt("sim:request-error", 8)).err)
	a := ask(t, p, prompt(3), withSalt("sim:request-error:3", 8))
	require.Len(t, a.tokens[0], 3)
	require.Equal(t, ipc.ErrorRequest, a.err.Kind)
	require.Equal(t, a.err, byToken(90002).err)
	require.Equal(t, a.err, ask(t, p, prompt(3), withSalt("trigger:90002", 8)).err)
	for salt, kind := range map[string]ipc.ErrorKind{
		"sim:value-error": ipc.ErrorValue, "sim:type-error": ipc.ErrorType, "sim:not-implemented": ipc.ErrorNotImplemented,
	} {
		require.Equal(t, kind, ask(t, p, prompt(3), withSalt(salt, 8)).err.Kind)
	}
	require.True(t, byToken(90008).noOutputs)
	a = byToken(90009)
	require.Len(t, a.tokens[0], 3)
	require.Empty(t, a.finish)
	require.Equal(t, "timeout", byToken(90011).finish[0])
	require.Equal(t, "length", ask(t, p, prompt(3), withSalt("sim:no-such-thing", 8)).finish[0])
	require.Equal(t, "length", ask(t, p, prompt(3), withSalt("trigger:xyz", 8)).finish[0])

	s := send(t, p, prompt(3), withSalt("sim:ignore-cancel", 50))
	s.Cancel()
	a = collect(t, s)
	require.Len(t, a.tokens[0], 50)
	require.Equal(t, "length", a.finish[0])

	s = send(t, p, prompt(3), withSalt("sim:stall:2", 50))
	got := 0
	for got < 2 {
		outs, err := s.Next(bounded(t))
		require.NoError(t, err)
		for _, o := range outs {
			got += len(o.Tokens)
		}
	}
	s.Cancel()
	require.Equal(t, "cancelled", collect(t, s).finish[0])

	s = send(t, p, prompt(3), withSalt("sim:unhealthy", 50))
	defer s.Close()
	require.Eventually(t, func() bool {
		body, err := p.Query(bounded(t), ipc.QueryHealth)
		require.NoError(t, err)
		return strings.Contains(string(body), `"healthy":false`)
	}, patience, time.Millisecond)
}

func TestEngineFailsAsAWhole(t *testing.T) {
	for salt, check := range map[string]func(t *testing.T, a answer, err error, exit *engine.Exit, ended error){
		"sim:fatal:3": func(t *testing.T, a answer, err error, exit *engine.Exit, ended error) {
			require.Equal(t, ipc.ErrorFatal, a.err.Kind, "the request that did it is told")
			require.ErrorIs(t, err, ipc.Fatal{ErrorType: "RuntimeError", Message: "simulated engine failure"})
			var fatal *sim.FatalError
			require.ErrorAs(t, ended, &fatal)
		},
		"sim:crash:2": func(t *testing.T, a answer, err error, exit *engine.Exit, ended error) {
			require.ErrorIs(t, err, engine.ErrChannelClosed)
			require.ErrorIs(t, ended, sim.ErrCrashed)
		},
		"sim:exit:2": func(t *testing.T, a answer, err error, exit *engine.Exit, ended error) {
			require.ErrorIs(t, err, engine.ErrChannelClosed)
			require.ErrorIs(t, ended, sim.ErrLeft)
		},
		"rank": func(t *testing.T, a answer, err error, exit *engine.Exit, ended error) {
			require.ErrorContains(t, err, "IndexError")
		},
	} {
		t.Run(salt, func(t *testing.T) {
			conn, ended := sim.InProcess(context.Background(), sim.Options{})
			p, err := engine.Attach(bounded(t), conn, configure(t, sim.Args{AttentionDPSize: 2}))
			require.NoError(t, err)
			bystander := send(t, p, prompt(3), withSalt("sim:stall", 50))
			g := withSalt(salt, 50)
			if salt == "rank" {
				g = streaming(1)
				g.Scheduling = &ipc.Scheduling{AttentionDPRank: 2}
			}
			culprit := send(t, p, prompt(3), g)
			var a answer
			a.tokens, a.finish, a.stop = map[uint16][]uint32{}, map[uint16]string{}, map[uint16]any{}
			for {
				outs, err := culprit.Next(bounded(t))
				if err != nil {
					break
				}
				for _, o := range outs {
					a.add(o)
				}
			}
			for err == nil {
				_, err = bystander.Next(bounded(t))
			}
			require.ErrorIs(t, err, engine.ErrEngineDead)
			<-p.Done()
			check(t, a, err, p.Exit(), <-ended)
		})
	}
}

// With attention DP off a rank means nothing, as in TensorRT-LLM.
func TestRankWithoutAttentionDP(t *testing.T) {
	p := attach(t, sim.Args{})
	g := streaming(1)
	g.Scheduling = &ipc.Scheduling{AttentionDPRank: 7}
	a := ask(t, p, prompt(3), g)
	require.Nil(t, a.err)
	require.Zero(t, *a.first.Rank)
}

// Ten conversations of five turns over four ranks, with requests that belong to
// none between them.
func TestConversationsStayOnTheirRank(t *testing.T) {
	p := attach(t, sim.Args{AttentionDPSize: 4, ConversationAffinity: true})
	home, firsts, loose := map[string]int{}, map[int]int{}, map[int]int{}
	for turn := range 5 {
		for c := range 10 {
			id := "conversation-" + string(rune('a'+c))
			g := streaming(2)
			g.Conversation = &ipc.Conversation{ID: &id}
			rank := *ask(t, p, prompt(10+turn), g).first.Rank
			if turn == 0 {
				home[id] = rank
				firsts[rank]++
			}
			require.Equal(t, home[id], rank)
			if c%4 == 0 { // five requests a round, so that the rotation of four ranks drifts
				g.Conversation = &ipc.Conversation{}
				loose[*ask(t, p, prompt(10), g).first.Rank]++
			}
		}
	}
	require.Len(t, firsts, 4, "first turns are spread")
	require.Len(t, loose, 4, "requests without an id are balanced")
}

func TestExplicitFirstRank(t *testing.T) {
	turn := func(p *engine.Process, rank int) int {
		g := streaming(1)
		g.Conversation = &ipc.Conversation{ID: ptr("c")}
		if rank >= 0 {
			g.Scheduling = &ipc.Scheduling{AttentionDPRank: rank}
		}
		return *ask(t, p, prompt(3), g).first.Rank
	}
	newer := attach(t, sim.Args{AttentionDPSize: 4, ConversationAffinity: true})
	require.Equal(t, []int{3, 3, 3}, []int{turn(newer, 3), turn(newer, -1), turn(newer, 1)})
	older := attach(t, sim.Args{AttentionDPSize: 4, ConversationAffinity: true, Build: "rc21"})
	require.Equal(t, []int{3, 0, 1, 0}, []int{turn(older, 3), turn(older, -1), turn(older, 1), turn(older, -1)})
}

func TestQueueBehindTheSlots(t *testing.T) {
	log := filepath.Join(t.TempDir(), "calls.jsonl")
	p := attach(t, sim.Args{MaxBatchSize: 1, AttentionDPSize: 2, CallsLog: log})
	var stalled []*engine.Stream
	for range 2 {
		stalled = append(stalled, send(t, p, prompt(3), withSalt("sim:stall", 5)))
	}
	var queued []*engine.Stream
	for i := range 5 {
		g := streaming(2)
		g.RequestID = string(rune('a' + i))
		queued = append(queued, send(t, p, prompt(3), g))
	}
	require.Eventually(t, func() bool { return countCalls(t, log, "generate") == 7 }, patience, time.Millisecond)
	queued[1].Cancel()
	a := collect(t, queued[1])
	require.Equal(t, "cancelled", a.finish[0], "one that waits is answered at once")
	require.Nil(t, a.first.Rank)
	stalled[0].Cancel()
	collect(t, stalled[0])
	for _, i := range []int{0, 2, 3, 4} {
		require.Equal(t, "length", collect(t, queued[i]).finish[0])
	}
	var order []string
	for _, c := range calls(t, log) {
		if c["event"] == "placed" && c["request_id"] != nil {
			order = append(order, c["request_id"].(string))
		}
	}
	require.Equal(t, []string{"a", "c", "d", "e"}, order, "first come, first served")
	stalled[1].Close()
}

func TestSeveralChoicesAreNoReasonToWait(t *testing.T) {
	log := filepath.Join(t.TempDir(), "calls.jsonl")
	p := attach(t, sim.Args{CallsLog: log})
	const requests = 16
	var streams []*engine.Stream
	for range requests {
		g := withSalt("sim:stall", 5)
		n := int64(4)
		temperature := 1.0
		g.Sampling.N, g.Sampling.Temperature = &n, &temperature
		streams = append(streams, send(t, p, prompt(3), g))
	}
	require.Eventually(t, func() bool { return countCalls(t, log, "placed") == requests }, patience, time.Millisecond, "none of them ends, and there are slots for all")
	for _, s := range streams {
		s.Cancel()
		collect(t, s)
	}
}

func calls(t *testing.T, path string) []map[string]any {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	var all []map[string]any
	for line := range bytes.Lines(b) {
		var c map[string]any
		require.NoError(t, json.Unmarshal(line, &c))
		all = append(all, c)
	}
	return all
}

func countCalls(t *testing.T, path, event string) (n int) {
	for _, c := range calls(t, path) {
		if c["event"] == event {
			n++
		}
	}
	return n
}

func TestCallsLog(t *testing.T) {
	log := filepath.Join(t.TempDir(), "calls.jsonl")
	p := attach(t, sim.Args{CallsLog: log, AttentionDPSize: 2})
	g := streaming(3)
	g.RequestID = "r-1"
	ask(t, p, []int32{5, 6, 7}, g)
	g = withSalt("sim:stall:1", 9)
	s := send(t, p, []int32{5}, g)
	_, err := s.Next(bounded(t))
	require.NoError(t, err)
	s.Cancel()
	collect(t, s)
	s.Cancel()
	ask(t, p, nil, streaming(1))
	require.NoError(t, p.Stop(bounded(t)))

	all := calls(t, log)
	for _, c := range all {
		require.NotEmpty(t, c["time"])
		delete(c, "time")
	}
	require.Equal(t, []map[string]any{
		{"event": "start", "args": map[string]any{"calls_log": log, "attention_dp_size": 2.0}},
		{
			"event": "generate", "id": 1.0, "request_id": "r-1", "prompt_tokens": 3.0, "prompt_sum": 18.0, "prompt_head": []any{5.0, 6.0, 7.0},
			"params": map[string]any{"request_id": "r-1", "streaming": true, "sampling": map[string]any{"max_tokens": 3.0}},
		},
		{"event": "placed", "id": 1.0, "request_id": "r-1", "rank": 0.0, "cached_tokens": 0.0},
		{"event": "finish", "id": 1.0, "request_id": "r-1", "rank": 0.0, "reason": "length", "tokens": []any{3.0}},
		{
			"event": "generate", "id": 2.0, "prompt_tokens": 1.0, "prompt_sum": 5.0, "prompt_head": []any{5.0},
			"params": map[string]any{"streaming": true, "sampling": map[string]any{"max_tokens": 9.0}, "cache_salt": "sim:stall:1"},
		},
		{"event": "placed", "id": 2.0, "rank": 0.0, "cached_tokens": 0.0},
		{"event": "cancel", "id": 2.0, "known": true, "tokens": []any{1.0}},
		{"event": "finish", "id": 2.0, "rank": 0.0, "reason": "cancelled", "tokens": []any{1.0}},
		{"event": "generate", "id": 3.0, "params": map[string]any{"streaming": true, "sampling": map[string]any{"max_tokens": 1.0}}},
		{"event": "finish", "id": 3.0, "reason": "error: RequestError"},
		{"event": "shutdown"},
	}, all)
}

// An engine without delay makes many texts at once, whole and in order.
func TestManyRequestsAtOnce(t *testing.T) {
	args := sim.Args{AttentionDPSize: 4, MaxBatchSize: 16}
	p := attach(t, args)
	streams := make([]*engine.Stream, 200)
	for i := range streams {
		streams[i] = send(t, p, prompt(i+1), streaming(100))
	}
	for i, s := range streams {
		require.Equal(t, sim.Continue(args.Text(), prompt(i+1), 0, 100), collect(t, s).tokens[0])
	}
	require.EqualValues(t, 200*100, p.Counters().Tokens)
	require.Zero(t, p.Counters().InFlight)
}

func TestStatsQueriesAndEvents(t *testing.T) {
	conn, ended := sim.InProcess(context.Background(), sim.Options{})
	events := make(chan string, 100)
	cfg := configure(t, sim.Args{AttentionDPSize: 2, KVEvents: true, StatsInterval: sim.Duration(time.Millisecond)})
	cfg.OnEvents = func(b []byte) { events <- string(b) }
	p, err := engine.Attach(bounded(t), conn, cfg)
	require.NoError(t, err)
	require.Contains(t, <-events, `"created"`)
	ask(t, p, prompt(40), streaming(3))
	stored := <-events
	require.Contains(t, stored, `"stored"`)
	require.Contains(t, stored, `"attention_dp_rank":0`)

	body, err := p.Query(bounded(t), ipc.QueryStats)
	require.NoError(t, err)
	var reply struct {
		Stats []struct {
			Rank int `json:"attentionDpRank"`
			KV   struct {
				Used int `json:"usedNumBlocks"`
			} `json:"kvCacheStats"`
		} `json:"stats"`
	}
	require.NoError(t, json.Unmarshal(body, &reply))
	require.Len(t, reply.Stats, 2)
	require.Equal(t, 1, reply.Stats[0].KV.Used)
	require.Zero(t, reply.Stats[1].KV.Used)
	require.Eventually(t, func() bool {
		s := p.Stats()
		return len(s.Rows) == 2 && strings.Contains(string(s.Rows[0]), `"usedNumBlocks":1`) && strings.Contains(string(s.Rows[0]), `"numActiveRequests":0`)
	}, patience, time.Millisecond, "news of the end come too")
	_, err = p.Query(bounded(t), ipc.QueryDescendants)
	require.NoError(t, err)
	_, err = p.Query(bounded(t), "weather")
	var unanswered *engine.QueryError
	require.ErrorAs(t, err, &unanswered)
	require.NoError(t, p.Stop(bounded(t)))
	require.NoError(t, <-ended)
}

// raw is the worker's side of a channel, for tests of what goes over it.
type raw struct {
	t    *testing.T
	conn net.Conn
	r    *ipc.Reader
}

func dial(t *testing.T, args sim.Args) (*raw, <-chan error) {
	conn, ended := sim.InProcess(t.Context(), sim.Options{})
	w := &raw{t: t, conn: conn, r: ipc.NewReader(conn, 0)}
	w.until(ipc.KindHello)
	w.send(ipc.AppendMessage(nil, ipc.Configure{Protocol: ipc.Version, Args: configure(t, args).Configure.Args}))
	return w, ended
}

func (w *raw) send(frame []byte, err error) {
	require.NoError(w.t, err)
	_, err = w.conn.Write(frame)
	require.NoError(w.t, err)
}

func (w *raw) until(want ipc.Kind) []byte {
	for {
		kind, payload, err := w.r.Next()
		require.NoError(w.t, err)
		if kind == want {
			return payload
		}
	}
}

func (w *raw) outputs() []ipc.Output {
	outs, err := ipc.ParseOutputs(w.until(ipc.KindOutputs))
	require.NoError(w.t, err)
	return outs
}

func (w *raw) generate(id uint64, g ipc.Generate) {
	w.send(ipc.AppendGenerate(nil, id, prompt(4), &g))
}

// The pace is exact: one message a step for all requests, each with one token.
func TestPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		w, ended := dial(t, sim.Args{
			LoadTime: sim.Duration(time.Minute), TokenDelay: sim.Duration(10 * time.Millisecond),
			FirstTokenDelay: sim.Duration(100 * time.Millisecond), StatsInterval: sim.Duration(time.Hour),
		})
		w.until(ipc.KindReady)
		require.Equal(t, time.Minute, time.Since(began))
		began = time.Now()
		for id := range uint64(3) {
			w.generate(id+1, streaming(5))
		}
		for step := range 5 {
			outs := w.outputs()
			require.Len(t, outs, 3, "all requests in one message")
			require.Equal(t, 100*time.Millisecond+time.Duration(step)*10*time.Millisecond, time.Since(began))
			for _, o := range outs {
				require.Len(t, o.Tokens, 1)
				require.Equal(t, step == 4, o.Last)
			}
		}
		w.conn.Close()
		require.ErrorIs(t, <-ended, sim.ErrWorkerGone)
	})
}

// After a pause the engine does not catch up.
func TestPaceAfterAPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, ended := dial(t, sim.Args{TokenDelay: sim.Duration(10 * time.Millisecond), StatsInterval: sim.Duration(time.Hour)})
		w.until(ipc.KindReady)
		for id := range uint64(2) {
			<-time.After(time.Second)
			began := time.Now()
			w.generate(id+1, streaming(3))
			for step := range 3 {
				w.outputs()
				require.Equal(t, time.Duration(step)*10*time.Millisecond, time.Since(began))
			}
		}
		w.conn.Close()
		<-ended
	})
}

// A worker that does not read blocks the engine's steps, not its ears: a cancel
// sent meanwhile takes effect with the next step.
func TestCancelWhileTheWorkerDoesNotRead(t *testing.T) {
	w, ended := dial(t, sim.Args{})
	w.until(ipc.KindReady)
	w.generate(1, streaming(8000))
	w.outputs()
	w.send(ipc.AppendCancel(nil, 1), nil) // returns although the engine is stuck in a write
	after := 0
	for {
		outs := w.outputs()
		if last := outs[len(outs)-1]; last.Last {
			require.Equal(t, "cancelled", last.Meta.FinishReason)
			break
		}
		after++
		require.Less(t, after, 10)
	}
	w.conn.Close()
	<-ended
}

func TestShutdownAnswersEverything(t *testing.T) {
	w, ended := dial(t, sim.Args{MaxBatchSize: 1})
	w.until(ipc.KindReady)
	w.generate(1, withSalt("sim:stall:1", 5))
	w.outputs()
	w.generate(2, streaming(5))
	w.send(ipc.AppendMessage(nil, ipc.Shutdown{DeadlineMillis: 1000}))
	left := map[uint64]string{}
	for len(left) < 2 {
		for _, o := range w.outputs() {
			require.True(t, o.Last)
			left[o.ID] = o.Meta.FinishReason
		}
	}
	require.Equal(t, map[uint64]string{1: "cancelled", 2: "cancelled"}, left)
	w.until(ipc.KindGoodbye)
	require.NoError(t, <-ended)
}

func TestBadMessagesFromTheWorker(t *testing.T) {
	w, ended := dial(t, sim.Args{})
	w.until(ipc.KindReady)
	w.send(ipc.AppendFrame(nil, ipc.KindGenerate, append([]byte{9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, "no JSON"...)))
	outs := w.outputs()
	require.Equal(t, uint64(9), outs[0].ID, "a request whose id is known is answered")
	require.Equal(t, ipc.ErrorRequest, outs[0].Meta.Error.Kind)
	w.send(ipc.AppendFrame(nil, ipc.KindGenerate, []byte{1}))
	w.until(ipc.KindFatal)
	var fatal *sim.FatalError
	require.ErrorAs(t, <-ended, &fatal)

	for name, frame := range map[string]func() ([]byte, error){
		"an id twice": func() ([]byte, error) {
			b, err := ipc.AppendGenerate(nil, 1, prompt(3), ptr(withSalt("sim:stall", 5)))
			return append(b, b...), err
		},
		"wrong way":       func() ([]byte, error) { return ipc.AppendMessage(nil, ipc.Goodbye{}) },
		"configure again": func() ([]byte, error) { return ipc.AppendMessage(nil, ipc.Configure{}) },
		"bad cancel":      func() ([]byte, error) { return ipc.AppendFrame(nil, ipc.KindCancel, []byte{1}) },
		"bad query":       func() ([]byte, error) { return ipc.AppendFrame(nil, ipc.KindQuery, []byte("x")) },
	} {
		t.Run(name, func(t *testing.T) {
			w, ended := dial(t, sim.Args{})
			w.until(ipc.KindReady)
			w.send(frame())
			w.until(ipc.KindFatal)
			require.Error(t, <-ended)
		})
	}
}

func TestStartFailures(t *testing.T) {
	for name, tc := range map[string]struct {
		conf ipc.Configure
		want string
	}{
		"unknown argument": {ipc.Configure{Protocol: ipc.Version, Args: json.RawMessage(`{"no_such":1}`)}, "no_such"},
		"affinity on rc19": {ipc.Configure{Protocol: ipc.Version, Args: json.RawMessage(`{"build":"rc19","conversation_affinity":true}`)}, "1.3.0rc19"},
		"calls log":        {ipc.Configure{Protocol: ipc.Version, Args: json.RawMessage(`{"calls_log":"/no/such/folder/x"}`)}, "calls_log"},
		"other protocol":   {ipc.Configure{Protocol: 2}, "protocol 2"},
	} {
		t.Run(name, func(t *testing.T) {
			conn, ended := sim.InProcess(t.Context(), sim.Options{})
			w := &raw{t: t, conn: conn, r: ipc.NewReader(conn, 0)}
			w.until(ipc.KindHello)
			w.send(ipc.AppendMessage(nil, tc.conf))
			fatal, err := ipc.ParseFatal(w.until(ipc.KindFatal))
			require.NoError(t, err)
			require.Contains(t, fatal.Message, tc.want)
			require.Error(t, <-ended)
		})
	}
}

// An engine that is still loading obeys, and notices the worker's death.
func TestEndWhileLoading(t *testing.T) {
	slow := sim.Args{LoadTime: sim.Duration(time.Hour)}
	w, ended := dial(t, slow)
	w.until(ipc.KindProgress)
	w.send(ipc.AppendMessage(nil, ipc.Shutdown{}))
	w.until(ipc.KindGoodbye)
	require.NoError(t, <-ended)

	w, ended = dial(t, slow)
	w.until(ipc.KindProgress)
	w.conn.Close()
	require.ErrorIs(t, <-ended, sim.ErrWorkerGone)

	w, ended = dial(t, slow)
	w.until(ipc.KindProgress)
	w.generate(1, streaming(1))
	w.until(ipc.KindFatal)
	require.Error(t, <-ended)

	conn, ended := sim.InProcess(t.Context(), sim.Options{})
	w = &raw{t: t, conn: conn, r: ipc.NewReader(conn, 0)}
	w.until(ipc.KindHello)
	w.send(ipc.AppendMessage(nil, ipc.Shutdown{}))
	w.until(ipc.KindGoodbye)
	require.NoError(t, <-ended)

	ctx, cancel := context.WithCancel(t.Context())
	_, ended = sim.InProcess(ctx, sim.Options{})
	cancel()
	require.ErrorIs(t, <-ended, sim.ErrWorkerGone)
}

// handClock moves when it is told to.
type handClock struct {
	mu     sync.Mutex
	now    time.Time
	timers map[chan time.Time]time.Time
}

func (c *handClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *handClock) Timer(at time.Time) (<-chan time.Time, func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	fires := make(chan time.Time, 1)
	if at.After(c.now) {
		c.timers[fires] = at
	} else {
		fires <- c.now
	}
	return fires, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.timers, fires)
		return true
	}
}

func (c *handClock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
	for fires, at := range c.timers {
		if !at.After(c.now) {
			delete(c.timers, fires)
			fires <- c.now
		}
	}
}

// An injected clock lets a test decide when an engine takes its next step.
func TestInjectedClock(t *testing.T) {
	clock := &handClock{now: time.Unix(1000, 0), timers: make(map[chan time.Time]time.Time)}
	conn, ended := sim.InProcess(t.Context(), sim.Options{Clock: clock})
	w := &raw{t: t, conn: conn, r: ipc.NewReader(conn, 0)}
	w.until(ipc.KindHello)
	args := sim.Args{TokenDelay: sim.Duration(time.Second), StatsInterval: sim.Duration(time.Hour)}
	w.send(ipc.AppendMessage(nil, ipc.Configure{Protocol: ipc.Version, Args: configure(t, args).Configure.Args}))
	w.until(ipc.KindReady)
	w.until(ipc.KindStats)
	w.generate(1, streaming(3))
	for step := range 3 {
		outs := w.outputs()
		require.Equal(t, step == 2, outs[0].Last)
		for seq := range uint64(3) {
			w.send(ipc.AppendMessage(nil, ipc.Query{Seq: seq, What: ipc.QueryHealth}))
			kind, _, err := w.r.Next()
			require.NoError(t, err)
			require.Equal(t, ipc.KindAnswer, kind, "no step without time")
		}
		clock.advance(time.Second)
	}
	w.conn.Close()
	require.ErrorIs(t, <-ended, sim.ErrWorkerGone)
}

// The whole thing as a child process, from the same binary.
func TestMainAsAChild(t *testing.T) {
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
	for salt, code := range map[string]int{"": 0, "sim:fatal:1": 1, "sim:crash:1": 134, "sim:exit:1": 0} {
		t.Run("salt "+salt, func(t *testing.T) {
			p := start(t)
			s := send(t, p, prompt(3), withSalt(salt, 3))
			var err error
			for err == nil {
				_, err = s.Next(bounded(t))
			}
			if salt == "" {
				require.Equal(t, io.EOF, err)
				require.NoError(t, p.Stop(bounded(t)))
			}
			<-p.Done()
			require.Equal(t, &engine.ExitError{Code: code}, p.Exit().Status)
			if salt == "" || salt == "sim:fatal:1" {
				// One that crashes is seen to have left the channel a moment before it is seen to have ended, and may be pushed in between.
				require.False(t, p.Exit().Forced)
			}
		})
	}
	t.Run("bad arguments", func(t *testing.T) {
		cfg := configure(t, sim.Args{Build: "rc1"})
		cfg.Command, cfg.Env, cfg.TermTimeout = []string{exe}, []string{childEnv + "=1"}, patience
		_, err := engine.Start(bounded(t), cfg)
		var start *engine.StartError
		require.True(t, errors.As(err, &start))
		require.ErrorContains(t, err, `no such build: "rc1"`)
		require.Equal(t, 1, start.Exit.Status.Code)
	})
}
