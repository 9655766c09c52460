package kvtransfer_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dynworker/pkg/engine/sim/kvtransfer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = time.Minute

// shelf has one context, and hands on what it is told.
type shelf struct {
	context uint64
	reply   kvtransfer.Reply
	taken   chan uint64
}

func (s *shelf) Asked(a *kvtransfer.Ask) {
	if a.Context != s.context || a.Nonce != "n" {
		a.Answer(kvtransfer.Reply{Err: "not here"})
		return
	}
	a.Answer(s.reply)
}

func (s *shelf) Taken(id uint64, nonce string) { s.taken <- id }

func listen(t *testing.T, s *shelf) *kvtransfer.Sender {
	sender, err := kvtransfer.Listen("127.0.0.1", patience, s)
	require.NoError(t, err)
	t.Cleanup(sender.Close)
	return sender
}

func at(sender *kvtransfer.Sender, content []byte) kvtransfer.Ticket {
	return kvtransfer.Ticket{Address: sender.Address(), Context: 7, Nonce: "n", Blocks: 1, Bytes: len(content), Checksum: kvtransfer.Checksum(content)}
}

func straightOn(context.Context) error { return nil }

func TestFetch(t *testing.T) {
	content := bytes.Repeat([]byte("kv cache"), 100_000)
	s := &shelf{context: 7, reply: kvtransfer.Reply{Bytes: content}, taken: make(chan uint64, 1)}
	ticket := at(listen(t, s), content)
	refused := errors.New("not mine")
	require.ErrorIs(t, kvtransfer.Fetch(t.Context(), ticket, straightOn, func([]byte) error { return refused }), refused)
	require.ErrorIs(t, kvtransfer.Fetch(t.Context(), ticket, func(context.Context) error { return refused }, nil), refused)
	var got []byte
	require.NoError(t, kvtransfer.Fetch(t.Context(), ticket, straightOn, func(b []byte) error { got = b; return nil }))
	require.Equal(t, content, got)
	require.EqualValues(t, 7, <-s.taken, "only what was acknowledged is taken")
	require.Empty(t, s.taken)
}

func TestFaults(t *testing.T) {
	content := []byte("some blocks")
	accept := func([]byte) error { t.Error("nothing that is right has come"); return nil }
	for fault, reason := range map[kvtransfer.Fault]string{
		kvtransfer.Lost: "ended early", kvtransfer.Corrupt: "not those that were announced", kvtransfer.Mismatch: "offers context 8",
	} {
		s := &shelf{context: 7, reply: kvtransfer.Reply{Bytes: content, Fault: fault}}
		require.ErrorContains(t, kvtransfer.Fetch(t.Context(), at(listen(t, s), content), straightOn, accept), reason)
	}
	s := &shelf{context: 7, reply: kvtransfer.Reply{Bytes: content, Fault: kvtransfer.Silent}}
	sender := listen(t, s)
	gone := errors.New("gone")
	ctx, cancel := context.WithCancelCause(t.Context())
	time.AfterFunc(time.Millisecond, func() { cancel(gone) })
	require.Equal(t, gone, kvtransfer.Fetch(ctx, at(sender, content), straightOn, accept))

	// Another shelf: the silent one may be looked at until its sender is closed.
	sender = listen(t, &shelf{context: 7, reply: kvtransfer.Reply{Bytes: content}})
	unknown := at(sender, content)
	unknown.Nonce = "m"
	require.ErrorContains(t, kvtransfer.Fetch(t.Context(), unknown, straightOn, accept), "the sender says: not here")
	shorter := at(sender, content)
	shorter.Bytes--
	require.ErrorContains(t, kvtransfer.Fetch(t.Context(), shorter, straightOn, accept), "were announced")
	sender.Close()
	require.ErrorContains(t, kvtransfer.Fetch(t.Context(), unknown, straightOn, accept), "reach the sender")
}

// A sender that is closed ends what is under way, and a receiver that talks
// nonsense, or says nothing, costs nothing but its connection.
func TestSenderEnds(t *testing.T) {
	s := &shelf{context: 7, reply: kvtransfer.Reply{Bytes: []byte("x"), Fault: kvtransfer.Silent}}
	sender := listen(t, s)
	for _, line := range []string{"", "{\"context\":7,\"nonce\":\"n\"}\n"} {
		conn, err := net.Dial("tcp", sender.Address())
		require.NoError(t, err)
		defer conn.Close()
		_, err = conn.Write([]byte(line))
		require.NoError(t, err)
	}
	for _, line := range []string{"no JSON\n", strings.Repeat("x", 1<<20) + "\n"} {
		conn, err := net.Dial("tcp", sender.Address())
		require.NoError(t, err)
		defer conn.Close()
		_, _ = conn.Write([]byte(line)) // may be cut off while it is written
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(patience)))
		_, err = conn.Read(make([]byte, 1))
		require.Error(t, err)
		require.NotErrorIs(t, err, context.DeadlineExceeded)
	}
	sender.Close()
	(*kvtransfer.Sender)(nil).Close()
	_, err := kvtransfer.Listen("no such host.", patience, s)
	require.ErrorContains(t, err, "listen for KV transfers")
}

func TestTicket(t *testing.T) {
	ticket := kvtransfer.Ticket{Address: "127.0.0.1:1", Context: 1<<64 - 1, Nonce: "ab", Blocks: 3, Bytes: 9, Checksum: 1 << 63}
	got, err := kvtransfer.ParseTicket(ticket.Encode())
	require.NoError(t, err)
	require.Equal(t, ticket, got)
	for text, reason := range map[string]string{
		``:                                   "no ticket",
		`standin-1`:                          "no ticket",
		`{"address":"a","more":1}`:           "no ticket",
		`{"address":"a"} {}`:                 "behind its ticket",
		`{}`:                                 "address is empty",
		`{"address":"a","bytes":-1}`:         "bytes is -1",
		`{"address":"a","bytes":1000000000}`: "bytes is 1000000000",
		`{"address":"a","blocks":-1}`:        "blocks is -1",
	} {
		_, err := kvtransfer.ParseTicket([]byte(text))
		require.ErrorContains(t, err, reason, text)
	}
}

func FuzzParseTicket(f *testing.F) {
	f.Add(kvtransfer.Ticket{Address: "127.0.0.1:1", Context: 1}.Encode())
	f.Add([]byte(`{"address":"a"} {}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		ticket, err := kvtransfer.ParseTicket(b)
		if err != nil {
			return
		}
		again, err := kvtransfer.ParseTicket(ticket.Encode())
		require.NoError(t, err)
		require.Equal(t, ticket, again)
	})
}

func FuzzParseBlocks(f *testing.F) {
	f.Add(kvtransfer.AppendBlocks(nil, []kvtransfer.Block{{Tokens: []int32{1, 2}, State: 3}, {Tokens: []int32{}, State: 4}}))
	f.Add([]byte{255, 255, 255, 255})
	f.Add([]byte{1, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		blocks, err := kvtransfer.ParseBlocks(b)
		if err != nil {
			return
		}
		require.True(t, bytes.Equal(b, kvtransfer.AppendBlocks(nil, blocks)))
	})
}
