package ipc

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
)

func sampleReady() Ready {
	return Ready{
		Engine: "sim", Version: "1.3.0rc29", ConfigReadable: true,
		ResolvedConfig:  json.RawMessage(`{"attention_dp_config":{"kv_cache_routing_conversation_affinity":true}}`),
		Capabilities:    Capabilities{ConversationParams: true, BindsExplicitRank: true},
		Bounds:          Bounds{VocabSize: 355, MaxSeqLen: 8192},
		AttentionDPSize: 4, KV: KV{TotalBlocks: 1024, BlockSize: 32},
	}
}

func TestControlMessagesRoundTrip(t *testing.T) {
	check := func(name string, m Message, parse func([]byte) (any, error)) {
		t.Run(name, func(t *testing.T) {
			b, err := AppendMessage([]byte{1}, m)
			require.NoError(t, err)
			kind, payload, err := NewReader(bytes.NewReader(b[1:]), 0).Next()
			require.NoError(t, err)
			require.Equal(t, m.kind(), kind)
			require.Equal(t, name, kind.String())
			got, err := parse(payload)
			require.NoError(t, err)
			require.Empty(t, cmp.Diff(any(m), got))
			for _, bad := range []string{"", "null", "[]", `"text"`, "{", `{"a":NaN}`, "{} {}"} {
				_, err := parse([]byte(bad))
				var malformed *MalformedError
				require.ErrorAs(t, err, &malformed, "payload %q", bad)
				require.Equal(t, kind, malformed.Kind)
			}
		})
	}
	check("hello", Hello{Protocol: 1, Engine: "sim", Version: "v", PID: 12},
		func(b []byte) (any, error) { return ParseHello(b) })
	check("configure", Configure{Protocol: 1, WorkerVersion: "w", Args: json.RawMessage(`{"a":18446744073709551615}`), Options: json.RawMessage(`{}`)},
		func(b []byte) (any, error) { return ParseConfigure(b) })
	check("progress", Progress{Phase: "weights", Detail: "3 of 4", Fraction: ptr(0.75)},
		func(b []byte) (any, error) { return ParseProgress(b) })
	check("ready", sampleReady(), func(b []byte) (any, error) { return ParseReady(b) })
	check("query", Query{Seq: math.MaxUint64, What: QueryStats}, func(b []byte) (any, error) { return ParseQuery(b) })
	check("shutdown", Shutdown{DeadlineMillis: 10000}, func(b []byte) (any, error) { return ParseShutdown(b) })
	check("goodbye", Goodbye{Reason: "shutdown"}, func(b []byte) (any, error) { return ParseGoodbye(b) })
	check("fatal", Fatal{ErrorType: "RuntimeError", Message: "gone"}, func(b []byte) (any, error) { return ParseFatal(b) })
}

func TestAppendMessageRefusesRawJSONThatIsNone(t *testing.T) {
	got, err := AppendMessage([]byte{1}, Configure{Args: json.RawMessage(`{`)})
	require.Error(t, err)
	require.Equal(t, []byte{1}, got)
}

func TestAnswerKeepsTheWholeObject(t *testing.T) {
	payload := []byte(`{"seq":3,"ok":true,"healthy":false,"detail":"x"}`)
	a, err := ParseAnswer(payload)
	require.NoError(t, err)
	clear(payload)
	require.Equal(t, Answer{Seq: 3, OK: true, Body: json.RawMessage(`{"seq":3,"ok":true,"healthy":false,"detail":"x"}`)}, a)
	_, err = ParseAnswer([]byte("7"))
	require.Error(t, err)
}

func TestRows(t *testing.T) {
	rows, err := ParseRows(KindStats, []byte(`[{"a":1},{"a":2}]`))
	require.NoError(t, err)
	require.Len(t, rows, 2)
	_, err = ParseRows(KindEvents, []byte(`{}`))
	var malformed *MalformedError
	require.ErrorAs(t, err, &malformed)
	require.Equal(t, KindEvents, malformed.Kind)
}

func TestReadyChecks(t *testing.T) {
	r, err := ParseReady([]byte(`{}`))
	require.NoError(t, err)
	require.Equal(t, 1, r.AttentionDPSize, "an engine that says nothing has one rank")
	for _, bad := range []string{
		`{"attention_dp_size":-1}`, `{"bounds":{"vocab_size":-1}}`, `{"kv":{"block_size":-1}}`,
		`{"resolved_config":[1]}`, `{"bounds":{"vocab_size":1.5}}`,
	} {
		_, err := ParseReady([]byte(bad))
		require.Error(t, err, bad)
	}
}

func TestReadyConfig(t *testing.T) {
	r := sampleReady()
	v, ok := r.Config("attention_dp_config", "kv_cache_routing_conversation_affinity")
	require.True(t, ok)
	require.Equal(t, "true", string(v))
	_, ok = r.Config("attention_dp_config", "other")
	require.False(t, ok)
	_, ok = r.Config("attention_dp_config", "kv_cache_routing_conversation_affinity", "deeper")
	require.False(t, ok)
	r.ConfigReadable = false
	_, ok = r.Config("attention_dp_config")
	require.False(t, ok, "an unreadable configuration proves nothing")
	_, ok = (&Ready{ConfigReadable: true}).Config("a")
	require.False(t, ok)
}

func sampleGenerate() Generate {
	return Generate{
		RequestID: "r-1", Streaming: true,
		Sampling: Sampling{
			MaxTokens: ptr(int64(0)), Temperature: ptr(float64(float32(0.7))), StopTokenIDs: []int64{},
			Seed: ptr(int64(math.MaxInt64)), IgnoreEOS: ptr(false),
		},
		Guided:       &Guided{JSON: json.RawMessage(`{"type":"object"}`)},
		Scheduling:   &Scheduling{},
		Conversation: &Conversation{},
		CacheSalt:    ptr(""), Priority: ptr(0.0),
		TraceHeaders: map[string]string{"traceparent": "00-1"}, LoRA: &LoRA{Name: "a", Path: "/p", ID: 1},
		Disaggregated: json.RawMessage(`{"request_type":"context_only"}`),
	}
}

func TestGenerateRoundTrip(t *testing.T) {
	for name, tc := range map[string]struct {
		tokens []int32
		params Generate
	}{
		"everything": {[]int32{0, -1, math.MaxInt32, math.MinInt32}, sampleGenerate()},
		"nothing":    {[]int32{}, Generate{}},
		"id":         {[]int32{5}, Generate{Conversation: &Conversation{ID: ptr("séance-日本")}, Scheduling: &Scheduling{AttentionDPRank: 2}}},
	} {
		t.Run(name, func(t *testing.T) {
			b, err := AppendGenerate([]byte{1}, math.MaxUint64, tc.tokens, &tc.params)
			require.NoError(t, err)
			kind, payload, err := NewReader(bytes.NewReader(b[1:]), 0).Next()
			require.NoError(t, err)
			require.Equal(t, KindGenerate, kind)
			got, err := ParseGenerate(payload)
			require.NoError(t, err)
			require.Empty(t, cmp.Diff(Request{ID: math.MaxUint64, Tokens: tc.tokens, Params: tc.params}, got))
		})
	}
}

// Not passing an argument, passing None and passing a value are three things.
func TestGenerateTellsAbsentFromNull(t *testing.T) {
	for want, params := range map[string]Generate{
		`{"streaming":true,"sampling":{}}`:                                                                  {Streaming: true},
		`{"streaming":false,"sampling":{},"conversation":{"id":null}}`:                                      {Conversation: &Conversation{}},
		`{"streaming":false,"sampling":{},"conversation":{"id":"s1"}}`:                                      {Conversation: &Conversation{ID: ptr("s1")}},
		`{"streaming":false,"sampling":{"max_tokens":0}}`:                                                   {Sampling: Sampling{MaxTokens: ptr(int64(0))}},
		`{"streaming":false,"sampling":{"stop_token_ids":[]}}`:                                              {Sampling: Sampling{StopTokenIDs: []int64{}}},
		`{"streaming":false,"sampling":{},"guided":{}}`:                                                     {Guided: &Guided{}},
		`{"streaming":false,"sampling":{},"cache_salt":"","priority":0}`:                                    {CacheSalt: ptr(""), Priority: ptr(0.0)},
		`{"streaming":false,"sampling":{"temperature":0.699999988079071}}`:                                  {Sampling: Sampling{Temperature: ptr(float64(float32(0.7)))}},
		`{"streaming":false,"sampling":{},"scheduling":{"attention_dp_rank":0,"attention_dp_relax":false}}`: {Scheduling: &Scheduling{}},
	} {
		b, err := AppendGenerate(nil, 1, nil, &params)
		require.NoError(t, err)
		require.Equal(t, want, string(b[HeaderLen+generateHead:]))
	}
}

func TestGenerateRefuses(t *testing.T) {
	got, err := AppendGenerate([]byte{1}, 1, nil, &Generate{Disaggregated: json.RawMessage(`{`)})
	require.Error(t, err)
	require.Equal(t, []byte{1}, got)

	got, err = AppendGenerate([]byte{1}, 1, make([]int32, MaxPayload/4), &Generate{})
	var size *SizeError
	require.ErrorAs(t, err, &size)
	require.Equal(t, []byte{1}, got)

	for name, bad := range map[string][]byte{
		"short":            make([]byte, 11),
		"no parameters":    make([]byte, 12),
		"too many tokens":  append(make([]byte, 8), 1, 0, 0, 0, '{', '}'),
		"absurd count":     append(make([]byte, 8), 255, 255, 255, 255, '{', '}'),
		"parameters null":  append(make([]byte, 12), "null"...),
		"parameters wrong": append(make([]byte, 12), `{"streaming":1}`...),
	} {
		_, err := ParseGenerate(bad)
		var malformed *MalformedError
		require.ErrorAs(t, err, &malformed, name)
	}
	req, err := ParseGenerate(append([]byte{9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, "{"...))
	require.Error(t, err)
	require.Equal(t, uint64(9), req.ID, "the id is known although the rest is not")
}

func TestCancel(t *testing.T) {
	b := AppendCancel([]byte{1}, 0x0102030405060708)
	require.Equal(t, []byte{1, 8, 0, 0, 0, 6, 8, 7, 6, 5, 4, 3, 2, 1}, b)
	id, err := ParseCancel(b[6:])
	require.NoError(t, err)
	require.Equal(t, uint64(0x0102030405060708), id)
	for _, n := range []int{0, 7, 9} {
		_, err := ParseCancel(make([]byte, n))
		require.Error(t, err)
	}
}

func TestErrorTexts(t *testing.T) {
	require.Equal(t, "engine failed: RuntimeError: gone", Fatal{ErrorType: "RuntimeError", Message: "gone"}.Error())
	require.Equal(t, "engine failed: gone", Fatal{Message: "gone"}.Error())
	require.Equal(t, "RequestError: no", (&RequestError{Type: "RequestError", Message: "no"}).Error())
	require.Equal(t, "no", (&RequestError{Message: "no"}).Error())
	inner := errors.New("inner")
	require.ErrorIs(t, &MalformedError{Kind: KindReady, Reason: "x", Err: inner}, inner)
}

func BenchmarkAppendGenerate(b *testing.B) {
	tokens := make([]int32, 1024)
	params := Generate{Streaming: true, Sampling: Sampling{MaxTokens: ptr(int64(256)), StopTokenIDs: []int64{2}}}
	var dst []byte
	b.ReportAllocs()
	for b.Loop() {
		dst, _ = AppendGenerate(dst[:0], 7, tokens, &params)
	}
}

// FuzzGenerate: what is accepted survives another round trip.
func FuzzGenerate(f *testing.F) {
	params := sampleGenerate()
	b, err := AppendGenerate(nil, 7, []int32{5, 6, 7}, &params)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b[HeaderLen:])
	f.Add([]byte{9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, '{', '}'})
	f.Add([]byte{9, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, payload []byte) {
		req, err := ParseGenerate(payload)
		if err != nil {
			return
		}
		b, err := AppendGenerate(nil, req.ID, req.Tokens, &req.Params)
		require.NoError(t, err)
		again, err := ParseGenerate(b[HeaderLen:])
		require.NoError(t, err)
		require.Equal(t, req.ID, again.ID)
		require.Equal(t, req.Tokens, again.Tokens)
	})
}

// FuzzControl: no control payload may do worse than be refused.
func FuzzControl(f *testing.F) {
	f.Add([]byte(`{"protocol":1,"engine":"sim"}`))
	f.Add([]byte(`{"seq":18446744073709551615,"ok":true,"stats":[]}`))
	f.Add([]byte(`{"resolved_config":{"a":{"b":true}},"config_readable":true,"attention_dp_size":4}`))
	f.Add([]byte(`{"deadline_ms":-1}`))
	f.Add([]byte(`[[[[`))
	f.Fuzz(func(t *testing.T, payload []byte) {
		for _, parse := range []func([]byte) error{
			func(b []byte) error { _, err := ParseHello(b); return err },
			func(b []byte) error { _, err := ParseConfigure(b); return err },
			func(b []byte) error { _, err := ParseProgress(b); return err },
			func(b []byte) error { _, err := ParseAnswer(b); return err },
			func(b []byte) error { _, err := ParseFatal(b); return err },
			func(b []byte) error {
				r, err := ParseReady(b)
				if err == nil {
					r.Config("a", "b")
					_, err = AppendMessage(nil, r)
					require.NoError(t, err)
				}
				return err
			},
			func(b []byte) error { _, err := ParseRows(KindStats, b); return err },
		} {
			if err := parse(payload); err != nil {
				var malformed *MalformedError
				require.ErrorAs(t, err, &malformed)
			}
		}
	})
}
