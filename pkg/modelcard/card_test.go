package modelcard

import (
	"testing"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/protocol"
)

func TestBadSpecs(t *testing.T) {
	m := load(t, recordedModel, Options{})
	for _, c := range []struct {
		spec  Spec
		field string
	}{
		{Spec{}, "Name"},
		{Spec{Name: "___"}, "Name"},
		{Spec{Name: "a", Aliases: []string{""}}, "Aliases"},
		{Spec{Name: "a", Aliases: []string{"b", "b"}}, "Aliases"},
		{Spec{Name: "a", Aliases: []string{"a"}}, "Aliases"},
		{Spec{Name: "a", Role: "encode"}, "Role"},
		{Spec{Name: "a", Endpoints: 64}, "Endpoints"},
		{Spec{Name: "a", ContextLength: ptr(uint32(0))}, "ContextLength"},
	} {
		_, err := m.Card(c.spec, nil)
		var e *SpecError
		require.ErrorAs(t, err, &e)
		require.Equal(t, c.field, e.Field)
		require.ErrorContains(t, err, "model card: "+c.field+": ")
	}
}

func TestSpecIsNotChanged(t *testing.T) {
	m := load(t, recordedModel, Options{})
	spec := Spec{Name: "a", Aliases: []string{"b"}, ContextLength: ptr(uint32(10)), Taints: []string{"t"}}
	card, err := m.Card(spec, nil)
	require.NoError(t, err)
	*card.RuntimeConfig.ContextLength = 11
	card.Aliases[0], card.RuntimeConfig.Taints[0] = "x", "x"
	*card.ArchitecturalMaxContextLength = 1
	require.EqualValues(t, 10, *spec.ContextLength)
	require.Equal(t, []string{"b"}, spec.Aliases)
	require.Equal(t, []string{"t"}, spec.Taints)
	require.EqualValues(t, 8192, *m.Facts().MaxPositions)
}

func TestSpecReachesTheCard(t *testing.T) {
	m := load(t, recordedModel, Options{})
	card, err := m.Card(Spec{
		Name: "Org/Model", Aliases: []string{"model"}, SourcePath: "org/model", Endpoints: EndpointCompletions,
		ContextLength: ptr(uint32(4096)), KVBlockSize: 64, DataParallelSize: 8,
		ToolCallParser: "hermes", ReasoningParser: "qwen3", KeepTools: true, NoStructuralTag: true,
		LocalIndexer: true, KVEvents: true, StableRoutingID: "worker-0", Taints: []string{"a"},
	}, nil)
	require.NoError(t, err)
	require.Equal(t, "Org/Model", card.DisplayName)
	require.Equal(t, "org_model", card.Slug)
	require.Equal(t, "org/model", card.SourcePath)
	require.Equal(t, "Completions", card.ModelType)
	require.Equal(t, []string{"model"}, card.Aliases)
	require.EqualValues(t, 64, card.KVCacheBlockSize)
	require.EqualValues(t, 4096, *card.ContextLength)
	require.EqualValues(t, 8192, *card.ArchitecturalMaxContextLength)
	rc := card.RuntimeConfig
	require.Equal(t, "hermes", *rc.ToolCallParser)
	require.Equal(t, "qwen3", *rc.ReasoningParser)
	require.False(t, rc.ExcludeToolsWhenToolChoiceNone)
	require.Nil(t, rc.StructuralTag)
	require.Equal(t, []string{"off", "auto", "auto"}, []string{rc.StructuralTagMode, rc.StructuralTagScope, rc.StructuralTagSchema})
	require.EqualValues(t, 8, rc.DataParallelSize)
	require.True(t, rc.EnableLocalIndexer)
	require.True(t, *rc.KVEventPublishingEnabled)
	require.Equal(t, "worker-0", rc.StableRoutingID)
	require.Equal(t, []string{"a"}, rc.Taints)
	require.JSONEq(t, `{"combined_limit":4096,"reject_prompt_overflow":true,"reject_total_overflow":false}`, string(rc.RuntimeData["token_budget"]))

	card, err = m.Card(Spec{Name: "m", StructuralTag: &protocol.StructuralTag{Scope: "auto", Schema: "strict", ReasoningBoundary: "backend"}}, nil)
	require.NoError(t, err)
	require.Equal(t, "strict", card.RuntimeConfig.StructuralTagSchema)
	require.Equal(t, "auto", card.RuntimeConfig.StructuralTagScope)
}

// Only chat needs a template, and prefill workers render nothing.
func TestChatNeedsATemplate(t *testing.T) {
	for _, c := range []struct {
		name string
		dir  string
		want string
	}{
		{"no tokenizer config", modelDir(t, nil, nameTokenizerConfig), "tokenizer_config.json: is missing (a frontend would fail to build the chat endpoint"},
		{"no template", modelDir(t, map[string]string{nameTokenizerConfig: `{"chat_template":null}`}), `tokenizer_config.json: has no "chat_template"`},
	} {
		m := load(t, c.dir, Options{})
		_, err := m.Card(Spec{Name: "m"}, nil)
		require.ErrorIs(t, err, ErrNoChatTemplate, c.name)
		require.ErrorContains(t, err, c.want)
		for _, fine := range []Spec{{Name: "m", Endpoints: EndpointCompletions}, {Name: "m", Role: RolePrefill}} {
			_, err = m.Card(fine, nil)
			require.NoError(t, err, c.name)
		}
	}
}

func TestParseEndpointTypes(t *testing.T) {
	for in, want := range map[string]EndpointTypes{
		"chat,completions":   EndpointChat | EndpointCompletions,
		"completions , chat": EndpointChat | EndpointCompletions,
		"chat":               EndpointChat,
		"completions":        EndpointCompletions,
	} {
		got, err := ParseEndpointTypes(in)
		require.NoError(t, err)
		require.Equal(t, want, got, in)
	}
	for _, bad := range []string{"", "chat,", "Chat", "embedding"} {
		_, err := ParseEndpointTypes(bad)
		require.Error(t, err, bad)
	}
	require.Empty(t, Role("x").DefaultComponent())
}
