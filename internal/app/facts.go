package app

import (
	"encoding/json"
	"fmt"

	"dynworker/pkg/affinity"
	"dynworker/pkg/config"
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/protocol"
)

// affinityFacts turns an engine's report into what the affinity gate looks at.
func affinityFacts(r *ipc.Ready) (affinity.Engine, error) {
	e := affinity.Engine{
		Build:              r.Version,
		ConfigReadable:     r.ConfigReadable,
		ConversationParams: r.Capabilities.ConversationParams,
		BindsExplicitRank:  affinity.No,
		Ranks:              r.AttentionDPSize,
	}
	if r.Capabilities.BindsExplicitRank {
		e.BindsExplicitRank = affinity.Yes
	}
	if !r.ConfigReadable {
		return e, nil
	}
	v, err := protocol.DecodeValue(protocol.CodecJSON, r.ResolvedConfig)
	if err != nil {
		return e, fmt.Errorf("the engine's resolved configuration: %w", err)
	}
	e.Config, _ = v.(protocol.Map)
	return e, nil
}

// affinitySettings are the operator's wishes.
func affinitySettings(c *config.Affinity) affinity.Settings {
	s := affinity.Settings{
		RankSource:           affinity.RankSource(c.RankSource),
		TolerateDisagreement: c.OnDisagreement == config.Warn,
		RejectOutOfRange:     c.OutOfRange == config.Reject,
	}
	switch {
	case c.Override:
		s.Override = affinity.OverrideOn
	case c.OverrideSet:
		s.Override = affinity.OverrideOff
	}
	return s
}

// resolvedBool reads a boolean of the engine's resolved configuration; false when it is not there.
func resolvedBool(r *ipc.Ready, path ...string) bool {
	raw, ok := r.Config(path...)
	var v bool
	return ok && json.Unmarshal(raw, &v) == nil && v
}
