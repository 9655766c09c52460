package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"dynworker/internal/caller"
	"dynworker/pkg/discovery"
	"dynworker/pkg/ingress/natsplane"
	"dynworker/pkg/protocol"

	"github.com/rs/zerolog"
)

// script is what the client says: two turns of three conversations, taken in turns, and one request without a conversation.
var script = []struct{ conversation, text string }{
	{"alice", "the quick brown fox jumps over the lazy dog and looks back"},
	{"bob", "worker streams tokens from the engine to the frontend"},
	{"carol", "conversation affinity routes each turn to the same rank"},
	{"alice", " and then the fox said"},
	{"bob", " one frame after the other"},
	{"", "a request without a conversation"},
	{"carol", " as long as the engine lives"},
}

const answerTokens = 40

// client plays the script.
type client struct {
	caller  *caller.Caller
	target  protocol.Instance
	text    *tokenizer
	worker  *worker
	history map[string][]int32
	home    map[string]int // rank by conversation
	stats   struct{ turns, tokens, frames, cached int }
}

// newClient finds the worker where a frontend would: in etcd.
func newClient(ctx context.Context, w *worker, text *tokenizer, etcd, nats string) (*client, error) {
	d, err := discovery.Connect(ctx, discovery.Config{Endpoints: []string{etcd}, StartupTimeout: patience, Logger: zerolog.Nop()})
	if err != nil {
		return nil, err
	}
	defer d.Close()
	records, err := d.List(ctx, protocol.InstancePrefix)
	if err != nil {
		return nil, err
	}
	if len(records) != 1 {
		return nil, fmt.Errorf("etcd holds %d instances, want 1", len(records))
	}
	target, err := protocol.ParseInstance(records[0].Value)
	if err != nil {
		return nil, err
	}
	c, err := caller.New(ctx, caller.Config{NATS: &natsplane.ConnConfig{URL: nats, Name: "demo"}, Logger: zerolog.Nop()})
	if err != nil {
		return nil, err
	}
	return &client{caller: c, target: target, text: text, worker: w, history: map[string][]int32{}, home: map[string]int{}}, nil
}

func (c *client) close() error { return c.caller.Close() }

func (c *client) play(ctx context.Context, out io.Writer) error {
	started := time.Now()
	for i, turn := range script {
		if err := c.turn(ctx, out, fmt.Sprintf("demo-%d", i+1), turn.conversation, turn.text); err != nil {
			return fmt.Errorf("turn %d: %w", i+1, err)
		}
	}
	_, err := fmt.Fprintf(out, "%d turns in %v: %d tokens in %d frames, %d prompt tokens came from the cache; every conversation stayed on its rank\n",
		c.stats.turns, time.Since(started).Round(time.Millisecond), c.stats.tokens, c.stats.frames, c.stats.cached)
	return err
}

// turn sends one request and prints its answer as it comes.
func (c *client) turn(ctx context.Context, out io.Writer, id, conversation, text string) error {
	prompt := append(c.history[conversation][:len(c.history[conversation]):len(c.history[conversation])], c.text.encode(text)...)
	request := &protocol.Request{TokenIDs: prompt, TokensState: protocol.TokensList, Fields: protocol.Map{
		"model": "tiny", "stop_conditions": protocol.Map{"max_tokens": int64(answerTokens)}, "sampling_options": protocol.Map{}, "output_options": protocol.Map{}, "routing": protocol.Map{},
	}}
	name := "nobody"
	if conversation != "" {
		name = conversation
		request.Fields["agent_context"] = protocol.Map{"session_id": conversation}
	}
	codec, err := protocol.ParseCodec(c.target.Codec)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%s> %s\n", name, strings.TrimSpace(text))
	sent := time.Now()
	stream, err := c.caller.Do(ctx, caller.Call{Transport: c.target.Transport, Codec: codec, Request: request, ID: id})
	if err != nil {
		return err
	}
	defer func() { _ = stream.Close() }()
	answer, err := c.read(out, stream, sent)
	if err != nil {
		return err
	}
	if conversation != "" {
		for _, token := range answer {
			prompt = append(prompt, int32(token))
		}
		c.history[conversation] = prompt
	}
	return c.explain(out, id, conversation)
}

// read prints a stream to its end and returns its tokens.
func (c *client) read(out io.Writer, stream *caller.Stream, sent time.Time) ([]uint32, error) {
	var tokens []uint32
	frames, cached := 0, 0
	var first time.Duration
	fmt.Fprint(out, "  ")
	for {
		item, err := stream.Next()
		switch {
		case errors.Is(err, io.EOF):
			fmt.Fprintf(out, "\n  [%d tokens in %d frames, first after %v", len(tokens), frames, first.Round(100*time.Microsecond))
			if len(tokens) != answerTokens {
				return nil, fmt.Errorf("%d tokens, want %d", len(tokens), answerTokens)
			}
			c.stats.turns++
			c.stats.tokens += len(tokens)
			c.stats.frames += frames
			c.stats.cached += cached
			return tokens, nil
		case err != nil:
			return nil, err
		case item.Err != nil:
			return nil, item.Err
		case item.Chunk == nil:
			continue
		}
		if frames == 0 {
			first = time.Since(sent)
		}
		frames++
		tokens = append(tokens, item.Chunk.TokenIDs...)
		fmt.Fprint(out, c.text.decode(item.Chunk.TokenIDs))
		if u := item.Chunk.Usage; u != nil {
			cached = u.CachedTokens
		}
	}
}

// explain prints what the worker did with a request: its own log line says how it decided, the engine's record on which rank it ran.
func (c *client) explain(out io.Writer, id, conversation string) error {
	accepted, err := findLine(c.worker.log, func(l map[string]any) bool { return l["message"] == "request accepted" && l["request_id"] == id })
	if err != nil {
		return err
	}
	finished, err := findLine(c.worker.calls, func(l map[string]any) bool { return l["request_id"] == id && l["rank"] != nil })
	if err != nil {
		return err
	}
	rank, err := strconv.Atoi(fmt.Sprint(finished["rank"]))
	if err != nil {
		return fmt.Errorf("rank in the engine's record: %w", err)
	}
	fmt.Fprintf(out, "; prompt of %v tokens, affinity decision %v, engine ran it on rank %d]\n\n", accepted["prompt_tokens"], accepted["affinity"], rank)
	home, known := c.home[conversation]
	if conversation != "" && known && home != rank {
		return fmt.Errorf("conversation %s moved from rank %d to rank %d", conversation, home, rank)
	}
	c.home[conversation] = rank
	return nil
}

// findLine reads a file of JSON lines up to the one that matches.
func findLine(name string, match func(map[string]any) bool) (map[string]any, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 4<<20)
	for lines.Scan() {
		var line map[string]any
		if json.Unmarshal(lines.Bytes(), &line) == nil && match(line) {
			return line, nil
		}
	}
	return nil, errors.Join(fmt.Errorf("%s has no such line", name), lines.Err())
}
