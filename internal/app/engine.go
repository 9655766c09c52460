package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"dynworker/pkg/config"
	"dynworker/pkg/engine"
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/handlers"
)

// EngineCommand is the hidden subcommand of the worker's own binary that is the simulated engine.
const EngineCommand = "engine-sim"

// engineConfig says how the configured engine is started.
func (w *worker) engineConfig() (engine.Config, error) {
	c := &w.cfg.Engine
	condition := w.health.Condition("engine")
	conf := engine.Config{
		Command: c.Command, Env: append(append([]string{}, w.opts.Environ...), c.Env...),
		StartTimeout: c.StartTimeout, StartInactivity: c.StartInactivity, StopTimeout: c.StopTimeout,
		KeepSteps: !w.cfg.ResponsePlane.MergeTokens,
		Logger:    w.component("engine"),
		OnProgress: func(p ipc.Progress) {
			w.health.SetProgress(p.Phase, p.Detail, p.Fraction)
			condition.Fail("loading: " + p.Phase)
		},
	}
	switch c.Kind {
	case config.EngineSim:
		if len(conf.Command) == 0 {
			conf.Command = []string{w.opts.Executable, EngineCommand}
		}
		args, err := json.Marshal(c.Sim.Args())
		if err != nil {
			return conf, fmt.Errorf("engine.sim: %w", err)
		}
		conf.Configure = ipc.Configure{WorkerVersion: w.opts.Version, Args: args}
	default:
		return conf, fmt.Errorf("engine.kind: %q is not built into this worker", c.Kind)
	}
	return conf, nil
}

// startEngine starts the engine and returns when it can take requests.
func (w *worker) startEngine(ctx context.Context) error {
	conf, err := w.engineConfig()
	if err != nil {
		return err
	}
	w.health.Condition("engine").Fail("starting")
	process, err := engine.Start(ctx, conf)
	if err != nil {
		w.metrics.EngineExited("start")
		return err
	}
	w.engine = process
	w.onStop("engine", w.cfg.Engine.StopTimeout+stopSlack, process.Stop)
	w.health.ClearProgress()
	w.health.Condition("engine").OK()
	r := process.Ready()
	w.metrics.EngineStarted()
	w.log.Info().Str("engine", r.Engine).Str("version", r.Version).Int("attention_dp_ranks", r.AttentionDPSize).Int("vocabulary", r.Bounds.VocabSize).Int("max_seq_len", r.Bounds.MaxSeqLen).
		Int("kv_blocks", r.KV.TotalBlocks).Int("kv_block_size", r.KV.BlockSize).Msg("engine ready")
	return nil
}

// engineAdapter gives handlers the engine process in the shape that they ask for.
type engineAdapter struct{ process *engine.Process }

func (a engineAdapter) Generate(ctx context.Context, g *ipc.Generate, tokens []int32) (handlers.Stream, error) {
	s, err := a.process.Generate(ctx, g, tokens)
	if err != nil {
		return nil, err
	}
	return s, nil
}

// ErrEngineDied ends a worker whose engine ended without being asked to.
var ErrEngineDied = errors.New("the engine died")
