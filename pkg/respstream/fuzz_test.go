package respstream

import (
	"bytes"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/wire"
)

// FuzzClient feeds a client's bytes to the reader's judgement. The one seed that is not made here is what the unmodified Dynamo 1.6.1 frontend sent when its HTTP
// client hung up.
func FuzzClient(f *testing.F) {
	f.Add([]byte("\x00\x00\x00\x00\x00\x00\x00\x06\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\"kill\""))
	f.Add(wire.AppendControl(nil, wire.ControlStop))
	f.Add(wire.AppendControl(nil, wire.ControlSentinel))
	f.Add(wire.AppendFrame(nil, nil, []byte("data")))
	f.Add(wire.AppendFrameHead(nil, 1<<62, 1<<62))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := wire.NewReaderSize(bytes.NewReader(b), controlLimits, readBufferSize)
		for range len(b)/wire.FrameHeaderLen + 1 {
			cause := verdict(r.Next())
			require.Error(t, cause)
			if errors.Is(cause, ErrStop) || errors.Is(cause, ErrKill) {
				continue
			}
			if !errors.Is(cause, errHalfClose) {
				require.True(t, errors.Is(cause, ErrProtocol), "%v", cause)
			}
			return
		}
	})
}
