package discovery

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// Entry is a record as it is in etcd.
type Entry struct {
	Record
	// Lease is the lease that the record is under, 0 for none.
	Lease int64
}

// Event is a record that is new or changed, or one that is gone.
type Event struct {
	Entry // of a record that is gone, what it was at last
	Gone  bool
}

// List returns all records whose keys begin with prefix, in the order of their keys. While etcd does not answer it waits until ctx ends.
func (c *Client) List(ctx context.Context, prefix string) ([]Entry, error) {
	entries, _, err := c.list(ctx, prefix)
	if err != nil {
		return nil, fmt.Errorf("list %s in etcd: %w", prefix, err)
	}
	return entries, nil
}

func (c *Client) list(ctx context.Context, prefix string) (entries []Entry, revision int64, err error) {
	ctx, why := c.dialer.withCause(ctx)
	resp, err := c.etcd.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByKey, clientv3.SortAscend))
	if err != nil {
		return nil, 0, why.explain(err)
	}
	for _, kv := range resp.Kvs {
		entries = append(entries, Entry{Record: Record{Key: string(kv.Key), Value: kv.Value}, Lease: kv.Lease})
	}
	return entries, resp.Header.Revision, nil
}

// Watch calls observe for every record whose key begins with prefix, first for those that exist, then for each change, until ctx ends or etcd refuses the request. It always returns an error.
//
// It outlives outages: after each new connection, and when etcd has thrown away the history that was needed, it reads all records again and reports the differences to what it reported before.
// So what observe was told is right in the end, though a record that changed twice in the meantime is reported once.
func (c *Client) Watch(ctx context.Context, prefix string, observe func(Event)) error {
	v := view{known: make(map[string]Entry), observe: observe}
	pause := newBackOff()
	for {
		err := c.watchOnce(ctx, prefix, &v, pause.Reset)
		if ctx.Err() != nil {
			return fmt.Errorf("watch %s in etcd: %w", prefix, context.Cause(ctx))
		}
		if isFinal(err) || c.etcd.Ctx().Err() != nil {
			return fmt.Errorf("watch %s in etcd: %w", prefix, err)
		}
		wait(ctx, pause.NextBackOff())
	}
}

func (c *Client) watchOnce(ctx context.Context, prefix string, v *view, works func()) error {
	// Asked before reading: a connection that is made between reading and watching counts too.
	again := c.dialer.dialled()
	reading, cancel := context.WithTimeout(ctx, c.cfg.CallTimeout)
	defer cancel()
	entries, revision, err := c.list(reading, prefix)
	if err != nil {
		return err
	}
	works()
	v.replace(entries)
	return follow(ctx, c.etcd, again, prefix, func(resp *clientv3.WatchResponse) {
		for _, ev := range resp.Events {
			if ev.Type == clientv3.EventTypeDelete {
				v.remove(string(ev.Kv.Key))
			} else {
				v.put(Entry{Record: Record{Key: string(ev.Kv.Key), Value: ev.Kv.Value}, Lease: ev.Kv.Lease})
			}
		}
	}, clientv3.WithPrefix(), clientv3.WithRev(revision+1))
}

// view is what an observer has been told.
type view struct {
	known   map[string]Entry
	observe func(Event)
}

func (v *view) put(e Entry) {
	v.known[e.Key] = e
	v.observe(Event{Entry: e})
}

func (v *view) remove(key string) {
	if e, ok := v.known[key]; ok {
		delete(v.known, key)
		v.observe(Event{Entry: e, Gone: true})
	}
}

// replace tells what is different now, first what is gone.
func (v *view) replace(entries []Entry) {
	now := make(map[string]Entry, len(entries))
	for _, e := range entries {
		now[e.Key] = e
	}
	for _, key := range slices.Sorted(maps.Keys(v.known)) {
		if _, ok := now[key]; !ok {
			v.remove(key)
		}
	}
	for _, e := range entries {
		if old, ok := v.known[e.Key]; !ok || old.Lease != e.Lease || !bytes.Equal(old.Value, e.Value) {
			v.put(e)
		}
	}
}
