package handlers

// rules are all the places in which the two handlers differ. docs/handlers.md explains each of them.
type rules struct {
	// nullSections takes a null sampling_options or stop_conditions for an absent one. The 1.6.1 worker fails on a null sampling_options with an internal error.
	nullSections bool
	// derivedMaxTokens derives max_tokens also when stop_conditions has no such key. The 1.6.1 worker fails then with an internal error.
	derivedMaxTokens bool
	// refuseUnserved answers with a 4xx what the 1.6.1 worker accepts and then ignores although it changes the answer: a thinking budget, embeddings instead of a prompt, token lists for the sampler, prefill results on a worker of
	// another role.
	refuseUnserved bool
	// strictRanges checks ranges that the 1.6.1 worker leaves to the engine or bends: priority, logprobs, penalties, min_p, seed.
	strictRanges bool
	// nullPriority passes an explicit null priority on to the engine.
	nullPriority bool
	// adapters maps routing.lora_name to a configured LoRA adapter. The 1.6.1 worker ignores the name.
	adapters bool
	// guidedCapability refuses guided decoding when the engine said that it has no backend for it.
	guidedCapability bool
	// earlyUsage puts the usage with the cached tokens on the first chunk as well when something was cached.
	earlyUsage bool
	// lastWordAtShutdown waits at shutdown for the engine's own last chunk, "cancelled", and sends it before the error item.
	lastWordAtShutdown bool
}

var (
	unifiedRules = rules{nullSections: true, derivedMaxTokens: true, refuseUnserved: true, strictRanges: true, adapters: true, guidedCapability: true, earlyUsage: true}
	legacyRules  = rules{nullPriority: true, lastWordAtShutdown: true}
)
