// Package discovery keeps the worker's records in etcd, where frontends find them.
//
// A Client is a connection to etcd. A Session holds one lease and guards the records that were registered with it: whatever happens to etcd, the session puts the same bytes back under the same keys,
// if need be under a new lease. The upstream runtime (Dynamo 1.6.1, transports/etcd/lease.rs) drains and exits when its lease is lost; this one goes on serving, since requests and their streams
// do not pass through etcd. The instance id is the id of the session's first lease, for ever: frontends know the worker by it, and it need not be the id of the lease that the records are under.
//
// Records are opaque: key and value come from the caller, see package protocol for their contents.
//
// What the guard does with a key that it finds in etcd:
//
//	absent                            put again, on condition that it is still absent
//	our value, our lease              nothing
//	our value, another lease or none  put again under our lease, on condition that nobody changed it meanwhile
//	a foreign value                   never touched; reported as a lost registration until it is gone
//
// A lease is only given up when etcd says that it is gone. An etcd that does not answer proves nothing: one that was stopped or killed gives every lease its full time again when it is back,
// so a record put besides an old one that seems to be there could vanish later. The session therefore first asks for its old lease and moves records only when there is none.
//
// Everything here may be used from several goroutines. Each goroutine of a session ends in Session.Close, those of a client in Client.Close.
package discovery
