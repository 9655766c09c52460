package replay

import (
	"bytes"
	"fmt"
	"os"
	"reflect"
	"strconv"
	"sync"
	"testing"

	"dynworker/pkg/protocol"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// difference is one place in which two runs differ.
type difference struct {
	path           string
	recorded, ours any // absent{} where a side has nothing
}

// diff lists the differences between two canonical forms. Maps and lists are gone through, so that a path leads to the smallest part that differs.
func diff(path string, recorded, ours any) []difference {
	recorded, ours = plain(recorded), plain(ours)
	switch a := recorded.(type) {
	case protocol.Map:
		if b, ok := ours.(protocol.Map); ok {
			return diffMaps(path, a, b)
		}
	case []any:
		if b, ok := ours.([]any); ok {
			return diffLists(path, a, b)
		}
	}
	if reflect.DeepEqual(recorded, ours) {
		return nil
	}
	return []difference{{path, recorded, ours}}
}

func diffMaps(path string, a, b protocol.Map) (found []difference) {
	all := protocol.Map{}
	for _, m := range []protocol.Map{a, b} {
		for k := range m {
			all[k] = nil
		}
	}
	for _, k := range keys(all) {
		below := k
		if path != "" {
			below = path + "." + k
		}
		found = append(found, diff(below, orAbsent(a, k), orAbsent(b, k))...)
	}
	return found
}

func orAbsent(m protocol.Map, key string) any {
	if v, ok := m[key]; ok {
		return v
	}
	return absent{}
}

func diffLists(path string, a, b []any) (found []difference) {
	for i := range max(len(a), len(b)) {
		var x, y any = absent{}, absent{}
		if i < len(a) {
			x = a[i]
		}
		if i < len(b) {
			y = b[i]
		}
		found = append(found, diff(path+"["+strconv.Itoa(i)+"]", x, y)...)
	}
	return found
}

// entry is one deliberate difference of testdata/differences.yaml, for each of its cases and each of its paths.
type entry struct {
	Cases []string `yaml:"cases"`
	Paths []string `yaml:"paths"`
	// Sessions and Ranks stand for the rows of affinity/ with each of these sessions and each of these ranks.
	Sessions []string  `yaml:"sessions"`
	Ranks    []string  `yaml:"ranks"`
	Recorded yaml.Node `yaml:"recorded"`
	Ours     yaml.Node `yaml:"ours"`
	// Ground is why a difference is allowed at all, Reason what is meant here.
	Ground string `yaml:"ground"`
	Reason string `yaml:"reason"`
}

// grounds are the only ones on which the worker may differ from a recording.
var grounds = map[string]string{
	"harm":   "the recorded behaviour harms the engine, another request or the process",
	"stream": "the recorded behaviour breaks the frontend's rules for streams",
	"rule":   "an explicit rule of this worker demands it: bounds checked before the engine, affinity gate, settings",
	"later":  "what the recording needs is not part of the worker yet",
}

// place is where a difference is.
type place struct{ name, path string }

// listed are all deliberate differences.
var listed = sync.OnceValues(func() (map[place]*entry, error) {
	text, err := os.ReadFile("testdata/differences.yaml")
	if err != nil {
		return nil, err
	}
	var entries []*entry
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	if err := d.Decode(&entries); err != nil {
		return nil, err
	}
	all := map[place]*entry{}
	for _, e := range entries {
		paths := e.Paths
		for _, session := range e.Sessions {
			for _, rank := range e.Ranks {
				paths = append(paths, session+"/"+rank)
			}
		}
		for _, name := range e.Cases {
			for _, path := range paths {
				at := place{name, path}
				if all[at] != nil {
					return nil, &doubledError{at}
				}
				all[at] = e
			}
		}
	}
	return all, nil
})

type doubledError struct{ at place }

func (e *doubledError) Error() string { return e.at.name + " " + e.at.path + " is listed twice" }

// value reads a side of an entry; a key that is left out means that the side has nothing there.
func value(n *yaml.Node) any {
	if n.Kind == 0 {
		return absent{}
	}
	var v any
	if err := n.Decode(&v); err != nil {
		return err
	}
	return plain(v)
}

// settle compares the differences that were found in a case with those that are listed for it: both have to be the same.
func settle(t *testing.T, name string, found []difference) {
	t.Helper()
	all, err := listed()
	require.NoError(t, err)
	for _, complaint := range judge(all, name, found) {
		t.Error(complaint)
	}
}

// judge says what is wrong with the differences of a case.
func judge(all map[place]*entry, name string, found []difference) (complaints []string) {
	complain := func(format string, args ...any) {
		complaints = append(complaints, name+" "+fmt.Sprintf(format, args...))
	}
	met := map[place]bool{}
	for _, d := range found {
		at := place{name, d.path}
		met[at] = true
		e := all[at]
		if e == nil {
			complain("differs and is not listed: %s\n  recorded %s\n  ours     %s", d.path, show(d.recorded), show(d.ours))
			continue
		}
		if recorded, ours := value(&e.Recorded), value(&e.Ours); !reflect.DeepEqual(recorded, d.recorded) || !reflect.DeepEqual(ours, d.ours) {
			complain("differs otherwise than listed: %s\n  recorded %s, listed as %s\n  ours     %s, listed as %s", d.path, show(d.recorded), show(recorded), show(d.ours), show(ours))
		}
	}
	for at := range all {
		if at.name == name && !met[at] {
			complain("is listed with a difference that is none: %s", at.path)
		}
	}
	return complaints
}
