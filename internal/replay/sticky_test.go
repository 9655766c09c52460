package replay

import (
	"fmt"
	"testing"

	"dynworker/pkg/protocol"

	"github.com/stretchr/testify/require"
)

const (
	conversations = 10
	turns         = 5
	rankCount     = 4
)

// turn is one request of the sticky test; conversation -1 has no id.
type turn struct {
	conversation, number int
	id                   string
}

// turnsInOrder lets all conversations have their turns one after the other, with a request without an id after every second one.
func turnsInOrder() (all []turn) {
	for n := range turns {
		for c := range conversations {
			all = append(all, turn{c, n, fmt.Sprintf("conversation %d turn %d", c, n)})
			if c%2 == 1 {
				all = append(all, turn{-1, n, fmt.Sprintf("without id %d after %d", n, c)})
			}
		}
	}
	return all
}

// wished is the rank that the frontend's router would choose: skewed on purpose, and another one at each turn.
func (u turn) wished() int64 { return int64((3*u.conversation*u.conversation + u.number) % rankCount) }

// request is the turn's body; with a rank if the frontend has a router.
func (u turn) request(router bool) protocol.Map {
	prompt := []any{int64(5), int64(6)}
	for range 3 * u.number {
		prompt = append(prompt, int64(7))
	}
	body := protocol.Map{"model": "tiny", "token_ids": prompt, "stop_conditions": protocol.Map{"max_tokens": int64(2)}, "sampling_options": protocol.Map{}, "output_options": protocol.Map{}}
	routing := protocol.Map{}
	if u.conversation >= 0 {
		body["agent_context"] = protocol.Map{"session_id": fmt.Sprintf("conversation-%d", u.conversation)}
		if router {
			routing["dp_rank"] = u.wished()
		}
	}
	body["routing"] = routing
	return body
}

// TestConversationsStayOnTheirRank has ten conversations of five turns over four ranks, on both routers and with both owners of the first rank.
func TestConversationsStayOnTheirRank(t *testing.T) {
	onStandin := setup{api: "rc29", engine: protocol.Map{"max_seq_len": int64(8192), "tensor_parallel_size": int64(rankCount), "enable_attention_dp": true, "attention_dp_config": protocol.Map{"kv_cache_routing_conversation_affinity": true}}}
	onSimulator := setup{simulator: []string{fmt.Sprintf("attention_dp_size=%d", rankCount), "conversation_affinity=true"}}
	for name, s := range map[string]setup{"stand-in": onStandin, "simulator": onSimulator} {
		for _, handler := range []string{"legacy", "unified"} {
			for _, source := range []string{"engine", "dynamo"} {
				t.Run(name+"/"+handler+"/"+source, func(t *testing.T) {
					t.Parallel()
					s := s
					s.settings = []string{"handler=" + handler, "affinity.rank_source=" + source}
					w := run(t, s)
					for _, u := range turnsInOrder() {
						answer := canonicalAnswer(w.ask(question{id: u.id, codec: protocol.CodecMsgpack, body: u.request(true)}))
						require.Equal(t, "handshake prologue chunk final sentinel eof", answer["order"], u.id)
					}
					require.Zero(t, w.stop())
					requireSticky(t, w.servingRanks(), source == "dynamo")
				})
			}
		}
	}
}

// servingRanks are the ranks on which the engine ran the requests, by request id.
func (w *worker) servingRanks() map[string]int64 {
	found := map[string]int64{}
	latest := ""
	for _, line := range w.engineLog() {
		switch line["event"] {
		case "generate_async":
			latest = line["trace_headers"].(protocol.Map)["request-id"].(string)
		case "placed":
			// The simulator says whose placement it is; the stand-in has its own numbers, and places at once.
			id, said := line["request_id"].(string)
			if !said {
				id = latest
			}
			found[id] = line["rank"].(int64)
		}
	}
	return found
}

// requireSticky wants every conversation on one rank, first turns spread and requests without an id balanced; and first turns where the frontend's router wanted them if that owns them.
func requireSticky(t *testing.T, ranks map[string]int64, router bool) {
	t.Helper()
	home := map[int]int64{}
	first, without := make([]int, rankCount), make([]int, rankCount)
	for _, u := range turnsInOrder() {
		rank, served := ranks[u.id]
		require.True(t, served, u.id)
		switch {
		case u.conversation < 0:
			without[rank]++
		case u.number == 0:
			home[u.conversation] = rank
			first[rank]++
			if router {
				require.Equal(t, u.wished(), rank, u.id)
			}
		default:
			require.Equal(t, home[u.conversation], rank, u.id)
		}
	}
	const evenly = turns * conversations / 2 / rankCount
	for rank := range rankCount {
		if !router {
			require.InDelta(t, float64(conversations)/rankCount, first[rank], 1, "first turns %v", first)
		}
		require.InDelta(t, evenly, without[rank], 2, "requests without an id %v", without)
	}
}
