package discovery

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// readBatch is how many keys are read in one transaction. etcd refuses more than 128 operations by default.
const readBatch = 100

// timeoutsUntilReset is after how many calls in a row without an answer the connections are taken for dead.
const timeoutsUntilReset = 2

// etcdStore is the store on a real etcd.
type etcdStore struct {
	etcd   *clientv3.Client
	dialer *dialer

	mu       sync.Mutex
	timeouts int
}

func (e *etcdStore) Grant(ctx context.Context, ttl time.Duration) (int64, time.Duration, error) {
	var resp *clientv3.LeaseGrantResponse
	err := e.call(ctx, func(ctx context.Context) (err error) {
		resp, err = e.etcd.Grant(ctx, int64(ttl/time.Second))
		return err
	})
	if err != nil {
		return 0, 0, err
	}
	return int64(resp.ID), time.Duration(resp.TTL) * time.Second, nil
}

func (e *etcdStore) KeepAlive(ctx context.Context, lease int64) (time.Duration, error) {
	var resp *clientv3.LeaseKeepAliveResponse
	err := e.call(ctx, func(ctx context.Context) (err error) {
		resp, err = e.etcd.KeepAliveOnce(ctx, clientv3.LeaseID(lease))
		return err
	})
	if err != nil {
		return 0, err
	}
	return time.Duration(resp.TTL) * time.Second, nil
}

func (e *etcdStore) Revoke(ctx context.Context, lease int64) error {
	return e.call(ctx, func(ctx context.Context) error {
		_, err := e.etcd.Revoke(ctx, clientv3.LeaseID(lease))
		return err
	})
}

func (e *etcdStore) Read(ctx context.Context, keys []string) (map[string]held, error) {
	found := make(map[string]held, len(keys))
	for len(keys) > 0 {
		n := min(len(keys), readBatch)
		ops := make([]clientv3.Op, 0, n)
		for _, key := range keys[:n] {
			ops = append(ops, clientv3.OpGet(key))
		}
		keys = keys[n:]
		err := e.call(ctx, func(ctx context.Context) error {
			resp, err := e.etcd.Txn(ctx).Then(ops...).Commit()
			if err != nil {
				return err
			}
			for _, r := range resp.Responses {
				for _, kv := range r.GetResponseRange().GetKvs() {
					found[string(kv.Key)] = held{value: kv.Value, lease: kv.Lease, revision: kv.ModRevision}
				}
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return found, nil
}

func (e *etcdStore) Write(ctx context.Context, lease int64, changes []change) (bool, error) {
	conditions := make([]clientv3.Cmp, 0, len(changes))
	ops := make([]clientv3.Op, 0, len(changes))
	for _, c := range changes {
		conditions = append(conditions, clientv3.Compare(clientv3.ModRevision(c.key), "=", c.revision))
		if c.remove {
			ops = append(ops, clientv3.OpDelete(c.key))
		} else {
			ops = append(ops, clientv3.OpPut(c.key, string(c.value), clientv3.WithLease(clientv3.LeaseID(lease))))
		}
	}
	done := false
	err := e.call(ctx, func(ctx context.Context) error {
		resp, err := e.etcd.Txn(ctx).If(conditions...).Then(ops...).Commit()
		if err == nil {
			done = resp.Succeeded
		}
		return err
	})
	return done, err
}

func (e *etcdStore) Watch(ctx context.Context, key string, changed func()) error {
	return follow(ctx, e.etcd, e.dialer.dialled(), key, func(resp *clientv3.WatchResponse) {
		if resp.Created {
			changed()
		}
		for _, ev := range resp.Events {
			// A put is either ours or nothing that would have to be undone at once: two sessions that both believe to own a key must not fight over it as fast as they can.
			if ev.Type == clientv3.EventTypeDelete {
				changed()
			}
		}
	}, clientv3.WithCreatedNotify(), clientv3.WithFilterPut())
}

// call makes one request and turns its error into one that a session understands and a person too.
func (e *etcdStore) call(ctx context.Context, request func(context.Context) error) error {
	ctx, cause := e.dialer.withCause(ctx)
	err := request(ctx)
	e.judge(err)
	if err != nil && e.etcd.Ctx().Err() != nil {
		return ErrClosed // the client is closed: nothing will ever succeed
	}
	if errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return errLeaseGone
	}
	return cause.explain(err)
}

// judge gives up the connections when nothing comes through them any more. A connection to a host that has vanished looks alive for long, and TCP's own pauses between retransmissions
// grow, so that a network which is back is used late; a new connection is there at once.
func (e *etcdStore) judge(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !errors.Is(err, context.DeadlineExceeded) {
		if err == nil {
			e.timeouts = 0
		}
		return
	}
	if e.timeouts++; e.timeouts >= timeoutsUntilReset {
		e.timeouts = 0
		e.dialer.closeAll()
	}
}

// follow passes on what etcd tells of a key, or of all keys with that prefix, until ctx ends or the watch breaks. It also ends, with errReconnected, when again tells of a new connection:
// the client would resume the watch where it was, which is right for the same etcd and silently wrong for one that has lost its data.
func follow(ctx context.Context, etcd *clientv3.Client, again <-chan struct{}, key string, observe func(*clientv3.WatchResponse), opts ...clientv3.OpOption) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	responses := etcd.Watch(clientv3.WithRequireLeader(ctx), key, opts...)
	for {
		select {
		case <-again:
			return errReconnected
		case resp, ok := <-responses:
			if !ok {
				if err := ctx.Err(); err != nil {
					return err
				}
				return errWatchEnded
			}
			if err := resp.Err(); err != nil {
				return err
			}
			observe(&resp)
		}
	}
}
