package modelcard

import (
	"encoding/json"
	"fmt"
	"slices"

	"dynworker/pkg/protocol"
)

// DefaultKVBlockSize is TensorRT-LLM's number of tokens in a KV block.
const DefaultKVBlockSize = 32

// Spec is what a card says besides the files. The zero value of a field means
// what the comment says; pointers that are nil are not told.
type Spec struct {
	// Name is the name under which callers ask for the model, Aliases are
	// others.
	Name    string
	Aliases []string
	// SourcePath is the origin of the model, a folder or a repository id. It is
	// part of the checksum by which frontends group workers. Empty means the
	// model folder.
	SourcePath string
	// Role and Endpoints; zero means aggregated, chat and completions.
	Role      Role
	Endpoints EndpointTypes

	// ContextLength is the engine's limit on prompt and answer together, in
	// tokens. When it is known, frontends refuse longer prompts by themselves.
	ContextLength *uint32
	// KVBlockSize is the number of tokens in a KV block; zero means the
	// default.
	KVBlockSize uint32
	// TotalKVBlocks is the capacity of one rank in blocks; MaxNumSeqs and
	// MaxNumBatchedTokens are the engine's batch limits.
	TotalKVBlocks, MaxNumSeqs, MaxNumBatchedTokens *uint64
	// DataParallelSize is the number of attention-DP ranks; zero means 1.
	DataParallelSize uint32

	// ToolCallParser and ReasoningParser name parsers of the frontend; empty
	// means none.
	ToolCallParser, ReasoningParser string
	// KeepTools leaves the tools in the prompt when the caller chose "none".
	KeepTools bool
	// StructuralTag configures structural tags for tool calls; nil means what
	// the TensorRT-LLM worker sends by default.
	StructuralTag *protocol.StructuralTag
	// NoStructuralTag turns them off.
	NoStructuralTag bool

	// LocalIndexer says that the worker answers KV queries of routers. Say it
	// only when it does: a router waits for the answers.
	LocalIndexer bool
	// KVEvents says that the worker publishes KV events.
	KVEvents bool
	// StableRoutingID keeps a worker's place in hash-based routing over
	// restarts; empty means none.
	StableRoutingID string
	Taints          []string
}

// normalise fills in defaults and checks what a frontend would choke on.
func (s *Spec) normalise(m *Model) error {
	if s.Name == "" {
		return &SpecError{"Name", "is empty"}
	}
	if protocol.Slugify(s.Name) == "" {
		return &SpecError{"Name", fmt.Sprintf("%q has no letter or digit, which the frontend's folder names need", s.Name)}
	}
	names := []string{s.Name}
	for _, a := range s.Aliases {
		switch {
		case a == "":
			return &SpecError{"Aliases", "one is empty"}
		case slices.Contains(names, a):
			return &SpecError{"Aliases", fmt.Sprintf("%q is given twice", a)}
		}
		names = append(names, a)
	}
	if s.SourcePath == "" {
		s.SourcePath = m.dir
	}
	if s.Role == "" {
		s.Role = RoleAggregated
	}
	if _, ok := roles[s.Role]; !ok {
		return &SpecError{"Role", fmt.Sprintf("%q is none of aggregated, prefill, decode", string(s.Role))}
	}
	if s.Endpoints == 0 {
		s.Endpoints = EndpointChat | EndpointCompletions
	}
	if s.Endpoints&^(EndpointChat|EndpointCompletions) != 0 {
		return &SpecError{"Endpoints", "has unknown endpoint types"}
	}
	if s.ContextLength != nil && *s.ContextLength == 0 {
		// For the frontend zero is no "unknown" but a limit that no prompt keeps.
		return &SpecError{"ContextLength", "is zero"}
	}
	if s.KVBlockSize == 0 {
		s.KVBlockSize = DefaultKVBlockSize
	}
	if s.DataParallelSize == 0 {
		s.DataParallelSize = 1
	}
	return nil
}

// Card makes the card for a spec. With a nil hosting the card names the files
// by their local paths, which serves frontends on the same machine; otherwise
// by URLs that [Model.Handler] answers. A spec that makes no valid card is a
// [*SpecError], a file that the wanted endpoints lack an [*Error].
func (m *Model) Card(s Spec, hosting *Hosting) (protocol.Card, error) {
	if err := s.normalise(m); err != nil {
		return protocol.Card{}, err
	}
	if hosting != nil && m.localOnly {
		return protocol.Card{}, &SpecError{"hosting", "the model was loaded for local paths only"}
	}
	row := roles[s.Role]
	modelType := row.modelType
	if modelType == "" {
		modelType = flags(s.Endpoints)
		if s.Endpoints&EndpointChat != 0 {
			if err := m.checkChat(); err != nil {
				return protocol.Card{}, err
			}
		}
	}
	slug := protocol.Slugify(s.Name)
	ref := func(f *file) protocol.File {
		path := f.path
		if hosting != nil {
			path = hosting.URL(slug, f.name)
		}
		return protocol.File{Path: path, Checksum: f.checksum, Size: uint64(f.size)}
	}
	tagged := func(kind string, f *file) *protocol.TaggedFile {
		if f == nil {
			return nil
		}
		return &protocol.TaggedFile{Kind: kind, File: ref(f)}
	}
	tokenizerKind := protocol.KindTokenizer
	if m.tokenizer.name != nameTokenizer {
		tokenizerKind = protocol.KindTikToken
	}
	c := protocol.Card{
		DisplayName:                   s.Name,
		Slug:                          slug,
		SourcePath:                    s.SourcePath,
		ModelInfo:                     tagged(protocol.KindConfig, m.config),
		Tokenizer:                     tagged(tokenizerKind, m.tokenizer),
		PromptFormatter:               tagged(protocol.KindTokenizerConfig, m.tokenizerConfig),
		GenConfig:                     tagged(protocol.KindGenerationConfig, m.generation),
		ArchitecturalMaxContextLength: clone(m.facts.MaxPositions),
		KVCacheBlockSize:              s.KVBlockSize,
		ModelType:                     modelType,
		ModelInput:                    "Tokens",
		WorkerType:                    string(s.Role),
		Needs:                         row.needs,
		Aliases:                       slices.Clone(s.Aliases),
	}
	if m.template != nil {
		c.ChatTemplate = &protocol.ChatTemplate{Kind: templateKind(m.template.name), Custom: m.templateCustom, File: ref(m.template)}
	}
	for _, f := range m.extras {
		c.ExtraFiles = append(c.ExtraFiles, ref(f))
	}
	var err error
	if c.RuntimeConfig, err = s.runtimeConfig(); err != nil {
		return protocol.Card{}, err
	}
	effective := effectiveContext(&c)
	c.ContextLength = &effective
	return c, nil
}

// checkChat finds out whether a frontend could render chats. Tried with the
// frontend of Dynamo 1.6.1: without either it retries for ever and never lists
// the model, under no endpoint.
func (m *Model) checkChat() error {
	const consequence = "a frontend would fail to build the chat endpoint and never list the model; offer completions only, or give a chat template"
	if m.tokenizerConfig == nil {
		return &Error{Kind: ErrNoChatTemplate, Dir: m.dir, File: nameTokenizerConfig, Problem: "is missing", Consequence: consequence}
	}
	if !m.facts.HasChatTemplate {
		return &Error{Kind: ErrNoChatTemplate, Dir: m.dir, File: nameTokenizerConfig,
			Problem:     `has no "chat_template", and there is no ` + nameTemplate + " or " + nameTemplateJSON,
			Consequence: consequence}
	}
	return nil
}

func templateKind(name string) string {
	if hasJSONSuffix(name) {
		return protocol.KindChatTemplateJSON
	}
	return protocol.KindChatTemplate
}

func (s *Spec) runtimeConfig() (protocol.RuntimeConfig, error) {
	rc := protocol.RuntimeConfig{
		ContextLength:                  clone(s.ContextLength),
		TotalKVBlocks:                  clone(s.TotalKVBlocks),
		MaxNumSeqs:                     clone(s.MaxNumSeqs),
		MaxNumBatchedTokens:            clone(s.MaxNumBatchedTokens),
		ToolCallParser:                 nonEmpty(s.ToolCallParser),
		ReasoningParser:                nonEmpty(s.ReasoningParser),
		ToolCallArgumentsFormat:        "json_string",
		StructuralTagMode:              "off",
		StructuralTagScope:             "auto",
		StructuralTagSchema:            "auto",
		ExcludeToolsWhenToolChoiceNone: !s.KeepTools,
		DataParallelSize:               s.DataParallelSize,
		EnableLocalIndexer:             s.LocalIndexer,
		KVEventPublishingEnabled:       &s.KVEvents,
		StableRoutingID:                s.StableRoutingID,
		Taints:                         slices.Clone(s.Taints),
	}
	if !s.NoStructuralTag {
		tag := protocol.StructuralTag{Scope: "always", Schema: "auto", ReasoningBoundary: "auto"}
		if s.StructuralTag != nil {
			tag = *s.StructuralTag
		}
		rc.StructuralTag = &tag
		rc.StructuralTagMode, rc.StructuralTagScope, rc.StructuralTagSchema = "on", tag.Scope, tag.Schema
	}
	if s.ContextLength != nil {
		budget, err := json.Marshal(protocol.TokenBudget{CombinedLimit: *s.ContextLength, RejectPromptOverflow: true})
		if err != nil {
			return rc, fmt.Errorf("model card: token budget: %w", err)
		}
		rc.RuntimeData = map[string]json.RawMessage{"token_budget": budget}
	}
	return rc, nil
}

// effectiveContext is the context length that frontends go by.
func effectiveContext(c *protocol.Card) uint32 {
	for _, n := range []*uint32{c.RuntimeConfig.ContextLength, c.ArchitecturalMaxContextLength, c.ContextLength} {
		if n != nil {
			return *n
		}
	}
	return 0
}

func clone[T any](p *T) *T {
	if p == nil {
		return nil
	}
	v := *p
	return &v
}

func nonEmpty(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}
