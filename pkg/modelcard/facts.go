package modelcard

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
)

// Facts are what the worker itself wants to know from the model's files.
type Facts struct {
	Architectures []string
	ModelType     string
	// EOSTokenIDs are the ids that end a text, in the order in which a frontend finds
	// them. Never empty.
	EOSTokenIDs []uint32
	// BOSTokenID is the id that begins a text; nil when the model names none.
	BOSTokenID *uint32
	// MaxPositions is the architecture's context length in tokens, nil when no
	// file tells.
	MaxPositions *uint32
	// VocabSize is the number of token ids according to the config, nil when it
	// does not tell.
	VocabSize *uint32
	// HasChatTemplate tells whether tokenizer_config.json holds a template or
	// there is one in a file of its own.
	HasChatTemplate bool
}

// textConfig are the fields that multimodal models keep in text_config and
// others at the top of config.json.
type textConfig struct {
	MaxPositionEmbeddings json.RawMessage `json:"max_position_embeddings"`
	EOSTokenID            json.RawMessage `json:"eos_token_id"`
	BOSTokenID            json.RawMessage `json:"bos_token_id"`
	VocabSize             json.RawMessage `json:"vocab_size"`
}

type configJSON struct {
	Architectures []string `json:"architectures"`
	ModelType     *string  `json:"model_type"`
	textConfig
	TextConfig *textConfig `json:"text_config"`
}

type generationJSON struct {
	EOSTokenID json.RawMessage `json:"eos_token_id"`
	BOSTokenID json.RawMessage `json:"bos_token_id"`
}

// tokenizerConfigJSON is tokenizer_config.json, and for its two tokens also
// special_tokens_map.json.
type tokenizerConfigJSON struct {
	EOSToken       json.RawMessage            `json:"eos_token"`
	BOSToken       json.RawMessage            `json:"bos_token"`
	ModelMaxLength json.RawMessage            `json:"model_max_length"`
	ChatTemplate   json.RawMessage            `json:"chat_template"`
	AddedTokens    map[string]json.RawMessage `json:"added_tokens_decoder"`
}

// gather fills m.facts from the files that were read. It finds EOS and BOS as
// the frontend of Dynamo 1.6.1 does (its model_card.rs): generation config,
// then config, then the tokenizer's files; the tokenizer's own EOS is added to
// what the first two say.
func (m *Model) gather(specialTokensMap []byte) error {
	var cfg configJSON
	if err := decodeLenient(m.config.data, &cfg); err != nil {
		return m.bad(m.config.name, "cannot be understood", err)
	}
	if cfg.Architectures == nil {
		return m.bad(m.config.name, `has no list "architectures"`, nil)
	}
	if cfg.ModelType == nil {
		return m.bad(m.config.name, `has no "model_type"`, nil)
	}
	text := cfg.textConfig
	if cfg.TextConfig != nil {
		text = *cfg.TextConfig
	}
	var gen generationJSON
	var tok, special tokenizerConfigJSON
	for _, f := range []struct {
		name string
		data []byte
		into any
	}{
		{nameGenerationConfig, m.generation.bytes(), &gen},
		{nameTokenizerConfig, m.tokenizerConfig.bytes(), &tok},
		{nameSpecialTokensMap, specialTokensMap, &special},
	} {
		if f.data == nil {
			continue
		}
		if err := json.Unmarshal(f.data, f.into); err != nil {
			return m.bad(f.name, "is not valid JSON", err)
		}
	}

	m.facts = Facts{
		Architectures:   cfg.Architectures,
		ModelType:       *cfg.ModelType,
		HasChatTemplate: m.template != nil || present(tok.ChatTemplate),
	}
	var err error
	if m.facts.MaxPositions, err = m.maxPositions(cfg, tok); err != nil {
		return err
	}
	m.facts.VocabSize = firstID(cfg.VocabSize, text.VocabSize)

	find := tokenFinder{m: m, config: tok}
	m.facts.EOSTokenIDs = firstIDs(gen.EOSTokenID, cfg.EOSTokenID, text.EOSTokenID)
	tokEOS, ok := find.id(tok.EOSToken)
	if !ok && len(m.facts.EOSTokenIDs) == 0 {
		tokEOS, ok = find.id(special.EOSToken)
	}
	if ok && !slices.Contains(m.facts.EOSTokenIDs, tokEOS) {
		m.facts.EOSTokenIDs = append(m.facts.EOSTokenIDs, tokEOS)
	}
	if m.facts.BOSTokenID = firstID(gen.BOSTokenID, cfg.BOSTokenID, text.BOSTokenID); m.facts.BOSTokenID == nil {
		for _, token := range []json.RawMessage{tok.BOSToken, special.BOSToken} {
			if id, ok := find.id(token); ok {
				m.facts.BOSTokenID = &id
				break
			}
		}
	}
	if find.err != nil {
		return find.err
	}
	if len(m.facts.EOSTokenIDs) == 0 {
		return &Error{Kind: ErrNoEOS, Dir: m.dir, Problem: "none of " + nameGenerationConfig + ", " + nameConfig + ", " +
			nameTokenizerConfig + " and " + nameSpecialTokensMap + " names a usable end-of-sequence token",
			Consequence: "a frontend would fail to build the model and try again for ever"}
	}
	return nil
}

// maxPositions is the architecture's context length: config first, then its
// text part, then, as a last resort, the tokenizer's own limit.
func (m *Model) maxPositions(cfg configJSON, tok tokenizerConfigJSON) (*uint32, error) {
	raws := []json.RawMessage{cfg.MaxPositionEmbeddings}
	if cfg.TextConfig != nil {
		raws = append(raws, cfg.TextConfig.MaxPositionEmbeddings)
	}
	for _, raw := range raws {
		if !present(raw) {
			continue
		}
		n, ok := tokenID(raw)
		if !ok {
			return nil, m.bad(nameConfig, "max_position_embeddings is no whole number of tokens", nil)
		}
		if n == 0 {
			return nil, nil
		}
		return &n, nil
	}
	// Often a huge number that means "none", which is no u32.
	if n, ok := tokenID(tok.ModelMaxLength); ok && n > 0 {
		return &n, nil
	}
	return nil, nil
}

func present(raw json.RawMessage) bool { return len(raw) > 0 && string(raw) != "null" }

// tokenID reads a u32. As for the frontend, 2.0 is none.
func tokenID(raw json.RawMessage) (uint32, bool) {
	n, err := strconv.ParseUint(string(raw), 10, 32)
	return uint32(n), err == nil
}

// firstID is the first of raws that is an id.
func firstID(raws ...json.RawMessage) *uint32 {
	for _, raw := range raws {
		if id, ok := tokenID(raw); ok {
			return &id
		}
	}
	return nil
}

// firstIDs reads the first of raws that is an id or a list with at least one.
func firstIDs(raws ...json.RawMessage) []uint32 {
	for _, raw := range raws {
		if id, ok := tokenID(raw); ok {
			return []uint32{id}
		}
		var list []json.RawMessage
		if !present(raw) || json.Unmarshal(raw, &list) != nil {
			continue
		}
		var ids []uint32
		for _, e := range list {
			if id, ok := tokenID(e); ok && !slices.Contains(ids, id) {
				ids = append(ids, id)
			}
		}
		if len(ids) > 0 {
			return ids
		}
	}
	return nil
}

// tokenFinder maps the text of a special token to its id.
type tokenFinder struct {
	m      *Model
	config tokenizerConfigJSON
	added  map[string]uint32 // of tokenizer.json, once it was needed
	err    error             // tokenizer.json could not be understood
}

// id resolves a token given as "text" or {"content": "text"}.
func (f *tokenFinder) id(token json.RawMessage) (uint32, bool) {
	text, ok := tokenText(token)
	if !ok {
		return 0, false
	}
	best, found := uint32(0), false
	for key, raw := range f.config.AddedTokens {
		if t, ok := tokenText(raw); !ok || t != text {
			continue
		}
		// The smallest id, should two be given: map order must not decide.
		if id, err := strconv.ParseUint(key, 10, 32); err == nil && (!found || uint32(id) < best) {
			best, found = uint32(id), true
		}
	}
	if found {
		return best, true
	}
	if f.m.tokenizer == nil || f.m.tokenizer.name != nameTokenizer {
		return 0, false
	}
	if f.added == nil {
		f.loadAdded()
	}
	id, ok := f.added[text]
	return id, ok
}

func (f *tokenFinder) loadAdded() {
	f.added = make(map[string]uint32)
	var tok struct {
		AddedTokens []struct {
			ID      json.RawMessage `json:"id"`
			Content string          `json:"content"`
		} `json:"added_tokens"`
	}
	if err := json.Unmarshal(f.m.tokenizer.data, &tok); err != nil {
		f.err = f.m.bad(nameTokenizer, "cannot be understood", err)
		return
	}
	for _, t := range tok.AddedTokens {
		if id, ok := tokenID(t.ID); ok {
			if _, twice := f.added[t.Content]; !twice {
				f.added[t.Content] = id
			}
		}
	}
}

func tokenText(raw json.RawMessage) (string, bool) {
	if !present(raw) {
		return "", false
	}
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return s, true
	}
	var o struct {
		Content *string `json:"content"`
	}
	if json.Unmarshal(raw, &o) == nil && o.Content != nil {
		return *o.Content, true
	}
	return "", false
}

// bad is a file that is there but of no use.
func (m *Model) bad(file, problem string, err error) error {
	return &Error{Kind: ErrBadFile, Dir: m.dir, File: file, Problem: problem, Err: err,
		Consequence: fmt.Sprintf("a frontend that reads %s so would fail to build the model and try again for ever", file)}
}
