package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"sort"
	"strconv"
	"strings"
	"time"

	"dynworker/internal/caller"
	"dynworker/pkg/config"
	"dynworker/pkg/discovery"
	"dynworker/pkg/ingress/natsplane"
	"dynworker/pkg/protocol"

	"github.com/rs/zerolog"
)

const askUsage = `worker ask sends one request to a worker that is registered in etcd, over the real request plane.

  --tokens 1,2,3      the prompt, as token ids (required)
  --max-tokens N      how many tokens to generate (16)
  --session ID        conversation id
  --dp-rank N         attention-DP rank, as a KV router would choose it
  --cache-salt TEXT   cache salt
  --instance HEX      ask this instance instead of the first one
  --host IP           our address for the worker's call-home (127.0.0.1)
  --timeout DURATION  give up after this (1m)
  --json              print every item as JSON

Where etcd and NATS are, and the namespace, come from the same settings as for serve.
`

// question is what ask was asked to ask.
type question struct {
	tokens    []int32
	maxTokens int
	session   string
	rank      *int64
	salt      string
	instance  *uint64
	host      string
	timeout   time.Duration
	json      bool
}

// parseQuestion takes ask's own flags out of the arguments and leaves those of the configuration.
func parseQuestion(args []string) (q question, rest []string, err error) {
	q = question{maxTokens: 16, host: "127.0.0.1", timeout: time.Minute}
	set := map[string]func(string) error{
		"--tokens":     func(v string) (err error) { q.tokens, err = parseTokens(v); return err },
		"--max-tokens": func(v string) (err error) { q.maxTokens, err = strconv.Atoi(v); return err },
		"--session":    func(v string) error { q.session = v; return nil },
		"--dp-rank": func(v string) error {
			n, err := strconv.ParseInt(v, 10, 64)
			q.rank = &n
			return err
		},
		"--cache-salt": func(v string) error { q.salt = v; return nil },
		"--instance": func(v string) error {
			n, err := strconv.ParseUint(v, 16, 64)
			q.instance = &n
			return err
		},
		"--host":    func(v string) error { q.host = v; return nil },
		"--timeout": func(v string) (err error) { q.timeout, err = time.ParseDuration(v); return err },
	}
	for i := 0; i < len(args); i++ {
		name, value, inline := strings.Cut(args[i], "=")
		if name == "--json" && !inline {
			q.json = true
			continue
		}
		f, ours := set[name]
		if !ours {
			rest = append(rest, args[i])
			continue
		}
		if !inline {
			if i++; i == len(args) {
				return q, nil, fmt.Errorf("%s needs a value", name)
			}
			value = args[i]
		}
		if err := f(value); err != nil {
			return q, nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	if len(q.tokens) == 0 {
		return q, nil, errors.New("--tokens is missing")
	}
	return q, rest, nil
}

func parseTokens(s string) ([]int32, error) {
	var ids []int32
	for word := range strings.SplitSeq(s, ",") {
		n, err := strconv.ParseInt(strings.TrimSpace(word), 10, 64)
		if err != nil || n < 0 || n > math.MaxInt32 {
			return nil, fmt.Errorf("%q is no token id", word)
		}
		ids = append(ids, int32(n))
	}
	return ids, nil
}

func (p *Process) ask(args []string) int {
	if len(args) > 0 && (args[0] == "--help" || args[0] == "-h") {
		fmt.Fprint(p.Stdout, askUsage)
		return ExitOK
	}
	q, rest, err := parseQuestion(args)
	if err != nil {
		fmt.Fprintf(p.Stderr, "worker ask: %v\n\n%s", err, askUsage)
		return ExitConfig
	}
	cfg, code := p.loadClient(rest)
	if code != ExitOK {
		return code
	}
	ctx, stop := p.signals(func() {})
	defer stop()
	ctx, cancel := context.WithTimeoutCause(ctx, q.timeout, fmt.Errorf("no answer within %v", q.timeout))
	defer cancel()
	if err := p.answer(ctx, cfg, &q); err != nil {
		fmt.Fprintln(p.Stderr, "worker ask: "+err.Error())
		return ExitFailure
	}
	return ExitOK
}

// answer finds a worker, sends the question and prints what comes.
func (p *Process) answer(ctx context.Context, cfg *config.Config, q *question) (err error) {
	target, model, err := find(ctx, cfg, q)
	if err != nil {
		return err
	}
	conf := caller.Config{Host: q.host, Logger: zerolog.Nop()}
	if target.Transport.Kind == protocol.TransportNATS {
		user, password := cfg.NATS.Login()
		conf.NATS = &natsplane.ConnConfig{
			URL: cfg.NATS.Server, Name: "worker ask", Username: user, Password: string(password), Token: string(cfg.NATS.Token), NKeySeed: string(cfg.NATS.NKey), CredentialsFile: cfg.NATS.CredentialsFile,
			CACert: cfg.NATS.TLS.CAFile, ClientCert: cfg.NATS.TLS.CertFile, ClientKey: cfg.NATS.TLS.KeyFile, Insecure: cfg.NATS.TLS.Insecure, StartupTimeout: q.timeout,
		}
	}
	c, err := caller.New(ctx, conf)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	codec, err := protocol.ParseCodec(target.Codec)
	if err != nil {
		return fmt.Errorf("instance %x: %w", target.InstanceID, err)
	}
	stream, err := c.Do(ctx, caller.Call{Transport: target.Transport, Codec: codec, Request: q.request(model)})
	if err != nil {
		return fmt.Errorf("instance %x: %w", target.InstanceID, err)
	}
	defer func() { err = errors.Join(err, stream.Close()) }()
	return p.print(stream, q.json)
}

// find chooses an instance of the configured endpoint.
func find(ctx context.Context, cfg *config.Config, q *question) (protocol.Instance, string, error) {
	var none protocol.Instance
	client, err := discovery.Connect(ctx, discovery.Config{
		Endpoints: cfg.Etcd.Endpoints, StartupTimeout: q.timeout, Username: cfg.Etcd.Username, Password: string(cfg.Etcd.Password), CA: cfg.Etcd.CA, ClientCert: cfg.Etcd.ClientCert, ClientKey: string(cfg.Etcd.ClientKey), Logger: zerolog.Nop(),
	})
	if err != nil {
		return none, "", err
	}
	defer client.Close()
	place := cfg.ServingNamespace() + "/" + cfg.Component + "/" + cfg.Endpoint + "/"
	records, err := client.List(ctx, protocol.InstancePrefix+place)
	if err != nil {
		return none, "", err
	}
	sort.Slice(records, func(i, j int) bool { return records[i].Key < records[j].Key })
	for _, r := range records {
		instance, err := protocol.ParseInstance(r.Value)
		if err != nil {
			return none, "", fmt.Errorf("%s: %w", r.Key, err)
		}
		if q.instance == nil || *q.instance == instance.InstanceID {
			return instance, modelName(ctx, client, place, instance.InstanceID), nil
		}
	}
	if q.instance != nil {
		return none, "", fmt.Errorf("instance %x is not registered under %s%s", *q.instance, protocol.InstancePrefix, place)
	}
	return none, "", fmt.Errorf("no worker is registered under %s%s", protocol.InstancePrefix, place)
}

// modelName reads the served name from the card. A worker without a card can be asked all the same.
func modelName(ctx context.Context, client *discovery.Client, place string, instance uint64) string {
	records, err := client.List(ctx, protocol.ModelPrefix+place+strconv.FormatUint(instance, 16))
	if err != nil || len(records) == 0 {
		return ""
	}
	record, err := protocol.ParseModelRecord(records[0].Value)
	if err != nil {
		return ""
	}
	return record.Card.DisplayName
}

// request is the body as a frontend would write it.
func (q *question) request(model string) *protocol.Request {
	routing := protocol.Map{}
	if q.rank != nil {
		routing["dp_rank"] = *q.rank
	}
	if q.salt != "" {
		routing["cache_salt"] = q.salt
	}
	fields := protocol.Map{
		"model": model, "annotations": []any{}, "eos_token_ids": []any{}, "routing": routing,
		"stop_conditions": protocol.Map{"max_tokens": int64(q.maxTokens)}, "sampling_options": protocol.Map{}, "output_options": protocol.Map{},
	}
	if q.session != "" {
		fields["agent_context"] = protocol.Map{"session_id": q.session}
	}
	return &protocol.Request{TokenIDs: q.tokens, TokensState: protocol.TokensList, Fields: fields}
}

// print shows the stream as it comes.
func (p *Process) print(stream *caller.Stream, asJSON bool) error {
	for {
		item, err := stream.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if asJSON {
			if err := p.printJSON(&item); err != nil {
				return err
			}
		} else if item.Chunk != nil {
			p.printChunk(item.Chunk)
		}
		if item.Err != nil {
			return item.Err
		}
		if item.Chunk != nil && item.Chunk.Finish == protocol.FinishError {
			return errors.New("the engine failed the request: " + item.Chunk.ErrorText)
		}
	}
}

func (p *Process) printChunk(c *protocol.Chunk) {
	words := make([]string, len(c.TokenIDs))
	for i, id := range c.TokenIDs {
		words[i] = strconv.FormatUint(uint64(id), 10)
	}
	line := strings.Join(words, " ")
	if c.Index > 0 {
		line = fmt.Sprintf("[%d] %s", c.Index, line)
	}
	if line != "" {
		fmt.Fprintln(p.Stdout, line)
	}
	if c.Finish != protocol.FinishNone && c.Finish != protocol.FinishError {
		fmt.Fprintf(p.Stdout, "finish: %s\n", c.Finish)
	}
	if c.Usage != nil && c.Finish != protocol.FinishNone {
		fmt.Fprintf(p.Stdout, "usage: %d prompt (%d cached), %d generated\n", c.Usage.PromptTokens, c.Usage.CachedTokens, c.Usage.CompletionTokens)
	}
}

// printJSON shows the item in the wire's own form.
func (p *Process) printJSON(item *protocol.Item) error {
	var line []byte
	switch {
	case item.Chunk != nil:
		line = protocol.AppendChunk(nil, protocol.CodecJSON, item.Chunk)
	case item.Err != nil:
		line = protocol.AppendErrorItem(nil, protocol.CodecJSON, item.Err)
	default:
		return nil
	}
	if !json.Valid(line) {
		return errors.New("the answer cannot be shown as JSON")
	}
	_, err := fmt.Fprintf(p.Stdout, "%s\n", line)
	return err
}
