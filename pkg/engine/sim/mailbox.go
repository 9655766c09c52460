package sim

import "sync"

// mailbox hands messages from the reading goroutine to the loop. It never
// fills up, because a reader that waited could not notice a cancel; what is in
// it is bounded by what the worker has in flight.
type mailbox struct {
	wake chan struct{} // holds a token when there may be mail

	mu   sync.Mutex
	mail []any
}

func newMailbox() *mailbox { return &mailbox{wake: make(chan struct{}, 1)} }

func (m *mailbox) put(msg any) {
	m.mu.Lock()
	m.mail = append(m.mail, msg)
	m.mu.Unlock()
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// take returns everything that has come, in order.
func (m *mailbox) take() []any {
	m.mu.Lock()
	defer m.mu.Unlock()
	mail := m.mail
	m.mail = nil
	return mail
}

// pop returns the oldest message alone.
func (m *mailbox) pop() (msg any, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.mail) == 0 {
		return nil, false
	}
	msg, m.mail = m.mail[0], m.mail[1:]
	return msg, true
}
