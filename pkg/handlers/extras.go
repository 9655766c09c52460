package handlers

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"

	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/protocol"
)

// planExtras maps what is neither sampling nor placement: cache salt, priority, adapter, trace, and a canary's marker.
func (h *Handler) planExtras(body section, call *Call, marked bool, p *plan) error {
	salt, err := cacheSalt(body)
	if err != nil {
		return err
	}
	if marked && salt == "" {
		salt = CanarySalt
	}
	if salt != "" {
		p.generate.CacheSalt = &salt
	}
	if err := h.planPriority(body, p); err != nil {
		return err
	}
	if err := h.planAdapter(body, p); err != nil {
		return err
	}
	if !call.Canary {
		p.generate.TraceHeaders, err = h.traceHeaders(call)
	}
	return err
}

// cacheSalt finds the salt: the routing hint, then the extension field; an empty text is none.
func cacheSalt(body section) (string, error) {
	routing, _, err := body.sub("routing")
	if err != nil {
		return "", err
	}
	salt, _, err := routing.text("cache_salt")
	if err != nil || salt != "" {
		return salt, err
	}
	extra, _, err := body.sub("extra_args")
	if err != nil {
		return "", err
	}
	nvext, _, err := extra.sub("nvext")
	if err != nil {
		return "", err
	}
	salt, _, err = nvext.text("cache_salt")
	return salt, err
}

// planPriority passes a top-level priority on, which only health checks carry. routing.priority is the router's own and was recorded not to reach the engine.
func (h *Handler) planPriority(body section, p *plan) error {
	v, present := body.fields["priority"]
	if present && v == nil && h.rules.nullPriority {
		return nil
	}
	priority, ok, err := body.number("priority")
	if err != nil {
		return err
	}
	if !ok {
		priority = DefaultPriority
	}
	if (priority < 0 || priority > 1) && h.rules.strictRanges {
		return invalid("priority must be within 0 and 1, got %v", priority)
	}
	p.generate.Priority = &priority
	return nil
}

func (h *Handler) planAdapter(body section, p *plan) error {
	if !h.rules.adapters {
		return nil
	}
	routing, _, err := body.sub("routing")
	if err != nil {
		return err
	}
	name, ok, err := routing.text("lora_name")
	if err != nil || !ok || name == "" {
		return err
	}
	a, known := h.adapters[name]
	if !known {
		return invalid("%s names no adapter that this worker serves (lora in its configuration)", routing.path("lora_name"))
	}
	p.generate.LoRA = &ipc.LoRA{Name: a.Name, Path: a.Path, ID: a.ID}
	return nil
}

// traceHeaders are the headers that the engine's own spans join. A request without a trace gets one of its own, as recorded.
func (h *Handler) traceHeaders(call *Call) (map[string]string, error) {
	headers := map[string]string{"request-id": call.ID}
	for k, v := range call.Trace {
		headers[k] = v
	}
	if headers["traceparent"] == "" {
		parent, err := newTraceparent(h.cfg.Random)
		if err != nil {
			return nil, protocol.Internal("make a trace id: " + err.Error())
		}
		headers["traceparent"] = parent
	}
	return headers, nil
}

// newTraceparent makes a W3C trace context header of version 00 with the sampled flag.
func newTraceparent(random io.Reader) (string, error) {
	if random == nil {
		random = rand.Reader
	}
	var id [24]byte
	if _, err := io.ReadFull(random, id[:]); err != nil {
		return "", err
	}
	return fmt.Sprintf("00-%s-%s-01", hex.EncodeToString(id[:16]), hex.EncodeToString(id[16:])), nil
}

// unserved are the fields that would change the answer if they were served, and that this worker does not serve. media is refused by both handlers, as recorded; the rest only where the rules say so.
var unserved = []struct {
	key, reason string
	always      bool
}{
	{"multi_modal_uuids", "belongs to another engine", true},
	{"multi_modal_data", "needs a multimodal worker; this one serves text", true},
	{"prompt_embeds", "is not served: send token ids", false},
	{"encoder_result", "needs a multimodal worker; this one serves text", false},
	{"prefill_result", "belongs to a decode worker, which this one is not", false},
	{"bootstrap_info", "belongs to another engine", false},
}

func (h *Handler) refuseUnserved(body section) error {
	for _, u := range unserved {
		if u.key == "prefill_result" && h.cfg.Role == Decode {
			continue
		}
		if body.has(u.key) && (u.always || h.rules.refuseUnserved) {
			return invalid("%s %s", u.key, u.reason)
		}
	}
	extra, _, err := body.sub("extra_args")
	if err != nil {
		return err
	}
	for _, place := range []section{body, extra} {
		if media(place.fields["messages"]) {
			return invalid("%s holds an image, audio or video part, which needs a multimodal worker; this one serves text", place.path("messages"))
		}
	}
	if !h.rules.refuseUnserved {
		return nil
	}
	stops, _, err := body.sub("stop_conditions")
	if err != nil {
		return err
	}
	if stops.has("max_thinking_tokens") {
		return invalid("%s is not served: the engine has no thinking budget", stops.path("max_thinking_tokens"))
	}
	options, _, err := extra.sub("sampling_options")
	if err != nil {
		return err
	}
	for _, key := range []string{"allowed_token_ids", "bad_words_token_ids", "logprob_token_ids"} {
		if options.has(key) {
			return invalid("%s is not served by this worker", options.path(key))
		}
	}
	return nil
}

// media reports whether messages in the OpenAI form hold a part that is not text.
func media(messages any) bool {
	list, _ := messages.([]any)
	for _, m := range list {
		message, _ := m.(protocol.Map)
		parts, _ := message["content"].([]any)
		for _, p := range parts {
			part, _ := p.(protocol.Map)
			if kind, _ := part["type"].(string); kind != "" && kind != "text" {
				return true
			}
		}
	}
	return false
}
