package protocol

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
)

var bothCodecs = []Codec{CodecJSON, CodecMsgpack}

// recordedCase is what the tests need of a recording of one request.
type recordedCase struct {
	Request json.RawMessage `json:"request"`
	Frames  []struct {
		Kind string          `json:"kind"`
		Body json.RawMessage `json:"body"`
	} `json:"frames"`
}

// bodies returns the answer's items as compact JSON, member order kept.
func (c *recordedCase) bodies(t testing.TB) []string {
	t.Helper()
	var list []string
	for _, f := range c.Frames {
		if f.Kind == "data" {
			list = append(list, compact(t, f.Body))
		}
	}
	return list
}

func compact(t testing.TB, raw []byte) string {
	t.Helper()
	var buf bytes.Buffer
	require.NoError(t, json.Compact(&buf, raw))
	return buf.String()
}

func readCase(t testing.TB, name string) *recordedCase {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", filepath.FromSlash(name)+".json"))
	require.NoError(t, err)
	var c recordedCase
	require.NoError(t, json.Unmarshal(b, &c), name)
	return &c
}

// allCases returns the names of all recorded requests.
func allCases(t testing.TB) []string {
	t.Helper()
	var names []string
	for _, dir := range []string{"core", "prefill", "decode", "fatal"} {
		paths, err := filepath.Glob(filepath.Join("testdata", dir, "*.json"))
		require.NoError(t, err)
		require.NotEmpty(t, paths)
		for _, p := range paths {
			names = append(names, dir+"/"+strings.TrimSuffix(filepath.Base(p), ".json"))
		}
	}
	return names
}

// asJSON is the JSON text of a chunk, an error or the end, as we write it.
func asJSON(item any) string { return string(appendAny(nil, CodecJSON, item)) }

func appendAny(dst []byte, c Codec, item any) []byte {
	switch item := item.(type) {
	case *Chunk:
		return AppendChunk(dst, c, item)
	case *Error:
		return AppendErrorItem(dst, c, item)
	default:
		return AppendFinal(dst, c)
	}
}

type final struct{}

func hit(prompt, reused int) Object {
	return Object{{"kv_cache_hit", KVCacheHit{PromptTokens: prompt, ReusedTokens: reused}}}
}

func token(index uint32, ids ...uint32) *Chunk {
	return &Chunk{TokenIDs: ids, Index: index, HasIndex: true}
}

// ended is the last chunk of a choice in the recordings: 3 prompt tokens, none
// of them cached.
func ended(index uint32, completion int, ids ...uint32) *Chunk {
	ch := token(index, ids...)
	ch.Finish = FinishLength
	ch.EngineData = hit(3, 0)
	ch.Usage = &Usage{PromptTokens: 3, CompletionTokens: completion, TotalTokens: 3 + completion}
	return ch
}

// withLogProbs gives a chunk of one token the values of the stand-in engine: k
// alternatives, one apart.
func withLogProbs(ch *Chunk, first float64, k int) *Chunk {
	ch.LogProbs = []float64{first}
	tops := make([]TopLogProb, k)
	for i := range tops {
		tops[i] = TopLogProb{Rank: uint32(i + 1), TokenID: ch.TokenIDs[0] + uint32(i), LogProb: first - float64(i)}
	}
	ch.TopLogProbs = [][]TopLogProb{tops}
	return ch
}

// The items below are built by hand from what the recordings say; their bytes
// must be the recorded ones, down to the order of members.
func TestEncodersReproduceRecordings(t *testing.T) {
	eight := func() []any {
		list := []any{}
		for id := uint32(18); id < 67; id += 7 {
			list = append(list, token(0, id))
		}
		return append(list, ended(0, 8, 67), final{})
	}
	promptLogProbs := ended(0, 3, 32)
	promptLogProbs.EngineData = Object{
		{"prompt_logprobs", []any{
			nil,
			Map{"6": Map{"logprob": -0.5, "rank": 1}},
			Map{"7": Map{"logprob": -0.75, "rank": 1}},
		}},
		{"kv_cache_hit", KVCacheHit{PromptTokens: 3}},
	}
	stopped := ended(0, 2)
	stopped.Finish, stopped.StopReason = FinishStop, int64(32)
	decoded := ended(0, 4, 39)
	decoded.EngineData = nil
	decoded.Usage.Details = Map{"cached_tokens": int64(2)}
	refused := NewError(ReasonBackendInvalidArgument, "ValueError: temperature must not be negative: -0.5")
	cancelled := ended(0, 24)
	cancelled.Finish = FinishCancelled

	for name, items := range map[string][]any{
		"core/plain":      {token(0, 18), token(0, 25), token(0, 32), ended(0, 4, 39), final{}},
		"core/json_codec": {token(0, 18), token(0, 25), token(0, 32), ended(0, 4, 39), final{}},
		"core/n2": {token(0, 18), token(1, 31), token(0, 25), token(1, 38), token(0, 32), token(1, 45),
			ended(0, 8, 39), ended(1, 8, 52), final{}},
		"core/logprobs_5": {withLogProbs(token(0, 18), -0.25, 5), withLogProbs(token(0, 25), -0.5, 5),
			withLogProbs(ended(0, 3, 32), -0.75, 5), final{}},
		"core/logprobs_0": {withLogProbs(token(0, 18), -0.25, 1), withLogProbs(token(0, 25), -0.5, 1),
			withLogProbs(ended(0, 3, 32), -0.75, 1), final{}},
		"core/logprobs_n2": {withLogProbs(token(0, 18), -0.25, 2), withLogProbs(token(1, 31), -0.25, 2),
			withLogProbs(ended(0, 4, 25), -0.5, 2), withLogProbs(ended(1, 4, 38), -0.5, 2), final{}},
		"core/prompt_logprobs_1": {token(0, 18), token(0, 25), promptLogProbs, final{}},
		"core/stop_hidden":       {token(0, 18), token(0, 25), stopped, final{}},
		"core/stop_token_ids":    eight(),
		"core/stop_visible":      eight(),
		"core/engine_request_error_first": {
			&Chunk{Finish: FinishError, ErrorText: "stand-in request error after 0 tokens"}, final{}},
		"core/temperature_negative":         {refused, final{}},
		"decode/with_prompt_tokens_details": {token(0, 18), token(0, 25), token(0, 32), decoded, final{}},
	} {
		t.Run(name, func(t *testing.T) {
			want := readCase(t, name).bodies(t)
			require.Len(t, items, len(want))
			for i, item := range items {
				require.Equal(t, want[i], asJSON(item), "item %d", i)

				recorded, err := DecodeValue(CodecJSON, []byte(want[i]))
				require.NoError(t, err)
				ours, err := DecodeValue(CodecMsgpack, appendAny(nil, CodecMsgpack, item))
				require.NoError(t, err)
				require.Equal(t, recorded, ours, "item %d in msgpack", i)
			}
		})
	}
	t.Run("fatal/sigterm_mid_stream", func(t *testing.T) {
		want := readCase(t, "fatal/sigterm_mid_stream").bodies(t)
		shutdown := EngineShutdown("Engine was shut down during generation.")
		for i, item := range []any{token(0, 179), cancelled, shutdown, final{}} {
			require.Equal(t, want[len(want)-4+i], asJSON(item))
		}
	})
}

// What the worker says in a finish reason that the frontend cannot read.
var unreadable = map[string]bool{"core/engine_finish_timeout": true, "core/engine_no_finish_reason": true}

// Every recorded item can be read, and is the same after another round through
// either codec.
func TestParseRecordedItems(t *testing.T) {
	items := 0
	for _, name := range allCases(t) {
		bad := 0
		for _, body := range readCase(t, name).bodies(t) {
			want, err := ParseItem(CodecJSON, []byte(body))
			if _, ok := errors.AsType[*FieldError](err); ok && unreadable[name] {
				require.ErrorContains(t, err, "finish_reason")
				bad++
				continue
			}
			require.NoError(t, err, "%s: %s", name, body)
			items++
			for _, c := range bothCodecs {
				got, err := ParseItem(c, appendItem(nil, c, &want))
				require.NoError(t, err)
				require.Empty(t, cmp.Diff(want, got), "%s in %s", name, c)
			}
		}
		require.Equal(t, unreadable[name], bad > 0, name)
	}
	require.Greater(t, items, 300)
}

// appendItem writes back what ParseItem has read.
func appendItem(dst []byte, c Codec, item *Item) []byte {
	switch {
	case item.Err != nil:
		return AppendErrorItem(dst, c, item.Err)
	case item.Chunk != nil:
		return AppendChunk(dst, c, item.Chunk)
	default:
		return AppendFinal(dst, c)
	}
}

// Every recorded request body can be read, in either codec, with its ids in
// either form. Long prompts were shortened by the recorder and are maps now.
func TestParseRecordedRequests(t *testing.T) {
	shortened := 0
	for _, name := range allCases(t) {
		raw := readCase(t, name).Request
		req, err := ParseRequest(CodecJSON, raw)
		if bytes.Contains(raw, []byte(`"head"`)) {
			shortened++
			require.Equal(t, &FieldError{Field: "token_ids", Reason: "is a map, not a list of token ids"}, err)
			continue
		}
		require.NoError(t, err, name)
		switch name {
		case "core/token_ids_missing":
			require.Equal(t, TokensAbsent, req.TokensState)
		case "core/token_ids_null":
			require.Equal(t, TokensNull, req.TokensState)
		default:
			require.Equal(t, TokensList, req.TokensState, name)
			require.NotEmpty(t, req.TokenIDs, name)
		}
		whole, err := DecodeValue(CodecJSON, raw)
		require.NoError(t, err)
		for _, c := range bothCodecs {
			body := req.Append(nil, c)
			got, err := DecodeValue(c, body)
			require.NoError(t, err)
			require.Empty(t, cmp.Diff(whole, got), name)
			again, err := ParseRequest(c, body)
			require.NoError(t, err)
			require.Empty(t, cmp.Diff(req, again), name)
		}
		packed := *req
		packed.Packed = req.TokensState == TokensList
		again, err := ParseRequest(CodecMsgpack, packed.Append(nil, CodecMsgpack))
		require.NoError(t, err)
		require.Empty(t, cmp.Diff(&packed, again), name)
	}
	require.Less(t, shortened, 5)
}

// A float of the sampling options has 32 bits on the wire and keeps their value.
func TestRecordedFloatsAre32Bits(t *testing.T) {
	req, err := ParseRequest(CodecJSON, readCase(t, "core/sampling_all").Request)
	require.NoError(t, err)
	sampling := req.Fields["sampling_options"].(Map)
	require.Equal(t, 0.7, sampling["temperature"])
	require.Equal(t, int64(40), sampling["top_k"])

	got, err := DecodeValue(CodecMsgpack, []byte{0xca, 0x3f, 0x33, 0x33, 0x33})
	require.NoError(t, err)
	require.Equal(t, float64(float32(0.7)), got)
	require.NotEqual(t, 0.7, got)
}
