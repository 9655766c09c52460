package handlers

import (
	"fmt"
	"math"
	"sort"

	"dynworker/pkg/protocol"
)

// section is one map of a request body together with its name, so that every complaint can say which field it is about. Values are what protocol.DecodeValue gives. Accessors treat null as absent.
type section struct {
	name   string
	fields protocol.Map
}

func (s section) path(key string) string {
	if s.name == "" {
		return key
	}
	return s.name + "." + key
}

func (s section) has(key string) bool { return s.fields[key] != nil }

func invalid(format string, args ...any) *protocol.Error {
	return protocol.InvalidArgument(format, args...)
}

func (s section) wrongType(key, want string) *protocol.Error {
	return invalid("%s must be %s, got %s", s.path(key), want, typeName(s.fields[key]))
}

func (s section) integer(key string) (value int64, ok bool, err error) {
	switch v := s.fields[key].(type) {
	case nil:
		return 0, false, nil
	case int64:
		return v, true, nil
	case uint64:
		return 0, false, invalid("%s is too large: %d", s.path(key), v)
	}
	return 0, false, s.wrongType(key, "an integer")
}

func (s section) number(key string) (value float64, ok bool, err error) {
	switch v := s.fields[key].(type) {
	case nil:
		return 0, false, nil
	case int64:
		return float64(v), true, nil
	case float64:
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return 0, false, invalid("%s must be a finite number", s.path(key))
		}
		return v, true, nil
	}
	return 0, false, s.wrongType(key, "a number")
}

func (s section) boolean(key string) (value, ok bool, err error) {
	switch v := s.fields[key].(type) {
	case nil:
		return false, false, nil
	case bool:
		return v, true, nil
	}
	return false, false, s.wrongType(key, "a boolean")
}

func (s section) text(key string) (value string, ok bool, err error) {
	switch v := s.fields[key].(type) {
	case nil:
		return "", false, nil
	case string:
		return v, true, nil
	}
	return "", false, s.wrongType(key, "text")
}

func (s section) tokenIDs(key string) (ids []int64, ok bool, err error) {
	switch v := s.fields[key].(type) {
	case nil:
		return nil, false, nil
	case []any:
		ids = make([]int64, len(v))
		for i, e := range v {
			id, isInt := e.(int64)
			if !isInt || id < 0 || id > math.MaxInt32 {
				return nil, false, invalid("%s[%d] must be a token id", s.path(key), i)
			}
			ids[i] = id
		}
		return ids, true, nil
	}
	return nil, false, s.wrongType(key, "a list of token ids")
}

// sub reads a map below this section. nullAllowed says whether null counts as absent; otherwise the second result says that it was there and null.
func (s section) sub(key string) (sub section, null bool, err error) {
	sub = section{name: s.path(key)}
	v, present := s.fields[key]
	switch v := v.(type) {
	case nil:
		return sub, present, nil
	case protocol.Map:
		sub.fields = v
		return sub, false, nil
	}
	return sub, false, s.wrongType(key, "a map")
}

// unknown returns the first key, in order, that is not among the known ones.
func (s section) unknown(known map[string]struct{}) (string, bool) {
	var strange []string
	for k := range s.fields {
		if _, ok := known[k]; !ok {
			strange = append(strange, k)
		}
	}
	sort.Strings(strange)
	if len(strange) == 0 {
		return "", false
	}
	return strange[0], true
}

func typeName(v any) string {
	switch v.(type) {
	case nil:
		return "null"
	case bool:
		return "a boolean"
	case int64, uint64:
		return "an integer"
	case float64:
		return "a number with a fraction"
	case string:
		return "text"
	case []byte:
		return "bytes"
	case []any:
		return "a list"
	case protocol.Map:
		return "a map"
	}
	return fmt.Sprintf("%T", v)
}
