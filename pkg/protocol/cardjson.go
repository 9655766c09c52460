package protocol

import (
	"encoding/json"
	"errors"
)

// MarshalJSON writes {kind: file}.
func (t TaggedFile) MarshalJSON() ([]byte, error) {
	return recordJSON(map[string]File{t.Kind: t.File}), nil
}

// UnmarshalJSON reads {kind: file}.
func (t *TaggedFile) UnmarshalJSON(b []byte) error {
	var m map[string]File
	if err := json.Unmarshal(b, &m); err != nil {
		return err
	}
	for t.Kind, t.File = range m {
	}
	return onlyOne(len(m))
}

type templateJSON struct {
	Custom bool `json:"is_custom"`
	File   File `json:"file"`
}

// MarshalJSON writes {kind: {"is_custom": …, "file": …}}.
func (t ChatTemplate) MarshalJSON() ([]byte, error) {
	return recordJSON(map[string]templateJSON{t.Kind: {Custom: t.Custom, File: t.File}}), nil
}

// UnmarshalJSON reads what MarshalJSON writes, and the older name of the same
// kind.
func (t *ChatTemplate) UnmarshalJSON(b []byte) error {
	var m map[string]templateJSON
	if err := json.Unmarshal(b, &m); err != nil {
		return err
	}
	for kind, v := range m {
		if kind == "hf_chat_template_jinja" {
			kind = KindChatTemplate
		}
		*t = ChatTemplate{Kind: kind, Custom: v.Custom, File: v.File}
	}
	return onlyOne(len(m))
}

func onlyOne(n int) error {
	if n != 1 {
		return errors.New("not a map of one member")
	}
	return nil
}

// NewRuntimeConfig returns what the real worker registers when nothing is
// configured, without the figures that come from the engine.
func NewRuntimeConfig() RuntimeConfig {
	c := defaultRuntimeConfig()
	c.StructuralTag = &StructuralTag{Scope: "always", Schema: "auto", ReasoningBoundary: "auto"}
	c.StructuralTagMode, c.StructuralTagScope, c.StructuralTagSchema = "on", "always", "auto"
	events := false
	c.KVEventPublishingEnabled = &events
	return c
}

// defaultRuntimeConfig holds what a reader assumes for members that are not
// there.
func defaultRuntimeConfig() RuntimeConfig {
	return RuntimeConfig{
		ToolCallArgumentsFormat:        "json_string",
		ExcludeToolsWhenToolChoiceNone: true,
		DataParallelSize:               1,
		EnableLocalIndexer:             true,
	}
}

const tokenBudgetKey = "token_budget"

// SetTokenBudget puts a budget into RuntimeData.
func (c *RuntimeConfig) SetTokenBudget(b TokenBudget) {
	if c.RuntimeData == nil {
		c.RuntimeData = map[string]json.RawMessage{}
	}
	c.RuntimeData[tokenBudgetKey] = recordJSON(b)
}

// TokenBudget returns the budget in RuntimeData, and false when there is none
// that can be read.
func (c *RuntimeConfig) TokenBudget() (TokenBudget, bool) {
	var b TokenBudget
	raw, ok := c.RuntimeData[tokenBudgetKey]
	return b, ok && json.Unmarshal(raw, &b) == nil
}
