package ipc

import (
	"encoding/json"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/stretchr/testify/require"
)

func ptr[T any](v T) *T { return &v }

func sampleOutputs() []Output {
	return []Output{
		{ID: 7, Tokens: []uint32{18, 25}},
		{ID: math.MaxUint64, Index: 1, Tokens: []uint32{math.MaxUint32}, TopK: 2, LogProbs: []TokenLogProb{
			{LogProb: -0.25, Top: []TopLogProb{{18, 1, -0.25}, {19, 2, math.Inf(-1)}}},
		}},
		{ID: 9, Tokens: []uint32{1}, LogProbs: []TokenLogProb{{LogProb: -1}}},
		{ID: 8, Last: true, Meta: &Meta{
			FinishReason: "stop", StopReason: int64(1)<<62 + 1, CachedTokens: ptr(int64(64)), CompletionTokens: ptr(int64(9)), Rank: ptr(3),
			PromptLogProbs: json.RawMessage(`[null,{"6":{"logprob":-0.5,"rank":1}}]`),
			Disaggregated:  json.RawMessage(`{"first_gen_tokens":[1]}`), Perf: json.RawMessage(`{"a":1}`),
			EngineRequestID: ptr(uint64(math.MaxUint64)),
		}},
		{ID: 8, Last: true, Meta: &Meta{StopReason: "END"}},
		{ID: 8, Last: true, Meta: &Meta{NoOutputs: true, Error: &RequestError{Kind: ErrorRequest, Type: "RequestError", Message: "no"}}},
		{ID: 8, LogProbs: []TokenLogProb{}},
	}
}

func encodeOutputs(t testing.TB, outs []Output) []byte {
	t.Helper()
	var b []byte
	var err error
	for i := range outs {
		b, err = AppendOutput(b, &outs[i])
		require.NoError(t, err)
	}
	return b
}

func TestOutputsRoundTrip(t *testing.T) {
	want := sampleOutputs()
	got, err := ParseOutputs(encodeOutputs(t, want))
	require.NoError(t, err)
	require.Empty(t, cmp.Diff(want, got, cmpopts.EquateEmpty()))
	require.NotNil(t, got[6].LogProbs, "present without tokens is not the same as absent")
	require.Nil(t, got[0].LogProbs)
}

func TestAppendOutputRefuses(t *testing.T) {
	prefix := []byte{1}
	for name, o := range map[string]Output{
		"fewer log probabilities than tokens": {Tokens: []uint32{1, 2}, LogProbs: []TokenLogProb{{}}},
		"too many alternatives":               {Tokens: []uint32{1}, LogProbs: []TokenLogProb{{Top: make([]TopLogProb, math.MaxUint16+1)}}},
		"raw meta that is no JSON":            {Meta: &Meta{Perf: json.RawMessage(`{`)}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := AppendOutput(prefix, &o)
			require.Error(t, err)
			require.Equal(t, prefix, got)
		})
	}
}

func TestParseRecordsRefuses(t *testing.T) {
	sound := encodeOutputs(t, []Output{{ID: 7, Tokens: []uint32{18}}})
	head := func(flags byte, count byte) []byte {
		return []byte{7, 0, 0, 0, 0, 0, 0, 0, 0, 0, flags, 0, count, 0, 0, 0}
	}
	for name, bad := range map[string][]byte{
		"short head":                   sound[:15],
		"unknown flag":                 head(8, 0),
		"tokens beyond the end":        head(0, 1),
		"huge token count":             {7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255},
		"log probabilities without k":  head(4, 0),
		"log probability cut short":    append(head(4, 1), 1, 0, 0, 0, 5, 0, 0, 0),
		"alternatives beyond the end":  append(append(head(4, 1), 1, 0, 0, 0, 5, 0), 0, 0, 0, 0, 0, 0, 0, 0, 255, 255),
		"meta without length":          head(1, 0),
		"meta that is empty":           append(head(1, 0), 0, 0, 0, 0),
		"meta beyond the end":          append(head(1, 0), 3, 0, 0, 0, '{', '}'),
		"meta with an enormous length": append(head(1, 0), 255, 255, 255, 255, '{', '}'),
	} {
		t.Run(name, func(t *testing.T) {
			records := ParseRecords(append(append([]byte{}, sound...), bad...))
			var rec Record
			more, err := records.Next(&rec)
			require.NoError(t, err)
			require.True(t, more, "the record before the bad one is delivered")
			require.Equal(t, []uint32{18}, rec.AppendTokens(nil))
			_, err = records.Next(&rec)
			var malformed *MalformedError
			require.ErrorAs(t, err, &malformed)
			require.Equal(t, KindOutputs, malformed.Kind)
			require.Equal(t, len(sound), malformed.Offset)
		})
	}
}

func TestMetaRefuses(t *testing.T) {
	for name, meta := range map[string]string{
		"null":                   `null`,
		"a list":                 `[]`,
		"no JSON":                `{`,
		"NaN":                    `{"cached_tokens":NaN}`,
		"fraction":               `{"cached_tokens":1.5}`,
		"stop reason is a float": `{"stop_reason":1.5}`,
		"stop reason is a list":  `{"stop_reason":[1]}`,
		"error is text":          `{"error":"no"}`,
	} {
		t.Run(name, func(t *testing.T) {
			rec := Record{meta: []byte(meta)}
			_, err := rec.Meta()
			var malformed *MalformedError
			require.ErrorAs(t, err, &malformed)
		})
	}
	rec := Record{meta: []byte(`{"stop_reason":null,"new_key":{"a":[1]}}`)}
	m, err := rec.Meta()
	require.NoError(t, err)
	require.Equal(t, &Meta{}, m)
}

// stepPayload is one step of many streams: the hot path.
func stepPayload(t testing.TB, streams int) []byte {
	outs := make([]Output, streams)
	for i := range outs {
		outs[i] = Output{ID: uint64(i), Tokens: []uint32{uint32(i)}}
	}
	return encodeOutputs(t, outs)
}

func TestHotPathDoesNotAllocate(t *testing.T) {
	payload := stepPayload(t, 64)
	logProbs := encodeOutputs(t, []Output{{Tokens: []uint32{1}, TopK: 1, LogProbs: []TokenLogProb{{Top: make([]TopLogProb, 3)}}}})
	tokens := make([]uint32, 0, 64)
	probs := make([]TokenLogProb, 0, 1)
	frame := make([]byte, 0, 4096)
	walk := func(p []byte) {
		var rec Record
		records := ParseRecords(p)
		for {
			more, err := records.Next(&rec)
			if err != nil || !more {
				return
			}
			tokens = rec.AppendTokens(tokens[:0])
			probs = rec.AppendLogProbs(probs[:0])
		}
	}
	walk(logProbs)
	require.Zero(t, testing.AllocsPerRun(100, func() { walk(payload); walk(logProbs) }))
	require.Zero(t, testing.AllocsPerRun(100, func() {
		frame = BeginFrame(frame[:0], KindOutputs)
		for i := range 64 {
			frame = AppendRecordHead(frame, uint64(i), 0, 0, 1)
			frame = append(frame, 1, 0, 0, 0)
		}
		frame, _ = EndFrame(frame, 0)
		frame = AppendCancel(frame, 7)
	}))
}

func BenchmarkWalkRecords(b *testing.B) {
	payload := stepPayload(b, 64)
	tokens := make([]uint32, 0, 64)
	b.ReportAllocs()
	b.SetBytes(int64(len(payload)))
	for b.Loop() {
		var rec Record
		records := ParseRecords(payload)
		for {
			more, err := records.Next(&rec)
			if err != nil {
				b.Fatal(err)
			}
			if !more {
				break
			}
			tokens = rec.AppendTokens(tokens[:0])
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/64, "ns/token")
}

// FuzzOutputs checks that what is accepted encodes to the same bytes again, up
// to the spelling of the JSON.
func FuzzOutputs(f *testing.F) {
	for _, o := range sampleOutputs() {
		f.Add(encodeOutputs(f, []Output{o}))
	}
	f.Add(encodeOutputs(f, sampleOutputs()))
	f.Add([]byte{7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 1, 0, 0, 0})
	f.Fuzz(func(t *testing.T, payload []byte) {
		outs, err := ParseOutputs(payload)
		if err != nil {
			return
		}
		again, err := ParseOutputs(encodeOutputs(t, outs))
		require.NoError(t, err)
		require.Empty(t, cmp.Diff(outs, again, cmpopts.EquateNaNs()))
		for _, o := range outs {
			if o.Meta != nil {
				return
			}
		}
		require.Equal(t, payload, append([]byte{}, encodeOutputs(t, outs)...))
	})
}
