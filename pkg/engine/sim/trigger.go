package sim

import (
	"strconv"
	"strings"

	"dynworker/pkg/engine/ipc"
)

// misdeed is something that goes wrong on request.
type misdeed uint8

const (
	behave         misdeed = iota
	requestError           // the request fails with RequestError
	valueError             // the call fails with ValueError
	typeError              // the call fails with TypeError
	notImplemented         // the call fails with NotImplementedError
	fatalError             // the engine fails as a whole
	stall                  // no more tokens; only a cancel ends the request
	crash                  // the process ends without a word
	leave                  // the process ends without a word, with status 0
	ignoreCancel           // a cancel has no effect
	noOutputs              // a result without any choice in it
	noFinish               // the request ends without a finish reason
	timeout                // the request ends with "timeout"
	unhealthy              // the health check turns false and the request stalls

	transferLost     // the connection that carries the KV ends half-way
	transferCorrupt  // the KV arrives changed
	transferMismatch // the KV is said to be another context's
	transferStall    // the prefill engine does not answer when it is asked for the KV
	transferCrash    // the prefill engine crashes when it is asked for the KV
	receiveCrash     // the decode engine crashes when half of the KV is there
)

// trigger is a misdeed and the number of tokens after which it happens.
type trigger struct {
	what  misdeed
	after int
}

// byName are the misdeeds that a request can ask for with the cache salt
// "sim:NAME" or "sim:NAME:TOKENS".
var byName = map[string]trigger{
	"request-error":   {what: requestError},
	"value-error":     {what: valueError},
	"type-error":      {what: typeError},
	"not-implemented": {what: notImplemented},
	"fatal":           {what: fatalError},
	"stall":           {what: stall},
	"crash":           {what: crash},
	"exit":            {what: leave},
	"ignore-cancel":   {what: ignoreCancel},
	"no-outputs":      {what: noOutputs},
	"no-finish":       {what: noFinish},
	"timeout":         {what: timeout},
	"unhealthy":       {what: unhealthy},

	"transfer-lost":     {what: transferLost},
	"transfer-corrupt":  {what: transferCorrupt},
	"transfer-mismatch": {what: transferMismatch},
	"transfer-stall":    {what: transferStall},
	"transfer-crash":    {what: transferCrash},
	"receive-crash":     {what: receiveCrash},
}

// byToken are the misdeeds that a prompt asks for with its first token, if the
// vocabulary is large enough to have it. The numbers are those of the stand-in
// engine on which Dynamo's own worker was recorded.
var byToken = map[int32]trigger{
	90001: {requestError, 0},
	90002: {requestError, 3},
	90003: {valueError, 0},
	90004: {typeError, 0},
	90005: {notImplemented, 0},
	90006: {fatalError, 3},
	90007: {fatalError, 3},
	90008: {noOutputs, 2},
	90009: {noFinish, 3},
	90010: {unhealthy, 3},
	90011: {timeout, 3},
	90012: {ignoreCancel, 0},
}

// triggerOf finds out whether a request asks for something to go wrong.
func triggerOf(prompt []int32, salt *string) trigger {
	if salt != nil {
		if name, ok := strings.CutPrefix(*salt, "sim:"); ok {
			name, count, _ := strings.Cut(name, ":")
			t := byName[name]
			if n, err := strconv.Atoi(count); err == nil && n >= 0 {
				t.after = n
			}
			return t
		}
		if id, ok := strings.CutPrefix(*salt, "trigger:"); ok {
			n, err := strconv.ParseInt(id, 10, 32)
			if err == nil {
				return byToken[int32(n)]
			}
		}
	}
	if len(prompt) > 0 {
		return byToken[prompt[0]]
	}
	return trigger{}
}

// callError is the error that a misdeed makes of a call, nil if it makes none.
func (m misdeed) callError() *ipc.RequestError {
	switch m {
	case valueError:
		return &ipc.RequestError{Kind: ipc.ErrorValue, Type: "ValueError", Message: "simulated ValueError of the call"}
	case typeError:
		return &ipc.RequestError{Kind: ipc.ErrorType, Type: "TypeError", Message: "simulated TypeError of the call"}
	case notImplemented:
		return &ipc.RequestError{Kind: ipc.ErrorNotImplemented, Type: "NotImplementedError", Message: "simulated NotImplementedError of the call"}
	default:
		return nil
	}
}
