package status

import (
	"errors"
	"fmt"
	"syscall"
)

// BindError says that a server could not take its address.
type BindError struct {
	Server  string // which server
	Address string // "host:port" as configured
	Holder  *Holder
	Err     error
}

// Holder is the process that listens on a port.
type Holder struct {
	PID  int
	Name string // of its executable; may be empty
}

// InUse reports whether another process has the address.
func (e *BindError) InUse() bool { return errors.Is(e.Err, syscall.EADDRINUSE) }

func (e *BindError) Error() string {
	if !e.InUse() {
		return fmt.Sprintf("%s: cannot listen on %s: %v", e.Server, e.Address, e.Err)
	}
	by := "another process"
	if e.Holder != nil {
		by = fmt.Sprintf("process %d", e.Holder.PID)
		if e.Holder.Name != "" {
			by += " (" + e.Holder.Name + ")"
		}
	}
	return fmt.Sprintf("%s: cannot listen on %s: address already in use by %s; choose another port, or 0 for any free one",
		e.Server, e.Address, by)
}

func (e *BindError) Unwrap() error { return e.Err }

func newBindError(server, addr string, port int, err error) *BindError {
	e := &BindError{Server: server, Address: addr, Err: err}
	if e.InUse() {
		e.Holder = findHolder(port)
	}
	return e
}
