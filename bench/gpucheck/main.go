// Command gpucheck checks conversation affinity on a real engine: that a conversation keeps its attention-DP rank over its turns, and that requests without a conversation are served as well. scripts/gpu-check runs it.
//
//	go run ./bench/gpucheck --model /models/m --tensor-parallel-size 4 --enable-attention-dp --extra-engine-args affinity.yaml
//	go run ./bench/gpucheck --sim        # the same check on the simulated engine, without a GPU
//
// Everything after the program's own flags goes to "worker serve". An engine does not tell on which rank a request ran, but every rank has a KV cache of its own: when a turn runs where the turn before it ran, its prompt is found there
// but for the last block and what follows. So a turn with too few cached tokens has moved. The exit code is 0 when no turn moved.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"dynworker/bench/rig"
	"dynworker/internal/caller"
	"dynworker/pkg/ingress/natsplane"
	"dynworker/pkg/protocol"

	"github.com/rs/zerolog"
)

const (
	conversations = 10
	turns         = 5
	// firstPrompt tokens are several KV blocks of any usual size; each turn adds turnPrompt and the answer.
	firstPrompt = 512
	turnPrompt  = 64
	answer      = 32
	// largestBlock is the largest KV block that is in use; what is in the last, unfinished block is not reusable.
	largestBlock = 128
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "gpucheck:", err)
		os.Exit(1)
	}
}

func run(options []string) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Hour)
	defer cancel()
	r, err := rig.New()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	var settings []string
	if i := slices.Index(options, "--sim"); i >= 0 {
		options = slices.Delete(slices.Clone(options), i, i+1)
		settings = []string{"model.path=" + r.Model, "model.name=tiny", "engine.kind=sim", "engine.sim.attention_dp_size=4", "engine.sim.conversation_affinity=true", "engine.sim.total_blocks=65536"}
	}
	w, err := r.Start(ctx, os.Stderr, settings, options)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Stop()) }()
	c, err := caller.New(ctx, caller.Config{NATS: &natsplane.ConnConfig{URL: r.NATS()}, Logger: zerolog.Nop()})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	return check(ctx, c, w.Target)
}

// result is what came of one turn.
type result struct {
	conversation, prompt, cached int
	tokens                       []uint32
	err                          error
}

// check plays all conversations. The requests of a turn are sent at the same time and in another order each turn, together with some that belong to no conversation: an engine that balanced them by load would move them.
func check(ctx context.Context, c *caller.Caller, target protocol.Instance) error {
	history := make([][]int32, conversations)
	moved, loose := 0, 0
	fmt.Println("turn  conversation  prompt  cached")
	for turn := range turns {
		results := make(chan result, 2*conversations)
		sent := 0
		before := make([]int, conversations)
		for k := range conversations {
			// 3 and 7 have no divisor in common with 10: every turn has an order of its own, and all conversations are in it.
			i := (k*[]int{1, 3, 7, 9}[turn%4] + turn) % conversations
			before[i] = len(history[i])
			history[i] = append(history[i], say(i, turn)...)
			prompt := slices.Clone(history[i])
			sent++
			go func() {
				tokens, cached, err := ask(ctx, c, target, fmt.Sprintf("conversation-%d", i), prompt)
				results <- result{i, len(prompt), cached, tokens, err}
			}()
			if (k+turn)%3 == 0 {
				sent, loose = sent+1, loose+1
				go func() {
					_, _, err := ask(ctx, c, target, "", say(100+k, turn))
					results <- result{conversation: -1, err: err}
				}()
			}
		}
		for range sent {
			r := <-results
			switch {
			case r.err != nil && r.conversation < 0:
				return fmt.Errorf("turn %d: a request without a conversation: %w", turn+1, r.err)
			case r.err != nil:
				return fmt.Errorf("turn %d of conversation %d: %w", turn+1, r.conversation, r.err)
			case r.conversation < 0:
				continue
			}
			verdict := ""
			if r.cached < before[r.conversation]-largestBlock {
				verdict = "  moved"
				moved++
			}
			fmt.Printf("%4d  %12d  %6d  %6d%s\n", turn+1, r.conversation, r.prompt, r.cached, verdict)
			for _, t := range r.tokens {
				history[r.conversation] = append(history[r.conversation], int32(t))
			}
		}
	}
	fmt.Printf("%d conversations of %d turns, %d turns moved; %d requests without a conversation were served\n", conversations, turns, moved, loose)
	if moved > 0 {
		return fmt.Errorf("%d turns did not run where the turn before them ran", moved)
	}
	return nil
}

// say makes up what one side says in a turn. Conversations differ from their first token on, so that none can find another one's blocks.
func say(conversation, turn int) []int32 {
	n := turnPrompt
	if turn == 0 {
		n = firstPrompt
	}
	words := make([]int32, n)
	for k := range words {
		words[k] = int32(10 + (7*conversation+13*turn+31*k+conversation*k)%300)
	}
	return words
}

// ask sends a request and returns its answer and how much of its prompt was cached.
func ask(ctx context.Context, c *caller.Caller, target protocol.Instance, session string, prompt []int32) (tokens []uint32, cached int, err error) {
	codec, err := protocol.ParseCodec(target.Codec)
	if err != nil {
		return nil, 0, err
	}
	fields := protocol.Map{"stop_conditions": protocol.Map{"max_tokens": int64(answer), "ignore_eos": true}, "sampling_options": protocol.Map{}, "output_options": protocol.Map{}, "routing": protocol.Map{}}
	if session != "" {
		fields["agent_context"] = protocol.Map{"session_id": session}
	}
	s, err := c.Do(ctx, caller.Call{Transport: target.Transport, Codec: codec, Request: &protocol.Request{TokenIDs: prompt, TokensState: protocol.TokensList, Fields: fields}})
	if err != nil {
		return nil, 0, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	for {
		item, err := s.Next()
		switch {
		case errors.Is(err, io.EOF):
			return tokens, cached, nil
		case err != nil:
			return nil, 0, err
		case item.Err != nil:
			return nil, 0, item.Err
		case item.Chunk == nil:
			continue
		case item.Chunk.Finish == protocol.FinishError:
			return nil, 0, errors.New(item.Chunk.ErrorText)
		}
		tokens = append(tokens, item.Chunk.TokenIDs...)
		if u := item.Chunk.Usage; u != nil {
			cached = u.CachedTokens
		}
	}
}
