package engineargs

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"dynworker/pkg/config/origin"
)

const kvCache = "kv_cache_config"

// typedSections are those of an engine file that TensorRT-LLM turns into
// objects while it merges; true marks the ones that may be null.
var typedSections = map[string]bool{
	kvCache: false, "attention_dp_config": false, "moe_config": false, "quant_config": false, "nvfp4_gemm_config": false, "lora_config": false,
	"decoding_config": false, "calib_config": false, "reorder_policy_config": false, "dwdp_config": false, "multimodal_config": true, "telemetry_config": true,
}

// merger builds the arguments up, layer by layer.
type merger struct {
	args     *Tree
	warnings []Warning
	errs     Errors
}

func (m *merger) fail(path []string, o origin.Origin, format string, args ...any) {
	m.errs = append(m.errs, &Error{Path: slices.Clone(path), Origin: o, Reason: fmt.Sprintf(format, args...)})
}

func (m *merger) warn(path []string, format string, args ...any) {
	m.warnings = append(m.warnings, Warning{Path: Dotted(path), Text: fmt.Sprintf(format, args...)})
}

// mergeFile follows TensorRT-LLM: keys at the top replace, and only the KV
// section keeps those of its entries that the file does not name.
func (m *merger) mergeFile(file *Tree) {
	for _, name := range slices.Sorted(maps.Keys(file.Children)) {
		sub, path := file.Children[name].clone(), []string{name}
		if mayBeNull, ok := typedSections[name]; ok {
			switch {
			case sub.IsMap():
				sub.typed = true
			case !sub.isNull() || !mayBeNull:
				m.fail(path, sub.Origin, "is %s, but must be a mapping; leave it out to keep what it is", show(path, sub))
				continue
			}
		}
		if old := m.args.Children[name]; name == kvCache && old.IsMap() {
			m.mergeKV(old, sub)
			continue
		}
		m.replace(m.args, name, sub, path)
	}
}

func (m *merger) mergeKV(old, sub *Tree) {
	for _, k := range slices.Sorted(maps.Keys(sub.Children)) {
		m.replace(old, k, sub.Children[k], []string{kvCache, k})
	}
	old.Origin, old.typed = sub.Origin, true
}

// mergeOverride follows Dynamo: it descends where both sides are plain
// mappings, and replaces everywhere else.
func (m *merger) mergeOverride(into, from *Tree, path []string) {
	for _, name := range slices.Sorted(maps.Keys(from.Children)) {
		sub, old := from.Children[name], into.Children[name]
		below := append(path[:len(path):len(path)], name)
		if old != nil && old.IsMap() && !old.typed && sub.IsMap() {
			m.mergeOverride(old, sub, below)
			continue
		}
		m.replace(into, name, sub.clone(), below)
	}
}

// replace puts sub in place of what is there and reports what that drops.
func (m *merger) replace(into *Tree, name string, sub *Tree, path []string) {
	if old := into.Children[name]; old != nil {
		m.report(old, sub, path)
	}
	into.put(name, sub)
}

// report warns of a value that somebody set and that counts no more, and of
// entries that go with the section they are in. A default that gives way to
// its setting is nothing to speak of.
func (m *merger) report(old, sub *Tree, path []string) {
	if reflect.DeepEqual(old.Plain(), sub.Plain()) {
		return
	}
	if !old.IsMap() {
		if old.Origin.Kind != origin.Default {
			m.warn(path, "%s (%s) is replaced by %s (%s)", show(path, old), old.Origin, show(path, sub), sub.Origin)
		}
		return
	}
	var lost []string
	old.Walk(func(below []string, leaf *Tree) {
		if leaf.IsMap() {
			return // an empty mapping holds nothing that could be lost
		}
		full := append(path[:len(path):len(path)], below...)
		if now := sub.Get(below...); now == nil {
			lost = append(lost, fmt.Sprintf("%s %s (%s)", Dotted(below), show(full, leaf), leaf.Origin))
		} else {
			m.report(leaf, now, full)
		}
	})
	if len(lost) > 0 {
		m.warn(path, "%s is replaced as a whole by %s (%s), not merged; lost: %s", show(path, old), show(path, sub), sub.Origin, strings.Join(lost, ", "))
	}
}
