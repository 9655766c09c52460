package modelcard

import (
	"fmt"
	"strings"
)

// Role is the part that a worker takes in serving a model.
type Role string

// The roles of a TensorRT-LLM text worker.
const (
	RoleAggregated Role = "aggregated"
	RolePrefill    Role = "prefill"
	RoleDecode     Role = "decode"
)

// roleRow is what registrations of a role say, as recorded from Dynamo 1.6.1.
type roleRow struct {
	component string
	modelType string // empty: from the endpoint types
	needs     [][]string
}

var roles = map[Role]roleRow{
	RoleAggregated: {component: "backend", needs: [][]string{}},
	RolePrefill:    {component: "prefill", modelType: "Prefill", needs: [][]string{{string(RoleDecode)}}},
	RoleDecode:     {component: "backend", needs: [][]string{{string(RolePrefill)}}},
}

// DefaultComponent is the component under which workers of the role register
// when the configuration names none; empty for an unknown role.
func (r Role) DefaultComponent() string { return roles[r].component }

// EndpointTypes is a set of the HTTP endpoints that a model is offered under.
type EndpointTypes uint8

// The endpoint types of text models.
const (
	EndpointChat EndpointTypes = 1 << iota
	EndpointCompletions
)

// ParseEndpointTypes reads a list such as "chat,completions".
func ParseEndpointTypes(s string) (EndpointTypes, error) {
	var set EndpointTypes
	for word := range strings.SplitSeq(s, ",") {
		switch strings.TrimSpace(word) {
		case "chat":
			set |= EndpointChat
		case "completions":
			set |= EndpointCompletions
		default:
			return 0, fmt.Errorf("endpoint type %q is neither chat nor completions", word)
		}
	}
	return set, nil
}

// flags is the set in the words of the card.
func flags(set EndpointTypes) string {
	var words []string
	if set&EndpointChat != 0 {
		words = append(words, "Chat")
	}
	if set&EndpointCompletions != 0 {
		words = append(words, "Completions")
	}
	return strings.Join(words, " | ")
}
