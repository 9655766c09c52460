package vitals

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// look lets n seconds pass and returns after how many of them something was found.
func look(l Looker, n int) (*Failure, int) {
	for i := 1; i <= n; i++ {
		if f := l.Look(time.Second); f != nil {
			return f, i
		}
	}
	return nil, n
}

func quiet(t *testing.T, l Looker, n int) {
	t.Helper()
	f, _ := look(l, n)
	require.Nil(t, f)
}

func refuse(t *testing.T) func(error) {
	return func(err error) { require.Fail(t, "given up", "%v", err) }
}

func TestAnEngineWithoutProgressIsFound(t *testing.T) {
	f := NewFlights(Limits{NoProgress: 10 * time.Second})
	quiet(t, f, 100)
	one, two := f.Begin(Request{Prompt: 5}, refuse(t)), f.Begin(Request{Prompt: 5}, refuse(t))
	quiet(t, f, 100) // nobody waits for the engine
	one.Wait()
	two.Wait()
	quiet(t, f, 9)
	one.Got()
	one.Wait()
	quiet(t, f, 10) // what anyone gets is progress
	two.Got()
	quiet(t, f, 1)
	one.End(true)
	quiet(t, f, 10) // the one that is left writes to its client
	two.Wait()
	found, after := look(f, 100)
	require.Equal(t, 10, after)
	require.Equal(t, Stall, found.Detector)
	require.ErrorContains(t, found, "no output for any of 1 requests for 10s")
	require.Equal(t, 1, f.Len())
}

// Requests that come and go do not hide that the engine answers none of them, but a moment with none is a new beginning.
func TestOnlyOutputIsProgress(t *testing.T) {
	f := NewFlights(Limits{NoProgress: 10 * time.Second})
	last := f.Begin(Request{Prompt: 1}, refuse(t))
	last.Wait()
	for range 9 {
		quiet(t, f, 1)
		next := f.Begin(Request{Prompt: 1}, refuse(t))
		next.Wait()
		last.Rest()
		last.End(false)
		last = next
	}
	found, _ := look(f, 1)
	require.NotNil(t, found)
	last.End(false)
	quiet(t, f, 1)
	f.Begin(Request{Prompt: 1}, refuse(t)).Wait()
	quiet(t, f, 9)
}

func TestALongPromptMayTakeItsTime(t *testing.T) {
	f := NewFlights(Limits{NoProgress: 10 * time.Second, PerPromptToken: time.Millisecond})
	long, short := f.Begin(Request{Prompt: 20_000}, refuse(t)), f.Begin(Request{Prompt: 1000}, refuse(t))
	long.Wait()
	short.Wait()
	quiet(t, f, 29)
	long.Got()
	long.Wait()
	quiet(t, f, 1)
	_, after := look(f, 100)
	require.Equal(t, 11, after, "its prefill is over; the short one's prompt counts")
}

func TestARequestThatGetsNothingIsGivenUp(t *testing.T) {
	f := NewFlights(Limits{Inactivity: 10 * time.Second, PerPromptToken: time.Millisecond})
	var why []error
	silent := f.Begin(Request{Prompt: 2000}, func(err error) { why = append(why, err) })
	silent.Wait()
	lively := f.Begin(Request{Prompt: 1}, refuse(t))
	for range 11 {
		lively.Wait()
		lively.Got()
		quiet(t, f, 1)
	}
	require.Empty(t, why)
	quiet(t, f, 100)
	var stall *StallError
	require.Len(t, why, 1)
	require.ErrorAs(t, why[0], &stall)
	require.Equal(t, 12*time.Second, stall.Silent)
	silent.End(true)
	require.Equal(t, 1, f.Len())
}

// A prefill worker that has died leaves requests on a decode worker without their cache. That is no fault of the decode worker's engine.
func TestARequestThatWaitsForAPeerProvesNothing(t *testing.T) {
	f := NewFlights(Limits{NoProgress: 10 * time.Second, Inactivity: time.Minute})
	given := 0
	f.Begin(Request{Prompt: 1, FromPeer: true}, func(error) { given++ }).Wait()
	quiet(t, f, 59)
	require.Zero(t, given)
	quiet(t, f, 1)
	require.Equal(t, 1, given)
	begun := f.Begin(Request{Prompt: 1, FromPeer: true}, refuse(t))
	begun.Got()
	begun.Wait()
	quiet(t, f, 1)
	_, after := look(f, 100)
	require.Equal(t, 10, after, "it has its cache")
}

func TestDropGivesAllUp(t *testing.T) {
	f := NewFlights(Limits{})
	n, gone := 0, errors.New("gone")
	for range 3 {
		f.Begin(Request{Prompt: 1}, func(err error) {
			require.ErrorIs(t, err, gone)
			n++
		})
	}
	f.Drop(gone)
	f.Drop(gone)
	require.Equal(t, 3, n)
	require.Zero(t, f.Len())
	quiet(t, f, 100)
}

func TestTooManyFailures(t *testing.T) {
	o := NewOutcomes(Tolerance{Window: 20 * time.Second, Share: 0.5, Count: 10})
	for range 9 {
		o.Ended("broken pool")
	}
	quiet(t, o, 1)
	for range 11 {
		o.Ended("")
	}
	o.Ended("broken pool")
	quiet(t, o, 1) // ten, but of 21
	o.Ended("the process must restart")
	found, _ := look(o, 1)
	require.Equal(t, Failures, found.Detector)
	require.ErrorContains(t, found, "11 of 22 requests failed in the engine within 20s, the last with: the process must restart")
	quiet(t, o, 1)

	for range 9 {
		o.Ended("x")
	}
	quiet(t, o, 21) // the window slides
	o.Ended("x")
	quiet(t, o, 1)

	off := NewOutcomes(Tolerance{Window: time.Minute, Count: 1})
	off.Ended("x")
	quiet(t, off, 1)
}

func TestLookTellsWhatOneOfThemFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFlights(Limits{NoProgress: 10 * time.Second})
		f.Begin(Request{Prompt: 1}, refuse(t)).Wait()
		start := time.Now()
		found := Look(t.Context(), NewOutcomes(Tolerance{}), f)
		require.Equal(t, Stall, found.Detector)
		require.Equal(t, 10*time.Second, time.Since(start))

		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.Nil(t, Look(ctx, NewFlights(Limits{})))
	})
}

func TestWhatWasNotSeenIsNoStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFlights(Limits{NoProgress: 10 * time.Second})
		f.Begin(Request{Prompt: 1}, refuse(t)).Wait()
		require.Nil(t, f.Look(witnessed(time.Hour, lookEvery)), "the worker was stopped for an hour")
	})
}
