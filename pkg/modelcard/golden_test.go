package modelcard

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"dynworker/pkg/protocol"
)

// recording is a recorded start of Dynamo's TensorRT-LLM worker.
type recording struct {
	Etcd       map[string]json.RawMessage `json:"etcd"`
	EngineArgs struct {
		MaxSeqLen      *uint32 `json:"max_seq_len"`
		MaxBatchSize   *uint64 `json:"max_batch_size"`
		MaxNumTokens   *uint64 `json:"max_num_tokens"`
		TensorParallel uint32  `json:"tensor_parallel_size"`
		AttentionDP    bool    `json:"enable_attention_dp"`
	} `json:"engine_args"`
}

func readRecording(t *testing.T, name string) (r recording, model json.RawMessage) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata/registration", name+".json"))
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(b, &r))
	for key, value := range r.Etcd {
		if strings.HasPrefix(key, "v1/mdc/") {
			require.Nil(t, model, "one model record a recording")
			model = value
		}
	}
	require.NotNil(t, model)
	return r, model
}

// What we write for the same model and engine is, byte for byte, what the
// Python worker was recorded to write.
func TestCardEqualsRecording(t *testing.T) {
	for _, c := range []struct {
		name    string
		role    Role
		indexer bool // what the recorded worker says; ours answers no KV queries
	}{
		{"aggregated", RoleAggregated, true},
		{"aggregated_adp4", RoleAggregated, true},
		{"affinity_adp4", RoleAggregated, true},
		{"aggregated_no_max_seq_len", RoleAggregated, true},
		{"prefill", RolePrefill, true},
		{"decode", RoleDecode, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, want := readRecording(t, c.name)
			m := load(t, recordedModel, Options{LocalOnly: true})
			ranks := uint32(1)
			if r.EngineArgs.AttentionDP {
				ranks = r.EngineArgs.TensorParallel
			}
			card, err := m.Card(Spec{
				Name:                "tiny",
				Role:                c.role,
				ContextLength:       r.EngineArgs.MaxSeqLen,
				TotalKVBlocks:       ptr(uint64(1024)), // from the engine, not an argument
				MaxNumSeqs:          r.EngineArgs.MaxBatchSize,
				MaxNumBatchedTokens: r.EngineArgs.MaxNumTokens,
				DataParallelSize:    ranks,
				LocalIndexer:        c.indexer,
			}, nil)
			require.NoError(t, err)

			recorded, err := protocol.ParseModelRecord(want)
			require.NoError(t, err)
			require.Equal(t, c.role.DefaultComponent(), recorded.Component)
			record := recorded
			record.Card = card
			var compact bytes.Buffer
			require.NoError(t, json.Compact(&compact, want))
			require.Empty(t, cmp.Diff(strings.ReplaceAll(compact.String(), "MODEL", m.Dir()), string(record.Value())))
		})
	}
}

// Unless told otherwise, a card never claims what this worker does not do.
func TestCardClaimsNothingByDefault(t *testing.T) {
	card, err := load(t, recordedModel, Options{}).Card(Spec{Name: "tiny"}, nil)
	require.NoError(t, err)
	require.False(t, card.RuntimeConfig.EnableLocalIndexer)
	require.Equal(t, ptr(false), card.RuntimeConfig.KVEventPublishingEnabled)
	require.EqualValues(t, 1, card.RuntimeConfig.DataParallelSize)
	require.EqualValues(t, DefaultKVBlockSize, card.KVCacheBlockSize)
	require.Nil(t, card.RuntimeConfig.RuntimeData, "no limit known, no limit told")
}

// The checksums are those that a real frontend computed for these cards.
func TestSumEqualsFrontends(t *testing.T) {
	b, err := os.ReadFile("testdata/sums.json")
	require.NoError(t, err)
	var cases []struct {
		Card protocol.Card `json:"card"`
		Sum  string        `json:"mdcsum"`
	}
	require.NoError(t, json.Unmarshal(b, &cases))
	require.Len(t, cases, 16)
	for _, c := range cases {
		sum, err := Sum(&c.Card)
		require.NoError(t, err, c.Card.DisplayName)
		require.Equal(t, c.Sum, sum, c.Card.DisplayName)
	}
}

func TestSumRefusesWhatItCannotKnow(t *testing.T) {
	card, err := load(t, recordedModel, Options{}).Card(Spec{Name: "tiny"}, nil)
	require.NoError(t, err)
	for name, spoil := range map[string]func(*protocol.Card){
		"router_config":    func(c *protocol.Card) { c.RouterConfig = json.RawMessage(`{"router_mode":"k_v"}`) },
		"indexer_identity": func(c *protocol.Card) { c.IndexerIdentity = json.RawMessage(`{}`) },
		"prompt_context":   func(c *protocol.Card) { c.PromptContext = json.RawMessage(`[]`) },
		"worker type":      func(c *protocol.Card) { c.WorkerType = "Prefill" },
		`type "x"`:         func(c *protocol.Card) { c.Needs = [][]string{{"x"}} },
	} {
		c := card
		spoil(&c)
		_, err := Sum(&c)
		require.ErrorIs(t, err, ErrNoSum)
		require.ErrorContains(t, err, name)
	}
	c := card
	c.RouterConfig = json.RawMessage("null")
	_, err = Sum(&c)
	require.NoError(t, err)
}

// What is not in the checksum cannot keep replicas apart.
func TestSumIgnoresPathsAndSizes(t *testing.T) {
	m := load(t, recordedModel, Options{})
	spec := Spec{Name: "tiny", SourcePath: "org/tiny", TotalKVBlocks: ptr(uint64(7))}
	local, err := m.Card(spec, nil)
	require.NoError(t, err)
	spec.TotalKVBlocks, spec.DataParallelSize = nil, 4
	other, err := m.Card(spec, &Hosting{Address: "10.0.0.7:9090", Namespace: "n", Component: "c", Endpoint: "e"})
	require.NoError(t, err)
	a, err := Sum(&local)
	require.NoError(t, err)
	b, err := Sum(&other)
	require.NoError(t, err)
	require.Equal(t, a, b)
}
