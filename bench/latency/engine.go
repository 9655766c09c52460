package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	"dynworker/pkg/engine/ipc"

	"golang.org/x/sys/unix"
)

// engineCommand makes this program the engine of the measured worker: "latency engine STEP GROUPS". Each of its tokens is the time at which it was written, in microseconds of the machine's monotonic clock (the lower 31 bits). Requests are
// dealt to GROUPS ranks, whose steps are spread evenly over the time of one step.
const engineCommand = "engine"

// stamp is the present in the unit of a token.
func stamp() (uint32, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return uint32(time.Duration(ts.Nano())/time.Microsecond) & stampMask, nil
}

const stampMask = 1<<31 - 1

// age is how long ago a token was written.
func age(now, token uint32) time.Duration {
	return time.Duration((now-token)&stampMask) * time.Microsecond
}

// engine is the state of the engine program.
type engine struct {
	conn net.Conn

	mu     sync.Mutex
	groups []map[uint64]int // tokens that are left, by request
	next   int
	out    []byte
}

func runEngine(args []string) error {
	step, err := time.ParseDuration(args[0])
	if err != nil {
		return err
	}
	groups, err := strconv.Atoi(args[1])
	if err != nil || groups < 1 {
		return fmt.Errorf("%q groups", args[1])
	}
	fd, err := strconv.Atoi(os.Getenv(ipc.EnvFD))
	if err != nil {
		return fmt.Errorf("%s: %w", ipc.EnvFD, err)
	}
	conn, err := net.FileConn(os.NewFile(uintptr(fd), "engine channel"))
	if err != nil {
		return err
	}
	e := &engine{conn: conn, groups: make([]map[uint64]int, groups)}
	for i := range e.groups {
		e.groups[i] = map[uint64]int{}
	}
	if err := e.say(ipc.Hello{Protocol: ipc.Version, Engine: "latency", PID: os.Getpid()}); err != nil {
		return err
	}
	r := ipc.NewReader(conn, ipc.MaxPayload)
	if _, _, err := r.Next(); err != nil { // configure
		return err
	}
	ready := ipc.Ready{Engine: "latency", Version: "1", ConfigReadable: true, ResolvedConfig: json.RawMessage("{}"), AttentionDPSize: 1, Bounds: ipc.Bounds{MaxSeqLen: 1 << 20}}
	if err := e.say(ready); err != nil {
		return err
	}
	for i := range e.groups {
		go e.steps(i, step, time.Duration(i)*step/time.Duration(groups))
	}
	return e.read(r)
}

func (e *engine) say(m ipc.Message) error {
	frame, err := ipc.AppendMessage(nil, m)
	if err != nil {
		return err
	}
	_, err = e.conn.Write(frame)
	return err
}

// read takes the worker's messages until it says to shut down or is gone.
func (e *engine) read(r *ipc.Reader) error {
	for {
		kind, payload, err := r.Next()
		if err != nil {
			return err
		}
		switch kind {
		case ipc.KindGenerate:
			q, err := ipc.ParseGenerate(payload)
			if err != nil {
				return err
			}
			left := 1
			if n := q.Params.Sampling.MaxTokens; n != nil {
				left = int(*n)
			}
			e.mu.Lock()
			e.groups[e.next%len(e.groups)][q.ID] = left
			e.next++
			e.mu.Unlock()
		case ipc.KindCancel:
			id, err := ipc.ParseCancel(payload)
			if err != nil {
				return err
			}
			e.mu.Lock()
			for _, g := range e.groups {
				if _, runs := g[id]; runs {
					g[id] = 0
				}
			}
			e.mu.Unlock()
		case ipc.KindQuery:
			q, err := ipc.ParseQuery(payload)
			if err != nil {
				return err
			}
			answer, err := ipc.AppendJSON(nil, ipc.KindAnswer, map[string]any{"seq": q.Seq, "ok": true, "healthy": true})
			if err != nil {
				return err
			}
			if _, err := e.conn.Write(answer); err != nil {
				return err
			}
		case ipc.KindShutdown:
			return e.say(ipc.Goodbye{Reason: "shutdown"})
		}
	}
}

// steps writes one frame with a token for every request of a group at each step.
func (e *engine) steps(group int, step, offset time.Duration) {
	time.Sleep(offset)
	tick := time.NewTicker(step)
	defer tick.Stop()
	for range tick.C {
		if err := e.step(group); err != nil {
			fmt.Fprintln(os.Stderr, "latency engine:", err)
			os.Exit(1)
		}
	}
}

func (e *engine) step(group int) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	running := e.groups[group]
	if len(running) == 0 {
		return nil
	}
	now, err := stamp()
	if err != nil {
		return err
	}
	out := ipc.BeginFrame(e.out[:0], ipc.KindOutputs)
	for id, left := range running {
		if left > 1 {
			out = ipc.AppendRecordHead(out, id, 0, 0, 1)
			out = binary.LittleEndian.AppendUint32(out, now)
			running[id] = left - 1
			continue
		}
		last := ipc.Output{ID: id, Last: true, Tokens: []uint32{now}, Meta: &ipc.Meta{FinishReason: "length"}}
		if left == 0 {
			last.Tokens, last.Meta.FinishReason = nil, "cancelled"
		}
		if out, err = ipc.AppendOutput(out, &last); err != nil {
			return err
		}
		delete(running, id)
	}
	if out, err = ipc.EndFrame(out, 0); err != nil {
		return err
	}
	e.out = out
	_, err = e.conn.Write(out)
	return err
}
