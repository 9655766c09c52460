package natsplane

import "time"

// State is how the connection stands.
type State struct {
	// Healthy is true from the moment when a message of our own came back, until the connection is lost.
	Healthy bool
	// Reason says why Healthy is false; empty otherwise.
	Reason string
	// Since is when the state was entered.
	Since time.Time
	// Server is the address of the server, without credentials; empty while there is none.
	Server string
	// Reconnects counts the returns to health after the first.
	Reconnects uint64
	// MaxPayload is the largest message in bytes that the server takes, 0 when unknown. It can change with the server.
	MaxPayload int64
}
