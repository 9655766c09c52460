package tcpplane

import (
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dynworker/internal/testenv"
	"dynworker/pkg/ingress"
)

// FuzzConnection plays arbitrary bytes to a plane. Whatever they are the connection comes to an end, and nothing that came with them stays open.
func FuzzConnection(f *testing.F) {
	recorded, err := os.ReadFile(filepath.Join("testdata", "tcp-plane-from-frontend.bin"))
	require.NoError(f, err)
	f.Add(recorded)
	f.Add(recorded[:100])
	f.Add(request(f, path, "id", []byte("body")))
	f.Add(request(f, "other", "id", nil))
	f.Add([]byte("GET / HTTP/1.1\r\nHost: worker\r\n\r\n"))
	p := listen(f, Config{MaxMessage: 4096})
	require.NoError(f, p.Serve(path, ingress.AdmitFunc(func(d *ingress.Delivery) (func(), *ingress.Refusal) {
		if d.BodyErr == nil && len(d.Body) > 4096 {
			panic("over the limit")
		}
		return nil, &ingress.Refusal{Kind: ingress.Overloaded}
	})))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := net.Dial("tcp", p.AddrPort().String())
		require.NoError(t, err)
		require.NoError(t, c.SetDeadline(time.Now().Add(testenv.Patience)))
		// The plane may close before it has read everything.
		_, _ = c.Write(b)
		_ = c.(*net.TCPConn).CloseWrite()
		_, err = io.Copy(io.Discard, c)
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
		require.NoError(t, c.Close())
		require.Eventually(t, func() bool { return p.Connections() == 0 }, testenv.Patience, time.Millisecond)
	})
}
