package engineargs

import "fmt"

// Limits that keep a text with aliases of aliases, or with a thousand brackets,
// from growing without end.
const (
	maxDepth = 64
	maxNodes = 50_000
	// MaxText bounds a file or override; both are written by hand.
	MaxText = 1 << 20
)

// budget counts what a reader has made.
type budget struct{ nodes int }

// spend accounts for one value at a depth; the reason is empty while there is room.
func (b *budget) spend(depth int) string {
	b.nodes++
	switch {
	case b.nodes > maxNodes:
		return fmt.Sprintf("holds more than %d values", maxNodes)
	case depth > maxDepth:
		return fmt.Sprintf("is nested more than %d levels deep", maxDepth)
	}
	return ""
}
