// Command badfrontend sends requests to a worker as no real frontend does, for scripts/chaos: it cannot be called back, does not read the answers, leaves, or sends more than can be read.
//
//	badfrontend -mode unread -count 60 -nats nats://127.0.0.1:4222 -instance '{"component":…}'
//
// It prints a line when everything has been sent and ends when its standard input does.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"dynworker/internal/caller"
	"dynworker/pkg/ingress/natsplane"
	"dynworker/pkg/protocol"
	"dynworker/pkg/wire"

	"github.com/rs/zerolog"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "badfrontend:", err)
		os.Exit(1)
	}
}

// bad is one run of the program.
type bad struct {
	caller    *caller.Caller
	transport protocol.Transport
	codec     protocol.Codec
	count     int
	tokens    int
	size      int
}

func run() (err error) {
	mode := flag.String("mode", "unread", "unread: asks for long answers and reads only their beginning; unreachable: names an answer address that nobody answers at; flood: sends nonsense as fast as it can")
	count := flag.Int("count", 1, "how many requests")
	tokens := flag.Int("tokens", 8000, "tokens of an answer")
	size := flag.Int("size", 64<<10, "bytes of a flood's message")
	url := flag.String("nats", "", "address of NATS, when the worker is on that plane")
	record := flag.String("instance", "", "the worker's instance record")
	flag.Parse()
	instance, err := protocol.ParseInstance([]byte(*record))
	if err != nil {
		return fmt.Errorf("-instance: %w", err)
	}
	codec, err := protocol.ParseCodec(instance.Codec)
	if err != nil {
		return fmt.Errorf("-instance: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	cfg := caller.Config{Logger: zerolog.Nop(), ReplyTimeout: 5 * time.Second}
	if *url != "" {
		cfg.NATS = &natsplane.ConnConfig{URL: *url}
	}
	b := &bad{transport: instance.Transport, codec: codec, count: *count, tokens: *tokens, size: *size}
	if b.caller, err = caller.New(ctx, cfg); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.caller.Close()) }()
	do, known := map[string]func(context.Context) error{"unread": b.unread, "unreachable": b.unreachable, "flood": b.flood}[*mode]
	if !known {
		return fmt.Errorf("-mode: %q is none of the modes", *mode)
	}
	if err := do(ctx); err != nil {
		return err
	}
	fmt.Println("sent")
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// request asks for a long answer that says much about every token, so that no buffer holds it.
func (b *bad) request() *protocol.Request {
	return &protocol.Request{TokenIDs: []int32{7, 8, 9}, TokensState: protocol.TokensList, Fields: protocol.Map{
		"stop_conditions": protocol.Map{"max_tokens": int64(b.tokens), "ignore_eos": true}, "sampling_options": protocol.Map{}, "output_options": protocol.Map{"logprobs": int64(5)},
	}}
}

// each does something count times at once and returns the first error.
func (b *bad) each(do func() error) error {
	var all sync.WaitGroup
	failed := make(chan error, b.count)
	for range b.count {
		all.Go(func() { failed <- do() })
	}
	all.Wait()
	close(failed)
	for err := range failed {
		if err != nil {
			return err
		}
	}
	return nil
}

// unread opens answers, reads the first item of each and no more.
func (b *bad) unread(ctx context.Context) error {
	return b.each(func() error {
		s, err := b.caller.Do(ctx, caller.Call{Transport: b.transport, Codec: b.codec, Request: b.request()})
		if err != nil {
			return err
		}
		_, err = s.Next()
		return err
	})
}

// unreachable names an address that takes no more connections and refuses none, as a host behind a firewall does.
func (b *bad) unreachable(ctx context.Context) error {
	address, closeAll, err := deaf(ctx)
	if err != nil {
		return err
	}
	defer closeAll()
	return b.each(func() error {
		_, err := b.caller.Do(ctx, caller.Call{
			Transport: b.transport, Codec: b.codec, Request: b.request(), CallHomeTimeout: 10 * time.Second,
			Edit: func(h *wire.RequestControl) { h.Connection.Address = address },
		})
		if errors.Is(err, caller.ErrNoCallHome) {
			return nil
		}
		return fmt.Errorf("call from an address that nobody answers at: %w", errors.Join(err, errNotExpected))
	})
}

var errNotExpected = errors.New("not what had to happen")

// flood sends messages that are no requests, more than a worker that stands still can be sent.
func (b *bad) flood(ctx context.Context) error {
	body := make([]byte, b.size)
	return b.each(func() error {
		_, err := b.caller.Do(ctx, caller.Call{Transport: b.transport, Codec: b.codec, Mangle: func([]byte) []byte { return body }})
		if err == nil {
			return fmt.Errorf("nonsense was accepted: %w", errNotExpected)
		}
		return nil // refused, or never read
	})
}

// deaf is an address on loopback at which connections are neither taken nor refused: the queue of its listener is full.
func deaf(ctx context.Context) (address string, closeAll func(), err error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", nil, fmt.Errorf("make a deaf address: %w", err)
	}
	conns := []net.Conn{}
	closeAll = func() {
		for _, c := range conns {
			_ = c.Close()
		}
		_ = syscall.Close(fd)
	}
	if err := errors.Join(syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), syscall.Listen(fd, 0)); err != nil {
		closeAll()
		return "", nil, fmt.Errorf("make a deaf address: %w", err)
	}
	name, err := syscall.Getsockname(fd)
	if err != nil {
		closeAll()
		return "", nil, fmt.Errorf("make a deaf address: %w", err)
	}
	address = net.JoinHostPort("127.0.0.1", fmt.Sprint(name.(*syscall.SockaddrInet4).Port))
	// The queue is full when a connection is not made any more.
	dialer := net.Dialer{Timeout: 500 * time.Millisecond}
	for range 64 {
		c, err := dialer.DialContext(ctx, "tcp", address)
		if err != nil {
			return address, closeAll, nil
		}
		conns = append(conns, c)
	}
	closeAll()
	return "", nil, errors.New("make a deaf address: the queue of a listener is never full here")
}
