package testenv

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dynworker/internal/testenv/embedded"
)

// Patience bounds every wait of a test for something that is going to happen. It is long enough for the busiest machine: a test that reaches it has found a defect.
const Patience = 60 * time.Second

// Context returns a context that ends after Patience, or with the test.
func Context(tb testing.TB) context.Context {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), Patience)
	tb.Cleanup(cancel)
	return ctx
}

// StartEtcd starts an etcd with an empty store, which is closed at the end of the test.
func StartEtcd(tb testing.TB, opts embedded.EtcdOptions) *embedded.Etcd {
	tb.Helper()
	e, err := embedded.NewEtcd(opts)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, e.Close()) })
	return e
}

// StartNATS starts a NATS server, which is closed at the end of the test.
func StartNATS(tb testing.TB, opts embedded.NATSOptions) *embedded.NATS {
	tb.Helper()
	n, err := embedded.NewNATS(opts)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, n.Close()) })
	return n
}

// Main is the TestMain of a package whose code starts goroutines: it runs the tests and fails when one of them has left a goroutine behind.
// The embedded servers and their clients end all of theirs, so nothing is excepted.
func Main(m *testing.M) { goleak.VerifyTestMain(m) }
