package kvtransfer

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"
)

// Fault is something that goes wrong in a transfer to order.
type Fault uint8

// The faults.
const (
	None     Fault = iota
	Lost           // the connection ends half-way
	Corrupt        // a byte arrives changed
	Mismatch       // the bytes are said to be another context's
	Silent         // no answer at all
)

// Reply is what a sender has for a receiver.
type Reply struct {
	Bytes []byte
	Err   string // why there is nothing; empty when there is
	Fault Fault
}

// Ask is a receiver's request for a context. It must be answered once.
type Ask struct {
	Context uint64
	Nonce   string

	reply chan Reply
}

// Answer hands the reply to the connection that waits for it. It does not
// block.
func (a *Ask) Answer(r Reply) { a.reply <- r }

// Owner holds what is sent. Its methods are called by several goroutines at
// once and must not block.
type Owner interface {
	// Asked is told that a receiver wants a context.
	Asked(*Ask)
	// Taken is told that a receiver has all of a context.
	Taken(context uint64, nonce string)
}

type asking struct {
	Context uint64 `json:"context"`
	Nonce   string `json:"nonce"`
}

type offering struct {
	Context uint64 `json:"context"`
	Bytes   int    `json:"bytes"`
	Error   string `json:"error,omitempty"`
}

type receipt struct {
	Taken bool `json:"taken"`
}

// Sender takes the connections of receivers.
type Sender struct {
	owner    Owner
	patience time.Duration
	listener net.Listener
	ctx      context.Context
	cancel   context.CancelFunc
	running  sync.WaitGroup
}

// Listen opens a sender on a free port of host. patience bounds each
// connection.
func Listen(host string, patience time.Duration, owner Owner) (*Sender, error) {
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		return nil, fmt.Errorf("listen for KV transfers: %w", err)
	}
	s := &Sender{owner: owner, patience: patience, listener: l}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.running.Go(s.accept)
	return s, nil
}

// Address is what goes into tickets.
func (s *Sender) Address() string { return s.listener.Addr().String() }

// Close ends the sender and its connections, and waits for them. A nil sender
// has nothing to close.
func (s *Sender) Close() {
	if s == nil {
		return
	}
	s.cancel()
	_ = s.listener.Close()
	s.running.Wait()
}

func (s *Sender) accept() {
	for {
		conn, err := s.listener.Accept()
		if err != nil {
			if s.ctx.Err() != nil {
				return
			}
			// Out of descriptors, or a receiver that was gone at once: the next one may fare better.
			select {
			case <-s.ctx.Done():
			case <-time.After(10 * time.Millisecond):
			}
			continue
		}
		s.running.Go(func() { s.serve(conn) })
	}
}

// serve is one connection. Whatever its errors are, the receiver sees its end,
// and the owner keeps what was not acknowledged.
func (s *Sender) serve(conn net.Conn) {
	defer conn.Close()
	defer context.AfterFunc(s.ctx, func() { _ = conn.Close() })()
	_ = conn.SetDeadline(time.Now().Add(s.patience))
	in := bufio.NewReaderSize(conn, maxLine)
	var want asking
	if readLine(in, &want) != nil {
		return
	}
	ask := &Ask{Context: want.Context, Nonce: want.Nonce, reply: make(chan Reply, 1)}
	s.owner.Asked(ask)
	var reply Reply
	select {
	case reply = <-ask.reply:
	case <-s.ctx.Done():
		return
	}
	if reply.Fault == Silent {
		_, _ = in.ReadByte() // until the receiver gives up
		return
	}
	if send(conn, want.Context, reply) != nil {
		return
	}
	var got receipt
	if readLine(in, &got) == nil && got.Taken {
		s.owner.Taken(want.Context, want.Nonce)
	}
}

func send(conn net.Conn, id uint64, r Reply) error {
	if r.Err != "" {
		return writeLine(conn, offering{Context: id, Error: r.Err})
	}
	content := r.Bytes
	switch r.Fault {
	case Mismatch:
		id++
	case Corrupt:
		content = slices.Clone(content)
		if len(content) > 0 {
			content[len(content)/2] ^= 1
		}
	case Lost:
		content = content[:len(content)/2]
	}
	if err := writeLine(conn, offering{Context: id, Bytes: len(r.Bytes)}); err != nil {
		return err
	}
	if _, err := conn.Write(content); err != nil {
		return err
	}
	if r.Fault == Lost {
		return net.ErrClosed
	}
	return nil
}

func writeLine(conn net.Conn, v any) error {
	b, err := json.Marshal(v)
	if err == nil {
		_, err = conn.Write(append(b, '\n'))
	}
	return err
}

func readLine(in *bufio.Reader, v any) error {
	line, err := in.ReadSlice('\n')
	if err != nil {
		return err
	}
	return json.Unmarshal(line, v)
}
