package bridge_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"dynworker/pkg/engine/bridge"
	"dynworker/pkg/engine/bridge/bridgetest"
	"dynworker/pkg/engine/ipc"
)

// Conversations of several turns on four ranks, some requests without an id:
// every turn of a conversation is served by one rank, the first turns are
// spread, and where the build remembers an explicit first rank, that one it is.
func TestConversationsStick(t *testing.T) {
	const conversations, turns, ranks = 10, 5, 4
	for _, api := range []string{"rc21", "rc29"} {
		for _, explicit := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s explicit %v", api, explicit), func(t *testing.T) {
				c := spawn(t, bridgetest.Setup{API: api})
				c.configure(args{
					"tensor_parallel_size": ranks, "enable_attention_dp": true,
					"attention_dp_config": args{"kv_cache_routing_conversation_affinity": true},
				}, bridge.Options{})
				binds := c.ready().Capabilities.BindsExplicitRank
				require.Equal(t, api == "rc29", binds)

				var next uint64
				for turn := range turns {
					for n := range conversations {
						g := order(2, func(g *ipc.Generate) {
							g.Conversation = &ipc.Conversation{ID: ptr(fmt.Sprint("conversation ", n))}
						})
						if explicit && turn == 0 {
							g.Scheduling = &ipc.Scheduling{AttentionDPRank: n * 3 % ranks}
						}
						c.generate(next, []int32{int32(n), int32(turn)}, g)
						c.answer(next)
						next++
						if n%4 != 0 { // not in step with the ranks, or they would always meet the same ones
							continue
						}
						c.generate(next, []int32{1}, order(2, func(g *ipc.Generate) { g.Conversation = &ipc.Conversation{} }))
						c.answer(next)
						next++
					}
				}

				home, served, moved := map[string]int{}, [2][ranks]int{}, 0
				for _, call := range c.log.Calls(t, "placed") {
					rank := call.Int("rank")
					id, _ := call["conversation"].(string)
					if id == "" {
						served[1][rank]++
						continue
					}
					first, known := home[id]
					switch {
					case !known:
						home[id] = rank
						served[0][rank]++
					case first != rank:
						moved++
						home[id] = rank
					}
				}
				require.Len(t, home, conversations)
				if !explicit || binds {
					require.Zero(t, moved)
				} else {
					require.NotZero(t, moved, "this build forgets an explicit first rank")
				}
				for rank := range ranks {
					require.NotZero(t, served[0][rank], "rank %d got no conversation", rank)
					require.NotZero(t, served[1][rank], "rank %d got no request without an id", rank)
				}
				if explicit && binds {
					for n := range conversations {
						require.Equal(t, n*3%ranks, home[fmt.Sprint("conversation ", n)])
					}
				}
			})
		}
	}
}
