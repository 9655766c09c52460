package handlers

import (
	"fmt"

	"dynworker/pkg/engine/ipc"
	"dynworker/pkg/protocol"
)

// transferFailed tells whether a failure is that of the KV transfer and not of the request: it came instead of the first token, and the prefill worker has served the same request.
func (r *relay) transferFailed(e *ipc.RequestError) bool {
	return r.plan.half == generationHalf && r.generated == 0 && (e.Kind == ipc.ErrorRequest || e.Kind == "")
}

// transferError makes the frontend run the prompt once more, perhaps elsewhere. Nothing has been sent yet, so nothing is lost. Dynamo 1.6.1's worker ends such a request with an error that its caller sees.
func transferError(r *protocol.Request, e *ipc.RequestError) error {
	from := "a prefill worker"
	if id := PrefillWorker(r); id != 0 {
		from = fmt.Sprintf("prefill worker %x", id)
	}
	return protocol.NewError(protocol.ReasonBackendDisconnected, fmt.Sprintf("the KV blocks of %s did not arrive: %s", from, e.Error()))
}

// PrefillWorker is the instance id of the worker that ran a decode request's prompt, as the frontend of Dynamo 1.6.1 tells it (routing.prefill_worker_id), or 0.
func PrefillWorker(r *protocol.Request) uint64 {
	routing, _ := r.Fields["routing"].(protocol.Map)
	switch id := routing["prefill_worker_id"].(type) {
	case int64:
		return uint64(max(id, 0))
	case uint64:
		return id
	}
	return 0
}
