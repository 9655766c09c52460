// Package logging builds the worker's logger.
//
// There is no global logger: cmd/worker makes one with New and passes it to
// every component, which adds its own fields. Lines are JSON on one stream,
// with the fields "time" (RFC 3339 with nanoseconds, UTC), "level", "message"
// and, for errors, "err"; a readable console form exists for people at a
// terminal. Prompts, generated text and token ids are never logged by anyone.
//
// A logger is safe for concurrent use as long as its writer takes whole lines
// in one Write, which a file does.
package logging

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/rs/zerolog"
)

// Format is the form of a log line.
type Format string

const (
	// JSON writes one JSON object a line.
	JSON Format = "json"
	// Console writes lines for people: time, level, message, fields.
	Console Format = "console"
)

// Options say how New builds a logger. The zero value is JSON at level info on
// nothing: a Writer is needed.
type Options struct {
	// Level is trace, debug, info, warn, error or off; empty is info.
	Level string
	// Format is JSON when empty.
	Format Format
	// Writer gets each line in a single Write.
	Writer io.Writer
	// Color lets the console form use terminal colours.
	Color bool
}

// LevelError names a level that does not exist.
type LevelError struct{ Level string }

func (e *LevelError) Error() string {
	return fmt.Sprintf("log level %q is not one of %s", e.Level, strings.Join(Levels, ", "))
}

// FormatError names a format that does not exist.
type FormatError struct{ Format Format }

func (e *FormatError) Error() string {
	return fmt.Sprintf("log format %q is neither %s nor %s", e.Format, JSON, Console)
}

// Levels are the names that ParseLevel knows, from the noisiest to silence.
var Levels = []string{"trace", "debug", "info", "warn", "error", "off"}

// ParseLevel turns a level's name into zerolog's level; empty is info. The
// error is a *LevelError.
func ParseLevel(name string) (zerolog.Level, error) {
	switch name {
	case "trace":
		return zerolog.TraceLevel, nil
	case "debug":
		return zerolog.DebugLevel, nil
	case "", "info":
		return zerolog.InfoLevel, nil
	case "warn":
		return zerolog.WarnLevel, nil
	case "error":
		return zerolog.ErrorLevel, nil
	case "off":
		return zerolog.Disabled, nil
	}
	return zerolog.Disabled, &LevelError{Level: name}
}

// zerolog keeps these three for the whole process and reads them with every
// line, so they are set before any line can be written and never again.
func init() {
	zerolog.TimeFieldFormat = time.RFC3339Nano
	zerolog.ErrorFieldName = "err"
	zerolog.TimestampFunc = func() time.Time { return time.Now().UTC() }
}

// New builds a logger. The error is a *LevelError or a *FormatError, or says
// that the writer is missing.
func New(o Options) (zerolog.Logger, error) {
	level, err := ParseLevel(o.Level)
	if err != nil {
		return zerolog.Nop(), err
	}
	if o.Writer == nil {
		return zerolog.Nop(), fmt.Errorf("building a logger: no writer")
	}
	w := o.Writer
	switch o.Format {
	case "", JSON:
	case Console:
		w = zerolog.ConsoleWriter{
			Out:        o.Writer,
			NoColor:    !o.Color,
			TimeFormat: "15:04:05.000",
			// The writer's own default would print local time; a console line
			// and a JSON line of the same moment should not differ by hours.
			TimeLocation: time.UTC,
		}
	default:
		return zerolog.Nop(), &FormatError{Format: o.Format}
	}
	return zerolog.New(w).Level(level).With().Timestamp().Logger(), nil
}
