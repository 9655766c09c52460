package affinity

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// config is a resolved engine configuration with the given value at ConfigPath.
func config(v any) map[string]any {
	return map[string]any{"attention_dp_config": map[string]any{"kv_cache_routing_conversation_affinity": v}}
}

func TestOnlyABooleanTrueIsOn(t *testing.T) {
	for name, c := range map[string]map[string]any{
		"false": config(false), "one": config(int64(1)), "float": config(1.0), "text": config("true"), "null": config(nil), "list": config([]any{true}),
		"absent field": {"attention_dp_config": map[string]any{}}, "null section": {"attention_dp_config": nil}, "absent section": {}, "nil config": nil, "section is a list": {"attention_dp_config": []any{true}},
	} {
		e := Engine{Config: c}
		require.False(t, e.PolicyEnabled(), name)
	}
	e := Engine{Config: config(true)}
	require.True(t, e.PolicyEnabled())
}

// TestGate is the table of everything that decides the gate. "api" is the build's ConversationParams; "binds" its memory for a strict first rank.
func TestGate(t *testing.T) {
	const (
		on, off, unreadable = "on", "off", "unreadable"
		old, new_           = false, true
	)
	type want struct {
		on       bool
		origin   Origin
		err      string // part of the error, "" for none
		warnings []string
	}
	fails := func(part string) want { return want{err: part} }
	is := func(on bool, origin Origin, warnings ...string) want {
		return want{on: on, origin: origin, warnings: warnings}
	}
	for _, row := range []struct {
		policy   string
		api      bool
		override Override
		tolerate bool
		source   RankSource
		binds    Truth
		want     want
	}{
		// policy  api   override       tolerate  source        binds    outcome
		{off, old, OverrideUnset, false, SourceEngine, No, is(false, FromConfig)},
		{off, new_, OverrideUnset, false, SourceEngine, No, is(false, FromConfig)},
		{off, new_, OverrideUnset, false, SourceDynamo, No, is(false, FromConfig)},
		{off, new_, OverrideOff, false, SourceEngine, No, is(false, FromConfig)},
		{on, new_, OverrideUnset, false, SourceEngine, No, is(true, FromConfig)},
		{on, new_, OverrideOn, false, SourceEngine, No, is(true, FromConfig)},
		{on, new_, OverrideOn, true, SourceEngine, No, is(true, FromConfig)},
		{on, new_, OverrideOff, false, SourceEngine, No, is(true, FromConfig, "does not turn off")},
		{on, new_, OverrideUnset, false, SourceDynamo, Yes, is(true, FromConfig)},
		{on, new_, OverrideUnset, false, SourceDynamo, No, is(true, FromConfig, "does not bind")},
		{on, new_, OverrideUnset, false, SourceDynamo, Unknown, is(true, FromConfig, "may not bind")},
		{on, old, OverrideUnset, false, SourceEngine, No, fails(ConfigPath + " is on but the engine's build 1.3.0rc19 has no ConversationParams API: a TensorRT-LLM build newer than 1.3.0rc20 is needed")},
		{on, old, OverrideOn, true, SourceEngine, No, fails("1.3.0rc19 has no ConversationParams")},
		{off, new_, OverrideOn, false, SourceEngine, No, fails("is on but " + ConfigPath)},
		{off, old, OverrideOn, false, SourceEngine, No, fails("affinity.override (--conversation-affinity, DYN_ENGINE_CONV_AFFINITY) is on but " + ConfigPath)},
		{off, new_, OverrideOn, true, SourceEngine, No, is(true, FromToleratedOverride, "is off: conversation ids are passed")},
		{off, old, OverrideOn, false, SourceDynamo, No, fails("which takes a TensorRT-LLM build newer than 1.3.0rc20")},
		{off, old, OverrideOn, true, SourceEngine, No, fails("affinity.override (--conversation-affinity, DYN_ENGINE_CONV_AFFINITY) is on but the engine's build 1.3.0rc19")},
		{unreadable, new_, OverrideUnset, false, SourceEngine, No, is(false, FromConfig, "could not be read")},
		{unreadable, new_, OverrideOff, false, SourceEngine, No, is(false, FromConfig, "could not be read")},
		{unreadable, new_, OverrideOn, false, SourceEngine, No, is(true, FromOverride)},
		{unreadable, old, OverrideOn, false, SourceEngine, No, fails("1.3.0rc19 has no ConversationParams")},
		{on, new_, OverrideUnset, false, "router", No, fails(`affinity.rank_source: rank source "router"`)},
		{off, new_, OverrideUnset, false, "router", No, fails(`affinity.rank_source: rank source "router"`)},
	} {
		e := Engine{Build: "1.3.0rc19", ConversationParams: row.api, BindsExplicitRank: row.binds, Ranks: 4, ConfigReadable: row.policy != unreadable}
		if e.ConfigReadable {
			e.Config = config(row.policy == on)
		}
		g, err := Resolve(e, Settings{Override: row.override, RankSource: row.source, TolerateDisagreement: row.tolerate})
		if row.want.err != "" {
			require.ErrorContains(t, err, row.want.err, "%+v", row)
			continue
		}
		require.NoError(t, err, "%+v", row)
		require.Equal(t, row.want.on, g.On(), "%+v", row)
		require.Equal(t, row.want.origin, g.Origin(), "%+v", row)
		require.Len(t, g.Warnings(), len(row.want.warnings), "%+v: %v", row, g.Warnings())
		for i, w := range row.want.warnings {
			require.Contains(t, g.Warnings()[i], w, "%+v", row)
		}
	}
}

func TestTheErrorsHaveTypes(t *testing.T) {
	_, err := Resolve(Engine{Ranks: 1, ConfigReadable: true}, Settings{Override: OverrideOn})
	var disagree *DisagreementError
	require.ErrorAs(t, err, &disagree)
	require.Contains(t, err.Error(), "(unknown)", "a build that was not reported is said to be unknown")
	_, err = Resolve(Engine{Ranks: 1, ConfigReadable: true, Config: config(true)}, Settings{})
	var missing *MissingAPIError
	require.ErrorAs(t, err, &missing)
	_, err = Resolve(Engine{}, Settings{})
	require.ErrorContains(t, err, "0 attention-DP ranks")
}

// sessions are the shapes of agent_context that were recorded, and some more; the value is the id that must come out ("" for none).
var sessions = map[string]struct {
	context any
	id      string
}{
	"present":      {map[string]any{"session_id": "s1"}, "s1"},
	"padded":       {map[string]any{"session_id": "  s1 \t"}, "s1"},
	"separators":   {map[string]any{"session_id": "\x1c\x1d\x1e\x1f\u0085\u00a0s1\u3000\u2029"}, "s1"},
	"zero width":   {map[string]any{"session_id": "\u200bs1"}, "\u200bs1"},
	"nul":          {map[string]any{"session_id": "\x00"}, "\x00"},
	"inner space":  {map[string]any{"session_id": "a b "}, "a b"},
	"unicode":      {map[string]any{"session_id": "séance-日本"}, "séance-日本"},
	"long":         {map[string]any{"session_id": strings.Repeat("x", 10240)}, strings.Repeat("x", 10240)},
	"with_parent":  {map[string]any{"session_id": "s1", "parent_session_id": "p1"}, "s1"},
	"final":        {map[string]any{"session_id": "s1", "session_final": true}, "s1"},
	"empty":        {map[string]any{"session_id": ""}, ""},
	"spaces":       {map[string]any{"session_id": "   "}, ""},
	"number":       {map[string]any{"session_id": int64(123)}, ""},
	"null":         {map[string]any{"session_id": nil}, ""},
	"list":         {map[string]any{"session_id": []any{"s1"}}, ""},
	"no_key":       {map[string]any{}, ""},
	"parent_only":  {map[string]any{"parent_session_id": "p1"}, ""},
	"control_only": {map[string]any{"session_control": map[string]any{"session_id": "s1"}}, ""},
	"context_null": {nil, ""},
	"context_text": {"s1", ""},
}

func TestSessionID(t *testing.T) {
	for name, s := range sessions {
		id, ok := SessionID(s.context)
		require.Equal(t, s.id, id, name)
		require.Equal(t, s.id != "", ok, name)
	}
}

func gate(t *testing.T, on bool, source RankSource, ranks int, reject bool) *Gate {
	g, err := Resolve(Engine{ConfigReadable: true, Config: config(on), ConversationParams: true, BindsExplicitRank: Yes, Ranks: ranks}, Settings{RankSource: source, RejectOutOfRange: reject})
	require.NoError(t, err)
	return g
}

// TestDecide is the truth table of one request. Role and handler are no inputs: both handlers and all roles call this with the same gate (pkg/handlers tests that). "kw" is the conversation argument: not passed, none, or the id.
func TestDecide(t *testing.T) {
	type shape struct {
		name  string
		value any
	}
	var (
		absent = shape{"absent", nil}
		zero   = shape{"0", int64(0)}
		three  = shape{"3", int64(3)}
		seven  = shape{"7 of 4", int64(7)}
		minus  = shape{"-1", int64(-1)}
		huge   = shape{"2^64-1", uint64(1<<64 - 1)}
	)
	const notPassed, none = "not passed", "none"
	const noRank = -1
	for _, row := range []struct {
		on      bool
		source  RankSource
		session string
		rank    shape
		kw      string
		strict  int
		reason  Reason
	}{
		// policy off: the rank is forced as asked, the conversation argument does not exist
		{false, SourceEngine, "present", absent, notPassed, noRank, ReasonNoRank},
		{false, SourceEngine, "present", zero, notPassed, 0, ReasonStrictRank},
		{false, SourceEngine, "present", three, notPassed, 3, ReasonStrictRank},
		{false, SourceEngine, "empty", three, notPassed, 3, ReasonStrictRank},
		{false, SourceDynamo, "present", three, notPassed, 3, ReasonStrictRank},
		{false, SourceDynamo, "empty", absent, notPassed, noRank, ReasonNoRank},
		{false, SourceEngine, "present", seven, notPassed, noRank, ReasonRankOutOfRange},
		{false, SourceEngine, "present", minus, notPassed, noRank, ReasonRankOutOfRange},
		{false, SourceEngine, "present", huge, notPassed, noRank, ReasonRankOutOfRange},
		// policy on, the engine places: the id goes through, the rank never
		{true, SourceEngine, "present", absent, "s1", noRank, ReasonConversation},
		{true, SourceEngine, "padded", zero, "s1", noRank, ReasonConversation},
		{true, SourceEngine, "present", three, "s1", noRank, ReasonConversation},
		{true, SourceEngine, "with_parent", three, "s1", noRank, ReasonConversation},
		{true, SourceEngine, "parent_only", three, none, noRank, ReasonNoConversation},
		{true, SourceEngine, "number", absent, none, noRank, ReasonNoConversation},
		{true, SourceEngine, "context_text", three, none, noRank, ReasonNoConversation},
		{true, SourceEngine, "present", seven, "s1", noRank, ReasonRankOutOfRange},
		{true, SourceEngine, "empty", minus, none, noRank, ReasonRankOutOfRange},
		// policy on, the frontend places the first turn: id and rank together, or neither
		{true, SourceDynamo, "present", absent, "s1", noRank, ReasonConversation},
		{true, SourceDynamo, "present", zero, "s1", 0, ReasonConversationFirstRank},
		{true, SourceDynamo, "unicode", three, "séance-日本", 3, ReasonConversationFirstRank},
		{true, SourceDynamo, "spaces", three, none, noRank, ReasonNoConversation},
		{true, SourceDynamo, "present", seven, "s1", noRank, ReasonRankOutOfRange},
		{true, SourceDynamo, "present", minus, "s1", noRank, ReasonRankOutOfRange},
	} {
		d, err := gate(t, row.on, row.source, 4, false).Decide(sessions[row.session].context, row.rank.value)
		require.NoError(t, err)
		want := Decision{Reason: row.reason, PassConversation: row.kw != notPassed}
		if row.kw != notPassed && row.kw != none {
			want.ConversationID = row.kw
		}
		if row.strict != noRank {
			want.ForceRank, want.Rank = true, row.strict
		}
		require.Equal(t, want, d, "on=%v source=%s session=%s rank=%s", row.on, row.source, row.session, row.rank.name)
	}
}

func TestWithoutAttentionDPRankZeroIsStillStrict(t *testing.T) {
	g := gate(t, false, SourceEngine, 1, false)
	d, err := g.Decide(nil, int64(0))
	require.NoError(t, err)
	require.Equal(t, Decision{ForceRank: true, Reason: ReasonStrictRank}, d)
	d, err = g.Decide(nil, int64(1))
	require.NoError(t, err)
	require.Equal(t, Decision{Reason: ReasonRankOutOfRange}, d)
}

func TestARankThatIsNoIntegerIsRefusedWhateverThePolicy(t *testing.T) {
	for _, on := range []bool{false, true} {
		for name, v := range map[string]any{"a boolean": true, "a number with a fraction": 1.0, "text": "1", "a list or map": []any{int64(1)}} {
			_, err := gate(t, on, SourceEngine, 4, false).Decide(nil, v)
			var typed *RankTypeError
			require.ErrorAs(t, err, &typed)
			require.ErrorContains(t, err, "routing.dp_rank must be an integer, got "+name)
		}
	}
}

func TestOutOfRangeIsRefusedOnDemandWhateverThePolicy(t *testing.T) {
	for _, on := range []bool{false, true} {
		g := gate(t, on, SourceEngine, 4, true)
		for v, text := range map[any]string{int64(4): "4", int64(-1): "-1", uint64(1<<64 - 1): "18446744073709551615"} {
			_, err := g.Decide(nil, v)
			var typed *RankRangeError
			require.ErrorAs(t, err, &typed)
			require.EqualError(t, err, "routing.dp_rank "+text+" is outside the engine's ranks [0, 4)")
		}
		_, err := g.Decide(nil, int64(3))
		require.NoError(t, err)
	}
}

func TestReasonsAreAllListed(t *testing.T) {
	seen := map[Reason]bool{}
	for _, r := range Reasons() {
		require.False(t, seen[r])
		seen[r] = true
	}
	require.Len(t, seen, 6)
}
