package handlers

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"dynworker/pkg/affinity"
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/protocol"

	"github.com/stretchr/testify/require"
)

// recordedRoles is one HTTP request on its way through a prefill and a decode worker.
type recordedRoles struct {
	Case string `json:"case"`
	Sent []struct {
		To   string          `json:"to"`
		Body json.RawMessage `json:"body"`
	} `json:"wire_requests"`
	Engine []struct {
		Sampling struct {
			MaxTokens    *int64  `json:"max_tokens"`
			LogProbs     *int64  `json:"logprobs"`
			StopTokenIDs []int64 `json:"stop_token_ids"`
		} `json:"sampling_params"`
		Streaming     bool           `json:"streaming"`
		Disaggregated map[string]any `json:"disaggregated_params"`
		Scheduling    *struct {
			Rank  int  `json:"attention_dp_rank"`
			Relax bool `json:"attention_dp_relax"`
		} `json:"scheduling_params"`
		Conversation json.RawMessage `json:"conversation_params"`
		CacheSalt    *string         `json:"cache_salt"`
		Priority     float64         `json:"priority"`
	} `json:"engine"`
}

// TestWhatTheFrontendSendsToBothRoles gives each handler what the real frontend sent to each role, and wants the engine asked for what the real workers asked for.
func TestWhatTheFrontendSendsToBothRoles(t *testing.T) {
	files, err := filepath.Glob("testdata/disaggregated/*.json")
	require.NoError(t, err)
	require.Len(t, files, 11)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		var r recordedRoles
		require.NoError(t, json.Unmarshal(text, &r))
		require.Len(t, r.Sent, 2)
		require.Len(t, r.Engine, 2)
		ranks := 1
		if strings.Contains(r.Case, "adp4") {
			ranks = 4
		}
		for i, sent := range r.Sent {
			for _, kind := range []Kind{Unified, Legacy} {
				name := r.Case + " " + sent.To + " " + string(kind)
				g := askedOf(t, kind, sent.To, sent.Body, ranks)
				want := r.Engine[i]
				require.Equal(t, want.Sampling.MaxTokens, g.Sampling.MaxTokens, name)
				require.Equal(t, want.Sampling.LogProbs, g.Sampling.LogProbs, name)
				require.Equal(t, want.Streaming, g.Streaming, name)
				require.Equal(t, want.CacheSalt, g.CacheSalt, name)
				require.Equal(t, want.Priority, *g.Priority, name)
				require.Nil(t, want.Conversation, name)
				require.Nil(t, g.Conversation, name)
				if want.Scheduling == nil {
					require.Nil(t, g.Scheduling, name)
				} else {
					require.Equal(t, &ipc.Scheduling{AttentionDPRank: want.Scheduling.Rank, AttentionDPRelax: want.Scheduling.Relax}, g.Scheduling, name)
				}
				require.JSONEq(t, recordedOrder(t, want.Disaggregated), ourOrder(t, g.Disaggregated), name)
			}
		}
	}
}

// askedOf is what a handler asks the engine for.
func askedOf(t *testing.T, kind Kind, to string, body json.RawMessage, ranks int) *ipc.Generate {
	b := newBench(t, kind, func(c *Config, e *scripted) {
		setup := onDecode([]ipc.Output{prefilled("length")})
		if strings.Contains(to, "prefill") {
			setup = onPrefill([]ipc.Output{prefilled("length")})
		}
		setup(c, e)
		c.Bounds = ipc.Bounds{MaxSeqLen: 8192}
		c.ResolveGate = func() (*affinity.Gate, error) {
			return affinity.Resolve(affinity.Engine{ConfigReadable: true, ConversationParams: true, Ranks: ranks, Config: map[string]any{}}, affinity.Settings{})
		}
	})
	request, err := protocol.ParseRequest(protocol.CodecJSON, body)
	require.NoError(t, err)
	require.NoError(t, b.handler.Generate(t.Context(), &Call{ID: "r", Request: request, Body: body, Codec: protocol.CodecJSON}, &record{}))
	require.Len(t, b.engine.calls, 1)
	return &b.engine.calls[0]
}

// recordedOrder puts what a recording shows of the engine's Python objects into the form of the engine's channel. The global id is masked there.
func recordedOrder(t *testing.T, params map[string]any) string {
	order := maps.Clone(params)
	delete(order, "_type")
	delete(order, "disagg_request_id")
	if state, ok := order["opaque_state"].(map[string]any); ok {
		raw, err := hex.DecodeString(state["_bytes"].(string))
		require.NoError(t, err)
		order["opaque_state"] = base64.StdEncoding.EncodeToString(raw)
	}
	if positions, ok := order["first_gen_log_probs"].([]any); ok {
		positions = slices.Clone(positions)
		order["first_gen_log_probs"] = positions
		for i, p := range positions {
			position := p.(map[string]any)
			var list []any
			for _, id := range slices.Sorted(maps.Keys(position)) {
				entry := position[id].(map[string]any)
				n, err := strconv.Atoi(id)
				require.NoError(t, err)
				list = append(list, map[string]any{"token_id": n, "logprob": entry["logprob"], "rank": entry["rank"]})
			}
			positions[i] = list
		}
	}
	text, err := json.Marshal(order)
	require.NoError(t, err)
	return string(text)
}

// ourOrder leaves the global id and what it is made of out; one of them has to be there.
func ourOrder(t *testing.T, order json.RawMessage) string {
	d := json.NewDecoder(bytes.NewReader(order))
	d.UseNumber()
	var m map[string]any
	require.NoError(t, d.Decode(&m))
	require.True(t, (m["machine_id"] == nil) != (m["disagg_request_id"] == nil), string(order))
	delete(m, "machine_id")
	delete(m, "disagg_request_id")
	text, err := json.Marshal(m)
	require.NoError(t, err)
	return string(text)
}
