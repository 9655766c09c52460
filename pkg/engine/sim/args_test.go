package sim

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestArgsDefaults(t *testing.T) {
	a, build, err := parseArgs(nil)
	require.NoError(t, err)
	require.Equal(t, 355, a.VocabSize)
	require.EqualValues(t, 354, a.LastTokenID)
	require.Equal(t, Builds["rc29"], build)

	a, _, err = parseArgs(json.RawMessage(`{"token_delay":"10ms","vocab_size":100,"build":"rc21"}`))
	require.NoError(t, err)
	require.Equal(t, Duration(10*time.Millisecond), a.TokenDelay)
	require.EqualValues(t, 99, a.LastTokenID)

	b, err := json.Marshal(Args{TokenDelay: Duration(time.Second), CallsLog: "/x"})
	require.NoError(t, err)
	require.JSONEq(t, `{"token_delay":"1s","calls_log":"/x"}`, string(b))
}

func TestArgsThatNoEngineCouldRunWith(t *testing.T) {
	for args, key := range map[string]string{
		`[]`:                                            "",
		`{"no_such_key":1}`:                             "",
		`{"token_delay":10}`:                            "",
		`{"token_delay":"-1s"}`:                         "",
		`{"vocab_size":-1}`:                             "vocab_size",
		`{"vocab_size":4294967296}`:                     "vocab_size",
		`{"max_batch_size":-1}`:                         "max_batch_size",
		`{"last_token_id":355}`:                         "last_token_id",
		`{"first_token_id":355}`:                        "first_token_id",
		`{"eos_token_id":400}`:                          "eos_token_id",
		`{"eos_every":-1}`:                              "eos_every",
		`{"kv_transfer_lose_every":-1}`:                 "kv_transfer_lose_every",
		`{"new_conv_placement":"x"}`:                    "new_conv_placement",
		`{"build":"rc20"}`:                              "build",
		`{"build":"rc19","conversation_affinity":true}`: "conversation_affinity",
	} {
		_, _, err := parseArgs(json.RawMessage(args))
		var bad *ArgError
		require.ErrorAs(t, err, &bad, args)
		require.Equal(t, key, bad.Key, args)
		require.Contains(t, bad.Error(), key)
	}
}

// What each build says about itself decides what a worker may do with it.
func TestBuildsTellTheirAbilities(t *testing.T) {
	const field = "kv_cache_routing_conversation_affinity"
	for name, want := range map[string]struct{ field, params, binds bool }{
		"rc19":   {false, false, false},
		"hybrid": {true, false, false},
		"rc21":   {true, true, false},
		"rc29":   {true, true, true},
	} {
		for _, on := range []bool{false, true} {
			if on && name == "rc19" {
				continue
			}
			a := Args{Build: name, ConversationAffinity: on, AttentionDPSize: 4}
			a.setDefaults()
			build, err := a.check()
			require.NoError(t, err)
			r, err := a.ready(build)
			require.NoError(t, err)
			require.Equal(t, want.params, r.Capabilities.ConversationParams, name)
			require.Equal(t, want.binds, r.Capabilities.BindsExplicitRank, name)
			v, there := r.Config("attention_dp_config", field)
			require.Equal(t, want.field, there, name)
			if there {
				require.Equal(t, on, string(v) == "true", name)
			}
			require.Equal(t, 4, r.AttentionDPSize)
			require.True(t, strings.HasPrefix(r.Version, "1.3.0rc"))
		}
	}
	a := Args{ConfigUnreadable: true}
	a.setDefaults()
	r, err := a.ready(Builds["rc29"])
	require.NoError(t, err)
	require.False(t, r.ConfigReadable)
	require.Nil(t, r.ResolvedConfig)
}

func FuzzArgs(f *testing.F) {
	f.Add([]byte(`{"vocab_size":355,"token_delay":"10ms","build":"rc21","attention_dp_size":4}`))
	f.Add([]byte(`{"first_token_id":2147483647,"last_token_id":2147483647}`))
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		a, build, err := parseArgs(raw)
		if err != nil {
			return
		}
		Continue(a.Text(), []int32{5}, 0, 3)
		if _, err := a.ready(build); err != nil {
			t.Fatal(err)
		}
	})
}
