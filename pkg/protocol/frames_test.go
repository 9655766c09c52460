package protocol

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"dynworker/pkg/wire"
)

var wide = wire.Limits{MaxHeader: wire.MaxControl, MaxData: wire.MaxMessage}

// frames returns the frames of a recorded file of pkg/wire.
func frames(t testing.TB, name string) []wire.Frame {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "wire", "testdata", "frames", name))
	require.NoError(t, err)
	return framesOf(t, b)
}

func framesOf(t testing.TB, b []byte) []wire.Frame {
	t.Helper()
	var list []wire.Frame
	for len(b) > 0 {
		f, rest, err := wire.ParseFrame(b, wide)
		require.NoError(t, err)
		list, b = append(list, f), rest
	}
	return list
}

// requestBodies are the bodies of all recorded raw requests, of both planes.
func requestBodies(t testing.TB) map[string][]byte {
	t.Helper()
	bodies := map[string][]byte{}
	for i := range 6 {
		name := fmt.Sprintf("request-%02d.bin", i)
		list := frames(t, name)
		require.Len(t, list, 1)
		bodies[name] = list[0].Data
	}
	b, err := os.ReadFile(filepath.Join("..", "wire", "testdata", "frames", "tcp-plane-from-frontend.bin"))
	require.NoError(t, err)
	r := bufio.NewReader(bytes.NewReader(b))
	for i := 0; ; i++ {
		req, err := wire.ReadPlaneRequest(r, wire.MaxMessage)
		if err == io.EOF {
			require.Equal(t, 3, i)
			return bodies
		}
		require.NoError(t, err)
		list := framesOf(t, req.Payload)
		require.Len(t, list, 1)
		bodies["tcp-plane "+strconv.Itoa(i)] = list[0].Data
	}
}

func TestRawRequests(t *testing.T) {
	for name, body := range requestBodies(t) {
		t.Run(name, func(t *testing.T) {
			req, err := ParseRequest(CodecMsgpack, body)
			require.NoError(t, err)
			require.Equal(t, "tiny", req.Fields["model"])
			require.Equal(t, TokensList, req.TokensState)
			require.False(t, req.Packed)
			require.NotEmpty(t, req.TokenIDs)
			for _, id := range req.TokenIDs {
				require.Less(t, id, int32(355), "the model's vocabulary")
			}
			stop := req.Fields["stop_conditions"].(Map)
			require.Len(t, stop, 8)
			require.Equal(t, []any{int64(2)}, stop["stop_token_ids_hidden"])
			require.IsType(t, int64(0), stop["max_tokens"])
			require.Len(t, req.Fields["sampling_options"], 14)
			require.Equal(t, []any{int64(2)}, req.Fields["eos_token_ids"])

			whole, err := DecodeValue(CodecMsgpack, body)
			require.NoError(t, err)
			ours := req.Append(nil, CodecMsgpack)
			// The frontend's 32-bit floats take 64 bits here.
			require.Len(t, ours, len(body)+4*floats(whole), "not the shortest forms")
			back, err := DecodeValue(CodecMsgpack, ours)
			require.NoError(t, err)
			require.Empty(t, cmp.Diff(whole, back))
		})
	}
}

// request-00 word by word, as the recorder printed it.
func TestRawRequestContents(t *testing.T) {
	req, err := ParseRequest(CodecMsgpack, requestBodies(t)["request-00.bin"])
	require.NoError(t, err)
	require.Equal(t, []int32{3, 263, 81, 81, 84, 265, 87, 74, 4}, req.TokenIDs)
	require.Equal(t, int64(5), req.Fields["stop_conditions"].(Map)["max_tokens"])
	require.Equal(t, []any{}, req.Fields["annotations"])
	require.Contains(t, req.Fields, "router_config_override")
	require.Nil(t, req.Fields["router_config_override"])
}

// The mocker writes unset keys as nil; they read as unset.
func TestRawResponses(t *testing.T) {
	for i := range 6 {
		name := fmt.Sprintf("response-%02d.bin", i)
		t.Run(name, func(t *testing.T) {
			tokens, last := 0, Item{}
			for _, f := range frames(t, name) {
				if len(f.Header) > 0 {
					continue
				}
				require.False(t, last.Final, "item after the last")
				item, err := ParseItem(CodecMsgpack, f.Data)
				require.NoError(t, err)
				last = item
				require.Nil(t, item.Err)
				if item.Final {
					require.Nil(t, item.Chunk)
					continue
				}
				ch := item.Chunk
				tokens += len(ch.TokenIDs)
				require.False(t, ch.HasIndex)
				require.Nil(t, ch.LogProbs)
				require.Nil(t, ch.TopLogProbs)
				require.Nil(t, ch.EngineData)
				require.Nil(t, ch.StopReason)
				if ch.Usage != nil {
					require.Equal(t, ch.Usage.TotalTokens, ch.Usage.PromptTokens+ch.Usage.CompletionTokens)
					require.Contains(t, ch.Usage.Details, "audio_tokens")
				}
				again, err := ParseItem(CodecMsgpack, AppendChunk(nil, CodecMsgpack, ch))
				require.NoError(t, err)
				require.Empty(t, cmp.Diff(item, again))
			}
			// The last request was hung up on: a stream that is not complete.
			require.Equal(t, i != 5, last.Final)
			require.Positive(t, tokens)
		})
	}
}

// Events are envelopes around a payload that is msgpack once more.
func TestRawEvents(t *testing.T) {
	paths, err := filepath.Glob(filepath.Join("testdata", "events", "*.bin"))
	require.NoError(t, err)
	require.Len(t, paths, 15)
	sequences := map[string]bool{}
	for _, p := range paths {
		t.Run(filepath.Base(p), func(t *testing.T) {
			b, err := os.ReadFile(p)
			require.NoError(t, err)
			v, err := DecodeValue(CodecMsgpack, b)
			require.NoError(t, err)
			env := v.(Map)
			require.Len(t, env, 5)
			topic := env["topic"].(string)
			require.True(t, strings.HasPrefix(filepath.Base(p), topic))
			publisher := env["publisher_id"].(int64)
			require.Less(t, publisher, int64(1)<<53)
			require.IsType(t, int64(0), env["published_at"])
			key := fmt.Sprintf("%s %x %d", topic, publisher, env["sequence"].(int64))
			require.False(t, sequences[key], "sequence number seen twice")
			sequences[key] = true

			payload, err := DecodeValue(CodecMsgpack, env["payload"].([]byte))
			require.NoError(t, err)
			require.NotEmpty(t, payload)
			require.Len(t, AppendValue(nil, CodecMsgpack, v), len(b), "not the shortest forms")

			// Identifiers of all 64 bits come through unchanged.
			again, err := DecodeValue(CodecMsgpack, AppendValue(nil, CodecMsgpack, payload))
			require.NoError(t, err)
			require.Empty(t, cmp.Diff(payload, again))
		})
	}
}

// floats counts the floats of a decoded tree.
func floats(v any) int {
	n := 0
	switch v := v.(type) {
	case float64:
		return 1
	case []any:
		for _, e := range v {
			n += floats(e)
		}
	case Map:
		for _, e := range v {
			n += floats(e)
		}
	}
	return n
}

// The block hashes of a KV event use all 64 bits.
func TestRawEventKeepsLargeNumbers(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("testdata", "events", "kv-events-00.bin"))
	require.NoError(t, err)
	v, err := DecodeValue(CodecMsgpack, b)
	require.NoError(t, err)
	payload, err := DecodeValue(CodecMsgpack, v.(Map)["payload"].([]byte))
	require.NoError(t, err)
	large := 0
	var walk func(any)
	walk = func(v any) {
		switch v := v.(type) {
		case []any:
			for _, e := range v {
				walk(e)
			}
		case Map:
			for _, e := range v {
				walk(e)
			}
		case uint64:
			large++
		case int64:
			if v > 1<<53 {
				large++
			}
		case float64:
			t.Errorf("a float in a KV event: %v", v)
		}
	}
	walk(payload)
	require.Positive(t, large)
}
