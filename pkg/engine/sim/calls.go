package sim

import (
	"encoding/json"
	"fmt"
	"os"
	"time"
)

// callLog writes a JSON line for each thing that happened to the engine, for
// tests and demonstrations that want to see what it was asked. Every line is
// written at once, so that several engines may share a file. A nil log writes
// nothing.
type callLog struct {
	file *os.File
	err  error // the first write error; nothing is written after it
}

func openCallLog(path string) (*callLog, error) {
	if path == "" {
		return nil, nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open the log of calls: %w", err)
	}
	return &callLog{file: f}, nil
}

// call is one line. Fields that say nothing about an event are left out.
type call struct {
	Event     string `json:"event"` // start, generate, placed, held, received, released, cancel, finish, shutdown
	Time      string `json:"time"`
	ID        uint64 `json:"id,omitempty"`
	RequestID string `json:"request_id,omitempty"`

	PromptTokens int             `json:"prompt_tokens,omitempty"`
	PromptSum    int64           `json:"prompt_sum,omitempty"`
	PromptHead   []int32         `json:"prompt_head,omitempty"`
	Params       json.RawMessage `json:"params,omitempty"` // of a generate, as sent
	Args         json.RawMessage `json:"args,omitempty"`   // of a start, as sent

	Context uint64 `json:"context,omitempty"` // of a hand-off
	Blocks  int    `json:"blocks,omitempty"`  // of its KV

	Rank         *int   `json:"rank,omitempty"`
	CachedTokens *int   `json:"cached_tokens,omitempty"`
	Known        *bool  `json:"known,omitempty"` // of a cancel: the request was there
	Reason       string `json:"reason,omitempty"`
	Tokens       []int  `json:"tokens,omitempty"` // made so far, by choice
}

// promptHead is how many tokens of a prompt are logged.
const promptHead = 8

func (l *callLog) add(now time.Time, c call) {
	if l == nil || l.err != nil {
		return
	}
	c.Time = now.UTC().Format(time.RFC3339Nano)
	line, err := json.Marshal(c)
	if err == nil {
		_, err = l.file.Write(append(line, '\n'))
	}
	if err != nil {
		l.err = err
		fmt.Fprintln(os.Stderr, "simulated engine: the log of calls ends here:", err)
	}
}

func (l *callLog) close() {
	if l != nil {
		_ = l.file.Close() // every line has been written
	}
}
