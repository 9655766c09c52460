package replay

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"testing"

	"dynworker/pkg/discovery"

	"github.com/stretchr/testify/require"
)

// witness remembers every record that was ever put into etcd, so that a worker can be shown never to have been registered, not even for a moment.
type witness struct {
	session *discovery.Session
	stop    context.CancelFunc
	done    chan error

	mu      sync.Mutex
	put     []string // keys
	changed chan struct{}
	marks   int
}

// markPrefix is where the witness puts records of its own, to know how far it has seen.
const markPrefix = "v1/witness/"

func newWitness(ctx context.Context, c *discovery.Client) (*witness, error) {
	session, err := c.Session(ctx)
	if err != nil {
		return nil, err
	}
	watching, stop := context.WithCancel(context.Background())
	w := &witness{session: session, stop: stop, done: make(chan error, 1), changed: make(chan struct{})}
	go func() { w.done <- c.Watch(watching, "v1/", w.observe) }()
	return w, nil
}

func (w *witness) close() error {
	w.stop()
	err := <-w.done
	if errors.Is(err, context.Canceled) {
		err = nil
	}
	return errors.Join(err, w.session.Close(context.Background()))
}

func (w *witness) observe(e discovery.Event) {
	if e.Gone {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.put = append(w.put, e.Key)
	close(w.changed)
	w.changed = make(chan struct{})
}

// seen returns all keys of a namespace that were ever put, once everything that is in etcd now has been seen.
func (w *witness) seen(t *testing.T, namespace string) (keys []string) {
	t.Helper()
	ctx := limited(t)
	w.mu.Lock()
	w.marks++
	mark := markPrefix + strconv.Itoa(w.marks)
	w.mu.Unlock()
	require.NoError(t, w.session.Register(ctx, discovery.Record{Key: mark, Value: []byte("seen")}))
	for {
		w.mu.Lock()
		keys, changed := w.put, w.changed
		w.mu.Unlock()
		found := []string{}
		for _, key := range keys {
			if key == mark {
				return found
			}
			if strings.Contains(key, "/"+namespace+"/") {
				found = append(found, key)
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			t.Fatalf("the record %s does not show", mark)
		}
	}
}
