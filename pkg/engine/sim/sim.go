// Package sim is an inference engine without a model. It speaks the engine
// protocol (pkg/engine/ipc) like any other engine, and imitates the parts of
// TensorRT-LLM's behaviour that a worker can observe: attention-DP ranks with
// their routers, a bounded batch with a queue behind it, block-wise reuse of
// cached prefixes, finish reasons, log probabilities, load figures, KV events,
// and the ways in which a request or the whole engine fails.
//
// It has two users: the worker, which runs it as a child process from its own
// binary (Main), and tests, which run it in process over any connection (Run).
//
// # The text
//
// The next token depends on nothing but the sequence so far, the choice's
// index and the seed (NextToken). A request that is cut off and continued
// elsewhere with prompt and output as its new prompt must therefore go on with
// the very text that an undisturbed run has.
//
// # Structure
//
// One goroutine (the loop) owns all state. A second one reads the channel into
// a mailbox that never fills up, so that an engine whose worker is slow to
// read still takes notice of cancels. Each pass of the loop takes the mail,
// admits and places waiting requests, and when a step is due gives every
// running request its next token, all in one outputs message.
//
// What is not modelled: time that depends on prompt length or batch, blocks
// running out (eviction takes blocks of running requests too; only KV
// that is held for another engine takes room), chunked prefill, beam search,
// guided decoding.
package sim

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"

	"dynworker/pkg/engine/ipc"
)

// Args are the arguments of a simulated engine, sent to it as JSON in the
// configure message. A zero value means the default named here, unless zero is
// said to have a meaning.
type Args struct {
	VocabSize    int   `json:"vocab_size,omitempty"`     // 355
	FirstTokenID int32 `json:"first_token_id,omitempty"` // 6: lowest id that is made up; ids below are the tokenizer's special ones
	LastTokenID  int32 `json:"last_token_id,omitempty"`  // vocab_size-1: highest id that is made up
	EOSTokenID   int32 `json:"eos_token_id,omitempty"`   // 2
	EOSEvery     int   `json:"eos_every,omitempty"`      // about one token in this many ends the text; 0: none does

	MaxSeqLen    int `json:"max_seq_len,omitempty"`    // 8192: prompt and output together
	MaxBatchSize int `json:"max_batch_size,omitempty"` // 2048: sequences at once on one rank
	MaxNumTokens int `json:"max_num_tokens,omitempty"` // 8192: longest prompt, since there is no chunked prefill
	BlockSize    int `json:"block_size,omitempty"`     // 32: tokens in a KV block
	TotalBlocks  int `json:"total_blocks,omitempty"`   // 1024: KV blocks of one rank

	AttentionDPSize      int  `json:"attention_dp_size,omitempty"` // 1: without attention DP
	ConversationAffinity bool `json:"conversation_affinity,omitempty"`
	// MaxSessions (65536), FairShare (2.0) and Placement ("round_robin" or
	// "least_queued") are the conversation router's settings.
	MaxSessions int     `json:"max_sessions,omitempty"`
	FairShare   float64 `json:"fair_share_multiplier,omitempty"`
	Placement   string  `json:"new_conv_placement,omitempty"`

	TokenDelay      Duration `json:"token_delay,omitempty"`       // length of a step
	FirstTokenDelay Duration `json:"first_token_delay,omitempty"` // from a request's admission to its first token
	LoadTime        Duration `json:"load_time,omitempty"`
	StatsInterval   Duration `json:"stats_interval,omitempty"` // 250ms: least time between two stats messages

	// KVTransferHost is where the engine listens for those that take over its
	// prefilled requests, and what it tells them; 127.0.0.1.
	KVTransferHost    string   `json:"kv_transfer_host,omitempty"`
	KVTransferTimeout Duration `json:"kv_transfer_timeout,omitempty"` // 1m: how long KV is held, and how long a transfer may take
	KVTransferDelay   Duration `json:"kv_transfer_delay,omitempty"`   // what a transfer takes longer, half-way
	// KVTransferLoseEvery makes one transfer in so many end half-way, on the
	// sender's side; 0: none does.
	KVTransferLoseEvery int `json:"kv_transfer_lose_every,omitempty"`

	Build            string `json:"build,omitempty"`             // "rc29": see Builds
	ConfigUnreadable bool   `json:"config_unreadable,omitempty"` // hide the resolved configuration
	KVEvents         bool   `json:"kv_events,omitempty"`         // send events messages
	CallsLog         string `json:"calls_log,omitempty"`         // file that gets a JSON line for each call
}

// Duration is a time.Duration that is written with its unit in JSON ("10ms").
type Duration time.Duration

// MarshalText writes the duration as time.Duration prints it.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// UnmarshalText reads a non-negative duration with a unit.
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil {
		return err
	}
	if v < 0 {
		return fmt.Errorf("negative duration %v", v)
	}
	*d = Duration(v)
	return nil
}

// Build is a build of TensorRT-LLM as far as its API differs for a worker.
type Build struct {
	Version            string
	AffinityField      bool // attention_dp_config knows the affinity setting
	ConversationParams bool // generate_async takes a conversation
	BindsExplicitRank  bool // an explicit first rank is remembered for the conversation
}

// Builds are the builds that can be simulated. "hybrid" stands for the builds
// in between, in which the engine's configuration had the affinity setting but
// the API had no way to name a conversation.
var Builds = map[string]Build{
	"rc19":   {Version: "1.3.0rc19"},
	"hybrid": {Version: "1.3.0rc20", AffinityField: true},
	"rc21":   {Version: "1.3.0rc21", AffinityField: true, ConversationParams: true},
	"rc29":   {Version: "1.3.0rc29", AffinityField: true, ConversationParams: true, BindsExplicitRank: true},
}

// Placements of conversations that are not bound to a rank.
const (
	RoundRobin  = "round_robin"
	LeastQueued = "least_queued"
)

// ArgError means that the engine cannot run with its arguments.
type ArgError struct {
	Key    string // the argument's JSON name; empty when they are no object
	Reason string
}

func (e *ArgError) Error() string {
	if e.Key == "" {
		return "simulated engine: arguments: " + e.Reason
	}
	return fmt.Sprintf("simulated engine: argument %s: %s", e.Key, e.Reason)
}

// parseArgs decodes and completes the arguments of a configure message.
// Unknown keys are refused, as TensorRT-LLM does.
func parseArgs(raw json.RawMessage) (Args, Build, error) {
	var a Args
	if len(raw) > 0 {
		d := json.NewDecoder(bytes.NewReader(raw))
		d.DisallowUnknownFields()
		if err := d.Decode(&a); err != nil {
			return a, Build{}, &ArgError{Reason: err.Error()}
		}
	}
	a.setDefaults()
	build, err := a.check()
	return a, build, err
}

func (a *Args) setDefaults() {
	setDefault(&a.VocabSize, 355)
	setDefault(&a.FirstTokenID, 6)
	setDefault(&a.LastTokenID, int32(min(a.VocabSize, 1<<31-1)-1))
	setDefault(&a.EOSTokenID, 2)
	setDefault(&a.MaxSeqLen, 8192)
	setDefault(&a.MaxBatchSize, 2048)
	setDefault(&a.MaxNumTokens, 8192)
	setDefault(&a.BlockSize, 32)
	setDefault(&a.TotalBlocks, 1024)
	setDefault(&a.AttentionDPSize, 1)
	setDefault(&a.MaxSessions, 1<<16)
	setDefault(&a.FairShare, 2)
	setDefault(&a.Placement, RoundRobin)
	setDefault(&a.StatsInterval, Duration(250*time.Millisecond))
	setDefault(&a.KVTransferHost, "127.0.0.1")
	setDefault(&a.KVTransferTimeout, Duration(time.Minute))
	setDefault(&a.Build, "rc29")
}

func setDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// check refuses what no engine could run with.
func (a *Args) check() (Build, error) {
	for key, n := range map[string]int{
		"vocab_size": a.VocabSize, "max_seq_len": a.MaxSeqLen, "max_batch_size": a.MaxBatchSize,
		"max_num_tokens": a.MaxNumTokens, "block_size": a.BlockSize, "total_blocks": a.TotalBlocks,
		"attention_dp_size": a.AttentionDPSize, "max_sessions": a.MaxSessions,
	} {
		if n < 1 {
			return Build{}, &ArgError{Key: key, Reason: "is not positive"}
		}
	}
	switch {
	case a.VocabSize > 1<<31-1:
		return Build{}, &ArgError{Key: "vocab_size", Reason: "is larger than token ids can be"}
	case a.LastTokenID < 0 || int(a.LastTokenID) >= a.VocabSize:
		return Build{}, &ArgError{Key: "last_token_id", Reason: "is outside of the vocabulary"}
	case a.FirstTokenID < 0 || a.FirstTokenID > a.LastTokenID:
		return Build{}, &ArgError{Key: "first_token_id", Reason: "leaves no token that could be made up"}
	case a.EOSTokenID < 0 || int(a.EOSTokenID) >= a.VocabSize:
		return Build{}, &ArgError{Key: "eos_token_id", Reason: "is outside of the vocabulary"}
	case a.EOSEvery < 0:
		return Build{}, &ArgError{Key: "eos_every", Reason: "is negative"}
	case a.KVTransferLoseEvery < 0:
		return Build{}, &ArgError{Key: "kv_transfer_lose_every", Reason: "is negative"}
	case a.Placement != RoundRobin && a.Placement != LeastQueued:
		return Build{}, &ArgError{Key: "new_conv_placement", Reason: "is neither round_robin nor least_queued"}
	}
	build, ok := Builds[a.Build]
	if !ok {
		return Build{}, &ArgError{Key: "build", Reason: fmt.Sprintf("no such build: %q", a.Build)}
	}
	if a.ConversationAffinity && !build.AffinityField {
		// The configuration classes of that build refuse what they do not know.
		return Build{}, &ArgError{Key: "conversation_affinity", Reason: "build " + build.Version + " has no kv_cache_routing_conversation_affinity"}
	}
	return build, nil
}

// ready is what the engine says about itself with these arguments.
func (a *Args) ready(build Build) (ipc.Ready, error) {
	r := ipc.Ready{
		Engine: "sim", Version: build.Version, ConfigReadable: !a.ConfigUnreadable,
		Capabilities: ipc.Capabilities{
			ConversationParams: build.ConversationParams, BindsExplicitRank: build.BindsExplicitRank,
			SchedulingParams: true, CacheSalt: true, Priority: true, ArrayPrompts: true,
			EngineDeadError: true, KVCacheCapacity: true, AbortBeforeFirstToken: true,
		},
		Bounds: ipc.Bounds{
			VocabSize: a.VocabSize, MaxSeqLen: a.MaxSeqLen, MaxNumTokens: a.MaxNumTokens,
			MaxBatchSize: a.MaxBatchSize, MaxBeamWidth: 1, MachineIDs: machineIDs,
		},
		AttentionDPSize: a.AttentionDPSize,
		KV:              ipc.KV{TotalBlocks: a.TotalBlocks, BlockSize: a.BlockSize},
	}
	if a.ConfigUnreadable {
		return r, nil
	}
	var err error
	r.ResolvedConfig, err = json.Marshal(a.resolved(build))
	return r, err
}

// resolved is the configuration as an engine of the build would show it.
func (a *Args) resolved(build Build) map[string]any {
	dp := map[string]any{"enable_balance": false}
	if build.AffinityField {
		dp["kv_cache_routing_conversation_affinity"] = a.ConversationAffinity
		dp["kv_cache_routing_max_sessions"] = a.MaxSessions
		dp["kv_cache_routing_fair_share_multiplier"] = a.FairShare
		dp["kv_cache_routing_new_conv_placement"] = a.Placement
	}
	return map[string]any{
		"enable_attention_dp":  a.AttentionDPSize > 1,
		"tensor_parallel_size": a.AttentionDPSize,
		"attention_dp_config":  dp,
		"max_batch_size":       a.MaxBatchSize,
		"max_num_tokens":       a.MaxNumTokens,
		"max_seq_len":          a.MaxSeqLen,
		"cache_transceiver_config": map[string]any{
			"backend": "DEFAULT", "kv_transfer_timeout_ms": time.Duration(a.KVTransferTimeout).Milliseconds(),
		},
		"kv_cache_config": map[string]any{"enable_block_reuse": true, "tokens_per_block": a.BlockSize},
	}
}
