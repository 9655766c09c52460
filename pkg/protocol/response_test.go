package protocol

import (
	"math"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Encoding a chunk is the daemon's inner loop: nothing may be allocated in it.
func TestAppendChunkDoesNotAllocate(t *testing.T) {
	tops := withLogProbs(token(0, 17), -0.123456789, 5)
	last := ended(1, 300, 128000)
	last.StopReason = int64(32)
	mapped := ended(0, 3, 1)
	mapped.EngineData = Map{"kv_cache_hit": Map{"prompt_tokens": int64(3), "reused_tokens": int64(0)}}
	failed := &Chunk{Finish: FinishError, ErrorText: "engine said no, with an é"}
	shutdown := EngineShutdown("engine was shut down")
	buf := make([]byte, 0, 4096)
	for _, c := range bothCodecs {
		for name, one := range map[string]func(){
			"token":     func() { buf = AppendChunk(buf[:0], c, eightTokens) },
			"log probs": func() { buf = AppendChunk(buf[:0], c, tops) },
			"last":      func() { buf = AppendChunk(buf[:0], c, last) },
			"map":       func() { buf = AppendChunk(buf[:0], c, mapped) },
			"failed":    func() { buf = AppendChunk(buf[:0], c, failed) },
			"error":     func() { buf = AppendErrorItem(buf[:0], c, shutdown) },
			"final":     func() { buf = AppendFinal(buf[:0], c) },
		} {
			require.Zero(t, testing.AllocsPerRun(100, one), "%s in %s", name, c)
		}
	}
}

var eightTokens = token(0, 1, 200, 3000, 40000, 128000, 5, 6, 7)

func BenchmarkAppendChunk(b *testing.B) {
	buf := make([]byte, 0, 4096)
	for name, ch := range map[string]*Chunk{
		"token": token(0, 12345), "8 tokens": eightTokens, "last": ended(0, 300, 12345),
		"5 log probs": withLogProbs(token(0, 12345), -0.123456789, 5),
	} {
		for _, c := range bothCodecs {
			b.Run(name+"/"+c.String(), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					buf = AppendChunk(buf[:0], c, ch)
				}
				b.SetBytes(int64(len(buf)))
			})
		}
	}
}

func BenchmarkParseItem(b *testing.B) {
	for _, c := range bothCodecs {
		body := AppendChunk(nil, c, token(0, 12345))
		b.Run(c.String(), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := ParseItem(c, body); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// A log probability that is no number would make the frontend drop the item in
// JSON, and print null to its caller in msgpack.
func TestLogProbsAreFinite(t *testing.T) {
	ch := token(0, 1, 2, 3)
	ch.LogProbs = []float64{math.Inf(-1), math.NaN(), -0.5}
	ch.TopLogProbs = [][]TopLogProb{{{Rank: 1, TokenID: 1, LogProb: math.Inf(1)}}, {}, nil}
	for _, c := range bothCodecs {
		item, err := ParseItem(c, AppendChunk(nil, c, ch))
		require.NoError(t, err)
		require.Equal(t, []float64{LogProbFloor, LogProbFloor, -0.5}, item.Chunk.LogProbs)
		require.Equal(t, [][]TopLogProb{{{Rank: 1, TokenID: 1, LogProb: LogProbFloor}}, {}, {}}, item.Chunk.TopLogProbs)
	}
}

// An empty list is not the same as none.
func TestEmptyLogProbsAreWritten(t *testing.T) {
	ch := token(0)
	ch.LogProbs, ch.TopLogProbs = []float64{}, [][]TopLogProb{}
	require.Equal(t, `{"data":{"data":{"token_ids":[],"index":0,"log_probs":[],"top_logprobs":[]}},"complete_final":false}`, asJSON(ch))
}

func TestJSONNumbers(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0.0", 1: "1.0", -1: "-1.0", 0.5: "0.5", 1e6: "1000000.0", 1e16: "10000000000000000.0", 1e17: "1e+17", 1e-6: "0.000001", 1e-7: "1e-07",
		math.MaxFloat64: "1.7976931348623157e+308", math.SmallestNonzeroFloat64: "5e-324", -0.1: "-0.1", math.Copysign(0, -1): "-0.0",
	} {
		require.Equal(t, want, string(AppendValue(nil, CodecJSON, v)))
		got, err := DecodeValue(CodecJSON, []byte(want))
		require.NoError(t, err)
		require.Equal(t, v, got)
	}
	for _, v := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		require.Equal(t, "null", string(AppendValue(nil, CodecJSON, v)))
	}
}

// Types that callers put into engine data and other free-form places.
func TestAppendValueTypes(t *testing.T) {
	type word string
	one := int32(1)
	for want, v := range map[string]any{
		"-1": int8(-1), "65535": uint16(65535), "1": &one, "null": (*int32)(nil), "1.5": float32(1.5), `"w"`: word("w"), "true": ptr(true),
		"[1,2]": []int{1, 2}, "[3,4]": [2]uint32{3, 4}, `["a"]`: []string{"a"}, "[7]": []uint32{7}, "[-7]": []int32{-7}, "[]": []any(nil), "[0,255]": []byte{0, 255},
		`{"a":1,"b":2}`: map[string]int{"b": 2, "a": 1}, `{"w":null}`: map[word]any{"w": nil}, `{"b":1,"a":{}}`: Object{{"b", 1}, {"a", Map(nil)}},
		`{"prompt_tokens":3,"reused_tokens":0}`: KVCacheHit{PromptTokens: 3},
		`"a\ufffdb"`:                            "a\xffb",
	} {
		got := AppendValue(nil, CodecJSON, v)
		require.Equal(t, strings.ReplaceAll(want, `\ufffd`, "\ufffd"), string(got))
		asJSON, err := DecodeValue(CodecJSON, got)
		require.NoError(t, err)
		asMsgpack, err := DecodeValue(CodecMsgpack, AppendValue(nil, CodecMsgpack, v))
		require.NoError(t, err)
		if b, ok := v.([]byte); ok {
			require.Equal(t, b, asMsgpack)
		} else {
			require.Equal(t, asJSON, asMsgpack, want)
		}
	}
	for _, v := range []any{make(chan int), func() {}, struct{}{}, map[int]int{}, complex(1, 1)} {
		require.Panics(t, func() { AppendValue(nil, CodecJSON, v) })
	}
}

// Every length form of msgpack is written where it belongs.
func TestMsgpackLengths(t *testing.T) {
	for _, n := range []int{0, 1, 15, 16, 31, 32, 255, 256, 65535, 65536} {
		list := make([]any, n)
		m := make(Map, n)
		for i := range n {
			list[i] = int64(i)
			m[strconv.Itoa(i)] = nil
		}
		for want, head := range map[any]map[int]byte{
			"text":  {31: 0xbf, 32: 0xd9, 255: 0xd9, 256: 0xda, 65535: 0xda, 65536: 0xdb},
			"bytes": {0: 0xc4, 255: 0xc4, 256: 0xc5, 65535: 0xc5, 65536: 0xc6},
			"list":  {15: 0x9f, 16: 0xdc, 65535: 0xdc, 65536: 0xdd},
			"map":   {15: 0x8f, 16: 0xde, 65535: 0xde, 65536: 0xdf},
		} {
			v := map[any]any{"text": strings.Repeat("x", n), "bytes": make([]byte, n), "list": list, "map": m}[want]
			b := AppendValue(nil, CodecMsgpack, v)
			if h, ok := head[n]; ok {
				require.Equal(t, h, b[0], "%s of %d", want, n)
			}
			got, err := DecodeValue(CodecMsgpack, b)
			require.NoError(t, err)
			require.True(t, reflect.DeepEqual(v, got), "%s of %d", want, n)
		}
	}
	for v, want := range map[int64]string{
		127: "7f", 128: "cc80", 255: "ccff", 256: "cd0100", 65536: "ce00010000", 1 << 32: "cf0000000100000000",
		-32: "e0", -33: "d0df", -128: "d080", -129: "d1ff7f", -32769: "d2ffff7fff", -1 << 31: "d280000000", -1<<31 - 1: "d3ffffffff7fffffff",
	} {
		require.Equal(t, unhex(t, want), AppendValue(nil, CodecMsgpack, v))
	}
}

func TestParseItem(t *testing.T) {
	for in, want := range map[string]Item{
		`{"complete_final":true}`:                                           {Final: true},
		`{"data":null,"complete_final":true}`:                               {Final: true},
		`{"data":{"event":"token_ids","comment":["[1]"]}}`:                  {Event: "token_ids", Comment: []string{"[1]"}},
		`{"data":{"data":{"token_ids":[]},"id":"x"},"complete_final":true}`: {Chunk: &Chunk{TokenIDs: []uint32{}}, Final: true},
		`{"data":{"data":{"token_ids":[4294967295],"index":null,"finish_reason":null,"new":1}}}`: {
			Chunk: &Chunk{TokenIDs: []uint32{math.MaxUint32}}},
		// An error object without the event is none.
		`{"data":{"data":{"token_ids":[]},"error":{"message":"x"}}}`: {Chunk: &Chunk{TokenIDs: []uint32{}}},
		`{"data":{"event":"error","comment":["a","b"]}}`: {Event: "error", Comment: []string{"a", "b"},
			Err: NewError(ReasonRuntimeUnclassified, "a; b")},
		`{"data":{"event":"error","data":{"token_ids":[]},"error":{}}}`:    {Event: "error", Err: NewError(ReasonRuntimeUnclassified, "")},
		`{"data":{"data":{"token_ids":[],"finish_reason":"abort"}}}`:       {Chunk: &Chunk{TokenIDs: []uint32{}, Finish: FinishCancelled}},
		`{"data":{"data":{"token_ids":[],"finish_reason":"error"}}}`:       {Chunk: &Chunk{TokenIDs: []uint32{}, Finish: FinishError}},
		`{"data":{"data":{"token_ids":[],"finish_reason":"error: boom"}}}`: {Chunk: &Chunk{TokenIDs: []uint32{}, Finish: FinishError, ErrorText: "boom"}},
		`{"data":{"data":{"token_ids":[],"stop_reason":[1,2],"engine_data":{"a":1},"disaggregated_params":{"b":null}}}}`: {
			Chunk: &Chunk{TokenIDs: []uint32{}, StopReason: []int64{1, 2}, EngineData: Map{"a": int64(1)}, Disaggregated: Map{"b": nil}}},
		`{"data":{"data":{"token_ids":[1],"log_probs":[-1],"top_logprobs":[[{"rank":1,"token_id":1,"token":"x","bytes":[120],"logprob":-1}]]}}}`: {
			Chunk: &Chunk{TokenIDs: []uint32{1}, LogProbs: []float64{-1}, TopLogProbs: [][]TopLogProb{{{1, 1, -1}}}}},
		`{"data":{"data":{"token_ids":[],"completion_usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}}}`: {
			Chunk: &Chunk{TokenIDs: []uint32{}, Usage: &Usage{PromptTokens: 1, CompletionTokens: 2, TotalTokens: 3}}},
	} {
		got, err := ParseItem(CodecJSON, []byte(in))
		require.NoError(t, err, in)
		require.Empty(t, cmp.Diff(want, got), in)
	}
}

func TestParseItemErrors(t *testing.T) {
	chunk := func(members string) string { return `{"data":{"data":{` + members + `}}}` }
	for in, field := range map[string]string{
		`null`: "item", `[]`: "item", `{"complete_final":1}`: "complete_final", `{}`: "data", `{"complete_final":false}`: "data", `{"data":1}`: "data",
		`{"data":{"data":1}}`: "data.data", `{"data":{"event":1}}`: "data.event", `{"data":{"comment":"x"}}`: "data.comment", `{"data":{"comment":[1]}}`: "data.comment[0]",
		`{"data":{"event":"error","error":1}}`: "data.error",
		chunk(``):                              "data.data.token_ids", chunk(`"token_ids":null`): "data.data.token_ids", chunk(`"token_ids":"x"`): "data.data.token_ids",
		chunk(`"token_ids":[1,-1]`): "data.data.token_ids[1]", chunk(`"token_ids":[4294967296]`): "data.data.token_ids[0]", chunk(`"token_ids":[null]`): "data.data.token_ids[0]", chunk(`"token_ids":[1.0]`): "data.data.token_ids[0]",
		chunk(`"token_ids":[],"index":-1`): "data.data.index", chunk(`"token_ids":[],"log_probs":[null]`): "data.data.log_probs[0]", chunk(`"token_ids":[],"top_logprobs":[null]`): "data.data.top_logprobs[0]",
		chunk(`"token_ids":[],"top_logprobs":[[{"rank":1,"token_id":1}]]`): "data.data.top_logprobs[0][0].logprob",
		chunk(`"token_ids":[],"finish_reason":"timeout"`):                  "data.data.finish_reason", chunk(`"token_ids":[],"finish_reason":""`): "data.data.finish_reason", chunk(`"token_ids":[],"finish_reason":{"error":1}`): "data.data.finish_reason",
		chunk(`"token_ids":[],"stop_reason":1.5`): "data.data.stop_reason", chunk(`"token_ids":[],"stop_reason":["x"]`): "data.data.stop_reason[0]",
		chunk(`"token_ids":[],"completion_usage":{}`): "data.data.completion_usage.prompt_tokens", chunk(`"token_ids":[],"completion_usage":{"prompt_tokens":-1}`): "data.data.completion_usage.prompt_tokens",
	} {
		_, err := ParseItem(CodecJSON, []byte(in))
		var fe *FieldError
		require.ErrorAs(t, err, &fe, in)
		require.Equal(t, field, fe.Field, in)
	}
	_, err := ParseItem(CodecMsgpack, []byte{0x81})
	var de *DecodeError
	require.ErrorAs(t, err, &de)
}

func TestFinishReasonNames(t *testing.T) {
	names := map[string]bool{}
	for f := FinishNone; f <= FinishError; f++ {
		names[f.String()] = true
	}
	require.Len(t, names, 7)
	require.Equal(t, "invalid", FinishReason(200).String())
}

func TestChunkRoundTrip(t *testing.T) {
	finite := rapid.Float64Range(-1e6, 0)
	rapid.Check(t, func(t *rapid.T) {
		want := &Chunk{TokenIDs: rapid.SliceOf(rapid.Uint32()).Draw(t, "ids"), Finish: FinishReason(rapid.IntRange(0, 6).Draw(t, "finish"))}
		maybe := rapid.Bool()
		if want.HasIndex = maybe.Draw(t, "has index"); want.HasIndex {
			want.Index = rapid.Uint32().Draw(t, "index")
		}
		if want.Finish == FinishError {
			want.ErrorText = rapid.String().Draw(t, "error")
		}
		if maybe.Draw(t, "has log probs") {
			want.LogProbs = rapid.SliceOf(finite).Draw(t, "log probs")
			want.TopLogProbs = rapid.SliceOfN(rapid.SliceOfN(rapid.Custom(func(t *rapid.T) TopLogProb {
				return TopLogProb{rapid.Uint32().Draw(t, "rank"), rapid.Uint32().Draw(t, "id"), finite.Draw(t, "p")}
			}), 0, 6), 0, 6).Draw(t, "tops")
		}
		want.StopReason = rapid.SampledFrom([]any{nil, int64(7), "stop", []int64{1, 2}}).Draw(t, "stop")
		if maybe.Draw(t, "has usage") {
			count := rapid.IntRange(0, math.MaxInt32)
			want.Usage = &Usage{count.Draw(t, "p"), count.Draw(t, "c"), count.Draw(t, "t"), count.Draw(t, "cached"), nil}
		}
		if maybe.Draw(t, "has engine data") {
			want.EngineData = rapid.MapOfN(rapid.String(), values(2), 0, 5).Draw(t, "engine data")
		}
		for _, c := range bothCodecs {
			got, err := ParseItem(c, AppendChunk(nil, c, want))
			require.NoError(t, err)
			require.Empty(t, cmp.Diff(Item{Chunk: want}, got))
		}
	})
}
