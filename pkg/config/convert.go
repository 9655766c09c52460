package config

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"dynworker/pkg/engineargs"
)

// parseText reads the value of k from a flag, a variable or --set. Durations
// need a unit; lists are separated by commas, or written as a YAML list.
func parseText(k *key, text string) (any, error) {
	switch k.kind {
	case kindBool:
		return parseBool(text)
	case kindInt:
		return parseInt(text)
	case kindDuration:
		return parseDuration(text)
	case kindList:
		return parseList(k, text)
	case kindFloat:
		return parseFloat(text)
	case kindAdapters:
		return parseAdapters(text)
	case kindMap:
		return nil, errors.New("is a mapping and cannot be given as plain text")
	}
	if k.choices != nil {
		text = strings.TrimSpace(text)
	}
	return text, nil
}

// parseBool takes the spellings of Dynamo's own worker, and nothing else.
func parseBool(text string) (bool, error) {
	switch strings.ToLower(strings.TrimSpace(text)) {
	case "true", "1", "yes", "on":
		return true, nil
	case "false", "0", "no", "off":
		return false, nil
	}
	return false, fmt.Errorf("%s is none of true, 1, yes, on, false, 0, no, off", quote(text))
}

func parseInt(text string) (int, error) {
	n, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	switch {
	case errors.Is(err, strconv.ErrRange):
		return 0, fmt.Errorf("%s is too large", quote(text))
	case err != nil:
		return 0, fmt.Errorf("%s is not a whole number", quote(text))
	}
	return int(n), nil
}

func parseFloat(text string) (float64, error) {
	f, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
	if err != nil || math.IsNaN(f) || math.IsInf(f, 0) {
		return 0, fmt.Errorf("%s is not a number", quote(text))
	}
	return f, nil
}

// parseDuration insists on a unit. A bare 0 is the same in every unit and
// therefore allowed.
func parseDuration(text string) (time.Duration, error) {
	text = strings.TrimSpace(text)
	d, err := time.ParseDuration(text)
	if err == nil {
		return d, nil
	}
	if _, err := strconv.ParseFloat(text, 64); err == nil {
		return 0, fmt.Errorf("%s has no unit; write %ss for seconds", quote(text), text)
	}
	return 0, fmt.Errorf("%s is not a duration such as 500ms, 30s or 5m", quote(text))
}

// parseSeconds reads what Dynamo's variables hold: a number of seconds without
// a unit, possibly with a fraction.
func parseSeconds(text string) (time.Duration, error) {
	f, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
	if err != nil || math.IsNaN(f) {
		if _, err := time.ParseDuration(text); err == nil {
			return 0, fmt.Errorf("%s has a unit, but this takes a plain number of seconds", quote(text))
		}
		return 0, fmt.Errorf("%s is not a number of seconds", quote(text))
	}
	const limit = math.MaxInt64 / float64(time.Second)
	if math.Abs(f) >= limit {
		return 0, fmt.Errorf("%s seconds is too long", quote(text))
	}
	return time.Duration(math.Round(f * float64(time.Second))), nil
}

func parseList(k *key, text string) ([]string, error) {
	text = strings.TrimSpace(text)
	if strings.HasPrefix(text, "[") {
		n, err := engineargs.Document([]byte(text))
		if err != nil {
			return nil, fmt.Errorf("cannot be read as a YAML list: %w", err)
		}
		v, err := listFromNode(k, n)
		return v, err
	}
	out := []string{}
	if text == "" {
		return out, nil
	}
	for _, s := range strings.Split(text, ",") {
		out = append(out, strings.TrimSpace(s))
	}
	return out, nil
}

// deref follows an alias to what it stands for. Cycles cannot arise here:
// callers descend at most as deep as their limits.
func deref(n *yaml.Node) *yaml.Node {
	for range 8 {
		if n.Kind != yaml.AliasNode || n.Alias == nil {
			return n
		}
		n = n.Alias
	}
	return n
}

// describe names the shape of a node for messages, never its content.
func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	}
	switch n.ShortTag() {
	case "!!null":
		return "nothing"
	case "!!bool":
		return "true or false"
	case "!!int", "!!float":
		return "a number"
	}
	return "text"
}

// fromNode reads the value of k from the file.
func fromNode(k *key, n *yaml.Node) (any, error) {
	n = deref(n)
	switch k.kind {
	case kindList:
		return listFromNode(k, n)
	case kindAdapters:
		return adaptersFromNode(n)
	}
	if n.Kind != yaml.ScalarNode {
		return nil, fmt.Errorf("is %s, but must be %s", describe(n), k.wanted())
	}
	tag := n.ShortTag()
	if tag == "!!null" {
		return nil, errors.New("has no value; leave the key out to keep the default")
	}
	switch k.kind {
	case kindBool:
		if tag != "!!bool" {
			return nil, fmt.Errorf("is %s, but must be true or false", describe(n))
		}
		var b bool
		if err := n.Decode(&b); err != nil {
			return nil, errors.New("must be true or false")
		}
		return b, nil
	case kindInt:
		if tag != "!!int" {
			if tag == "!!float" {
				return nil, fmt.Errorf("%s is not a whole number", quote(n.Value))
			}
			return nil, fmt.Errorf("is %s, but must be a whole number", describe(n))
		}
		var i int
		if err := n.Decode(&i); err != nil {
			return nil, fmt.Errorf("%s is too large", quote(n.Value))
		}
		return i, nil
	case kindFloat:
		if tag != "!!float" && tag != "!!int" {
			return nil, fmt.Errorf("is %s, but must be a number", describe(n))
		}
		return parseFloat(n.Value)
	case kindDuration:
		if tag != "!!str" && tag != "!!int" && tag != "!!float" {
			return nil, fmt.Errorf("is %s, but must be %s", describe(n), k.wanted())
		}
		return parseDuration(n.Value)
	}
	return stringFromNode(n)
}

// stringFromNode takes numbers and dates as they are written. true, false and
// null are refused, since somebody may have meant the word or its meaning.
func stringFromNode(n *yaml.Node) (string, error) {
	n = deref(n)
	if n.Kind != yaml.ScalarNode {
		return "", fmt.Errorf("is %s, but must be text", describe(n))
	}
	switch n.ShortTag() {
	case "!!str", "!!int", "!!float", "!!timestamp":
		return n.Value, nil
	case "!!bool", "!!null":
		return "", fmt.Errorf("is %s, but must be text; put it in quotes if the word is meant", describe(n))
	}
	return "", fmt.Errorf("has the type %s, but must be text", n.ShortTag())
}

func listFromNode(k *key, n *yaml.Node) ([]string, error) {
	if n == nil || n.Kind != yaml.SequenceNode {
		if n != nil && n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" {
			return nil, errors.New("has no value; leave the key out to keep the default, or write [] for an empty list")
		}
		shape := "nothing"
		if n != nil {
			shape = describe(n)
		}
		return nil, fmt.Errorf("is %s, but must be a list", shape)
	}
	out := make([]string, 0, len(n.Content))
	for i, c := range n.Content {
		s, err := stringFromNode(c)
		if err != nil {
			return nil, fmt.Errorf("entry %d %w", i+1, err)
		}
		out = append(out, s)
	}
	return out, nil
}

func (k *key) wanted() string {
	switch k.kind {
	case kindBool:
		return "true or false"
	case kindInt:
		return "a whole number"
	case kindFloat:
		return "a number"
	case kindDuration:
		return "a duration such as 30s"
	case kindList:
		return "a list"
	case kindMap:
		return "a mapping"
	}
	return "text"
}

// formatDuration writes 15m instead of 15m0s.
func formatDuration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
