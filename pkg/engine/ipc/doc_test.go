package ipc

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"math"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
)

const protocolDoc = "../../../docs/engine-protocol.md"

var hexBlock = regexp.MustCompile("(?s)```hex ([a-z ]+)\n(.*?)```")

// documented returns the frames of the protocol document's examples by name.
// The bytes there were written by another program than this package. A text
// between bars must be what the bytes of its line say.
func documented(t *testing.T) map[string][]byte {
	t.Helper()
	doc, err := os.ReadFile(protocolDoc)
	require.NoError(t, err)
	frames := make(map[string][]byte)
	for _, m := range hexBlock.FindAllSubmatch(doc, -1) {
		name := string(m[1])
		require.NotContains(t, frames, name)
		for line := range strings.Lines(string(m[2])) {
			digits, said, told := strings.Cut(strings.TrimSpace(line), "|")
			digits, _, _ = strings.Cut(digits, ";")
			b, err := hex.DecodeString(strings.ReplaceAll(strings.TrimSpace(digits), " ", ""))
			require.NoError(t, err, "%s: %s", name, line)
			if told {
				require.Equal(t, string(b), strings.TrimSuffix(said, "|"), "%s: %s", name, line)
			}
			frames[name] = append(frames[name], b...)
		}
	}
	return frames
}

// Every kind has an example, and each example means what the text around it
// says.
func TestDocumentedExamples(t *testing.T) {
	raw := func(s string) json.RawMessage { return json.RawMessage(s) }
	want := map[string]any{
		"hello":     Hello{Protocol: Version, Engine: "mine", Version: "0.1", PID: 42},
		"configure": Configure{Protocol: Version, WorkerVersion: "1.0", Args: raw(`{"model":"/models/tiny"}`), Options: raw(`{}`)},
		"progress":  Progress{Phase: "weights", Detail: "3 of 4", Fraction: ptr(0.75)},
		"ready": Ready{
			Engine: "mine", Version: "0.1", ResolvedConfig: raw(`{"enable_attention_dp":false}`), ConfigReadable: true,
			Capabilities: Capabilities{SchedulingParams: true}, Bounds: Bounds{VocabSize: 355, MaxSeqLen: 8192},
			AttentionDPSize: 1, KV: KV{TotalBlocks: 1024, BlockSize: 32},
		},
		"generate": Request{ID: 7, Tokens: []int32{5, 6, 7}, Params: Generate{
			RequestID: "r-1", Streaming: true, Conversation: &Conversation{ID: ptr("s1")},
			Sampling: Sampling{MaxTokens: ptr(int64(4)), StopTokenIDs: []int64{2}},
		}},
		"cancel":  uint64(7),
		"outputs": []Output{{ID: 7, Tokens: []uint32{117}}, {ID: 8, Index: 1, Tokens: []uint32{44, 348}}},
		"outputs last": []Output{{
			ID: 7, Last: true, Tokens: []uint32{124}, TopK: 2,
			LogProbs: []TokenLogProb{{LogProb: -0.25, Top: []TopLogProb{{124, 1, -0.25}, {125, 2, -1.25}}}},
			Meta:     &Meta{FinishReason: "length", CachedTokens: ptr(int64(64))},
		}},
		"outputs error": []Output{{ID: 8, Last: true, Meta: &Meta{
			Error: &RequestError{Kind: ErrorRequest, Type: "RequestError", Message: "no room"},
		}}},
		"stats":    []json.RawMessage{raw(`{"attentionDpRank":0,"numActiveRequests":2}`)},
		"events":   []json.RawMessage{raw(`{"event_id":5,"data":{"type":"removed","block_hashes":[18446744073709551615]},"attention_dp_rank":0}`)},
		"query":    Query{Seq: 3, What: QueryHealth},
		"answer":   Answer{Seq: 3, OK: true, Body: raw(`{"seq":3,"ok":true,"healthy":true}`)},
		"shutdown": Shutdown{DeadlineMillis: 10000},
		"goodbye":  Goodbye{Reason: "shutdown"},
		"fatal":    Fatal{ErrorType: "RuntimeError", Message: "device lost"},
	}
	frames := documented(t)
	seen := make(map[Kind]bool)
	for name, frame := range frames {
		r := NewReader(bytes.NewReader(frame), 0)
		kind, payload, err := r.Next()
		require.NoError(t, err, name)
		require.Equal(t, kind.String(), strings.Fields(name)[0])
		seen[kind] = true
		got, err := parseAny(kind, payload)
		require.NoError(t, err, name)
		require.Contains(t, want, name)
		require.Empty(t, cmp.Diff(want[name], got), name)
		_, _, err = r.Next()
		require.Error(t, err, "%s: one frame an example", name)
	}
	require.Len(t, frames, len(want))
	require.Len(t, seen, int(KindFatal))

	again, err := AppendGenerate(nil, 7, []int32{5, 6, 7}, ptr(want["generate"].(Request).Params))
	require.NoError(t, err)
	require.Equal(t, frames["generate"], again, "both encoders agree")
	require.Equal(t, frames["cancel"], AppendCancel(nil, 7))
	for _, name := range []string{"outputs", "outputs last", "outputs error"} {
		payload := encodeOutputs(t, want[name].([]Output))
		require.Equal(t, frames[name], frame(t, KindOutputs, payload), name)
	}
}

func parseAny(k Kind, payload []byte) (any, error) {
	switch k {
	case KindHello:
		return ParseHello(payload)
	case KindConfigure:
		return ParseConfigure(payload)
	case KindProgress:
		return ParseProgress(payload)
	case KindReady:
		return ParseReady(payload)
	case KindGenerate:
		return ParseGenerate(payload)
	case KindCancel:
		return ParseCancel(payload)
	case KindOutputs:
		return ParseOutputs(payload)
	case KindQuery:
		return ParseQuery(payload)
	case KindAnswer:
		return ParseAnswer(payload)
	case KindShutdown:
		return ParseShutdown(payload)
	case KindGoodbye:
		return ParseGoodbye(payload)
	case KindFatal:
		return ParseFatal(payload)
	default:
		return ParseRows(k, payload)
	}
}

// The tables name every kind, capability, bound, meta key and sampling key.
func TestDocumentNamesEverything(t *testing.T) {
	doc, err := os.ReadFile(protocolDoc)
	require.NoError(t, err)
	text := string(doc)
	for k := KindHello; k <= KindFatal; k++ {
		require.Contains(t, text, "| "+k.String()+" |")
	}
	for _, kind := range []ErrorKind{ErrorRequest, ErrorValue, ErrorType, ErrorNotImplemented, ErrorParams, ErrorFatal} {
		require.Contains(t, text, "`"+string(kind)+"`")
	}
	require.Contains(t, text, "67,108,864")
	require.EqualValues(t, 67_108_864, MaxPayload)

	some := ptr(int64(1))
	everything := []any{
		Capabilities{}, Bounds{1, 1, 1, 1, 1, 1}, KV{1, 1},
		Meta{"x", 1, some, some, json.RawMessage("1"), ptr(1), &RequestError{"x", "x", "x"}, json.RawMessage("1"), true, json.RawMessage("1"), ptr(uint64(1))},
		Generate{"x", true, Sampling{
			some, some, some, some, ptr(1.0), ptr(1.0), some, ptr(1.0), ptr(1.0), ptr(1.0), ptr(1.0), ptr(1.0), ptr(true),
			some, some, some, []int64{1}, ptr(true), ptr(true), some, some, ptr(true), ptr(true),
		}, &Guided{json.RawMessage("1"), ptr("x"), ptr("x"), ptr(true), ptr("x")}, &Scheduling{}, &Conversation{}, ptr("x"), ptr(1.0), map[string]string{}, &LoRA{}, json.RawMessage("1")},
		Ready{"x", "x", "x", json.RawMessage("{}"), true, Capabilities{}, Bounds{}, 1, KV{}, []string{"x"}},
		Hello{1, "x", "x", 1}, Configure{1, "x", json.RawMessage("1"), json.RawMessage("1")}, Progress{"x", "x", ptr(math.Pi)},
		Shutdown{}, Fatal{},
	}
	for _, v := range everything {
		b, err := json.Marshal(v)
		require.NoError(t, err)
		for _, m := range regexp.MustCompile(`"([a-z_]+)":`).FindAllStringSubmatch(string(b), -1) {
			require.Regexp(t, "[`{\"]"+m[1]+"[`\"]", text, "%T", v)
		}
	}
}
