package sim

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

func sequenceOf(n int) []int32 {
	s := make([]int32, n)
	for i := range s {
		s[i] = int32(i%300) + 6
	}
	return s
}

func writeAll(c *cache, root blockHash, tokens []int32, salt string) {
	s := newChain(c, root, salt)
	for _, t := range tokens {
		s.write(t)
	}
}

func testCache(blocks int, events bool) *cache {
	a := Args{BlockSize: 4, TotalBlocks: blocks, KVEvents: events}
	a.setDefaults()
	return newCache(0, &a)
}

func TestCacheMatchesWholeBlocks(t *testing.T) {
	c := testCache(100, false)
	root := rootHash("", "")
	text := sequenceOf(18)
	require.Zero(t, c.match(root, text))
	writeAll(c, root, text, "")
	require.Len(t, c.blocks, 4)
	require.Equal(t, 16, c.match(root, text))
	require.Equal(t, 8, c.match(root, append(sequenceOf(9), 1, 2, 3, 4)))
	require.Zero(t, c.match(root, text[1:]), "another beginning is another sequence")
	require.Zero(t, c.match(rootHash("salt", ""), text), "another salt shares nothing")
	require.Zero(t, c.match(rootHash("", "adapter"), text))
	require.NotEqual(t, rootHash("a", "b"), rootHash("ab", ""))
	require.Equal(t, 6, c.reused)
}

func TestCacheEvictsFromTheEnds(t *testing.T) {
	c := testCache(3, false)
	root := rootHash("", "")
	long := sequenceOf(12)
	writeAll(c, root, long, "")
	require.Equal(t, 12, c.match(root, long))
	other := []int32{1, 2, 3, 4}
	writeAll(c, root, other, "")
	require.Equal(t, 8, c.match(root, long), "the last block of the longest chain had to go, not the first")
	require.Equal(t, 4, c.match(root, other))

	c = testCache(1, false)
	writeAll(c, root, long, "")
	require.Len(t, c.blocks, 1, "a block is not evicted for its own successor")
	require.Equal(t, 4, c.match(root, long))
}

func TestCacheTellsWhatItDoes(t *testing.T) {
	c := testCache(2, true)
	root := rootHash("s", "")
	writeAll(c, root, sequenceOf(8), "s")
	writeAll(c, root, []int32{1, 2, 3, 4}, "s")
	b, err := json.Marshal(c.events.take())
	require.NoError(t, err)
	var events []struct {
		ID   uint64 `json:"event_id"`
		Data struct {
			Type   string   `json:"type"`
			Parent *uint64  `json:"parent_hash"`
			Hashes []uint64 `json:"block_hashes"`
			Blocks []struct {
				Hash   uint64 `json:"block_hash"`
				Salt   string `json:"cache_salt"`
				Tokens []struct {
					ID int32 `json:"token_id"`
				} `json:"tokens"`
			} `json:"blocks"`
		} `json:"data"`
	}
	require.NoError(t, json.Unmarshal(b, &events))
	require.Len(t, events, 5)
	for i, typ := range []string{"created", "stored", "stored", "removed", "stored"} {
		require.Equal(t, typ, events[i].Data.Type)
		require.EqualValues(t, i, events[i].ID)
	}
	first, second := events[1].Data, events[2].Data
	require.Nil(t, first.Parent)
	require.Equal(t, first.Blocks[0].Hash, *second.Parent)
	require.Equal(t, "s", first.Blocks[0].Salt)
	require.Len(t, first.Blocks[0].Tokens, 4)
	require.EqualValues(t, 6, first.Blocks[0].Tokens[0].ID)
	require.Equal(t, []uint64{second.Blocks[0].Hash}, events[3].Data.Hashes)
	require.Empty(t, c.events.take())
}
