package wire

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// wide lets every recorded frame pass.
var wide = Limits{MaxHeader: MaxControl, MaxData: MaxMessage}

// recordings returns the recorded files that match a pattern, by base name.
func recordings(t testing.TB, pattern string) map[string][]byte {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join("testdata", "frames", pattern))
	require.NoError(t, err)
	require.NotEmpty(t, paths, "no recordings match %s", pattern)
	files := make(map[string][]byte, len(paths))
	for _, p := range paths {
		b, err := os.ReadFile(p)
		require.NoError(t, err)
		files[filepath.Base(p)] = b
	}
	return files
}

// naiveFrames cuts a whole stream into frames in the plainest way there is. The
// error has no type; it only tells that the stream is not a row of frames.
func naiveFrames(b []byte, lim Limits) ([]Frame, error) {
	var frames []Frame
	for len(b) > 0 {
		if len(b) < FrameHeaderLen {
			return frames, fmt.Errorf("%d bytes are no head", len(b))
		}
		var h, d uint64
		for i := range 8 {
			h = h<<8 | uint64(b[i])
			d = d<<8 | uint64(b[8+i])
		}
		if h > lim.MaxHeader || d > lim.MaxData {
			return frames, fmt.Errorf("too large")
		}
		if uint64(len(b)) < FrameHeaderLen+h+d {
			return frames, fmt.Errorf("cut short")
		}
		frames = append(frames, Frame{Header: b[FrameHeaderLen:][:h], Data: b[FrameHeaderLen+h:][:d]})
		b = b[FrameHeaderLen+h+d:]
	}
	return frames, nil
}

func TestRecordedRequests(t *testing.T) {
	for name, b := range recordings(t, "request-*.bin") {
		t.Run(name, func(t *testing.T) {
			f, rest, err := ParseFrame(b, wide)
			require.NoError(t, err)
			require.Empty(t, rest)
			require.NotEmpty(t, f.Data)
			require.Equal(t, b, AppendFrame(nil, f.Header, f.Data))

			c, err := ParseRequestControl(f.Header)
			require.NoError(t, err)
			require.Len(t, c.ID, 36)
			require.Equal(t, RequestSingleIn, c.RequestType)
			require.Equal(t, ResponseManyOut, c.ResponseType)
			require.Equal(t, "msgpack", c.PayloadCodec)
			require.False(t, c.HasRequestStream)
			require.Equal(t, string(f.Header), string(AppendRequestControl(nil, &c)),
				"our header differs from the frontend's")
		})
	}
}

func TestRecordedResponses(t *testing.T) {
	for name, b := range recordings(t, "response-0?.bin") {
		t.Run(name, func(t *testing.T) {
			frames, err := naiveFrames(b, wide)
			require.NoError(t, err)
			require.Greater(t, len(frames), 3)

			hs, err := ParseHandshake(frames[0].Header)
			require.NoError(t, err)
			require.Equal(t, StreamTypeResponse, hs.StreamType)
			ours := AppendHandshake(nil, hs.Subject)

			p, err := ParsePrologue(frames[1].Header)
			require.NoError(t, err)
			require.Nil(t, p.Error)
			ours = AppendPrologueOK(ours)

			items := frames[2:]
			if last := items[len(items)-1]; len(last.Header) > 0 {
				word, err := ParseControl(last.Header)
				require.NoError(t, err)
				require.Equal(t, ControlSentinel, word)
				items = items[:len(items)-1]
			} else {
				require.Equal(t, "response-05.bin", name, "only the killed stream has no sentinel")
			}
			for _, f := range items {
				require.Empty(t, f.Header)
				require.NotEmpty(t, f.Data)
				ours = AppendFrame(ours, nil, f.Data)
			}
			if name != "response-05.bin" {
				ours = AppendControl(ours, ControlSentinel)
			}
			require.Equal(t, b, ours, "our frames differ from the worker's")
		})
	}
}

// The subject of each answer is the one that the request asked for.
func TestRecordedAnswersBelongToRequests(t *testing.T) {
	requests, responses := recordings(t, "request-*.bin"), recordings(t, "response-0?.bin")
	require.Len(t, responses, len(requests))
	for i := range len(requests) {
		req, _, err := ParseFrame(requests[fmt.Sprintf("request-%02d.bin", i)], wide)
		require.NoError(t, err)
		c, err := ParseRequestControl(req.Header)
		require.NoError(t, err)
		resp, _, err := ParseFrame(responses[fmt.Sprintf("response-%02d.bin", i)], wide)
		require.NoError(t, err)
		hs, err := ParseHandshake(resp.Header)
		require.NoError(t, err)
		require.Equal(t, c.Connection.Subject, hs.Subject)
	}
}

func TestRecordedKill(t *testing.T) {
	b := recordings(t, "response-05-from-frontend.bin")["response-05-from-frontend.bin"]
	f, rest, err := ParseFrame(b, Limits{MaxHeader: 64})
	require.NoError(t, err)
	require.Empty(t, rest)
	word, err := ParseControl(f.Header)
	require.NoError(t, err)
	require.Equal(t, ControlKill, word)
	require.Equal(t, b, AppendControl(nil, ControlKill))
}
