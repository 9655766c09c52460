package sim

import (
	"encoding/json"
	"fmt"

	"dynworker/pkg/engine/ipc"
)

// Global request ids are put together as builds up to rc21 do it: time in
// milliseconds, machine, counter.
const (
	machineBits = 10
	counterBits = 12
)

// machineIDs is the number of machine ids.
const machineIDs = 1 << machineBits

// nameContext gives a prompt a global id if the call names the machine to make
// it out of.
func (e *engine) nameContext(h *handoff, raw json.RawMessage) *ipc.RequestError {
	var order struct {
		Machine *uint64 `json:"machine_id"`
	}
	if err := json.Unmarshal(raw, &order); err != nil {
		return callError(ipc.ErrorType, "TypeError", "machine_id: "+err.Error())
	}
	if order.Machine == nil {
		return nil
	}
	if *order.Machine >= machineIDs {
		return callError(ipc.ErrorValue, "ValueError", fmt.Sprintf("machine_id %d is not below %d", *order.Machine, machineIDs))
	}
	e.named++
	id := uint64(e.clock.Now().UnixMilli())<<(machineBits+counterBits) | *order.Machine<<counterBits | e.named%(1<<counterBits)
	h.terms.DisaggRequestID = &id
	return nil
}
