package handlers

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"sync"

	"dynworker/pkg/affinity"
)

// lazyGate resolves the affinity gate once, at the first use that succeeds, and answers every later use from memory. A failure is not kept: it is the answer to that request alone.
type lazyGate struct {
	resolve func() (*affinity.Gate, error)
	mu      sync.Mutex
	gate    *affinity.Gate
}

func (l *lazyGate) get() (*affinity.Gate, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gate == nil {
		g, err := l.resolve()
		if err != nil {
			return nil, fmt.Errorf("resolve the conversation affinity gate: %w", err)
		}
		l.gate = g
	}
	return l.gate, nil
}

// hashConversation shortens an id to something that can be followed through a log without telling what it was.
func hashConversation(id string) string {
	sum := sha256.Sum256([]byte(id))
	return "sha256:" + hex.EncodeToString(sum[:8])
}
