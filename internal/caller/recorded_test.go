package caller

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/protocol"
	"dynworker/pkg/wire"
)

// A recorded answer is read as the frontend read it, from the worker that has another subject to answer.
func TestRecordedAnswers(t *testing.T) {
	for name, count := range map[string]int{"response-00.bin": 6, "response-04.bin": 71} {
		t.Run(name, func(t *testing.T) {
			raw, err := os.ReadFile(filepath.Join("testdata", name))
			require.NoError(t, err)
			r := wire.NewReader(bytes.NewReader(raw), wire.Limits{MaxHeader: 1 << 20, MaxData: 1 << 20})
			first, err := r.Next()
			require.NoError(t, err)
			rest := raw[wire.FrameHeaderLen+len(first.Header):]
			p := rawWorker(t, func(info wire.ConnectionInfo) []byte {
				return append(wire.AppendHandshake(nil, info.Subject), rest...)
			})
			s := p.do(t, p.call(protocol.CodecMsgpack, ""))
			tokens, items, err := collect(s)
			require.Equal(t, io.EOF, err)
			require.NotEmpty(t, tokens)
			require.Len(t, items, count)
			require.NotEqual(t, protocol.FinishNone, items[len(items)-1].Chunk.Finish)
			require.Equal(t, "handshake prologue "+strings.Repeat("data ", count+1)+"control ", kinds(s))
		})
	}
}
