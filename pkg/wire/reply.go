package wire

import "strings"

// ReplyKind is how the frontend understands the reply to a request message.
type ReplyKind uint8

// The kinds of reply.
const (
	// ReplyAccepted: the worker will call home. The empty reply means it, and
	// so does any text that is not one of the two refusals.
	ReplyAccepted ReplyKind = iota
	// ReplyOverloaded: no room; the frontend tries another worker and leaves
	// this one alone for about a second.
	ReplyOverloaded
	// ReplyUnavailable: not serving; the frontend tries another worker and
	// leaves this one alone for about five seconds.
	ReplyUnavailable
)

func (k ReplyKind) String() string {
	switch k {
	case ReplyOverloaded:
		return "overloaded"
	case ReplyUnavailable:
		return "unavailable"
	default:
		return "accepted"
	}
}

// The frontend compares these prefixes literally.
const (
	overloadedPrefix  = "Server overloaded:"
	unavailablePrefix = "Server unavailable:"
)

// OverloadedReply is the reply of a worker that has no room for a request.
func OverloadedReply(reason string) []byte { return []byte(overloadedPrefix + " " + reason) }

// UnavailableReply is the reply of a worker that does not serve the request for
// any other reason.
func UnavailableReply(reason string) []byte { return []byte(unavailablePrefix + " " + reason) }

// ParseReply tells how the frontend understands a reply. The reason is what
// follows the prefix; for an accepted request it is the text of the reply,
// usually empty.
func ParseReply(b []byte) (kind ReplyKind, reason string) {
	text := string(b)
	if rest, ok := strings.CutPrefix(text, overloadedPrefix); ok {
		return ReplyOverloaded, strings.TrimSpace(rest)
	}
	if rest, ok := strings.CutPrefix(text, unavailablePrefix); ok {
		return ReplyUnavailable, strings.TrimSpace(rest)
	}
	return ReplyAccepted, text
}
