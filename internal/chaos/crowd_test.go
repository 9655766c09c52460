package chaos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"dynworker/internal/caller"
	"dynworker/pkg/engine/sim"
	"dynworker/pkg/ingress/natsplane"
	"dynworker/pkg/protocol"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
)

const (
	// terminal is how long after a fault, or after it was sent if that is later, a request may wait for its end. Beyond it the request counts as lost.
	terminal = 30 * time.Second
	// enough requests have to be in flight when something is broken.
	enough = 50
	// moves is how often a request is moved to another worker, for the half of the callers that move any.
	moves = 10
)

// verdict is what became of a request.
type verdict uint8

const (
	full  verdict = iota // the right text to its end
	typed                // an error that says what it is; the text before it was right
	lost                 // no end in time, or one without a word
	wrong                // a text that is not the right one
)

// outcome is a request that has ended.
type outcome struct {
	moving  bool
	verdict verdict
	detail  string
	sent    time.Time
	ended   time.Time
}

// crowd are callers that ask one question after another. Like a frontend it knows the workers from etcd, takes turns between them, and continues what a worker has cut short on another one; half of the callers do without the latter.
type crowd struct {
	t      *testing.T
	caller *caller.Caller
	tokens int

	salt string // of every request

	mu       sync.Mutex
	known    []protocol.Instance
	outcomes []outcome

	turn    atomic.Uint64
	flying  atomic.Int64 // requests that have had a token and have not ended
	silent  atomic.Int64 // answers of workers that ended without a word
	stop    context.CancelFunc
	clients sync.WaitGroup
}

// gather starts that many callers.
func (w *world) gather(callers, tokens int) *crowd {
	c := &crowd{t: w.t, caller: w.caller(), tokens: tokens}
	ctx, cancel := context.WithCancel(context.Background())
	c.stop = cancel
	c.look(w)
	c.clients.Go(func() {
		for ctx.Err() == nil {
			c.look(w)
			pause(ctx, 20*time.Millisecond)
		}
	})
	for n := range callers {
		c.clients.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				o := c.ask(n%2 == 0, []int32{7, int32(8 + n%300), int32(8 + i%300)})
				c.mu.Lock()
				c.outcomes = append(c.outcomes, o)
				c.mu.Unlock()
				if o.verdict != full {
					pause(ctx, 50*time.Millisecond)
				}
			}
		})
	}
	w.t.Cleanup(c.disperse)
	return c
}

func (w *world) caller() *caller.Caller {
	c, err := caller.New(w.t.Context(), caller.Config{NATS: &natsplane.ConnConfig{URL: w.nats.URL()}, ReplyTimeout: terminal, Logger: zerolog.Nop()})
	require.NoError(w.t, err)
	w.t.Cleanup(func() { require.NoError(w.t, c.Close()) })
	return c
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// look takes note of the workers in etcd. While etcd is away, or has forgotten all of them, those of before count, as they do for a frontend.
func (c *crowd) look(w *world) {
	if found := w.instances(); len(found) > 0 {
		c.mu.Lock()
		c.known = found
		c.mu.Unlock()
	}
}

// disperse lets all requests end.
func (c *crowd) disperse() {
	c.stop()
	c.clients.Wait()
}

// pick is the next worker's turn, one that has not failed this request if there is one.
func (c *crowd) pick(failed []uint64) protocol.Instance {
	c.mu.Lock()
	defer c.mu.Unlock()
	turn := int(c.turn.Add(1))
	for i := range c.known {
		if one := c.known[(turn+i)%len(c.known)]; !slices.Contains(failed, one.InstanceID) {
			return one
		}
	}
	return c.known[turn%len(c.known)]
}

// ask sends one request and reads its answer, on other workers too if it is moving.
func (c *crowd) ask(moving bool, prompt []int32) outcome {
	o := outcome{moving: moving, sent: time.Now()}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	a := &answer{crowd: c, want: expected(prompt, c.tokens)}
	var failed []uint64
	for attempt := 0; ; attempt++ {
		i := c.pick(failed)
		err := a.from(ctx, i, prompt)
		if err == nil {
			break
		}
		if errors.Is(err, caller.ErrIncomplete) || errors.Is(err, caller.ErrNoCallHome) {
			c.silent.Add(1)
		}
		failed = append(failed, i.InstanceID)
		if o.verdict, o.detail = judge(err), err.Error(); o.verdict != typed || !moving || attempt == moves {
			break
		}
		o.verdict, o.detail = full, ""
		pause(ctx, 20*time.Millisecond)
	}
	if a.flying {
		c.flying.Add(-1)
	}
	o.ended = time.Now()
	switch n := len(a.got); {
	case n > len(a.want), !slices.Equal(a.got, a.want[:min(n, len(a.want))]), o.verdict == full && n < len(a.want):
		o.verdict, o.detail = wrong, fmt.Sprintf("%d tokens %v, wanted %v", n, a.got, a.want)
	}
	return o
}

// judge says what the error that ended an attempt is worth.
func judge(err error) verdict {
	var said *protocol.Error
	var refused *caller.RefusedError
	var home *caller.PrologueError
	switch {
	case errors.As(err, &said), errors.As(err, &refused), errors.As(err, &home):
		return typed
	case errors.Is(err, errShort):
		return wrong
	case errors.Is(err, caller.ErrNoCallHome), errors.Is(err, caller.ErrIncomplete), errors.Is(err, context.DeadlineExceeded):
		return lost
	default:
		return typed // it never reached a worker: nobody there, no reply, no NATS
	}
}

// errShort is an answer that ends like a complete one and is none.
var errShort = errors.New("the answer ends early")

// answer is the text of a request over all of its attempts.
type answer struct {
	crowd  *crowd
	want   []uint32
	got    []uint32
	flying bool
}

// from asks one worker for what is missing and returns why it did not come.
func (a *answer) from(ctx context.Context, i protocol.Instance, prompt []int32) error {
	sequence := slices.Clone(prompt)
	for _, t := range a.got {
		sequence = append(sequence, int32(t))
	}
	missing := len(a.want) - len(a.got)
	if missing == 0 {
		return nil // cut short after its last token
	}
	s, err := a.crowd.caller.Do(ctx, call(i, sequence, missing, a.crowd.salt))
	if err != nil {
		return err
	}
	defer func() { _ = s.Close() }()
	finish := protocol.FinishNone
	for {
		item, err := s.Next()
		switch {
		case errors.Is(err, io.EOF) && finish == protocol.FinishLength && len(a.got) == len(a.want):
			return nil
		case errors.Is(err, io.EOF):
			return fmt.Errorf("%w: %d of %d tokens, finish %v", errShort, len(a.got), len(a.want), finish)
		case err != nil:
			return err
		case item.Err != nil:
			return item.Err
		case item.Chunk == nil:
			continue
		}
		if item.Chunk.Finish == protocol.FinishError {
			return &protocol.Error{Message: item.Chunk.ErrorText}
		}
		finish = item.Chunk.Finish
		a.got = append(a.got, item.Chunk.TokenIDs...)
		if !a.flying && len(a.got) > 0 {
			a.flying = true
			a.crowd.flying.Add(1)
		}
	}
}

// call is a request for so many tokens. A salt that begins with "sim:" makes the simulated engine misbehave.
func call(i protocol.Instance, sequence []int32, tokens int, salt string) caller.Call {
	fields := protocol.Map{"stop_conditions": protocol.Map{"max_tokens": int64(tokens), "ignore_eos": true}, "sampling_options": protocol.Map{}, "output_options": protocol.Map{}}
	if salt != "" {
		fields["routing"] = protocol.Map{"cache_salt": salt}
	}
	return caller.Call{CallHomeTimeout: terminal, Transport: i.Transport, Codec: protocol.CodecMsgpack, Request: &protocol.Request{TokenIDs: sequence, TokensState: protocol.TokensList, Fields: fields}}
}

// expected is the text of the simulated engine that does not end by itself.
func expected(prompt []int32, n int) []uint32 {
	text := sim.Args{}.Text()
	text.EOSEvery = 0
	return sim.Continue(text, prompt, 0, n)
}

// tally counts what became of the requests that a fault can have touched.
type tally struct {
	inFlight      int
	silent        int64 // answers that ended without a word, moved on or not
	count         map[verdict]int
	fixed, moving map[verdict]int
	samples       map[verdict]string
}

// strike breaks something while enough requests are in flight, waits until done says that all is well again, and accounts for every request that was open when it struck or was sent until then.
func (c *crowd) strike(break_ func(), done func() bool) tally {
	require.Eventually(c.t, func() bool { return c.flying.Load() >= enough }, patience, time.Millisecond)
	r := tally{inFlight: int(c.flying.Load()), count: map[verdict]int{}, fixed: map[verdict]int{}, moving: map[verdict]int{}, samples: map[verdict]string{}}
	struck := time.Now()
	break_()
	require.Eventually(c.t, done, patience, 5*time.Millisecond)
	after := time.Now()
	// Every caller has begun a new request after this, so what was open has ended.
	require.Eventually(c.t, func() bool { return c.endedSince(after) >= enough }, patience, 5*time.Millisecond)
	c.disperse()
	r.silent = c.silent.Load()
	for _, o := range c.outcomes {
		if o.ended.Before(struck) {
			continue
		}
		v := o.verdict
		if since := o.ended.Sub(latest(o.sent, struck)); since > terminal {
			v, o.detail = lost, fmt.Sprintf("%v after %v", o.verdict, since)
		}
		r.count[v]++
		if o.moving {
			r.moving[v]++
		} else {
			r.fixed[v]++
		}
		r.samples[v] = o.detail
	}
	require.GreaterOrEqual(c.t, r.inFlight, enough)
	require.Zero(c.t, r.count[lost], r.samples[lost])
	require.Zero(c.t, r.count[wrong], r.samples[wrong])
	require.NotZero(c.t, r.count[full])
	c.t.Logf("in flight %d, full %d, typed %d, lost %d, wrong %d", r.inFlight, r.count[full], r.count[typed], r.count[lost], r.count[wrong])
	return r
}

func (c *crowd) endedSince(when time.Time) (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range c.outcomes {
		if o.sent.After(when) && o.verdict == full {
			n++
		}
	}
	return n
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
