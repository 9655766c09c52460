package status

import (
	"encoding/json"
	"net/http"
	"time"
)

// uptime is a duration in the form in which it was recorded.
type uptime struct {
	Secs  uint64 `json:"secs"`
	Nanos uint32 `json:"nanos"`
}

func newUptime(d time.Duration) uptime {
	return uptime{Secs: uint64(d / time.Second), Nanos: uint32(d % time.Second)}
}

// healthBody is the body of /health. The first three fields are those of
// Dynamo 1.6.1 as recorded; the others are ours and absent when empty, so that
// a ready worker answers exactly like the recorded one.
type healthBody struct {
	Status    string            `json:"status"`
	Uptime    uptime            `json:"uptime"`
	Endpoints map[string]string `json:"endpoints"`
	Reasons   []Reason          `json:"reasons,omitempty"`
	Startup   *Progress         `json:"startup,omitempty"`
}

func readyWord(ok bool) string {
	if ok {
		return "ready"
	}
	return "notready"
}

func (s *Server) serveHealth(w http.ResponseWriter) {
	snap := s.health.Snapshot()
	body := healthBody{
		Status:    readyWord(snap.Ready),
		Uptime:    newUptime(snap.Uptime),
		Endpoints: make(map[string]string, len(snap.Endpoints)),
		Reasons:   snap.Reasons,
		Startup:   snap.Progress,
	}
	for name, ok := range snap.Endpoints {
		body.Endpoints[name] = readyWord(ok)
	}
	code := http.StatusOK
	if !snap.Ready {
		code = http.StatusServiceUnavailable
	}
	writeJSON(w, code, body)
}

// serveLive answers from constants and the clock alone: nothing that another
// goroutine may hold can delay it.
func (s *Server) serveLive(w http.ResponseWriter) {
	writeJSON(w, http.StatusOK, struct {
		Status string `json:"status"`
		Uptime uptime `json:"uptime"`
	}{"live", newUptime(s.health.Uptime())})
}

// writeJSON writes v as JSON under the content type that Dynamo's system
// server was recorded to use for its JSON bodies.
func writeJSON(w http.ResponseWriter, code int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		writeText(w, http.StatusInternalServerError, "answer cannot be encoded: "+err.Error())
		return
	}
	writeText(w, code, string(b))
}
