package respstream

import (
	"sync"
	"time"

	"github.com/rs/zerolog"
)

const (
	// troublePeriod is how often the same unreachable address is logged.
	troublePeriod = time.Minute
	// troubleMax bounds how many addresses are remembered.
	troubleMax = 256
)

// trouble logs unreachable frontends. Behind a wrong address are usually many requests, and one line says it all.
type trouble struct {
	log zerolog.Logger

	mu    sync.Mutex
	peers map[string]*peer
}

type peer struct {
	logged     time.Time
	suppressed int
}

func (t *trouble) report(address string, err error) {
	t.mu.Lock()
	p := t.peers[address]
	if p == nil {
		if len(t.peers) >= troubleMax || t.peers == nil {
			// Whoever makes so many addresses up gets them logged again.
			t.peers = map[string]*peer{}
		}
		p = &peer{}
		t.peers[address] = p
	}
	now := time.Now()
	if !p.logged.IsZero() && now.Sub(p.logged) < troublePeriod {
		p.suppressed++
		t.mu.Unlock()
		return
	}
	suppressed := p.suppressed
	p.logged, p.suppressed = now, 0
	t.mu.Unlock()
	t.log.Error().Err(err).Str("address", address).Int("since_last", suppressed).
		Msg("frontend cannot be reached under the address that it gave, so its requests are lost")
}

// over forgets an address that has answered.
func (t *trouble) over(address string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.peers, address)
}
