package engineargs

import (
	"math"
	"math/big"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// scalar reads a value in the builder's dialect. The reason is not empty when
// it cannot be passed on.
func (b *builder) scalar(n *yaml.Node) (v any, reason string) {
	tag := n.ShortTag()
	if !b.python {
		return scalar12(n, tag)
	}
	const quoted = yaml.SingleQuotedStyle | yaml.DoubleQuotedStyle | yaml.LiteralStyle | yaml.FoldedStyle
	switch {
	case n.Style&yaml.TaggedStyle == 0 && n.Style&quoted != 0:
		return n.Value, ""
	case n.Style&yaml.TaggedStyle == 0:
		tag = pythonTag(n.Value)
	}
	switch tag {
	case "!!str":
		return n.Value, ""
	case "!!null":
		return nil, ""
	case "!!bool":
		if v, ok := pythonBools[strings.ToLower(n.Value)]; ok {
			return v, ""
		}
	case "!!int":
		if v, ok := pythonYAMLInt(n.Value); ok {
			return v, ""
		}
		return nil, quote(n.Value) + " is not a number that can be passed on"
	case "!!float":
		if v, ok := pythonYAMLFloat(n.Value); ok {
			return v, ""
		}
		return nil, quote(n.Value) + " is not a number that can be passed on"
	case "!!timestamp":
		return nil, quote(n.Value) + " is a date, which cannot be passed on; put it in quotes if the text is meant"
	}
	return nil, "has the type " + quote(tag) + ", which cannot be passed on"
}

// scalar12 reads a value of the worker's own file.
func scalar12(n *yaml.Node, tag string) (v any, reason string) {
	switch tag {
	case "!!null":
		return nil, ""
	case "!!bool":
		var v bool
		if n.Decode(&v) == nil {
			return v, ""
		}
	case "!!int":
		var i int64
		if n.Decode(&i) == nil {
			return i, ""
		}
		var u uint64
		if n.Decode(&u) == nil {
			return u, ""
		}
		return nil, quote(n.Value) + " is not a number that can be passed on"
	case "!!float":
		var f float64
		if n.Decode(&f) == nil && !math.IsNaN(f) && !math.IsInf(f, 0) {
			return f, ""
		}
		return nil, quote(n.Value) + " is not a number that can be passed on"
	case "!!str", "!!timestamp":
		return n.Value, ""
	}
	return nil, "has the type " + quote(n.Tag) + ", which cannot be passed on"
}

var pythonBools = map[string]bool{"yes": true, "true": true, "on": true, "no": false, "false": false, "off": false}

// The forms of plain scalars that PyYAML's safe loader recognises.
var (
	yaml11Bool      = regexp.MustCompile(`^(yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$`)
	yaml11Null      = regexp.MustCompile(`^(~|null|Null|NULL|)$`)
	yaml11Int       = regexp.MustCompile(`^([-+]?0b[0-1_]+|[-+]?0[0-7_]+|[-+]?(0|[1-9][0-9_]*)|[-+]?0x[0-9a-fA-F_]+|[-+]?[1-9][0-9_]*(:[0-5]?[0-9])+)$`)
	yaml11Float     = regexp.MustCompile(`^([-+]?[0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|\.[0-9][0-9_]*([eE][-+][0-9]+)?|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+\.[0-9_]*|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$`)
	yaml11Timestamp = regexp.MustCompile(`^([0-9]{4}-[0-9]{2}-[0-9]{2}|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt]|[ \t]+)[0-9]{1,2}:[0-9]{2}:[0-9]{2}(\.[0-9]*)?([ \t]*(Z|[-+][0-9]{1,2}(:[0-9]{2})?))?)$`)
)

func pythonTag(text string) string {
	switch {
	case yaml11Null.MatchString(text):
		return "!!null"
	case yaml11Bool.MatchString(text):
		return "!!bool"
	case yaml11Int.MatchString(text):
		return "!!int"
	case yaml11Float.MatchString(text):
		return "!!float"
	case yaml11Timestamp.MatchString(text):
		return "!!timestamp"
	}
	return "!!str"
}

// pythonYAMLInt knows binary, octal with a leading zero, hexadecimal, and
// numbers to the base of sixty ("1:30" is ninety).
func pythonYAMLInt(text string) (any, bool) {
	digits := strings.ReplaceAll(text, "_", "")
	sign := ""
	if strings.HasPrefix(digits, "-") || strings.HasPrefix(digits, "+") {
		sign, digits = digits[:1], digits[1:]
	}
	base := 10
	switch {
	case digits == "0":
	case strings.HasPrefix(digits, "0b"):
		base, digits = 2, digits[2:]
	case strings.HasPrefix(digits, "0x"):
		base, digits = 16, digits[2:]
	case strings.HasPrefix(digits, "0"):
		base = 8
	case strings.Contains(digits, ":"):
		total := new(big.Int)
		for part := range strings.SplitSeq(digits, ":") {
			n, ok := new(big.Int).SetString(part, 10)
			if !ok {
				return nil, false
			}
			total.Add(total.Mul(total, big.NewInt(60)), n)
		}
		digits = total.String()
	}
	if digits == "" || strings.ContainsAny(digits[:1], "+-") {
		return nil, false
	}
	return whole(sign+digits, base)
}

func pythonYAMLFloat(text string) (any, bool) {
	number := strings.ToLower(strings.ReplaceAll(text, "_", ""))
	sign := 1.0
	if strings.HasPrefix(number, "-") {
		sign = -1
	}
	number = strings.TrimLeft(number, "+-")
	total := 0.0
	for part := range strings.SplitSeq(number, ":") {
		if strings.ContainsAny(part, "xpi") { // hexadecimal and infinite forms of Go's parser
			return nil, false
		}
		f, err := strconv.ParseFloat(part, 64)
		if err != nil || math.IsNaN(f) {
			return nil, false
		}
		total = total*60 + f
	}
	if math.IsInf(total, 0) {
		return nil, false
	}
	return sign * total, true
}
