package discovery

import (
	"context"
	"time"
)

// store is what a session needs of etcd. Every call may fail without saying whether it took effect, as calls over a network do.
type store interface {
	// Grant makes a lease. The time that is granted may be longer than ttl.
	Grant(ctx context.Context, ttl time.Duration) (lease int64, granted time.Duration, err error)
	// KeepAlive gives the lease its full time again, which it returns, or fails with errLeaseGone.
	KeepAlive(ctx context.Context, lease int64) (time.Duration, error)
	// Revoke ends the lease and removes all that is under it, or fails with errLeaseGone.
	Revoke(ctx context.Context, lease int64) error
	// Read returns those of the keys that exist.
	Read(ctx context.Context, keys []string) (map[string]held, error)
	// Write makes all changes at once, or none and returns false when one of their conditions does not hold. It fails with errLeaseGone when the lease to put under is gone.
	Write(ctx context.Context, lease int64, changes []change) (done bool, err error)
	// Watch calls changed when it has begun to watch the key and whenever the key may have been removed. It returns when the watch breaks or ctx ends, always with an error.
	Watch(ctx context.Context, key string, changed func()) error
}

// held is what a store holds under a key.
type held struct {
	value    []byte
	lease    int64 // 0 for none
	revision int64 // of the last change of the key
}

// change is a put or, with remove, a removal of a key, on condition that its last change is still revision; 0 stands for a key that does not exist.
type change struct {
	key      string
	value    []byte
	remove   bool
	revision int64
}
