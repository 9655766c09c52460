package app

import "encoding/json"

// heldForOthers adds up what the ranks of an engine hold for decode engines.
// Rows without these figures, or with others in their place, hold nothing: they
// are the engine's own, and there is nobody whom an error would help.
func heldForOthers(rows []json.RawMessage) (requests, blocks int) {
	for _, row := range rows {
		var r struct {
			Handoff struct {
				Requests int `json:"requests"`
				Blocks   int `json:"blocks"`
			} `json:"handoff"`
		}
		if json.Unmarshal(row, &r) == nil {
			requests += r.Handoff.Requests
			blocks += r.Handoff.Blocks
		}
	}
	return requests, blocks
}
