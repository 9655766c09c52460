package handlers

import (
	"encoding/json"
	"strings"

	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/protocol"
)

// planGuided maps guided_decoding onto the engine's guide. nil means no guide; an empty guide is passed on as such, as recorded. A choice becomes a regular expression, and an explicit regular expression wins over it.
func (h *Handler) planGuided(s section, call *Call) (*ipc.Guided, error) {
	g, _, err := s.sub("guided_decoding")
	if err != nil || g.fields == nil {
		return nil, err
	}
	guide := &ipc.Guided{}
	guides := 0
	for _, step := range []func(section, *Call, *ipc.Guided) (bool, error){schemaGuide, grammarGuide, objectGuide, tagGuide, regexGuide} {
		given, err := step(g, call, guide)
		if err != nil {
			return nil, err
		}
		if given {
			guides++
		}
	}
	if guides > 1 {
		return nil, invalid("%s takes one guide, got %d", g.name, guides)
	}
	if can := h.cfg.GuidedDecoding; guides > 0 && h.rules.guidedCapability && can != nil && !*can {
		return nil, invalid("%s cannot be served: the engine was started without a guided decoding backend (guided_decoding_backend)", g.name)
	}
	return guide, nil
}

// ordered gives a field of guided_decoding as JSON in the caller's own key order, which is the order in which a grammar lets an object's members appear.
func ordered(g section, call *Call, key, want string) (json.RawMessage, error) {
	text, ok, err := protocol.ExtractJSON(call.Codec, call.Body, "sampling_options", "guided_decoding", key)
	if err != nil || !ok {
		return nil, g.wrongType(key, want)
	}
	return text, nil
}

func schemaGuide(g section, call *Call, guide *ipc.Guided) (bool, error) {
	const want = "a schema as a map or as text"
	var err error
	switch g.fields["json"].(type) {
	case nil:
		return false, nil
	case string, bool, protocol.Map:
		guide.JSON, err = ordered(g, call, "json", want)
	default:
		err = g.wrongType("json", want)
	}
	return true, err
}

func objectGuide(g section, _ *Call, guide *ipc.Guided) (bool, error) {
	object, _, err := g.boolean("json_object")
	if object {
		guide.JSONObject = &object
	}
	return object, err
}

func tagGuide(g section, call *Call, guide *ipc.Guided) (bool, error) {
	const want = "a tag as a map or as text"
	switch v := g.fields["structural_tag"].(type) {
	case nil:
		return false, nil
	case string:
		guide.StructuralTag = &v
		return true, nil
	case protocol.Map:
		raw, err := ordered(g, call, "structural_tag", want)
		text := string(raw)
		guide.StructuralTag = &text
		return true, err
	}
	return true, g.wrongType("structural_tag", want)
}

func grammarGuide(g section, _ *Call, guide *ipc.Guided) (bool, error) {
	text, ok, err := g.text("grammar")
	if ok {
		guide.Grammar = &text
	}
	return ok, err
}

func regexGuide(g section, _ *Call, guide *ipc.Guided) (bool, error) {
	regex, ok, err := g.text("regex")
	if err != nil {
		return true, err
	}
	if !ok {
		if regex, err = choiceRegex(g); err != nil || regex == "" {
			return err != nil, err
		}
	}
	guide.Regex = &regex
	return true, nil
}

// choiceRegex makes one group of the escaped alternatives; nulls among them are dropped, and nothing is made of nothing.
func choiceRegex(g section) (string, error) {
	v := g.fields["choice"]
	if v == nil {
		return "", nil
	}
	list, ok := v.([]any)
	if !ok {
		return "", g.wrongType("choice", "a list of texts")
	}
	var alternatives []string
	for _, e := range list {
		switch e := e.(type) {
		case nil:
		case string:
			alternatives = append(alternatives, escapeRegex(e))
		default:
			return "", g.wrongType("choice", "a list of texts")
		}
	}
	if len(alternatives) == 0 {
		return "", nil
	}
	return "(" + strings.Join(alternatives, "|") + ")", nil
}

// regexSpecial are the characters that Python's re.escape puts a backslash before (since Python 3.7). Go's regexp.QuoteMeta knows fewer.
const regexSpecial = "()[]{}?*+-|^$\\.&~# \t\n\r\v\f"

func escapeRegex(s string) string {
	var b strings.Builder
	for _, r := range s {
		if strings.ContainsRune(regexSpecial, r) {
			b.WriteByte('\\')
		}
		b.WriteRune(r)
	}
	return b.String()
}
