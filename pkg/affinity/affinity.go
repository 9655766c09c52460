// Package affinity decides, for one request, what the worker tells the engine about where to run it: a conversation id, a strict attention-DP rank, both or neither.
//
// There are two steps. Resolve turns what the engine process reported about itself into a Gate, once in the life of an engine; it also finds every combination of settings that cannot work, so that a worker can end before it
// registers. Gate.Decide then applies the gate to one request. Both are pure: no I/O, no clock, no shared state. A Gate is immutable and safe for concurrent use.
//
// The engine is the single source of truth. Its resolved configuration says whether it keeps a conversation on one rank (attention_dp_config.kv_cache_routing_conversation_affinity); a switch on the worker's side that disagreed would
// drop the rank that a KV router chose although no router in the engine takes over. The facts about the Dynamo worker's override and about the API that carries the conversation id were recorded from Dynamo 1.6.1.
package affinity

import (
	"fmt"
	"strings"
)

// ConfigPath is the place in the resolved engine configuration that decides the policy. Only a boolean true there counts.
const ConfigPath = "attention_dp_config.kv_cache_routing_conversation_affinity"

// NeededBuild names the first TensorRT-LLM builds whose generate call takes a conversation id.
const NeededBuild = "newer than 1.3.0rc20"

// RankSource says who picks the rank of a conversation's first turn while the policy is on.
type RankSource string

const (
	// SourceEngine leaves the choice to the engine's own router.
	SourceEngine RankSource = "engine"
	// SourceDynamo passes the rank that the frontend's KV router chose, strictly, together with the conversation id.
	SourceDynamo RankSource = "dynamo"
)

// ParseRankSource reads a rank source as a flag, a variable or a file gives it.
func ParseRankSource(s string) (RankSource, error) {
	switch RankSource(s) {
	case SourceEngine, SourceDynamo:
		return RankSource(s), nil
	}
	return "", fmt.Errorf("rank source %q is neither %q nor %q", s, SourceEngine, SourceDynamo)
}

// Override is the state of the worker's own conversation-affinity switch, which exists for the command line's sake.
type Override uint8

const (
	// OverrideUnset means that nobody set the switch.
	OverrideUnset Override = iota
	// OverrideOn asks for the policy.
	OverrideOn
	// OverrideOff is the negated flag. It never turns an engine's policy off.
	OverrideOff
)

// Truth is a fact that an engine reported as true or false, or could not tell.
type Truth uint8

const (
	// Unknown means that the engine process could not find out.
	Unknown Truth = iota
	// No means that the engine process found the feature missing.
	No
	// Yes means that the engine process found the feature.
	Yes
)

// Engine is what an engine process reported about itself in its handshake.
type Engine struct {
	// Build is the engine's version, for messages.
	Build string
	// ConfigReadable says whether the resolved configuration could be read back at all.
	ConfigReadable bool
	// Config is the resolved engine configuration.
	Config map[string]any
	// ConversationParams says whether the build's generate call takes a conversation id.
	ConversationParams bool
	// BindsExplicitRank says whether the build remembers a strict first-turn rank as the conversation's home.
	BindsExplicitRank Truth
	// Ranks is the number of attention-DP ranks; 1 without attention DP. Valid ranks are [0, Ranks).
	Ranks int
}

// PolicyEnabled reports whether the resolved configuration holds a boolean true at ConfigPath. Anything else, a 1 or the text "true" included, is off, as it is for the engine.
func (e *Engine) PolicyEnabled() bool {
	section, ok := e.Config["attention_dp_config"].(map[string]any)
	if !ok {
		return false
	}
	on, ok := section["kv_cache_routing_conversation_affinity"].(bool)
	return ok && on
}

// Settings are the operator's wishes.
type Settings struct {
	Override   Override
	RankSource RankSource
	// TolerateDisagreement keeps the behaviour of Dynamo 1.6.1 when the override asks for the policy and the engine says off: the gate is on, with a warning. Otherwise that is an error.
	TolerateDisagreement bool
	// RejectOutOfRange answers a rank outside [0, Ranks) with an error instead of leaving the choice to the engine.
	RejectOutOfRange bool
}

// Origin says what put the gate into its state.
type Origin string

const (
	// FromConfig is the resolved engine configuration.
	FromConfig Origin = "engine_config"
	// FromOverride is the override with an engine whose configuration could not be read.
	FromOverride Origin = "override"
	// FromToleratedOverride is the override against an engine that says off.
	FromToleratedOverride Origin = "override_against_engine"
)

// Gate is the resolved policy of one engine. The zero Gate is not usable; Resolve makes one.
type Gate struct {
	on               bool
	origin           Origin
	source           RankSource
	ranks            int
	rejectOutOfRange bool
	warnings         []string
}

// On reports whether requests carry a conversation argument.
func (g *Gate) On() bool { return g.on }

// Origin reports what decided the gate.
func (g *Gate) Origin() Origin { return g.origin }

// Source reports who owns a conversation's first rank; it matters only while the gate is on.
func (g *Gate) Source() RankSource { return g.source }

// Ranks reports the number of attention-DP ranks.
func (g *Gate) Ranks() int { return g.ranks }

// Warnings are sentences that an operator should read at start; they never change.
func (g *Gate) Warnings() []string { return g.warnings }

// DisagreementError means that the override asks for a policy that the engine says it does not have.
type DisagreementError struct {
	Build string
	// MissingAPI says that the build could not serve the policy either way.
	MissingAPI bool
}

func (e *DisagreementError) Error() string {
	text := fmt.Sprintf("affinity.override (--conversation-affinity, DYN_ENGINE_CONV_AFFINITY) is on but %s of the engine (build %s) is off: set the engine's option, drop the override, or accept it with affinity.on_disagreement: warn", ConfigPath, orUnknown(e.Build))
	if e.MissingAPI {
		text += "; this build has no ConversationParams API in any case, which takes a TensorRT-LLM build " + NeededBuild
	}
	return text
}

// MissingAPIError means that the policy is on and the engine's build cannot take a conversation id.
type MissingAPIError struct {
	Build  string
	Origin Origin
}

func (e *MissingAPIError) Error() string {
	by := ConfigPath
	if e.Origin != FromConfig {
		by = "affinity.override (--conversation-affinity, DYN_ENGINE_CONV_AFFINITY)"
	}
	return fmt.Sprintf("%s is on but the engine's build %s has no ConversationParams API: a TensorRT-LLM build %s is needed", by, orUnknown(e.Build), NeededBuild)
}

func orUnknown(build string) string {
	if build == "" {
		return "(unknown)"
	}
	return build
}

// Resolve makes the gate of one engine. Its errors (*DisagreementError, *MissingAPIError, or an unusable rank source or rank count) mean that the worker must not register.
func Resolve(e Engine, s Settings) (*Gate, error) {
	if s.RankSource == "" {
		s.RankSource = SourceEngine
	}
	source, err := ParseRankSource(string(s.RankSource))
	if err != nil {
		return nil, fmt.Errorf("affinity.rank_source: %w", err)
	}
	if e.Ranks < 1 {
		return nil, fmt.Errorf("engine reported %d attention-DP ranks, want at least 1", e.Ranks)
	}
	g := &Gate{source: source, ranks: e.Ranks, rejectOutOfRange: s.RejectOutOfRange, origin: FromConfig}
	switch {
	case e.ConfigReadable && e.PolicyEnabled():
		g.on = true
		if s.Override == OverrideOff {
			g.warn("the negated --conversation-affinity does not turn off the policy that %s turned on", ConfigPath)
		}
	case e.ConfigReadable && s.Override == OverrideOn && !s.TolerateDisagreement:
		return nil, &DisagreementError{Build: e.Build, MissingAPI: !e.ConversationParams}
	case e.ConfigReadable && s.Override == OverrideOn:
		g.on, g.origin = true, FromToleratedOverride
		g.warn("affinity.override is on but %s of the engine is off: conversation ids are passed and ranks are not forced, so the engine's ordinary balancing places every turn", ConfigPath)
	case !e.ConfigReadable && s.Override == OverrideOn:
		g.on, g.origin = true, FromOverride
	case !e.ConfigReadable:
		g.warn("the engine's resolved configuration could not be read: conversation affinity counts as off")
	}
	if g.on && !e.ConversationParams {
		return nil, &MissingAPIError{Build: e.Build, Origin: g.origin}
	}
	if g.on && source == SourceDynamo && e.BindsExplicitRank != Yes {
		known := "does not bind"
		if e.BindsExplicitRank == Unknown {
			known = "may not bind"
		}
		g.warn("affinity.rank_source is dynamo but the engine's build %s %s a conversation to its first explicit rank: a later turn can move", orUnknown(e.Build), known)
	}
	return g, nil
}

func (g *Gate) warn(format string, args ...any) {
	g.warnings = append(g.warnings, fmt.Sprintf(format, args...))
}

// SessionID reads the conversation id out of a request's agent_context: a text at session_id of a map, trimmed of the white space that Python's str.strip removes. Anything else is no id and never an error.
// Parent sessions are never used.
func SessionID(agentContext any) (string, bool) {
	m, ok := agentContext.(map[string]any)
	if !ok {
		return "", false
	}
	s, ok := m["session_id"].(string)
	if !ok {
		return "", false
	}
	s = strings.TrimFunc(s, pythonSpace)
	return s, s != ""
}

// pythonSpace is str.isspace of one character: Unicode white space and the four information separators, which unicode.IsSpace leaves out.
func pythonSpace(r rune) bool {
	switch {
	case r >= '\t' && r <= '\r', r >= 0x1c && r <= ' ', r == 0x85, r == 0xa0, r == 0x1680,
		r >= 0x2000 && r <= 0x200a, r == 0x2028, r == 0x2029, r == 0x202f, r == 0x205f, r == 0x3000:
		return true
	}
	return false
}
