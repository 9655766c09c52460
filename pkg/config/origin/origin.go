// Package origin says where the value of a setting came from, so that every
// message and report can name the place to change it.
package origin

import "fmt"

// Kind is the layer of a value.
type Kind uint8

// The layers, from the weakest to the strongest.
const (
	Default Kind = iota
	File
	Env
	Flag
	Set
	// Worker marks what the worker puts in whatever anybody set.
	Worker
)

// Origin is the place that a value came from.
type Origin struct {
	Kind Kind
	// Name is the file, the variable or the flag (with its dashes).
	Name string
	// Line is the line in the file, counted from 1; 0 elsewhere.
	Line int
}

// String is what reports print: "default", "worker.yaml:12", "env NATS_SERVER",
// "flag --namespace", "--set" or "worker".
func (o Origin) String() string {
	switch o.Kind {
	case File:
		if o.Line == 0 {
			return o.Name
		}
		return fmt.Sprintf("%s:%d", o.Name, o.Line)
	case Env:
		return "env " + o.Name
	case Flag:
		return "flag " + o.Name
	case Set:
		return "--set"
	case Worker:
		return "worker"
	}
	return "default"
}

// AtLine is the place n lines into a file; any other origin has no lines.
func (o Origin) AtLine(n int) Origin {
	if o.Kind == File {
		o.Line = n
	}
	return o
}
