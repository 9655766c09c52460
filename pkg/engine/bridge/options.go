package bridge

import (
	"encoding/json"
	"time"
)

// wireOptions mirrors the Options class in serve.py, which refuses keys that it
// does not know.
type wireOptions struct {
	Abort            AbortPolicy `json:"abort,omitempty"`
	AbortGrace       int64       `json:"abort_grace_ms,omitempty"`
	FirstTokenWait   int64       `json:"first_token_wait_ms,omitempty"`
	ProgressInterval int64       `json:"progress_interval_ms,omitempty"`
	WatchInterval    int64       `json:"watch_interval_ms,omitempty"`
	StopTimeout      int64       `json:"stop_ms,omitempty"`
}

func marshalOptions(o Options) ([]byte, error) {
	return json.Marshal(wireOptions{
		Abort:            o.Abort,
		AbortGrace:       millis(o.AbortGrace),
		FirstTokenWait:   millis(o.FirstTokenWait),
		ProgressInterval: millis(o.ProgressInterval),
		WatchInterval:    millis(o.WatchInterval),
		StopTimeout:      millis(o.StopTimeout),
	})
}

// millis rounds up, since zero would mean the default.
func millis(d time.Duration) int64 {
	return int64((d + time.Millisecond - 1) / time.Millisecond)
}
