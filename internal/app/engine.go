package app

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"dynworker/pkg/config"
	"dynworker/pkg/engine"
	"dynworker/pkg/engine/bridge"
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/engine/vitals"
	"dynworker/pkg/handlers"
)

// EngineCommand is the hidden subcommand of the worker's own binary that is the simulated engine.
const EngineCommand = "engine-sim"

// Resolve works out the arguments of the engine that a worker with this configuration and environment starts.
func Resolve(cfg *config.Config, environ []string) (*config.Resolved, error) {
	environ = EngineEnviron(environ, cfg.Engine.Env)
	return cfg.Resolve(config.Surroundings{VisibleGPUs: VisibleGPUs(environ, os.DirFS("/dev")), Environ: environ})
}

// engineConfig says how the configured engine is started.
func (w *worker) engineConfig() (engine.Config, error) {
	c := &w.cfg.Engine
	conf := engine.Config{
		Command: c.Command, Env: append(append([]string{}, w.opts.Environ...), c.Env...),
		StartTimeout: c.StartTimeout, StartInactivity: c.StartInactivity, StopTimeout: c.StopTimeout,
		KeepSteps: !w.cfg.ResponsePlane.MergeTokens,
		Logger:    w.component("engine"),
		OnProgress: func(p ipc.Progress) {
			w.health.SetProgress(p.Phase, p.Detail, p.Fraction)
			w.engineDown("loading: " + p.Phase)
		},
		OnStats: func(s engine.Stats) { w.metrics.EngineHolds(heldForOthers(s.Rows)) },
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
	case config.EngineTRTLLM:
		// Two statements: the order of a plain operand and a call in one return is not specified.
		err := w.configureTRTLLM(&conf)
		return conf, err
	}
	return conf, nil
}

// configureTRTLLM completes conf for the built-in program that runs TensorRT-LLM.
func (w *worker) configureTRTLLM(conf *engine.Config) error {
	resolved := w.opts.Resolved
	if resolved == nil {
		var err error
		if resolved, err = Resolve(w.cfg, w.opts.Environ); err != nil {
			return err
		}
	}
	args, err := json.Marshal(resolved.Engine.Engine())
	if err != nil {
		return fmt.Errorf("engine arguments: %w", err)
	}
	options, err := json.Marshal(bridge.Options{})
	if err != nil {
		return fmt.Errorf("engine options: %w", err)
	}
	program, err := bridge.Install("")
	if err != nil {
		return err
	}
	// Noted before the engine is started, so that it happens after the engine has ended.
	w.onStop("engine program", stopServer, func(context.Context) error { return os.RemoveAll(filepath.Dir(program)) })
	python := conf.Command
	if len(python) == 0 {
		python = []string{"python3"}
	}
	// The interpreter may have options of its own, or a launcher in front of it.
	conf.Command = append(slices.Clone(python[:len(python)-1]), bridge.Command(python[len(python)-1], program)...)
	conf.Env = EngineEnviron(w.opts.Environ, w.cfg.Engine.Env)
	conf.Configure = ipc.Configure{WorkerVersion: w.opts.Version, Args: args, Options: options}
	return nil
}

// adapters are the configured LoRA adapters with the ids under which the engine knows them: their places in the list, counted from 1.
func adapters(list []config.Adapter) []handlers.Adapter {
	out := make([]handlers.Adapter, len(list))
	for i, a := range list {
		out[i] = handlers.Adapter{Name: a.Name, Path: a.Path, ID: int64(i + 1)}
	}
	return out
}

// startEngine starts the engine's first life and returns when it can take requests.
func (w *worker) startEngine(ctx context.Context) error {
	conf, err := w.engineConfig()
	if err != nil {
		return err
	}
	c := &w.cfg.Engine
	w.lives = &lives{
		start: func(ctx context.Context) (engineProcess, error) {
			w.engineDown("starting")
			p, err := engine.Start(ctx, conf)
			if err != nil {
				return nil, err
			}
			w.metrics.EngineStarted()
			return engineAdapter{p}, nil
		},
		service: w, counter: w.metrics, log: w.component("engine"), restart: c.Restart.Policy == config.RestartInPlace,
		budget:    restartBudget{max: c.Restart.Max, window: c.Restart.Window, backoff: c.Restart.Backoff, cap: c.Restart.BackoffMax, jitter: randomJitter},
		suspects:  newSuspects(c.Restart.SuspectAfter),
		limits:    vitals.Limits{NoProgress: c.Watch.NoProgress, Inactivity: c.Watch.StreamInactivity, PerPromptToken: c.Watch.PromptAllowance},
		tolerance: vitals.Tolerance{Window: c.Watch.FailureWindow, Share: c.Watch.FailureShare, Count: c.Watch.FailureCount},
		questions: vitals.Questions{Interval: c.Watch.HealthInterval, Timeout: c.Watch.HealthTimeout},
	}
	p, err := w.lives.begin(ctx)
	if err != nil {
		return err
	}
	w.onStop("engine", c.StopTimeout+stopSlack, w.lives.stop)
	w.ready = p.Ready()
	w.engineUp(w.ready)
	return nil
}

// engineUp notes that an engine serves.
func (w *worker) engineUp(r *ipc.Ready) {
	w.health.ClearProgress()
	w.health.Condition("engine").OK()
	w.log.Info().Str("engine", r.Engine).Str("version", r.Version).Int("attention_dp_ranks", r.AttentionDPSize).Int("vocabulary", r.Bounds.VocabSize).Int("max_seq_len", r.Bounds.MaxSeqLen).
		Int("kv_blocks", r.KV.TotalBlocks).Int("kv_block_size", r.KV.BlockSize).Msg("engine ready")
}

// engineDown says in health why there is no engine, and after a failure also which.
func (w *worker) engineDown(state string) {
	if after := w.engineFailure.Load(); after != nil {
		state += ", after " + after.Error()
	}
	w.health.Condition("engine").Fail(state)
}

// engineAdapter is an engine process in the shape that its owner asks for.
type engineAdapter struct{ *engine.Process }

// Open implements engineProcess.
func (a engineAdapter) Open(ctx context.Context, g *ipc.Generate, tokens []int32) (engineStream, error) {
	s, err := a.Generate(ctx, g, tokens)
	if err != nil {
		return nil, err
	}
	return s, nil
}

// unwatched gives a handler a life that nobody looks after.
type unwatched struct{ engineProcess }

// Generate implements handlers.Engine.
func (u unwatched) Generate(ctx context.Context, g *ipc.Generate, tokens []int32) (handlers.Stream, error) {
	return u.Open(ctx, g, tokens)
}
