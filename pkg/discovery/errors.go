package discovery

import (
	"errors"
	"fmt"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

var (
	// ErrKeyTaken means that a key which was to be registered belongs to somebody else. The error is a *KeyTakenError.
	ErrKeyTaken = errors.New("key is taken")
	// ErrAuthentication means that etcd refuses the credentials, or the lack of them. Waiting does not help.
	ErrAuthentication = errors.New("etcd refuses the credentials")
	// ErrClosed is returned by a session when it or its client is closed.
	ErrClosed = errors.New("connection to etcd is closed")

	// errLeaseGone is what a store answers when the lease does not exist any more.
	errLeaseGone = errors.New("lease is gone")
	// errRaced means that a conditional write found another state than the one that was read just before.
	errRaced = errors.New("records changed between reading and writing")
	// errReconnected ends a watch when there is a new connection: it may lead to another etcd than before.
	errReconnected = errors.New("etcd connection was made anew")
	// errWatchEnded ends a watch without a stated reason.
	errWatchEnded = errors.New("etcd watch ended")
)

// KeyTakenError names the key that somebody else holds, and the lease that it is under (0 for none).
type KeyTakenError struct {
	Key   string
	Lease int64
}

func (e *KeyTakenError) Error() string {
	return fmt.Sprintf("key %s is taken: it holds another record, under lease %x", e.Key, e.Lease)
}

// Is makes errors.Is(err, ErrKeyTaken) true.
func (e *KeyTakenError) Is(target error) bool { return target == ErrKeyTaken }

// foreignError means that a guarded key holds a value which is not ours.
type foreignError struct{ key string }

func (e *foreignError) Error() string {
	return fmt.Sprintf("key %s holds a record of somebody else", e.key)
}

// refusesCredentials tells whether err is etcd's verdict on who we are, as opposed to a failure that time may heal.
func refusesCredentials(err error) bool {
	for _, verdict := range []error{rpctypes.ErrAuthFailed, rpctypes.ErrUserEmpty, rpctypes.ErrUserNotFound} {
		if errors.Is(err, verdict) {
			return true
		}
	}
	return false
}

// isFinal tells whether the same request would fail again however often it is repeated.
func isFinal(err error) bool {
	var taken *KeyTakenError
	if errors.As(err, &taken) || errors.Is(err, ErrClosed) {
		return true
	}
	var fromServer rpctypes.EtcdError
	if errors.As(err, &fromServer) {
		if errors.Is(err, rpctypes.ErrAuthOldRevision) {
			return false // users were changed at the same moment
		}
		return fromServer.Code() == codes.InvalidArgument || fromServer.Code() == codes.PermissionDenied
	}
	// gRPC itself refuses to send a message above the limit.
	return status.Code(err) == codes.ResourceExhausted
}
