package caller

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"

	"dynworker/internal/testenv"
	"dynworker/internal/testenv/embedded"
	"dynworker/pkg/ingress"
	"dynworker/pkg/ingress/natsplane"
	"dynworker/pkg/ingress/tcpplane"
	"dynworker/pkg/protocol"
	"dynworker/pkg/respstream"
	"dynworker/pkg/wire"
)

const tick = time.Millisecond

func TestWholeWay(t *testing.T) {
	for _, p := range planes(t) {
		for _, codec := range codecs {
			t.Run(p.name+" "+codec.String(), func(t *testing.T) {
				call := p.call(codec, "", 5, 6, 7)
				call.Headers = map[string]string{"traceparent": "00-a-b-01", "x-extra": "y"}
				s := p.do(t, call)
				require.NoError(t, s.Prologue())
				tokens, items, err := collect(s)
				require.Equal(t, io.EOF, err)
				require.Equal(t, []uint32{5, 6, 7}, tokens)
				require.Len(t, items, 3)
				_, err = s.Next()
				require.Equal(t, io.EOF, err, "the end stays")
				require.Equal(t, "handshake prologue data data data data control ", kinds(s))
				frames := s.Frames()
				require.JSONEq(t, `"sentinel"`, string(frames[len(frames)-1].Bytes))
				require.Equal(t, protocol.AppendFinal(nil, codec), frames[len(frames)-2].Bytes)

				d := p.worker.last()
				require.Equal(t, s.ID, d.Control.ID)
				require.Equal(t, s.ID, d.RequestID)
				require.Equal(t, "00-a-b-01", d.Traceparent)
				require.Equal(t, "y", d.Headers["x-extra"])
				require.NotZero(t, d.SentNanos)
				require.ErrorIs(t, p.worker.cause(t, s.ID), respstream.ErrFinished)
			})
		}
	}
}

func TestChosenIDsAndHeaders(t *testing.T) {
	p := tcpPlane(t, tcpplane.Config{}, respstream.Config{}, Config{})
	call := p.call(protocol.CodecJSON, "")
	call.ID = "my-id"
	call.Metadata = map[string]string{"dynamo.lifecycle.root": "v1"}
	call.Headers = map[string]string{ingress.HeaderRequestID: "other", ingress.HeaderSentNanos: ""}
	_, _, err := collect(p.do(t, call))
	require.Equal(t, io.EOF, err)
	d := p.worker.last()
	require.Equal(t, "my-id", d.Control.ID)
	require.Equal(t, "other", d.RequestID)
	require.Zero(t, d.SentNanos)
	require.Equal(t, call.Metadata, d.Control.Metadata)
}

func TestManyCallsAtOnce(t *testing.T) {
	for _, p := range planes(t) {
		t.Run(p.name, func(t *testing.T) {
			const n = 100
			ctx := testenv.Context(t)
			errs := make(chan error, n)
			for i := range n {
				go func() {
					s, err := p.caller.Do(ctx, p.call(codecs[i%2], "", int32(i), int32(i+1)))
					if err != nil {
						errs <- err
						return
					}
					tokens, _, err := collect(s)
					if errors.Is(err, io.EOF) {
						err = s.Close()
					}
					if err == nil && (len(tokens) != 2 || tokens[0] != uint32(i) || tokens[1] != uint32(i+1)) {
						err = fmt.Errorf("call %d got %v", i, tokens)
					}
					errs <- err
				}()
			}
			for range n {
				require.NoError(t, <-errs)
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	for _, p := range planes(t) {
		t.Run(p.name, func(t *testing.T) {
			for _, c := range []struct {
				kind ingress.RefusalKind
				want error
			}{{ingress.Overloaded, ErrOverloaded}, {ingress.Unavailable, ErrUnavailable}} {
				p.worker.refusal = &ingress.Refusal{Kind: c.kind, Reason: "because"}
				_, err := p.caller.Do(testenv.Context(t), p.call(protocol.CodecJSON, ""))
				require.ErrorIs(t, err, c.want)
				var refused *RefusedError
				require.ErrorAs(t, err, &refused)
				require.Equal(t, "because", refused.Reason)
			}
			p.worker.refusal = nil
			p.works(t)
		})
	}
}

func TestNobodyThere(t *testing.T) {
	all := planes(t)
	overNATS, overTCP := all[0], all[1]

	gone := overNATS.call(protocol.CodecJSON, "")
	gone.Transport.Address = wire.Subject(instance+1, "dynamo", "backend", "generate")
	_, err := overNATS.caller.Do(testenv.Context(t), gone)
	require.ErrorIs(t, err, ErrNoResponders)
	require.ErrorContains(t, err, gone.Transport.Address)
	overNATS.works(t)

	gone = overTCP.call(protocol.CodecJSON, "")
	gone.Transport.Address = overTCP.tcp.Address(wire.PlanePath(instance+1, "dynamo", "backend", "generate"))
	_, err = overTCP.caller.Do(testenv.Context(t), gone)
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, "no endpoint at")
	overTCP.works(t)

	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	gone.Transport.Address = ln.Addr().String() + "/a/b/c/d"
	require.NoError(t, ln.Close())
	_, err = overTCP.caller.Do(testenv.Context(t), gone)
	require.ErrorContains(t, err, "refused")
	overTCP.works(t)

	for _, bad := range []protocol.Transport{{Kind: "pigeon"}, {Kind: protocol.TransportTCP, Address: "no-path"}} {
		gone.Transport = bad
		_, err = overTCP.caller.Do(testenv.Context(t), gone)
		require.Error(t, err)
	}
	gone.Transport = overNATS.transport
	_, err = overTCP.caller.Do(testenv.Context(t), gone)
	require.ErrorIs(t, err, ErrNoNATS)
}

func TestReplyThatDoesNotCome(t *testing.T) {
	srv := testenv.StartNATS(t, embedded.NATSOptions{})
	silent, err := nats.Connect(srv.URL())
	require.NoError(t, err)
	defer silent.Close()
	_, err = silent.SubscribeSync("silent")
	require.NoError(t, err)
	require.NoError(t, silent.FlushWithContext(testenv.Context(t)))
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, ln.Close()) }()
	c := newCaller(t, Config{NATS: &natsplane.ConnConfig{URL: srv.URL()}, ReplyTimeout: 30 * time.Millisecond})
	for _, transport := range []protocol.Transport{
		{Kind: protocol.TransportNATS, Address: "silent"},
		{Kind: protocol.TransportTCP, Address: ln.Addr().String() + "/a/b/c/d"},
	} {
		_, err = c.Do(testenv.Context(t), Call{Transport: transport, Body: []byte("{}")})
		require.ErrorIs(t, err, ErrNoReply)
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(errTest)
		_, err = c.Do(ctx, Call{Transport: transport, Body: []byte("{}")})
		require.ErrorIs(t, err, errTest)
	}
}

func TestPayloadLimit(t *testing.T) {
	p := natsPlane(t, embedded.NATSOptions{MaxPayload: 4096})
	require.Equal(t, int64(4096), p.caller.MaxPayload())
	var over *PayloadLimitError
	_, err := p.caller.Do(testenv.Context(t), p.call(protocol.CodecMsgpack, "", make([]int32, 5000)...))
	require.ErrorAs(t, err, &over)
	require.Equal(t, int64(4096), over.Limit)
	require.Greater(t, over.Size, int64(5000))
	require.ErrorContains(t, err, "4096")
	require.Empty(t, p.worker.delivered)
	// The size that is reported is the one that counts: what just fits arrives.
	fits := p.call(protocol.CodecMsgpack, "", make([]int32, 5000)...)
	fits.Request.TokenIDs = fits.Request.TokenIDs[:5000-int(over.Size-over.Limit)]
	_, _, err = collect(p.do(t, fits))
	require.Equal(t, io.EOF, err)

	p = tcpPlane(t, tcpplane.Config{}, respstream.Config{}, Config{MaxMessage: 1000})
	_, err = p.caller.Do(testenv.Context(t), p.call(protocol.CodecMsgpack, "", make([]int32, 1000)...))
	require.ErrorAs(t, err, &over)
	require.Equal(t, int64(1000), over.Limit)
	require.Zero(t, p.caller.MaxPayload(), "without nats")
}

func TestMessageOverTheWorkersLimit(t *testing.T) {
	p := tcpPlane(t, tcpplane.Config{}, respstream.Config{}, Config{MaxMessage: -1})
	call := p.call(protocol.CodecMsgpack, "")
	call.Body = bytes.Repeat([]byte{0xc0}, 40<<20)
	_, items, err := collect(p.do(t, call))
	require.Equal(t, io.EOF, err)
	require.Len(t, items, 1)
	require.Equal(t, protocol.ReasonBackendInvalidArgument, items[0].Err.Reason)
	require.Contains(t, items[0].Err.Public.Message, "over the limit of 33554432 bytes")
	p.works(t)
	require.Equal(t, 1, p.tcp.Connections(), "all over the same connection")
}

func TestErrorsOfTheWorker(t *testing.T) {
	p := tcpPlane(t, tcpplane.Config{}, respstream.Config{}, Config{})

	_, _, err := collect(p.do(t, p.call(protocol.CodecJSON, "refuse")))
	var refused *PrologueError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, protocol.ReasonCapacityWorkerOverloaded, refused.Typed.Reason)

	tokens, items, err := collect(p.do(t, p.call(protocol.CodecJSON, "fail", 1)))
	require.Equal(t, io.EOF, err)
	require.Equal(t, []uint32{1}, tokens)
	require.Equal(t, protocol.ReasonBackendEngineShutdown, items[1].Err.Reason)

	s := p.do(t, p.call(protocol.CodecJSON, "abort", 1, 2))
	tokens, _, err = collect(s)
	require.ErrorIs(t, err, ErrIncomplete)
	require.Equal(t, []uint32{1, 2}, tokens)
	require.Equal(t, "handshake prologue data data eof ", kinds(s))
	_, err = s.Next()
	require.ErrorIs(t, err, ErrIncomplete, "and stays")
}

func TestWhatTheCallerDoesReachesTheWorker(t *testing.T) {
	for _, c := range []struct {
		name string
		did  func(*testing.T, *Stream)
		want error
		end  error
		// frames is what Dynamo's own worker was recorded to do, where it matters.
		frames string
	}{
		{"stop", func(t *testing.T, s *Stream) { require.NoError(t, s.Stop()) }, respstream.ErrStop, ErrCancelled,
			"handshake prologue data clientstop eof "},
		{"kill", func(t *testing.T, s *Stream) { require.NoError(t, s.Kill()) }, respstream.ErrKill, ErrCancelled,
			"handshake prologue data clientkill eof "},
		{"stop and kill", func(t *testing.T, s *Stream) {
			require.NoError(t, s.Stop())
			_ = s.Kill() // the worker may be gone already
		}, respstream.ErrStop, ErrCancelled, ""},
		{"sentinel", func(t *testing.T, s *Stream) {
			require.NoError(t, s.SendRaw(wire.AppendControl(nil, wire.ControlSentinel)))
		}, respstream.ErrProtocol, ErrIncomplete, "handshake prologue data eof "},
		{"reset", func(_ *testing.T, s *Stream) { s.Reset() }, respstream.ErrReset, ErrClosed, ""},
		{"close", func(t *testing.T, s *Stream) { require.NoError(t, s.Close()) }, respstream.ErrKill, ErrClosed, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := tcpPlane(t, tcpplane.Config{}, respstream.Config{}, Config{})
			s := p.do(t, p.call(protocol.CodecMsgpack, "wait", 1))
			item, err := s.Next()
			require.NoError(t, err)
			require.Equal(t, []uint32{1}, item.Chunk.TokenIDs)
			c.did(t, s)
			require.ErrorIs(t, p.worker.cause(t, s.ID), c.want)
			_, err = s.Next()
			require.ErrorIs(t, err, c.end)
			if c.frames != "" {
				require.Equal(t, c.frames, kinds(s))
			}
			p.works(t)
		})
	}
}

func TestAnswerThatIsKeptOpen(t *testing.T) {
	p := tcpPlane(t, tcpplane.Config{}, respstream.Config{}, Config{})
	call := p.call(protocol.CodecMsgpack, "", 1)
	call.KeepOpen = true
	s := p.do(t, call)
	_, _, err := collect(s)
	require.Equal(t, io.EOF, err)
	require.Equal(t, 1, p.worker.dialer.Open(), "the worker waits for the frontend")
	require.NoError(t, s.AwaitClose())
	require.Equal(t, "handshake prologue data data control eof ", kinds(s))
}

func TestHalfCloseAndDrop(t *testing.T) {
	p := tcpPlane(t, tcpplane.Config{}, respstream.Config{}, Config{})
	s := p.do(t, p.call(protocol.CodecMsgpack, "write"))
	require.NoError(t, s.Prologue())
	require.NoError(t, s.HalfClose())
	for range 1000 {
		_, err := s.Next()
		require.NoError(t, err, "a half-close cancels nothing")
	}
	require.NoError(t, s.Drop())
	cause := p.worker.cause(t, s.ID)
	require.ErrorIs(t, cause, respstream.ErrWrite)
	require.False(t, respstream.ByClient(cause))
	p.works(t)
}

func TestEndOfTheContext(t *testing.T) {
	p := tcpPlane(t, tcpplane.Config{}, respstream.Config{}, Config{})
	ctx, cancel := context.WithCancelCause(t.Context())
	s, err := p.caller.Do(ctx, p.call(protocol.CodecMsgpack, "wait", 1))
	require.NoError(t, err)
	_, err = s.Next()
	require.NoError(t, err)
	time.AfterFunc(tick, func() { cancel(errTest) })
	_, err = s.Next()
	require.ErrorIs(t, err, errTest)
	require.NoError(t, s.Close())
	require.ErrorIs(t, p.worker.cause(t, s.ID), respstream.ErrKill)
}

func TestCloseOfTheCallerEndsItsStreams(t *testing.T) {
	p := natsPlane(t, embedded.NATSOptions{})
	s := p.do(t, p.call(protocol.CodecMsgpack, "wait", 1))
	_, err := s.Next()
	require.NoError(t, err)
	require.NoError(t, p.caller.Close())
	require.NoError(t, p.caller.Close(), "again")
	_, err = s.Next()
	require.ErrorIs(t, err, ErrClosed)
	require.ErrorIs(t, p.worker.cause(t, s.ID), respstream.ErrKill)
	_, err = p.caller.Do(testenv.Context(t), p.call(protocol.CodecMsgpack, ""))
	require.ErrorIs(t, err, ErrClosed)
}

// Whatever a frontend may send, the caller gets to know, nothing stays behind, and the next request is served.
func TestBadInput(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	nowhere := ln.Addr().String()
	require.NoError(t, ln.Close())
	for _, p := range planes(t) {
		good := func() Call { return p.call(protocol.CodecMsgpack, "", 1, 2, 3) }
		invalid := func(t *testing.T, call Call, words string) {
			t.Helper()
			_, items, err := collect(p.do(t, call))
			require.Equal(t, io.EOF, err, "the answer is complete")
			require.Len(t, items, 1)
			require.Equal(t, protocol.ClassInvalidRequest, items[0].Err.Class)
			require.Contains(t, items[0].Err.Public.Message, words)
		}
		refused := func(t *testing.T, call Call) {
			t.Helper()
			_, err := p.caller.Do(testenv.Context(t), call)
			require.ErrorIs(t, err, ErrUnavailable)
			require.ErrorContains(t, err, "malformed request")
		}
		for _, c := range []struct {
			name string
			try  func(t *testing.T)
		}{
			{"frame cut in its data", func(t *testing.T) {
				call := good()
				call.Mangle = func(m []byte) []byte { return m[:len(m)-1] }
				invalid(t, call, "truncated")
			}},
			{"frame cut in its header", func(t *testing.T) {
				call := good()
				call.Mangle = func(m []byte) []byte { return m[:40] }
				refused(t, call)
			}},
			{"empty message", func(t *testing.T) {
				call := good()
				call.Mangle = func([]byte) []byte { return nil }
				refused(t, call)
			}},
			{"bytes behind the frame", func(t *testing.T) {
				call := good()
				call.Mangle = func(m []byte) []byte { return append(m, "more"...) }
				invalid(t, call, "bytes behind")
			}},
			{"header no json", func(t *testing.T) {
				call := good()
				call.Mangle = func(m []byte) []byte {
					m[wire.FrameHeaderLen] = 'x'
					return m
				}
				refused(t, call)
			}},
			{"another codec than announced", func(t *testing.T) {
				call := good()
				call.Body = call.Request.Append(nil, protocol.CodecJSON)
				invalid(t, call, "")
			}},
			{"unknown codec", func(t *testing.T) {
				call := good()
				call.Codec = protocol.CodecJSON
				call.Edit = func(c *wire.RequestControl) { c.PayloadCodec = "protobuf" }
				invalid(t, call, "protobuf")
			}},
			{"body no map", func(t *testing.T) {
				call := good()
				call.Body = protocol.AppendValue(nil, protocol.CodecMsgpack, []any{int64(1)})
				invalid(t, call, "not a map")
			}},
			{"empty body", func(t *testing.T) {
				call := good()
				call.Body = []byte{}
				invalid(t, call, "")
			}},
			{"address that does not answer", func(t *testing.T) {
				call := good()
				call.CallHomeTimeout = 50 * time.Millisecond
				call.ID = "lost " + p.name
				call.Edit = func(c *wire.RequestControl) { c.Connection.Address = nowhere }
				_, err := p.caller.Do(testenv.Context(t), call)
				require.ErrorIs(t, err, ErrNoCallHome)
				var failed *respstream.DialError
				require.ErrorAs(t, p.worker.cause(t, call.ID), &failed)
				require.Equal(t, nowhere, failed.Address)
			}},
			{"subject that nobody waits for", func(t *testing.T) {
				call := good()
				call.CallHomeTimeout = 50 * time.Millisecond
				call.ID = "stray " + p.name
				call.Request.Fields["do"] = "write"
				call.Edit = func(c *wire.RequestControl) { c.Connection.Subject = "elsewhere" }
				_, err := p.caller.Do(testenv.Context(t), call)
				require.ErrorIs(t, err, ErrNoCallHome)
				require.Error(t, p.worker.cause(t, call.ID), "the worker finds the door closed and stops")
			}},
		} {
			t.Run(p.name+" "+c.name, func(t *testing.T) {
				c.try(t)
				p.works(t)
				require.Eventually(t, func() bool { return p.worker.dialer.Open() == 0 }, testenv.Patience, tick)
			})
		}
	}
}

func TestNATSRestarted(t *testing.T) {
	p := natsPlane(t, embedded.NATSOptions{})
	s := p.do(t, p.call(protocol.CodecMsgpack, "wait", 1))
	_, err := s.Next()
	require.NoError(t, err)
	p.restart(t)
	p.works(t)
	require.NoError(t, s.Stop(), "a stream under way does not depend on nats")
	_, err = s.Next()
	require.ErrorIs(t, err, ErrCancelled)
}

func TestWorkerOfTheTCPPlaneRestarted(t *testing.T) {
	p := tcpPlane(t, tcpplane.Config{}, respstream.Config{}, Config{})
	p.works(t)
	require.NoError(t, p.tcp.Close())
	again, err := tcpplane.Listen(tcpplane.Config{Host: "127.0.0.1", Port: p.tcp.AddrPort().Port()})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, again.Close()) })
	require.NoError(t, again.Serve(wire.PlanePath(instance, "dynamo", "backend", "generate"), p.worker))
	// A call may still meet the connection that has just ended; the one after it does not.
	require.Eventually(t, func() bool {
		s, err := p.caller.Do(testenv.Context(t), p.call(protocol.CodecMsgpack, ""))
		if err != nil {
			return false
		}
		_, _, err = collect(s)
		return errors.Is(err, io.EOF)
	}, testenv.Patience, tick)
}

func TestTLSOnBothWays(t *testing.T) {
	ca := testenv.NewCA(t)
	server, client := ca.Issue("server"), ca.Issue("client")
	planeTLS, err := tcpplane.ServerTLS(server.CertFile, server.KeyFile, ca.File)
	require.NoError(t, err)
	homeTLS, err := respstream.ClientTLS(respstream.TLSFiles{CA: ca.File, Cert: client.CertFile, Key: client.KeyFile})
	require.NoError(t, err)
	p := tcpPlane(t, tcpplane.Config{TLS: planeTLS}, respstream.Config{TLS: homeTLS}, Config{
		PlaneTLS: &tls.Config{RootCAs: ca.Pool(), Certificates: []tls.Certificate{client.TLS(t)}},
		ResponseTLS: &tls.Config{
			Certificates: []tls.Certificate{server.TLS(t)}, ClientCAs: ca.Pool(), ClientAuth: tls.RequireAndVerifyClientCert,
		},
	})
	p.works(t)
	s := p.do(t, p.call(protocol.CodecMsgpack, "wait", 1))
	_, err = s.Next()
	require.NoError(t, err)
	require.NoError(t, s.Stop())
	require.ErrorIs(t, p.worker.cause(t, s.ID), respstream.ErrStop)
	s = p.do(t, p.call(protocol.CodecMsgpack, "wait", 1))
	_, err = s.Next()
	require.NoError(t, err)
	s.Reset()
	require.Error(t, p.worker.cause(t, s.ID))
}

func TestAnswersThatBreakTheProtocol(t *testing.T) {
	const codec = protocol.CodecJSON
	handshake := func(info wire.ConnectionInfo) []byte { return wire.AppendHandshake(nil, info.Subject) }
	started := func(info wire.ConnectionInfo) []byte { return wire.AppendPrologueOK(handshake(info)) }
	final := func(b []byte) []byte { return wire.AppendFrame(b, nil, protocol.AppendFinal(nil, codec)) }
	item := func(b []byte) []byte {
		return wire.AppendFrame(b, nil, protocol.AppendChunk(nil, codec, &protocol.Chunk{TokenIDs: []uint32{1}}))
	}
	for _, c := range []struct {
		name   string
		answer func(wire.ConnectionInfo) []byte
		want   error
	}{
		{"end after the handshake", handshake, ErrIncomplete},
		{"data as prologue", func(i wire.ConnectionInfo) []byte { return item(handshake(i)) }, ErrProtocol},
		{"prologue no json", func(i wire.ConnectionInfo) []byte { return wire.AppendFrame(handshake(i), []byte("?"), nil) }, ErrProtocol},
		{"error of the prologue no object", func(i wire.ConnectionInfo) []byte {
			return wire.AppendPrologueError(handshake(i), "no", []byte(`"text"`))
		}, ErrProtocol},
		{"end after the prologue", started, ErrIncomplete},
		{"sentinel without end mark", func(i wire.ConnectionInfo) []byte { return wire.AppendControl(item(started(i)), wire.ControlSentinel) }, ErrIncomplete},
		{"cut item", func(i wire.ConnectionInfo) []byte { b := item(started(i)); return b[:len(b)-1] }, ErrIncomplete},
		{"stop from the worker", func(i wire.ConnectionInfo) []byte { return wire.AppendControl(started(i), wire.ControlStop) }, ErrProtocol},
		{"unknown word", func(i wire.ConnectionInfo) []byte { return wire.AppendFrame(started(i), []byte(`"x"`), nil) }, ErrProtocol},
		{"item no json", func(i wire.ConnectionInfo) []byte { return wire.AppendFrame(started(i), nil, []byte("{")) }, ErrProtocol},
		{"data after the end mark", func(i wire.ConnectionInfo) []byte { return item(final(started(i))) }, ErrProtocol},
		{"stop after the end mark", func(i wire.ConnectionInfo) []byte { return wire.AppendControl(final(started(i)), wire.ControlStop) }, ErrProtocol},
		{"no sentinel", func(i wire.ConnectionInfo) []byte { return final(started(i)) }, io.EOF},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := rawWorker(t, c.answer)
			s := p.do(t, p.call(codec, ""))
			_, _, err := collect(s)
			require.ErrorIs(t, err, c.want)
			require.NoError(t, s.Close())
		})
	}
}

func TestCallHomesThatMakeNoSense(t *testing.T) {
	p := tcpPlane(t, tcpplane.Config{}, respstream.Config{}, Config{})
	for _, b := range [][]byte{
		nil, []byte("GET / HTTP/1.1\r\n\r\n                     "), wire.AppendFrame(nil, []byte("{}"), nil),
		wire.AppendHandshake(nil, "nobody"), wire.AppendFrame(nil, []byte(`{"subject":"s","stream_type":"request"}`), nil),
	} {
		conn, err := net.Dial("tcp", p.caller.Address())
		require.NoError(t, err)
		_, err = conn.Write(b)
		require.NoError(t, err)
		require.NoError(t, conn.(*net.TCPConn).CloseWrite())
		_, _ = io.Copy(io.Discard, conn)
		require.NoError(t, conn.Close())
	}
	// One that says nothing does not keep the caller from closing.
	conn, err := net.Dial("tcp", p.caller.Address())
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close()) }()
	p.works(t)
}

func TestConcurrentOpeningsShareAConnection(t *testing.T) {
	p := tcpPlane(t, tcpplane.Config{}, respstream.Config{}, Config{})
	var all sync.WaitGroup
	var mu sync.Mutex
	var failures []string
	for range 20 {
		all.Go(func() {
			s, err := p.caller.Do(t.Context(), p.call(protocol.CodecMsgpack, ""))
			if err == nil {
				_, _, err = collect(s)
			}
			if !errors.Is(err, io.EOF) {
				mu.Lock()
				defer mu.Unlock()
				failures = append(failures, fmt.Sprint(err))
			}
		})
	}
	all.Wait()
	require.Empty(t, strings.Join(failures, "\n"))
	require.Equal(t, 1, p.tcp.Connections())
}

func TestListenAddressThatIsNotOurs(t *testing.T) {
	_, err := New(testenv.Context(t), Config{Host: "203.0.113.1"})
	require.ErrorContains(t, err, "203.0.113.1")
	srv := testenv.StartNATS(t, embedded.NATSOptions{})
	_, err = New(testenv.Context(t), Config{Host: "203.0.113.1", NATS: &natsplane.ConnConfig{URL: srv.URL()}})
	require.Error(t, err)
	require.Eventually(t, func() bool { return srv.NumClients() == 0 }, testenv.Patience, tick)
}
