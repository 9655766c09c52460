package respstream

import (
	"fmt"
	"io"
	"net"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/protocol"
)

// BenchmarkFrames writes one-token items over loopback, with as many items for each flush as the name says.
func BenchmarkFrames(b *testing.B) {
	for _, perFlush := range []int{1, 8} {
		b.Run(fmt.Sprint(perFlush), func(b *testing.B) {
			d := NewDialer(Config{})
			s, f := start(b, d)
			drained := make(chan struct{})
			go func() {
				defer close(drained)
				_, _ = io.Copy(io.Discard, f.Conn)
			}()
			s.SetCodec(protocol.CodecMsgpack)
			require.NoError(b, s.Accept())
			chunk := tokens(1234)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if err := s.Send(chunk); err != nil {
					b.Fatal(err)
				}
				if i%perFlush == perFlush-1 {
					if err := s.Flush(); err != nil {
						b.Fatal(err)
					}
				}
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "frames/s")
			s.Abort()
			<-drained
			closeDialer(b, d)
		})
	}
}

// BenchmarkIdleStream reports what an open stream that waits for its next token holds: objects, and the stack of its reader. The far end's socket is included.
func BenchmarkIdleStream(b *testing.B) {
	const n = 1000
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	defer func() { require.NoError(b, ln.Close()) }()
	var perStream float64
	for b.Loop() {
		d := NewDialer(Config{})
		before := inUse()
		streams := make([]*Stream, n)
		peers := make([]net.Conn, n)
		for i := range n {
			streams[i], err = d.Dial(b.Context(), info(ln.Addr().String()))
			require.NoError(b, err)
			peers[i], err = ln.Accept()
			require.NoError(b, err)
			require.NoError(b, streams[i].Send(tokens(1)))
			require.NoError(b, streams[i].Flush())
		}
		perStream = float64(inUse()-before) / n
		for i := range n {
			streams[i].Abort()
			require.NoError(b, peers[i].Close())
		}
		closeDialer(b, d)
	}
	b.ReportMetric(perStream, "B/stream")
}

func inUse() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}
