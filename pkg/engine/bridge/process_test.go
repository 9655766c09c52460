package bridge_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"testing"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"dynworker/pkg/engine"
	"dynworker/pkg/engine/bridge"
	"dynworker/pkg/engine/bridge/bridgetest"
	"dynworker/pkg/engine/ipc"
)

// startProcess runs a bridge the way the worker does.
func startProcess(t *testing.T, setup bridgetest.Setup, a args) (*engine.Process, bridgetest.Log) {
	t.Helper()
	l := bridgetest.New(t, setup)
	a["model"] = l.Model
	p, err := engine.Start(t.Context(), engine.Config{
		Command: l.Command, Env: l.Env,
		Configure:   ipc.Configure{Args: mustJSON(a), Options: mustJSON(bridge.Options{})},
		StopTimeout: patience, TermTimeout: patience,
		Logger: zerolog.Nop(),
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Stop(context.Background())) })
	return p, l.Log
}

// drain reads a stream to its end.
func drain(ctx context.Context, s *engine.Stream) (tokens []uint32, last ipc.Meta, err error) {
	for {
		outs, err := s.Next(ctx)
		for _, o := range outs {
			tokens = append(tokens, o.Tokens...)
			if o.Last && o.Meta != nil {
				last = *o.Meta
			}
		}
		if errors.Is(err, io.EOF) {
			return tokens, last, nil
		}
		if err != nil {
			return tokens, last, err
		}
	}
}

func TestTheWorkersEngineProcess(t *testing.T) {
	p, log := startProcess(t, bridgetest.Setup{API: "rc29", Env: []string{"STANDIN_NOISE=1", "STANDIN_WORKERS=2"}},
		args{"tensor_parallel_size": 2})
	require.Equal(t, "1.3.0rc29", p.Ready().Version)
	require.True(t, p.Ready().Capabilities.BindsExplicitRank)

	var group errgroup.Group
	for i := range 64 {
		group.Go(func() error {
			s, err := p.Generate(t.Context(), order(50, func(g *ipc.Generate) { g.Sampling.IgnoreEOS = ptr(true) }), []int32{int32(i), 7})
			if err != nil {
				return err
			}
			tokens, last, err := drain(t.Context(), s)
			if err != nil || len(tokens) != 50 || tokens[0] != uint32(i+7) || last.FinishReason != "length" {
				return errors.Join(err, errors.New("wrong answer"))
			}
			return nil
		})
	}
	require.NoError(t, group.Wait())

	s, err := p.Generate(t.Context(), order(9), []int32{stallsBeforeFirst})
	require.NoError(t, err)
	s.Cancel()
	_, last, err := drain(t.Context(), s)
	require.NoError(t, err)
	require.Equal(t, "cancelled", last.FinishReason)

	body, err := p.Query(t.Context(), ipc.QueryDescendants)
	require.NoError(t, err)
	var answer struct{ Descendants []struct{ PID int } }
	require.NoError(t, json.Unmarshal(body, &answer))
	require.GreaterOrEqual(t, len(answer.Descendants), 2)

	require.NoError(t, p.Stop(t.Context()))
	require.Equal(t, &engine.ExitError{Code: bridge.ExitStopped}, p.Exit().Status)
	require.False(t, p.Exit().Forced)
	for _, pid := range workers(t, log) {
		state, _ := stat(pid)
		require.False(t, alive(state))
	}
}

func TestTheWorkerHearsOfAFatalError(t *testing.T) {
	p, _ := startProcess(t, bridgetest.Setup{}, args{})
	bystander, err := p.Generate(t.Context(), order(9), []int32{stallsAfterThree})
	require.NoError(t, err)
	s, err := p.Generate(t.Context(), order(9), []int32{90006})
	require.NoError(t, err)
	tokens, last, err := drain(t.Context(), s)
	require.NoError(t, err)
	require.Len(t, tokens, 3)
	require.Equal(t, ipc.ErrorFatal, last.Error.Kind)

	_, _, err = drain(t.Context(), bystander)
	require.ErrorIs(t, err, engine.ErrEngineDead)
	var fatal ipc.Fatal
	require.ErrorAs(t, err, &fatal)
	require.Equal(t, "RuntimeError", fatal.ErrorType)
	<-p.Done()
	require.Equal(t, bridge.ExitEngineFailed, p.Exit().Status.Code)
}

func TestStreamsOfAStoppedEngineDoNotLookComplete(t *testing.T) {
	p, _ := startProcess(t, bridgetest.Setup{}, args{})
	s, err := p.Generate(t.Context(), order(9), []int32{stallsAfterThree})
	require.NoError(t, err)
	_, err = s.Next(t.Context())
	require.NoError(t, err)
	require.NoError(t, p.Stop(t.Context()))
	_, _, err = drain(context.Background(), s)
	require.ErrorIs(t, err, engine.ErrStopped)
}

func TestAFailedLoadIsAStartError(t *testing.T) {
	l := bridgetest.New(t, bridgetest.Setup{API: "rc19"})
	_, err := engine.Start(t.Context(), engine.Config{
		Command: l.Command, Env: l.Env, Logger: zerolog.Nop(),
		Configure: ipc.Configure{Args: mustJSON(args{
			"model": l.Model, "attention_dp_config": args{"kv_cache_routing_conversation_affinity": true},
		})},
	})
	var failed *engine.StartError
	require.ErrorAs(t, err, &failed)
	require.Contains(t, err.Error(), "kv_cache_routing_conversation_affinity")
	require.Equal(t, bridge.ExitLoadFailed, failed.Exit.Status.Code)
}
