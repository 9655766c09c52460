// Package natsplane receives requests over NATS: one queue subscription for each endpoint, on exactly the subject that its instance record advertises.
//
// A Plane keeps itself alive. It reconnects for ever; it opens a new connection when the client library has given one up for good; and after each reconnect it calls
// itself healthy only when a message that it published to a private subject has come back, because a connection that is open is no proof that messages arrive.
// Its State tells how it stands; the worker's readiness follows from that.
//
// Each endpoint is read by one goroutine, which asks the Admitter and replies. Admit does not block, so the queue in front of it stays short, and its limits are low:
// a message that has to wait long has been given up by its sender already. All methods may be called from several goroutines.
//
// Conn and Dial are exported for internal/caller, which plays the frontend over the same kind of connection.
package natsplane
