package app

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestHeldForOthers(t *testing.T) {
	requests, blocks := heldForOthers([]json.RawMessage{
		json.RawMessage(`{"attentionDpRank":0,"handoff":{"requests":2,"blocks":7}}`),
		json.RawMessage(`{"attentionDpRank":1}`),
		json.RawMessage(`{"handoff":"much"}`),
		json.RawMessage(`{"handoff":{"requests":1,"blocks":1}}`),
	})
	require.Equal(t, []int{3, 8}, []int{requests, blocks})
}
