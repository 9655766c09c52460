package sim

import (
	"container/list"
	"hash/fnv"
)

// blockHash names a KV block by its tokens and everything before them.
type blockHash uint64

// rootHash is the parent of a sequence's first block. Sequences with different
// salts share nothing.
func rootHash(salt, lora string) blockHash {
	h := fnv.New64a()
	_, _ = h.Write([]byte(salt + "\x00" + lora)) // a hash does not fail
	return blockHash(State(h.Sum64()).Add(int32(len(salt))))
}

// cache is the KV cache of one rank: full blocks, each of which has its
// predecessor in the cache too. The blocks used least recently make room for
// new ones; blocks that others build on stay.
type cache struct {
	rank      int
	blockSize int
	limit     int
	blocks    map[blockHash]*list.Element
	order     *list.List // of *block, least recently used first
	reused    int        // blocks found, ever
	missed    int        // blocks looked for and not found, ever
	events    *eventLog  // nil: nobody wants events
}

type block struct {
	hash, parent blockHash
	children     int
}

func newCache(rank int, a *Args) *cache {
	c := &cache{
		rank: rank, blockSize: a.BlockSize, limit: a.TotalBlocks,
		blocks: make(map[blockHash]*list.Element), order: list.New(),
	}
	if a.KVEvents {
		c.events = &eventLog{rank: rank, window: a.MaxSeqLen, known: make(map[blockHash]bool)}
		c.events.created(a.TotalBlocks)
	}
	return c
}

// match counts the leading tokens of a prompt whose blocks are cached. The last
// token is always computed anew.
func (c *cache) match(root blockHash, prompt []int32) int {
	hash, found := root, 0
	for ; len(prompt) >= c.blockSize; prompt = prompt[c.blockSize:] {
		hash = blockHash(State(hash).AddAll(prompt[:c.blockSize]))
		e, ok := c.blocks[hash]
		if !ok {
			break
		}
		c.order.MoveToBack(e)
		found++
	}
	c.reused += found
	c.missed += len(prompt) / c.blockSize
	return found * c.blockSize
}

// store puts a full block into the cache, unless what it builds on is not
// there. first says that it builds on nothing.
func (c *cache) store(parent, hash blockHash, first bool, tokens []int32, salt string) {
	if e, ok := c.blocks[hash]; ok {
		c.order.MoveToBack(e)
		return
	}
	if _, ok := c.blocks[parent]; !ok && !first {
		return
	}
	for len(c.blocks) >= c.limit {
		if !c.evict(parent) {
			return // nothing may go: the new block is not kept
		}
	}
	if e, ok := c.blocks[parent]; ok {
		e.Value.(*block).children++
	}
	c.blocks[hash] = c.order.PushBack(&block{hash: hash, parent: parent})
	if c.events != nil {
		c.events.stored(parent, hash, tokens, salt)
	}
}

// evict drops the block used least recently that no other builds on, but not
// keep, and reports whether there was one.
func (c *cache) evict(keep blockHash) bool {
	for e := c.order.Front(); e != nil; e = e.Next() {
		b := e.Value.(*block)
		if b.children > 0 || b.hash == keep {
			continue
		}
		if p, ok := c.blocks[b.parent]; ok {
			p.Value.(*block).children--
		}
		delete(c.blocks, b.hash)
		c.order.Remove(e)
		if c.events != nil {
			c.events.removed(b.hash)
		}
		return true
	}
	return false
}

// chain follows the blocks of one sequence as its tokens are written.
type chain struct {
	cache  *cache
	root   blockHash
	parent blockHash
	salt   string
	part   []int32 // tokens of the block that is not full yet
	hash   State   // parent and part
}

func newChain(c *cache, root blockHash, salt string) chain {
	return chain{cache: c, root: root, parent: root, salt: salt, hash: State(root)}
}

// write adds one token whose KV entries exist.
func (s *chain) write(token int32) {
	s.part = append(s.part, token)
	s.hash = s.hash.Add(token)
	if len(s.part) == s.cache.blockSize {
		s.cache.store(s.parent, blockHash(s.hash), s.parent == s.root, s.part, s.salt)
		s.parent, s.part = blockHash(s.hash), s.part[:0]
	}
}

// clone returns a chain that goes on from the same place.
func (s *chain) clone() chain {
	c := *s
	c.part = append([]int32(nil), s.part...)
	return c
}

// eventLog collects KV events in the shape in which TensorRT-LLM reports them.
type eventLog struct {
	rank, window int
	next         uint64
	known        map[blockHash]bool // blocks in the cache; others are not named as parents
	pending      []any
}

type kvEvent struct {
	EventID uint64 `json:"event_id"`
	Data    any    `json:"data"`
	Window  int    `json:"window_size"`
	Rank    int    `json:"attention_dp_rank"`
}

type createdData struct {
	Type   string `json:"type"`
	Blocks [2]int `json:"num_blocks_per_cache_level"`
}

type storedData struct {
	Type   string        `json:"type"`
	Parent *blockHash    `json:"parent_hash"`
	Blocks []storedBlock `json:"blocks"`
}

type storedBlock struct {
	Type     string        `json:"type"`
	Hash     blockHash     `json:"block_hash"`
	Tokens   []uniqueToken `json:"tokens"`
	Level    int           `json:"cache_level"`
	Priority int           `json:"priority"`
	Salt     string        `json:"cache_salt,omitempty"`
}

type uniqueToken struct {
	Type  string `json:"type"`
	ID    int32  `json:"token_id"`
	Extra int    `json:"token_extra_id"`
}

type removedData struct {
	Type   string      `json:"type"`
	Hashes []blockHash `json:"block_hashes"`
}

// defaultPriority is the priority that TensorRT-LLM gives a block that nobody
// gave another one.
const defaultPriority = 35

func (l *eventLog) add(data any) {
	l.pending = append(l.pending, kvEvent{EventID: l.next, Data: data, Window: l.window, Rank: l.rank})
	l.next++
}

func (l *eventLog) created(blocks int) {
	l.add(createdData{Type: "created", Blocks: [2]int{blocks, 0}})
}

func (l *eventLog) stored(parent, hash blockHash, tokens []int32, salt string) {
	b := storedBlock{Type: "stored_block", Hash: hash, Priority: defaultPriority, Salt: salt}
	for _, t := range tokens {
		b.Tokens = append(b.Tokens, uniqueToken{Type: "unique_token", ID: t})
	}
	d := storedData{Type: "stored", Blocks: []storedBlock{b}}
	if l.known[parent] {
		d.Parent = &parent
	}
	l.known[hash] = true
	l.add(d)
}

func (l *eventLog) removed(hash blockHash) {
	delete(l.known, hash)
	l.add(removedData{Type: "removed", Hashes: []blockHash{hash}})
}

// take returns the events since the last call.
func (l *eventLog) take() []any {
	if l == nil {
		return nil
	}
	events := l.pending
	l.pending = nil
	return events
}
