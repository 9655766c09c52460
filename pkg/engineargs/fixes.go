package engineargs

import (
	"math"
	"strconv"
	"strings"

	"dynworker/pkg/config/origin"
)

const (
	// backend is the only one that Dynamo 1.6.1 runs.
	backend = "pytorch"
	// eventBuffer is the number of KV events that the engine keeps for the
	// worker, where nobody set another one.
	eventBuffer = 100_000
)

// dropPostprocessWorkers removes an argument with which the engine would hand
// out text instead of the results that the worker reads.
func (m *merger) dropPostprocessWorkers() {
	const name = "num_postprocess_workers"
	t := m.args.drop(name)
	if t == nil || t.isNull() {
		return
	}
	if n, ok := asInt(t.Value); ok && t.Children == nil && n <= 0 {
		return
	}
	m.warn([]string{name}, "%s (%s) is left out: the worker needs the engine's plain results", show([]string{name}, t), t.Origin)
}

// asInt reads a number as Python's int() does.
func asInt(v any) (int64, bool) {
	switch v := v.(type) {
	case bool:
		if v {
			return 1, true
		}
		return 0, true
	case int64:
		return v, true
	case uint64:
		return int64(min(v, math.MaxInt64)), true
	case float64:
		return int64(v), true
	case string:
		n, err := strconv.ParseInt(strings.TrimSpace(v), 10, 64)
		return n, err == nil
	}
	return 0, false
}

func (m *merger) checkBackend() {
	path := []string{"backend"}
	if t := m.args.Get(path...); t != nil && t.Plain() != any(backend) {
		m.fail(path, t.Origin, "%s is not supported, only %s is", show(path, t), backend)
	}
}

// events makes the engine keep KV events for the worker.
func (m *merger) events(in Input, r *Result) {
	path := []string{kvCache}
	kv := m.args.Get(path...)
	switch {
	case kv.isNull() && !in.PublishKVEvents:
		return // the engine takes it for its own default
	case !kv.IsMap():
		m.fail(path, kv.Origin, "is %s, but must be a mapping", show(path, kv))
		return
	}
	streams := m.streams(kv)
	switch {
	case !in.PublishKVEvents:
		if streams {
			m.warn([]string{kvCache, eventsConfig}, "has no effect, since KV events are not published (publish.kv_events)")
		}
		return
	case streams:
		r.EventMode = EventsStreaming
		if !in.StreamingEvents {
			m.fail([]string{kvCache, eventsConfig}, kv.Get(eventsConfig).Origin, "needs TLLM_KV_CACHE_MANAGER_V2_BACKEND=python in the engine's environment")
		}
		return
	}
	r.EventMode = EventsPolling
	const buffer = "event_buffer_max_size"
	full := []string{kvCache, buffer}
	if kv.typed { // Dynamo leaves out what is null when it makes a dict of the section
		for name, sub := range kv.Children {
			if sub.isNull() {
				kv.drop(name)
			}
		}
	}
	if t := kv.Get(buffer); t == nil || falsy(t) {
		kv.put(buffer, &Tree{Value: int64(eventBuffer), Origin: origin.Origin{Kind: origin.Worker}})
	}
	t := kv.Get(buffer)
	n, ok := asInt(t.Value)
	if !ok || t.Children != nil {
		m.fail(full, t.Origin, "%s is not a number", show(full, t))
	}
	r.EventBuffer = n
	if reuse := kv.Get("enable_block_reuse"); reuse != nil && reuse.Value == any(false) {
		m.warn([]string{kvCache, "enable_block_reuse"}, "is false (%s): the engine then has no KV events that a router could use", reuse.Origin)
	}
}

const eventsConfig = "kv_events_config"

// streams reports whether the engine is told to publish KV events by itself.
func (m *merger) streams(kv *Tree) bool {
	path := []string{kvCache, eventsConfig}
	t := kv.Get(eventsConfig)
	if t == nil || t.isNull() {
		return false
	}
	if !t.IsMap() {
		m.fail(path, t.Origin, "is %s, but must be a mapping", show(path, t))
		return false
	}
	on := t.Get("enable_kv_cache_events")
	if on == nil || falsy(on) {
		return false
	}
	publisher := t.Get("publisher")
	switch {
	case publisher == nil || publisher.isNull() || publisher.Value == any("zmq"):
		return true
	case publisher.Value == any("null"):
		return false
	}
	full := append(path, "publisher")
	m.fail(full, publisher.Origin, "%s is neither zmq nor null", show(full, publisher))
	return false
}

// falsy is Python's idea of an empty value.
func falsy(t *Tree) bool {
	switch v := t.Value.(type) {
	case nil:
		return t.Children == nil
	case bool:
		return !v
	case int64:
		return v == 0
	case float64:
		return v == 0
	case string:
		return v == ""
	case []any:
		return len(v) == 0
	case map[string]any:
		return true
	}
	return false
}
