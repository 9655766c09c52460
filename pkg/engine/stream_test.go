package engine

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"net"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"dynworker/pkg/engine/ipc"
)

// attach connects a Process to a peer that the test drives by hand.
func attach(t testing.TB, cfg Config) (*Process, *peer) {
	t.Helper()
	ours, theirs := net.Pipe()
	other := newPeer(theirs)
	t.Cleanup(func() { theirs.Close() })
	go other.hello()
	shaken := make(chan struct{})
	go func() {
		defer close(shaken)
		other.until(ipc.KindConfigure)
		other.send(ipc.Ready{Engine: "test", AttentionDPSize: 1})
	}()
	p, err := Attach(bounded(t), ours, cfg)
	require.NoError(t, err)
	<-shaken
	t.Cleanup(func() { stop(t, p) })
	return p, other
}

func generate(t testing.TB, p *Process, other *peer, params ipc.Generate) *Stream {
	t.Helper()
	s, err := p.Generate(bounded(t), &params, []int32{1})
	require.NoError(t, err)
	payload, ok := other.until(ipc.KindGenerate)
	require.True(t, ok)
	req, err := ipc.ParseGenerate(payload)
	require.NoError(t, err)
	require.Equal(t, s.ID(), req.ID)
	return s
}

// flush waits until the worker has handled everything sent before.
func flush(t *testing.T, p *Process, other *peer) {
	t.Helper()
	done := make(chan error, 1)
	go func() {
		_, err := p.Query(bounded(t), ipc.QueryStats)
		done <- err
	}()
	payload, ok := other.until(ipc.KindQuery)
	require.True(t, ok)
	q, err := ipc.ParseQuery(payload)
	require.NoError(t, err)
	other.write(ipc.AppendJSON(nil, ipc.KindAnswer, map[string]any{"seq": q.Seq, "ok": true}))
	require.NoError(t, <-done)
}

// collect reads a stream to its end and joins the tokens of each choice.
func collect(t *testing.T, s *Stream) map[uint16][]uint32 {
	t.Helper()
	got := make(map[uint16][]uint32)
	for {
		outs, err := s.Next(bounded(t))
		if err == io.EOF {
			return got
		}
		require.NoError(t, err)
		for _, o := range outs {
			got[o.Index] = append(got[o.Index], o.Tokens...)
		}
	}
}

func TestStreamOverAProcess(t *testing.T) {
	p := start(t, testConfig(t, "good"))
	prompt := make([]int32, 300)
	var want []uint32
	for i := range prompt {
		prompt[i] = int32(i)
		want = append(want, uint32(i))
	}
	streams := make([]*Stream, 50)
	for i := range streams {
		var err error
		streams[i], err = p.Generate(bounded(t), &ipc.Generate{}, prompt)
		require.NoError(t, err)
	}
	for _, s := range streams {
		require.Equal(t, map[uint16][]uint32{0: want}, collect(t, s))
		_, err := s.Next(bounded(t))
		require.Equal(t, io.EOF, err, "the end is final")
	}
	c := p.Counters()
	require.Equal(t, Counters{Requests: 50, Tokens: 50 * 300}, c)

	body, err := p.Query(bounded(t), ipc.QueryHealth)
	require.NoError(t, err)
	var health struct{ Healthy bool }
	require.NoError(t, json.Unmarshal(body, &health))
	require.True(t, health.Healthy)
	_, err = p.Query(bounded(t), "weather")
	var query *QueryError
	require.ErrorAs(t, err, &query)
	require.Equal(t, &QueryError{What: "weather", Reason: "unknown query"}, query)
}

// A reader that was away gets everything at once, merged by choice.
func TestNextReturnsAllThatIsReady(t *testing.T) {
	p, other := attach(t, Config{})
	s := generate(t, p, other, ipc.Generate{Sampling: ipc.Sampling{N: ptr(int64(2))}})
	cached := ptr(int64(32))
	other.outputs(
		ipc.Output{ID: s.ID(), Tokens: []uint32{1}, Meta: &ipc.Meta{CachedTokens: cached}},
		ipc.Output{ID: s.ID(), Index: 1, Tokens: []uint32{11}},
	)
	other.outputs(ipc.Output{ID: s.ID(), Tokens: []uint32{2}}, ipc.Output{ID: s.ID(), Index: 1, Tokens: []uint32{12}})
	other.outputs(ipc.Output{ID: s.ID(), Tokens: []uint32{3, 4}, Meta: &ipc.Meta{FinishReason: "stop"}})
	other.outputs(ipc.Output{ID: s.ID(), Index: 1, Tokens: []uint32{13}, Last: true, Meta: &ipc.Meta{FinishReason: "length"}})
	flush(t, p, other)
	outs, err := s.Next(bounded(t))
	require.NoError(t, err)
	require.Empty(t, cmp.Diff([]ipc.Output{
		{ID: s.ID(), Tokens: []uint32{1}, Meta: &ipc.Meta{CachedTokens: cached}},
		{ID: s.ID(), Index: 1, Tokens: []uint32{11, 12}},
		{ID: s.ID(), Tokens: []uint32{2, 3, 4}, Meta: &ipc.Meta{FinishReason: "stop"}},
		{ID: s.ID(), Index: 1, Tokens: []uint32{13}, Last: true, Meta: &ipc.Meta{FinishReason: "length"}},
	}, outs))
	_, err = s.Next(bounded(t))
	require.Equal(t, io.EOF, err)
}

// With KeepSteps the reader sees every record as the engine made it.
func TestStepsAreKeptOnRequest(t *testing.T) {
	p, other := attach(t, Config{KeepSteps: true})
	s := generate(t, p, other, ipc.Generate{})
	for token := range uint32(3) {
		other.outputs(ipc.Output{ID: s.ID(), Tokens: []uint32{token}, Last: token == 2})
	}
	flush(t, p, other)
	outs, err := s.Next(bounded(t))
	require.NoError(t, err)
	require.Equal(t, []ipc.Output{
		{ID: s.ID(), Tokens: []uint32{0}}, {ID: s.ID(), Tokens: []uint32{1}}, {ID: s.ID(), Tokens: []uint32{2}, Last: true},
	}, outs)
}

func TestLastIsNeverMovedForward(t *testing.T) {
	p, other := attach(t, Config{})
	s := generate(t, p, other, ipc.Generate{Sampling: ipc.Sampling{N: ptr(int64(2))}})
	other.outputs(
		ipc.Output{ID: s.ID(), Tokens: []uint32{1}}, ipc.Output{ID: s.ID(), Index: 1, Tokens: []uint32{11}},
		ipc.Output{ID: s.ID(), Last: true},
	)
	outs, err := s.Next(bounded(t))
	require.NoError(t, err)
	require.Len(t, outs, 3)
	require.True(t, outs[2].Last)

	s = generate(t, p, other, ipc.Generate{})
	other.outputs(ipc.Output{ID: s.ID(), Tokens: []uint32{1}}, ipc.Output{ID: s.ID(), Last: true, Tokens: []uint32{2}})
	outs, err = s.Next(bounded(t))
	require.NoError(t, err)
	require.Equal(t, []ipc.Output{{ID: s.ID(), Tokens: []uint32{1, 2}, Last: true}}, outs)
}

func TestLogProbsStayWithTheirTokens(t *testing.T) {
	p, other := attach(t, Config{})
	s := generate(t, p, other, ipc.Generate{})
	probs := func(v float64) []ipc.TokenLogProb {
		return []ipc.TokenLogProb{{LogProb: v, Top: []ipc.TopLogProb{{TokenID: 1, Rank: 1, LogProb: v}}}}
	}
	for round := range 3 { // memory is reused from the second round on
		v := -float64(round)
		other.outputs(ipc.Output{ID: s.ID(), Tokens: []uint32{7}})
		other.outputs(ipc.Output{ID: s.ID(), Tokens: []uint32{8}, TopK: 1, LogProbs: probs(v)})
		other.outputs(ipc.Output{ID: s.ID(), Tokens: []uint32{9}, TopK: 1, LogProbs: probs(v - 1)})
		flush(t, p, other)
		outs, err := s.Next(bounded(t))
		require.NoError(t, err)
		require.Empty(t, cmp.Diff([]ipc.Output{
			{ID: s.ID(), Tokens: []uint32{7}},
			{ID: s.ID(), Tokens: []uint32{8, 9}, TopK: 1, LogProbs: append(probs(v), probs(v-1)...)},
		}, outs))
	}
}

func TestCancelAndClose(t *testing.T) {
	p, other := attach(t, Config{})
	s := generate(t, p, other, ipc.Generate{})
	s.Cancel()
	s.Cancel()
	payload, _ := other.until(ipc.KindCancel)
	id, err := ipc.ParseCancel(payload)
	require.NoError(t, err)
	require.Equal(t, s.ID(), id)
	other.outputs(ipc.Output{ID: s.ID(), Tokens: []uint32{5}, Last: true, Meta: &ipc.Meta{FinishReason: "cancelled"}})
	require.Equal(t, map[uint16][]uint32{0: {5}}, collect(t, s), "a cancelled stream still ends as it should")
	s.Cancel()
	s.Close()

	s = generate(t, p, other, ipc.Generate{})
	other.outputs(ipc.Output{ID: s.ID(), Tokens: []uint32{5}})
	flush(t, p, other)
	s.Close()
	s.Close()
	_, err = s.Next(bounded(t))
	require.ErrorIs(t, err, ErrClosed)
	require.Equal(t, 1, p.Counters().Orphans)
	kind, _, _ := other.next()
	require.Equal(t, ipc.KindCancel, kind)
	other.outputs(ipc.Output{ID: s.ID(), Tokens: []uint32{6}}, ipc.Output{ID: s.ID(), Last: true})
	flush(t, p, other)
	require.Equal(t, Counters{Requests: 2, Cancels: 2, Tokens: 3}, p.Counters(), "one cancel each, and nothing in flight")
}

func TestNextGivesUpWithItsContextOnly(t *testing.T) {
	p, other := attach(t, Config{})
	s := generate(t, p, other, ipc.Generate{})
	cause := errors.New("not now")
	ctx, cancel := context.WithCancelCause(bounded(t))
	time.AfterFunc(10*time.Millisecond, func() { cancel(cause) })
	_, err := s.Next(ctx)
	require.Equal(t, cause, err)
	other.outputs(ipc.Output{ID: s.ID(), Tokens: []uint32{5}, Last: true})
	require.Equal(t, map[uint16][]uint32{0: {5}}, collect(t, s))
}

// The engine's offences are counted, cost the stream at most, and never the worker.
func TestEngineMisbehavesWithinTheProtocol(t *testing.T) {
	var log logBuffer
	p, other := attach(t, Config{Logger: log.logger()})
	good := generate(t, p, other, ipc.Generate{})
	ended := generate(t, p, other, ipc.Generate{})
	other.outputs(ipc.Output{ID: ended.ID(), Last: true})
	badChoice := generate(t, p, other, ipc.Generate{})
	badMeta := generate(t, p, other, ipc.Generate{})

	other.outputs(
		ipc.Output{ID: math.MaxUint64, Tokens: []uint32{1}},
		ipc.Output{ID: 0, Tokens: []uint32{1}},
		ipc.Output{ID: ended.ID(), Tokens: []uint32{1}},
		ipc.Output{ID: ended.ID(), Last: true},
		ipc.Output{ID: badChoice.ID(), Index: 1, Tokens: []uint32{1}},
		ipc.Output{ID: good.ID(), Tokens: []uint32{7}},
	)
	frame := ipc.AppendRecordHead(ipc.BeginFrame(nil, ipc.KindOutputs), badMeta.ID(), 0, ipc.FlagMeta, 0)
	frame = append(frame, 4, 0, 0, 0, 'n', 'u', 'l', 'l')
	other.write(ipc.EndFrame(frame, 0))
	other.write(ipc.AppendJSON(nil, ipc.KindAnswer, map[string]any{"seq": 12345}))
	other.send(ipc.Progress{Phase: "late"})

	var protocol *ProtocolError
	_, err := badChoice.Next(bounded(t))
	require.ErrorAs(t, err, &protocol)
	require.NotErrorIs(t, err, ErrEngineDead)
	for range 2 {
		_, err = badMeta.Next(bounded(t))
		require.ErrorAs(t, err, &protocol)
	}
	outs, err := good.Next(bounded(t))
	require.NoError(t, err)
	require.Equal(t, []uint32{7}, outs[0].Tokens)

	cancelled := map[uint64]bool{}
	for range 2 {
		payload, _ := other.until(ipc.KindCancel)
		id, err := ipc.ParseCancel(payload)
		require.NoError(t, err)
		cancelled[id] = true
	}
	require.Equal(t, map[uint64]bool{badChoice.ID(): true, badMeta.ID(): true}, cancelled)
	flush(t, p, other)
	c := p.Counters()
	require.Equal(t, Counters{
		Requests: 4, Cancels: 2, Tokens: 5, InFlight: 3, UnknownID: 2, AfterLast: 2, BrokenStreams: 2, UnexpectedWords: 1,
	}, c)
	warnings := 0
	for _, e := range log.entries(t) {
		if e["level"] == "warn" {
			warnings++
		}
	}
	require.Equal(t, 1, warnings, "a flood of offences is one line now and then")
}

func TestPendingOutputIsBounded(t *testing.T) {
	p, other := attach(t, Config{MaxPending: 4096})
	slow := generate(t, p, other, ipc.Generate{})
	other.outputs(ipc.Output{ID: slow.ID(), Tokens: make([]uint32, 900)})
	flush(t, p, other)
	outs, err := slow.Next(bounded(t))
	require.NoError(t, err, "up to the limit all is well")
	require.Len(t, outs[0].Tokens, 900)

	other.outputs(ipc.Output{ID: slow.ID(), Tokens: make([]uint32, 900)}, ipc.Output{ID: slow.ID(), Tokens: make([]uint32, 900)})
	flush(t, p, other)
	_, err = slow.Next(bounded(t))
	require.Equal(t, ErrOverflow, err)
	require.EqualValues(t, 1, p.Counters().BrokenStreams)

	prompt := generate(t, p, other, ipc.Generate{Sampling: ipc.Sampling{PromptLogProbs: ptr(int64(100))}})
	require.Greater(t, prompt.limit, 4096+100*promptLogProbCost)
}

// Records without tokens must not pile up for free.
func TestEmptyRecordsAreBoundedToo(t *testing.T) {
	p, other := attach(t, Config{MaxPending: 4096})
	s := generate(t, p, other, ipc.Generate{})
	for range 100 { // neither can be merged into the other
		other.outputs(ipc.Output{ID: s.ID()}, ipc.Output{ID: s.ID(), LogProbs: []ipc.TokenLogProb{}})
	}
	flush(t, p, other)
	_, err := s.Next(bounded(t))
	require.Equal(t, ErrOverflow, err)
}

func TestStatsAndEvents(t *testing.T) {
	var stats []Stats
	var events []string
	p, other := attach(t, Config{
		OnStats:  func(s Stats) { stats = append(stats, s) },
		OnEvents: func(b []byte) { events = append(events, string(b)) },
	})
	require.Zero(t, p.Stats())
	other.write(ipc.AppendJSON(nil, ipc.KindStats, []any{map[string]int{"iter": 1}}))
	other.write(ipc.AppendJSON(nil, ipc.KindEvents, []any{1}))
	flush(t, p, other)
	require.Equal(t, []json.RawMessage{json.RawMessage(`{"iter":1}`)}, p.Stats().Rows)
	require.Len(t, stats, 1)
	require.Equal(t, []string{"[1]"}, events)
}

// Messages whose layout is wrong leave no way to go on.
func TestEngineBreaksTheProtocol(t *testing.T) {
	for name, frame := range map[string]func() ([]byte, error){
		"outputs":       func() ([]byte, error) { return ipc.AppendFrame(nil, ipc.KindOutputs, []byte{1}) },
		"stats":         func() ([]byte, error) { return ipc.AppendFrame(nil, ipc.KindStats, []byte("{}")) },
		"answer":        func() ([]byte, error) { return ipc.AppendFrame(nil, ipc.KindAnswer, []byte("[]")) },
		"fatal":         func() ([]byte, error) { return ipc.AppendFrame(nil, ipc.KindFatal, nil) },
		"goodbye":       func() ([]byte, error) { return ipc.AppendFrame(nil, ipc.KindGoodbye, nil) },
		"progress":      func() ([]byte, error) { return ipc.AppendFrame(nil, ipc.KindProgress, nil) },
		"ready again":   func() ([]byte, error) { return ipc.AppendMessage(nil, ipc.Ready{}) },
		"hello again":   func() ([]byte, error) { return ipc.AppendMessage(nil, hello()) },
		"wrong way":     func() ([]byte, error) { return ipc.AppendCancel(nil, 1), nil },
		"unknown kind":  func() ([]byte, error) { return []byte{0, 0, 0, 0, 77}, nil },
		"over the size": func() ([]byte, error) { return []byte{255, 255, 255, 255, 7}, nil },
	} {
		t.Run(name, func(t *testing.T) {
			p, other := attach(t, Config{})
			s := generate(t, p, other, ipc.Generate{})
			other.write(frame())
			_, err := s.Next(bounded(t))
			require.ErrorIs(t, err, ErrEngineDead)
			var protocol *ProtocolError
			require.ErrorAs(t, err, &protocol)
			require.ErrorIs(t, waitDone(t, p), err.(interface{ Unwrap() []error }).Unwrap()[1])
		})
	}
}

func TestChannelEndsInsideAMessage(t *testing.T) {
	p, other := attach(t, Config{})
	s := generate(t, p, other, ipc.Generate{})
	other.outputs(ipc.Output{ID: s.ID(), Tokens: []uint32{1}})
	other.write([]byte{9, 0, 0}, nil)
	other.conn.Close()
	outs, err := s.Next(bounded(t))
	require.NoError(t, err, "what had arrived is delivered")
	require.Len(t, outs, 1)
	_, err = s.Next(bounded(t))
	require.ErrorIs(t, err, ErrEngineDead)
	require.ErrorIs(t, err, ErrChannelClosed)
	require.Nil(t, waitDone(t, p).Status)
}

// An engine that does not read holds up new requests, with their context, but
// neither cancels nor the reading side.
func TestEngineThatDoesNotRead(t *testing.T) {
	p, other := attach(t, Config{MaxQueued: 4096})
	s := generate(t, p, other, ipc.Generate{})
	big := make([]int32, 2048)
	var queued []*Stream
	for {
		ctx, cancel := context.WithTimeout(bounded(t), 20*time.Millisecond)
		q, err := p.Generate(ctx, &ipc.Generate{}, big)
		cancel()
		if err != nil {
			require.ErrorIs(t, err, context.DeadlineExceeded)
			break
		}
		queued = append(queued, q)
		require.Less(t, len(queued), 4, "the queue has a bound")
	}
	inFlight := p.Counters().InFlight
	require.Equal(t, 1+len(queued), inFlight, "a request that was not sent is forgotten")
	s.Cancel()
	other.outputs(ipc.Output{ID: s.ID(), Tokens: []uint32{1}})
	outs, err := s.Next(bounded(t))
	require.NoError(t, err)
	require.Len(t, outs, 1)
	waiting := make(chan error, 1)
	go func() {
		_, err := p.Generate(context.Background(), &ipc.Generate{}, big)
		waiting <- err
	}()
	payload, _ := other.until(ipc.KindCancel)
	id, err := ipc.ParseCancel(payload)
	require.NoError(t, err)
	require.Equal(t, s.ID(), id)
	require.NoError(t, <-waiting, "room is made when the engine reads again")
}

func TestWaitingForRoomEndsWithTheEngine(t *testing.T) {
	box := newOutbox(10)
	frame := func(b []byte) ([]byte, error) { return append(b, 1, 2, 3), nil }
	require.NoError(t, box.append(t.Context(), 100, frame), "an empty queue takes anything")
	waiting := make(chan error, 1)
	go func() { waiting <- box.append(context.Background(), 100, frame) }()
	box.close(ErrEngineDead)
	require.Equal(t, ErrEngineDead, <-waiting)
	require.Equal(t, ErrEngineDead, box.message(ipc.Goodbye{}))
	box.cancel(1)
	require.NoError(t, box.run(io.Discard))
}

func TestRequestThatCannotBeSent(t *testing.T) {
	p, _ := attach(t, Config{})
	_, err := p.Generate(bounded(t), &ipc.Generate{Disaggregated: json.RawMessage("{")}, nil)
	require.Error(t, err)
	_, err = p.Generate(bounded(t), &ipc.Generate{}, make([]int32, ipc.MaxPayload/4))
	var size *ipc.SizeError
	require.ErrorAs(t, err, &size)
	require.Zero(t, p.Counters().InFlight)
}

// In the steady state a token costs no allocation between channel and reader.
func TestSteadyStateDoesNotAllocate(t *testing.T) {
	p, other := attach(t, Config{})
	s := generate(t, p, other, ipc.Generate{})
	frame := ipc.AppendRecordHead(nil, s.ID(), 0, 0, 1)
	frame = append(frame, 42, 0, 0, 0)
	d := demux{p: p}
	ctx := context.Background()
	step := func() {
		if err := d.handle(ipc.KindOutputs, frame); err != nil {
			panic(err)
		}
		if _, err := s.Next(ctx); err != nil {
			panic(err)
		}
	}
	step()
	step()
	require.Zero(t, testing.AllocsPerRun(200, step))
}
