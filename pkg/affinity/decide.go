package affinity

import (
	"fmt"
	"math"
)

// Reason says why a decision came out as it did. The set is closed: reasons are labels of a metric.
type Reason string

const (
	// ReasonConversation passes a conversation id and no rank: the engine's router places the turn.
	ReasonConversation Reason = "conversation"
	// ReasonConversationFirstRank passes a conversation id and the frontend's rank.
	ReasonConversationFirstRank Reason = "conversation_first_rank"
	// ReasonNoConversation passes an explicit none: the policy is on and the request has no usable id.
	ReasonNoConversation Reason = "no_conversation_id"
	// ReasonStrictRank passes the frontend's rank: the policy is off.
	ReasonStrictRank Reason = "strict_rank"
	// ReasonNoRank passes nothing: the policy is off and the request asks for no rank.
	ReasonNoRank Reason = "no_rank"
	// ReasonRankOutOfRange passes no rank because the one asked for does not exist; the engine chooses. A conversation argument is passed as the policy says.
	ReasonRankOutOfRange Reason = "rank_out_of_range"
)

// Reasons lists every reason, for metrics that want all series to exist from the start.
func Reasons() []Reason {
	return []Reason{ReasonConversation, ReasonConversationFirstRank, ReasonNoConversation, ReasonStrictRank, ReasonNoRank, ReasonRankOutOfRange}
}

// Decision is what goes to the engine with one request.
type Decision struct {
	// PassConversation says that the conversation argument is part of the call, whether it holds an id or an explicit none.
	PassConversation bool
	// ConversationID is the id, or empty for an explicit none.
	ConversationID string
	// ForceRank says that Rank is passed as a strict rank, never a relaxed one.
	ForceRank bool
	Rank      int
	Reason    Reason
}

// RankTypeError means that a request's rank is no integer.
type RankTypeError struct{ Got string }

func (e *RankTypeError) Error() string { return "routing.dp_rank must be an integer, got " + e.Got }

// RankRangeError means that a request's rank does not exist and that such ranks are refused.
type RankRangeError struct {
	Rank  string
	Ranks int
}

func (e *RankRangeError) Error() string {
	return fmt.Sprintf("routing.dp_rank %s is outside the engine's ranks [0, %d)", e.Rank, e.Ranks)
}

// rank is a request's wish, already judged.
type rank struct {
	asked, inRange bool
	value          int
	text           string
}

// Decide applies the gate to one request. agentContext and dpRank are the values as they were decoded from the wire (nil when absent or null; integers as int64 or uint64). The errors are *RankTypeError and *RankRangeError;
// both are the caller's fault and nothing may reach the engine then.
func (g *Gate) Decide(agentContext, dpRank any) (Decision, error) {
	want, err := g.judge(dpRank)
	if err != nil {
		return Decision{}, err
	}
	if !g.on {
		switch {
		case !want.asked:
			return Decision{Reason: ReasonNoRank}, nil
		case !want.inRange:
			return Decision{Reason: ReasonRankOutOfRange}, nil
		}
		return Decision{ForceRank: true, Rank: want.value, Reason: ReasonStrictRank}, nil
	}
	d := Decision{PassConversation: true, Reason: ReasonNoConversation}
	if id, ok := SessionID(agentContext); ok {
		d.ConversationID, d.Reason = id, ReasonConversation
		if g.source == SourceDynamo && want.asked && want.inRange {
			d.ForceRank, d.Rank, d.Reason = true, want.value, ReasonConversationFirstRank
		}
	}
	if want.asked && !want.inRange {
		d.Reason = ReasonRankOutOfRange
	}
	return d, nil
}

func (g *Gate) judge(dpRank any) (rank, error) {
	r := rank{asked: true}
	switch v := dpRank.(type) {
	case nil:
		return rank{}, nil
	case int64:
		r.text = fmt.Sprint(v)
		r.inRange = v >= 0 && v < int64(g.ranks)
		r.value = int(v)
	case uint64:
		r.text = fmt.Sprint(v)
		r.inRange = v <= math.MaxInt64 && int64(v) < int64(g.ranks)
		r.value = int(v)
	case bool:
		return rank{}, &RankTypeError{Got: "a boolean"}
	case float64:
		return rank{}, &RankTypeError{Got: "a number with a fraction"}
	case string:
		return rank{}, &RankTypeError{Got: "text"}
	default:
		return rank{}, &RankTypeError{Got: "a list or map"}
	}
	if !r.inRange {
		if g.rejectOutOfRange {
			return rank{}, &RankRangeError{Rank: r.text, Ranks: g.ranks}
		}
		r.value = 0
	}
	return r, nil
}
