package protocol

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
)

// constructors are all functions that make an error, with the reason that the
// frontend's behaviour depends on.
var constructors = map[string]struct {
	make     *Error
	reason   Reason
	migrates bool
}{
	"InvalidArgument":  {InvalidArgument("n must be at least %d", 1), ReasonBackendInvalidArgument, false},
	"ContextLength":    {ContextLength(8192, 9000), ReasonBackendInvalidArgument, false},
	"EngineShutdown":   {EngineShutdown("m"), ReasonBackendEngineShutdown, true},
	"StreamIncomplete": {StreamIncomplete("m"), ReasonBackendStreamIncomplete, true},
	"Internal":         {Internal("m"), ReasonBackendUnknown, false},
	"Overloaded":       {Overloaded("m"), ReasonCapacityWorkerOverloaded, true},
	"Unavailable":      {Unavailable("m"), ReasonBackendWorkerUnavailable, true},
	"Cancelled":        {Cancelled("m"), ReasonBackendCancelled, false},
	"DeadlineExceeded": {DeadlineExceeded("m"), ReasonRequestDeadlineExceeded, false},
	"NotImplemented":   {NotImplemented("m"), ReasonRuntimeNotImplemented, false},
	"NewError":         {NewError("no.such_reason", "m"), ReasonBackendUnknown, false},
}

func TestConstructors(t *testing.T) {
	for name, c := range constructors {
		t.Run(name, func(t *testing.T) {
			e := c.make
			require.Equal(t, c.reason, e.Reason)
			class, ok := ClassOf(e.Reason)
			require.True(t, ok)
			require.Equal(t, class, e.Class)
			require.Equal(t, class, catalogue[reasonOfLegacy[e.Type]].class, "an old reader would derive another class")
			require.Equal(t, c.migrates, e.Migratable())
			require.ErrorContains(t, e, string(e.Reason))
			for _, codec := range bothCodecs {
				item, err := ParseItem(codec, AppendErrorItem(nil, codec, e))
				require.NoError(t, err)
				require.Nil(t, item.Chunk)
				require.Equal(t, "error", item.Event)
				require.Empty(t, cmp.Diff(e, item.Err))
			}
			back, err := ParseErrorJSON(e.AppendJSON(nil))
			require.NoError(t, err)
			require.Empty(t, cmp.Diff(e, back))
		})
	}
	require.Equal(t, "n must be at least 1", constructors["InvalidArgument"].make.Public.Message)
}

// The texts that were tried against the running frontend.
func TestPublicParts(t *testing.T) {
	require.Equal(t, `{"data":{"event":"error","error":{"error_type":{"Backend":"InvalidArgument"},"class":"InvalidRequest",`+
		`"reason":"backend.invalid_argument","message":"max_tokens must be at least 1","diagnostic":"max_tokens must be at least 1",`+
		`"public":{"type":"message","message":"max_tokens must be at least 1"}}},"complete_final":false}`,
		asJSON(InvalidArgument("max_tokens must be at least 1")))
	require.Contains(t, asJSON(ContextLength(8192, 9000)), `"public":{"type":"context_length","limit":8192,"actual":9000}`)
	limited := NewError(ReasonRequestRateLimited, "")
	limited.Public = &Public{Type: PublicRateLimit}
	require.Contains(t, asJSON(limited), `"public":{"type":"rate_limit"}`)
}

func TestCatalogue(t *testing.T) {
	require.Len(t, catalogue, 34)
	classes := map[Class]bool{}
	for reason, e := range catalogue {
		require.NotEmpty(t, e.legacy.Name, reason)
		require.False(t, e.migrates && e.blocks, reason)
		_, known := reasonOfLegacy[e.legacy]
		require.True(t, known, "%s: the legacy type is not readable", reason)
		require.Equal(t, e.class, catalogue[reasonOfLegacy[e.legacy]].class, "%s: old readers would derive another class", reason)
		classes[e.class] = true
	}
	require.Len(t, classes, 15)
	require.Len(t, reasonOfClass, 15)
	for class, reason := range reasonOfClass {
		require.Equal(t, class, catalogue[reason].class)
	}
	for legacy, reason := range reasonOfLegacy {
		require.Contains(t, catalogue, reason, legacy)
	}
	_, ok := ClassOf("no.such_reason")
	require.False(t, ok)
}

func TestMigratable(t *testing.T) {
	var eligible, blocking []string
	for reason := range catalogue {
		if NewError(reason, "").Migratable() {
			eligible = append(eligible, string(reason))
		}
		// Under a cause that may migrate, only a blocking reason says no.
		outer := NewError(reason, "")
		outer.Cause = Internal("")
		outer.Cause.Cause = EngineShutdown("")
		if !outer.Migratable() {
			blocking = append(blocking, string(reason))
		}
	}
	require.ElementsMatch(t, []string{
		"transport.cannot_connect", "transport.disconnected", "transport.connection_timeout",
		"backend.cannot_connect", "backend.disconnected", "backend.connection_timeout", "backend.response_timeout",
		"backend.engine_shutdown", "backend.stream_incomplete", "backend.worker_unavailable", "capacity.worker_overloaded",
	}, eligible)
	require.ElementsMatch(t, []string{
		"request.cancelled", "request.deadline_exceeded", "backend.cancelled", "capacity.exhausted", "capacity.pool_exhausted",
	}, blocking)

	// A blocking cause spoils an eligible error.
	e := EngineShutdown("")
	e.Cause = Cancelled("")
	require.False(t, e.Migratable())
	require.False(t, (*Error)(nil).Migratable())
}

func TestErrorChain(t *testing.T) {
	e := Internal("outer")
	e.Cause = EngineShutdown("inner")
	back, err := ParseErrorJSON(e.AppendJSON(nil))
	require.NoError(t, err)
	require.Empty(t, cmp.Diff(e, back))
	require.ErrorIs(t, e, e.Cause)
	require.NoError(t, e.Cause.Unwrap())

	// A chain that bites its tail ends.
	e.Cause.Cause = e
	back, err = ParseErrorJSON(e.AppendJSON(nil))
	require.NoError(t, err)
	depth := 0
	for ; back != nil; back = back.Cause {
		depth++
	}
	require.Equal(t, maxCauses, depth)
	require.True(t, e.Migratable())
}

// However an Error was put together, what is written fits the catalogue.
func TestAppendRepairsErrors(t *testing.T) {
	for _, e := range []*Error{
		{},
		{Reason: "no.such_reason", Class: "None"},
		{Reason: ReasonBackendEngineShutdown, Class: ClassInvalidRequest},
	} {
		v, err := DecodeValue(CodecJSON, e.AppendJSON(nil))
		require.NoError(t, err)
		m := v.(Map)
		class, ok := ClassOf(Reason(m["reason"].(string)))
		require.True(t, ok)
		require.Equal(t, string(class), m["class"])
		require.NotEmpty(t, m["error_type"])
	}
}

func TestMessageIsCut(t *testing.T) {
	for _, text := range []string{
		strings.Repeat("x", MaxMessageLen), strings.Repeat("x", MaxMessageLen+1),
		strings.Repeat("é", MaxMessageLen), "x" + strings.Repeat("é", MaxMessageLen), strings.Repeat("日", MaxMessageLen),
		"xx" + strings.Repeat("😀", MaxMessageLen), strings.Repeat("\x80", 2*MaxMessageLen),
	} {
		got := cut(text)
		require.LessOrEqual(t, len(got), MaxMessageLen)
		require.Greater(t, len(got), MaxMessageLen-2*utf8.UTFMax)
		require.True(t, strings.HasPrefix(text, got))
		require.Equal(t, utf8.ValidString(text), utf8.ValidString(got))

		e := InvalidArgument("%s", text)
		for _, c := range bothCodecs {
			item, err := ParseItem(c, AppendErrorItem(nil, c, e))
			require.NoError(t, err)
			if utf8.ValidString(text) {
				require.Equal(t, got, item.Err.Message)
				require.Equal(t, got, item.Err.Public.Message)
			}
		}
	}
}

// How the frontend reads errors of other writers.
func TestReadErrors(t *testing.T) {
	for in, want := range map[string]struct {
		class  Class
		reason Reason
	}{
		`{"error_type":"WorkerOverloaded"}`:         {ClassCapacityExhausted, ReasonCapacityWorkerOverloaded},
		`{"error_type":{"Backend":"Cancelled"}}`:    {ClassCancelled, ReasonBackendCancelled},
		`{"error_type":"SomethingNew"}`:             {ClassInternal, ReasonRuntimeUnclassified},
		`{"error_type":{"Backend":"SomethingNew"}}`: {ClassInternal, ReasonBackendUnknown},
		`{}`:                   {ClassInternal, ReasonRuntimeUnclassified},
		`{"class":"NotFound"}`: {ClassNotFound, ReasonRequestNotFound},
		`{"error_type":"Disconnected","class":"Unavailable"}`:           {ClassUnavailable, ReasonTransportDisconnected},
		`{"error_type":"Disconnected","class":"Cancelled"}`:             {ClassCancelled, ReasonRequestCancelled},
		`{"error_type":"Disconnected","reason":"backend.disconnected"}`: {ClassUnavailable, ReasonBackendDisconnected},
		`{"class":"Unavailable","reason":"backend.cancelled"}`:          {ClassInternal, ReasonRuntimeInvalidError},
		`{"class":"Unavailable","reason":"backend.something"}`:          {ClassInternal, ReasonRuntimeInvalidError},
		`{"class":"Strange"}`: {ClassInternal, ReasonRuntimeInvalidError},
		`{"error_type":"Cancelled","reason":"backend.engine_shutdown"}`:             {ClassInternal, ReasonRuntimeInvalidError},
		`{"error_type":{"Backend":"EngineShutdown"},"class":null,"public":null}`:    {ClassUnavailable, ReasonBackendEngineShutdown},
		`{"class":"DeadlineExceeded","reason":"router.queue_deadline_exceeded"}`:    {ClassDeadlineExceeded, ReasonRouterQueueDeadlineExceeded},
		`{"class":"InvalidRequest","reason":"request.invalid","message":"a","x":1}`: {ClassInvalidRequest, ReasonRequestInvalid},
	} {
		e, err := ParseErrorJSON([]byte(in))
		require.NoError(t, err, in)
		require.Equal(t, want.class, e.Class, in)
		require.Equal(t, want.reason, e.Reason, in)
	}
	e, err := ParseErrorJSON([]byte(`{"message":"a","diagnostic":"b","public":{"type":"size_limit","limit":10,"actual":20},"caused_by":{"message":"c"}}`))
	require.NoError(t, err)
	require.Equal(t, "b", e.Message)
	require.Equal(t, &Public{Type: PublicSizeLimit, Limit: ptr(int64(10)), Actual: ptr(int64(20))}, e.Public)
	require.Equal(t, "c", e.Cause.Message)

	for _, in := range []string{
		`null`, `[]`, `{"error_type":1}`, `{"error_type":{"Backend":1}}`, `{"error_type":{}}`, `{"message":1}`, `{"class":[]}`,
		`{"public":1}`, `{"public":{"type":"size_limit","limit":1.5}}`, `{"caused_by":"x"}`,
	} {
		_, err := ParseErrorJSON([]byte(in))
		var fe *FieldError
		require.ErrorAs(t, err, &fe, in)
	}
	_, err = ParseErrorJSON([]byte(`{`))
	var de *DecodeError
	require.ErrorAs(t, err, &de)
}

func TestAsError(t *testing.T) {
	require.Nil(t, AsError(nil))
	own := Overloaded("full")
	require.Same(t, own, AsError(fmt.Errorf("admit: %w", own)))
	for _, c := range []struct {
		err    error
		reason Reason
		public bool
	}{
		{&DecodeError{Codec: CodecMsgpack, Offset: 3, Reason: reasonEnd}, ReasonBackendInvalidArgument, true},
		{&NotMapError{Kind: "list"}, ReasonBackendInvalidArgument, true},
		{fmt.Errorf("body: %w", &FieldError{Field: "token_ids[3]", Reason: reasonNegative}), ReasonBackendInvalidArgument, true},
		{&UnknownCodecError{Name: "cbor"}, ReasonBackendInvalidArgument, true},
		{fmt.Errorf("wait: %w", context.Canceled), ReasonBackendCancelled, false},
		{context.DeadlineExceeded, ReasonRequestDeadlineExceeded, false},
		{errors.New("disk on fire"), ReasonBackendUnknown, false},
	} {
		e := AsError(c.err)
		require.Equal(t, c.reason, e.Reason, c.err.Error())
		require.Equal(t, c.public, e.Public != nil)
		if c.public {
			require.Contains(t, c.err.Error(), e.Public.Message)
		}
	}
}
