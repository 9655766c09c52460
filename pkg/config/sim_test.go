package config_test

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/config"
	"dynworker/pkg/engine/sim"
)

// TestSimArgsAreTheEngines: the keys under engine.sim are handed over as they
// are, so the engine has to know each of them.
func TestSimArgsAreTheEngines(t *testing.T) {
	c, _, err := config.Load([]string{
		"--model", "/m", "--set", "engine.kind=sim", "--set", "engine.sim.token_delay=20ms", "--set", "engine.sim.last_token_id=99", "--set", "engine.sim.calls_log=/c",
	}, nil, nil)
	require.NoError(t, err)
	text, err := json.Marshal(c.Engine.Sim.Args())
	require.NoError(t, err)
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	var got sim.Args
	require.NoError(t, d.Decode(&got))

	s := &c.Engine.Sim
	require.Equal(t, sim.Args{
		VocabSize: s.VocabSize, FirstTokenID: int32(s.FirstTokenID), LastTokenID: int32(s.LastTokenID), EOSTokenID: int32(s.EOSTokenID), EOSEvery: s.EOSEvery,
		MaxSeqLen: s.MaxSeqLen, MaxBatchSize: s.MaxBatchSize, MaxNumTokens: s.MaxNumTokens, BlockSize: s.BlockSize, TotalBlocks: s.TotalBlocks,
		AttentionDPSize: s.AttentionDPSize, ConversationAffinity: s.ConversationAffinity, Placement: s.NewConvPlacement, MaxSessions: s.MaxSessions, FairShare: s.FairShareMultiplier, StatsInterval: sim.Duration(s.StatsInterval),
		KVTransferHost: s.KVTransferHost, KVTransferTimeout: sim.Duration(s.KVTransferTimeout), KVTransferDelay: sim.Duration(s.KVTransferDelay), KVTransferLoseEvery: s.KVTransferLoseEvery,
		ConfigUnreadable: s.ConfigUnreadable,
		TokenDelay:       sim.Duration(s.TokenDelay), FirstTokenDelay: sim.Duration(s.FirstTokenDelay), LoadTime: sim.Duration(s.LoadTime), Build: s.Build, CallsLog: s.CallsLog,
	}, got)
}

// TestSimBuilds: a build that the engine knows can be configured, and no other.
func TestSimBuilds(t *testing.T) {
	for _, build := range slices.Sorted(maps.Keys(sim.Builds)) {
		c := config.Default()
		c.Model.Path, c.Engine.Sim.Build = "/m", build
		require.NoError(t, c.Validate(), build)
	}
	c := config.Default()
	c.Model.Path, c.Engine.Sim.Build = "/m", "rc1"
	require.Error(t, c.Validate())
}
