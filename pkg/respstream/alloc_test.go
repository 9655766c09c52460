//go:build !race

package respstream

import (
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/protocol"
)

// The race detector makes sync.Pool forget on purpose, so this holds only without it.
func TestSendAndFlushDoNotAllocate(t *testing.T) {
	d := NewDialer(Config{})
	s, f := start(t, d)
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		_, _ = io.Copy(io.Discard, f.Conn)
	}()
	s.SetCodec(protocol.CodecMsgpack)
	require.NoError(t, s.Accept())
	chunk := tokens(1234)
	allocs := testing.AllocsPerRun(2000, func() {
		if s.Send(chunk) != nil || s.Flush() != nil {
			t.Fatal("stream ended")
		}
	})
	require.Zero(t, allocs)
	s.Abort()
	<-drained
	closeDialer(t, d)
}
