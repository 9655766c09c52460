package replay

import (
	"encoding/json"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"dynworker/pkg/protocol"
)

// Two runs are equal when their canonical forms are. A canonical form is a JSON tree without what may differ: request ids and trace ids, the cutting of an answer into frames, texts of errors, the order of what is a set.

// absent stands for a value that one side does not have.
type absent struct{}

// canonicalAnswer is what a client got on one connection.
//
//	order      kinds of frames in their order, neighbours of one kind once: handshake, prologue, chunk (of a choice), bare (a chunk without index), error, final, sentinel, eof, reset
//	handshake, prologue   their headers
//	choices    by index the items of that choice, neighbours joined
//	bare, errors, strange   chunks without index, error items, and everything that is neither
func canonicalAnswer(events []event) protocol.Map {
	out := protocol.Map{}
	choices := protocol.Map{}
	var order []string
	gone, words := false, 0
	add := func(kind string) {
		if len(order) == 0 || order[len(order)-1] != kind {
			order = append(order, kind)
		}
	}
	list := func(key string, v any) {
		l, _ := out[key].([]any)
		out[key] = append(l, v)
	}
	for _, e := range events {
		switch e.kind {
		case "client":
			// A client that has hung up sees nothing of what the worker does.
			gone = gone || e.did == "close" || e.did == "reset"
			if e.did == "stop" || e.did == "kill" {
				words++
			}
		case "eof", "reset":
			switch {
			case gone:
			case words > 1:
				// The worker closes at the first word. The kernel answers the second with a reset if it comes after that.
				add("eof")
			default:
				add(e.kind)
			}
		case "handshake":
			add(e.kind)
			out["handshake"] = masked(e.header, "subject")
		case "prologue":
			add(e.kind)
			out["prologue"] = e.header
		case "control":
			word, _ := e.header.(string)
			add(word)
		case "data":
			kind, item := itemOf(e.body)
			add(kind)
			switch kind {
			case "chunk":
				index := strconv.FormatInt(item["index"].(int64), 10)
				items, _ := choices[index].([]any)
				choices[index] = join(items, item)
			case "final":
			default:
				list(map[string]string{"bare": "bare", "error": "errors"}[kind], item)
			}
		}
	}
	out["order"] = strings.Join(order, " ")
	if len(choices) > 0 {
		out["choices"] = choices
	}
	return out
}

// masked replaces texts that are made anew each time by their names.
func masked(v any, keys ...string) any {
	m, ok := v.(protocol.Map)
	if !ok {
		return v
	}
	out := protocol.Map{}
	for k, v := range m {
		if s, isText := v.(string); isText && s != "" && slices.Contains(keys, k) {
			v = "<" + k + ">"
		}
		out[k] = v
	}
	return out
}

// itemOf takes a data frame's body apart. An envelope that is not exactly as it should be makes the item strange.
func itemOf(body any) (kind string, item protocol.Map) {
	strange := protocol.Map{"strange": body}
	envelope, _ := body.(protocol.Map)
	inner, _ := envelope["data"].(protocol.Map)
	chunk, isChunk := inner["data"].(protocol.Map)
	failure, isError := inner["error"].(protocol.Map)
	switch {
	case len(envelope) == 1 && envelope["complete_final"] == true:
		return "final", nil
	case len(envelope) != 2 || envelope["complete_final"] != false:
		return "strange", strange
	case isChunk && len(inner) == 1:
		chunk = withoutText(chunk)
		if _, ok := chunk["index"].(int64); ok {
			return "chunk", chunk
		}
		return "bare", chunk
	case isError && len(inner) == 2 && inner["event"] == "error":
		return "error", protocol.Map{"error_type": failure["error_type"], "class": failure["class"], "reason": failure["reason"]}
	}
	return "strange", strange
}

// withoutText is a chunk without the wording of an error.
func withoutText(chunk protocol.Map) protocol.Map {
	out := protocol.Map{}
	for k, v := range chunk {
		out[k] = v
	}
	if left, ok := chunk["disaggregated_params"].(protocol.Map); ok {
		out["disaggregated_params"] = handoffShape(left)
	}
	if reason, ok := chunk["finish_reason"].(protocol.Map); ok {
		out["finish_reason"] = masked(reason, "error")
		if reason["error"] == "" {
			out["finish_reason"] = protocol.Map{"error": "<error>"}
		}
	}
	return out
}

// handoffShape names the ids and the state that an engine makes anew with each prompt. What a decode worker passes on came with its request and is compared as it is.
func handoffShape(params protocol.Map) protocol.Map {
	if params["request_type"] != "context_only" {
		return params
	}
	out := masked(params, "opaque_state").(protocol.Map)
	for _, key := range []string{"ctx_request_id", "disagg_request_id"} {
		id, isNumber := out[key].(int64)
		if isNumber && id > 0 || out[key] == "<disagg id>" {
			out[key] = "<id>"
		}
	}
	return out
}

// growing are the keys of a chunk that continue in the next one.
var growing = []string{"token_ids", "log_probs", "top_logprobs"}

// join adds an item to those of its choice. The item before it takes it up if it says nothing but tokens and has the same kinds of lists.
func join(items []any, item protocol.Map) []any {
	if len(items) == 0 {
		return append(items, item)
	}
	before := items[len(items)-1].(protocol.Map)
	joined := protocol.Map{}
	for k, v := range before {
		if k != "index" && !slices.Contains(growing, k) {
			return append(items, item)
		}
		joined[k] = v
	}
	for _, k := range growing {
		a, inBefore := before[k].([]any)
		b, inItem := item[k].([]any)
		if inBefore != inItem {
			return append(items, item)
		}
		if inItem {
			joined[k] = append(slices.Clone(a), b...)
		}
	}
	for k, v := range item {
		if !slices.Contains(growing, k) {
			joined[k] = v
		}
	}
	items[len(items)-1] = joined
	return items
}

// cut prepares two answers that ended at a moment that differs from run to run: the longer sequence of tokens is shortened to the other when it begins with it, a prologue or the first chunk may be missing, and usage counts what was sent.
func cut(a, b protocol.Map) {
	for _, m := range []protocol.Map{a, b} {
		words := strings.Fields(m["order"].(string))
		words = slices.DeleteFunc(words, func(w string) bool { return w == "prologue" || w == "chunk" })
		m["order"] = strings.Join(words, " ")
		if p, ok := m["prologue"].(protocol.Map); ok && len(p) == 1 && p["error"] == nil {
			delete(m, "prologue")
		}
		countSent(m)
	}
	ca, _ := a["choices"].(protocol.Map)
	cb, _ := b["choices"].(protocol.Map)
	for _, m := range []*protocol.Map{&ca, &cb} {
		if *m == nil {
			*m = protocol.Map{}
		}
	}
	for _, index := range append(keys(ca), keys(cb)...) {
		cutChoice(ca, cb, index)
	}
	a["choices"], b["choices"] = ca, cb
}

// cutChoice shortens the tokens of one choice.
func cutChoice(a, b protocol.Map, index string) {
	ta, tb := tokensOf(a, index), tokensOf(b, index)
	n := min(len(ta), len(tb))
	if !slices.Equal(ta[:n], tb[:n]) {
		return // the comparison will show it
	}
	for _, m := range []protocol.Map{a, b} {
		items, ok := m[index].([]any)
		if !ok {
			m[index] = []any{protocol.Map{"index": number(index), "token_ids": []any{}}}
			continue
		}
		item := protocol.Map{}
		for k, v := range items[0].(protocol.Map) {
			item[k] = v
		}
		item["token_ids"] = slices.Clone(ta[:n])
		m[index] = append([]any{item}, items[1:]...)
	}
}

// tokensOf are the tokens of a choice's first item, which are all of them in an answer without log probabilities.
func tokensOf(choices protocol.Map, index string) []any {
	items, _ := choices[index].([]any)
	if len(items) == 0 {
		return nil
	}
	ids, _ := items[0].(protocol.Map)["token_ids"].([]any)
	return ids
}

// countSent replaces the counts of usage by words if they agree with what was sent.
func countSent(m protocol.Map) {
	choices, _ := m["choices"].(protocol.Map)
	sent := int64(0)
	for index := range choices {
		sent += int64(len(tokensOf(choices, index)))
	}
	for _, items := range choices {
		for i, item := range items.([]any) {
			item := item.(protocol.Map)
			usage, ok := item["completion_usage"].(protocol.Map)
			if !ok || usage["completion_tokens"] != sent || usage["total_tokens"] != usage["prompt_tokens"].(int64)+sent {
				continue
			}
			counted, changed := protocol.Map{}, protocol.Map{}
			for k, v := range usage {
				counted[k] = v
			}
			counted["completion_tokens"], counted["total_tokens"] = "<sent>", "<prompt and sent>"
			for k, v := range item {
				changed[k] = v
			}
			changed["completion_usage"] = counted
			items.([]any)[i] = changed
		}
	}
}

func number(text string) int64 {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		panic(err)
	}
	return n
}

func keys(m protocol.Map) []string {
	var out []string
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

// traceparent is the form of a W3C trace context header.
var traceparent = regexp.MustCompile(`^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$`)

// canonicalCall is what generate_async was called with.
func canonicalCall(line protocol.Map) protocol.Map {
	call := protocol.Map{}
	for k, v := range line {
		if k != "event" && k != "t" {
			call[k] = v
		}
	}
	if headers, ok := call["trace_headers"].(protocol.Map); ok {
		// The id is what the call was found by, so it is the request's.
		made := []string{"request-id"}
		if text, _ := headers["traceparent"].(string); traceparent.MatchString(text) {
			made = append(made, "traceparent")
		}
		call["trace_headers"] = masked(headers, made...)
	}
	if order, ok := call["disaggregated_params"].(protocol.Map); ok {
		call["disaggregated_params"] = handoffShape(order)
	}
	if sampling, ok := call["sampling_params"].(protocol.Map); ok {
		call["sampling_params"] = canonicalSampling(sampling)
	}
	return call
}

func canonicalSampling(sampling protocol.Map) protocol.Map {
	out := protocol.Map{}
	for k, v := range sampling {
		out[k] = v
	}
	if ids, ok := sampling["stop_token_ids"].([]any); ok {
		ids = slices.Clone(ids)
		slices.SortFunc(ids, func(a, b any) int { return int(a.(int64) - b.(int64)) })
		out["stop_token_ids"] = ids
	}
	if guide, ok := sampling["guided_decoding"].(protocol.Map); ok {
		if text, ok := guide["structural_tag"].(string); ok {
			if tag, err := protocol.DecodeValue(protocol.CodecJSON, []byte(text)); err == nil {
				guide = masked(guide).(protocol.Map)
				guide["structural_tag"] = tag
				out["guided_decoding"] = guide
			}
		}
	}
	return out
}

// engineSide is what the engine saw of one request.
type engineSide struct {
	calls    []protocol.Map
	aborts   int
	finishes []protocol.Map
	// rank is where the stand-in ran it, and conversation what its router knew it as.
	rank         int64
	conversation string
}

// canonical is the engine's side for comparison. How a request that was aborted ended, and after how many tokens, is the stand-in's affair.
func (e *engineSide) canonical() protocol.Map {
	out := protocol.Map{"aborts": int64(e.aborts)}
	for i, call := range e.calls {
		if i == 0 {
			out["calls"] = []any{}
		}
		out["calls"] = append(out["calls"].([]any), canonicalCall(call))
	}
	if e.aborts == 0 {
		for _, f := range e.finishes {
			l, _ := out["finishes"].([]any)
			finish := protocol.Map{}
			for _, k := range []string{"reason", "tokens"} {
				if v, ok := f[k]; ok {
					finish[k] = v
				}
			}
			out["finishes"] = append(l, finish)
		}
	}
	return out
}

// sortByRequest sorts the lines of a stand-in's log by request, and returns the requests under the id that came with them, and those without one (health checks) in their order. The line of a call is followed at once by that of its
// placement, which has the number under which the stand-in speaks of it from then on. Recordings have no such lines; where they have several calls, these are the first ones of a worker and numbered in their order.
func sortByRequest(lines []protocol.Map) (byID map[string]*engineSide, nameless []*engineSide) {
	byID = map[string]*engineSide{}
	byNumber := map[int64]*engineSide{}
	placed := slices.ContainsFunc(lines, func(line protocol.Map) bool { return line["event"] == "placed" })
	var latest *engineSide
	calls := int64(0)
	for _, line := range lines {
		n, _ := line["request_id"].(int64)
		switch line["event"] {
		case "generate_async":
			latest = sideOf(line, byID, &nameless)
			latest.calls = append(latest.calls, line)
			if calls++; !placed {
				byNumber[calls] = latest
			}
		case "placed":
			byNumber[n] = latest
			latest.rank, _ = line["rank"].(int64)
			latest.conversation, _ = line["conversation"].(string)
		case "abort", "finish":
			r := byNumber[n]
			if r == nil {
				r = latest
			}
			if line["event"] == "abort" {
				r.aborts++
			} else {
				r.finishes = append(r.finishes, line)
			}
		}
	}
	return byID, nameless
}

// sideOf finds the request that a call belongs to, a new one usually.
func sideOf(line protocol.Map, byID map[string]*engineSide, nameless *[]*engineSide) *engineSide {
	headers, _ := line["trace_headers"].(protocol.Map)
	id, named := headers["request-id"].(string)
	if side := byID[id]; named && side != nil {
		return side
	}
	side := &engineSide{rank: -1}
	if named {
		byID[id] = side
	} else {
		*nameless = append(*nameless, side)
	}
	return side
}

// plain turns any tree of JSON or YAML values into one whose numbers can be compared.
func plain(v any) any {
	switch v := v.(type) {
	case protocol.Map:
		out := protocol.Map{}
		for k, e := range v {
			out[k] = plain(e)
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i := range v {
			out[i] = plain(v[i])
		}
		return out
	case int:
		return int64(v)
	case float64:
		if n := int64(v); float64(n) == v {
			return n
		}
	}
	return v
}

// show writes a value for people.
func show(v any) string {
	if _, none := v.(absent); none {
		return "absent"
	}
	text, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(text)
}
