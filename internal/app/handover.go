package app

import (
	"context"
	"encoding/json"
	"fmt"
	"sync/atomic"
	"time"

	"dynworker/pkg/config"
	"dynworker/pkg/discovery"
	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/handlers"
)

// machineSlots is where workers claim the numbers out of which global request ids are made. It is outside of what frontends look at, and above all namespaces, since engines of any of them may meet.
const machineSlots = "dynworker/machine_slots/"

// heldInterval is how often an engine is asked whether its KV blocks have been fetched.
const heldInterval = 200 * time.Millisecond

// handovers is what a worker of a disaggregated model keeps besides its requests.
type handovers struct {
	// machine is the claimed slot, nil when there is none.
	machine atomic.Pointer[discovery.Slot]
	// last is when a prefill last went out, in nanoseconds since 1970.
	last atomic.Int64
}

// slot is the claimed machine slot, -1 while it is not certain that no other worker has it. Prefills then go without a global request id, as with builds that have none.
func (h *handovers) slot() int {
	if slot := h.machine.Load(); slot != nil {
		if number, ok := slot.Number(); ok {
			return number
		}
	}
	return -1
}

func (h *handovers) went(now time.Time) { h.last.Store(now.UnixNano()) }

// claimMachine takes a machine slot for a prefill worker whose engine makes global request ids out of one.
func (w *worker) claimMachine(ctx context.Context, id identity) error {
	bound := w.ready.Bounds.MachineIDs
	if w.cfg.Role != config.RolePrefill || bound == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	slot, err := w.session.ClaimSlot(ctx, machineSlots, bound, id.namespace+"/"+id.component)
	if err != nil {
		return fmt.Errorf("a machine slot for disaggregated request ids: %w", err)
	}
	w.handovers.machine.Store(slot)
	number, _ := slot.Number()
	w.log.Info().Int("slot", number).Int("of", bound).Msg("machine slot claimed")
	return nil
}

// settleHandovers waits, within the budget, for what outlives its request: on a decode worker aborts that wait for KV transfers, on a prefill worker KV blocks that decode workers have yet to fetch.
func (w *worker) settleHandovers(budget context.Context) error {
	var err error
	switch w.cfg.Role {
	case config.RoleDecode:
		err = w.handler.Settle(budget)
	case config.RolePrefill:
		err = w.awaitFetched(budget)
	}
	if err != nil {
		w.log.Warn().Err(err).Msg("drain budget used up while KV blocks were on their way between workers")
	}
	return nil
}

// awaitFetched asks the engine until it holds nothing for others any more. An engine that cannot tell is given the time that a transfer may take since the last prefill.
func (w *worker) awaitFetched(budget context.Context) error {
	tick := time.NewTicker(heldInterval)
	defer tick.Stop()
	for {
		held, known := w.heldKV(budget)
		since := time.Since(time.Unix(0, w.handovers.last.Load()))
		if known && (held.Requests == nil || *held.Requests == 0) || !known && since >= w.cfg.Disaggregation.TransferTimeout {
			return nil
		}
		select {
		case <-budget.Done():
			return fmt.Errorf("the engine still holds blocks that nobody has fetched: %w", context.Cause(budget))
		case <-tick.C:
		}
	}
}

// heldKV is what the engine keeps for decode workers; known is false when it cannot tell, and true with nothing held when there is no engine.
func (w *worker) heldKV(ctx context.Context) (held heldKV, known bool) {
	now := w.lives.current.Load()
	if now == nil {
		return held, true
	}
	ctx, cancel := context.WithTimeout(ctx, engineAnswerTimeout)
	defer cancel()
	raw, err := now.Query(ctx, ipc.QueryHeldKV)
	if err != nil {
		return held, false
	}
	if json.Unmarshal(raw, &held) != nil || held.Requests == nil {
		return held, false
	}
	return held, true
}

// heldKV is an engine's answer to ipc.QueryHeldKV, as far as the way out needs it.
type heldKV struct {
	Requests *int `json:"requests"`
}

// engineAnswerTimeout bounds one question to the engine on the way out.
const engineAnswerTimeout = 2 * time.Second

// leaveNothing sees to a request whose caller cannot be reached: a prefill worker may hold KV blocks for it.
func (d *dispatcher) leaveNothing(call *handlers.Call) {
	if d.abandon == nil {
		return
	}
	if err := d.abandon(d.work, call); err != nil {
		d.log.Debug().Err(err).Str("request_id", call.ID).Msg("the KV blocks of a request without a caller were not fetched")
	}
}
