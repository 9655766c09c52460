package logging

import (
	"github.com/rs/zerolog"
	"go.uber.org/zap/zapcore"
)

// ZapCore returns a zap core that writes into l. The etcd client logs through
// zap and would otherwise print lines of another shape on stderr by itself.
//
// Lines of the library that are below min are dropped: such clients call an
// ordinary retry a warning, and the code that handles the failure logs it
// anyway. zap's levels above error (dpanic, panic, fatal) are written as
// errors; what zap does after such a line is up to the zap logger.
func ZapCore(l zerolog.Logger, min zapcore.Level) zapcore.Core {
	return &zapCore{logger: l, min: min}
}

type zapCore struct {
	logger zerolog.Logger
	min    zapcore.Level
	fields []zapcore.Field
}

func (c *zapCore) Enabled(level zapcore.Level) bool {
	return level >= c.min && toZerolog(level) >= c.logger.GetLevel()
}

func (c *zapCore) With(fields []zapcore.Field) zapcore.Core {
	// The three-index slice makes two children of one parent copy instead of
	// writing over each other's fields.
	joined := append(c.fields[:len(c.fields):len(c.fields)], fields...)
	return &zapCore{logger: c.logger, min: c.min, fields: joined}
}

func (c *zapCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

func (c *zapCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	enc := zapcore.NewMapObjectEncoder()
	for _, f := range c.fields {
		f.AddTo(enc)
	}
	for _, f := range fields {
		f.AddTo(enc)
	}
	ev := c.logger.WithLevel(toZerolog(e.Level))
	if e.LoggerName != "" {
		ev = ev.Str("logger", e.LoggerName)
	}
	// A library's field must not double one of ours; JSON with the same key
	// twice is read differently by every tool.
	for k, v := range enc.Fields {
		switch k {
		case zerolog.TimestampFieldName, zerolog.LevelFieldName, zerolog.MessageFieldName, "component", "logger":
			k = "lib_" + k
		case "error":
			k = zerolog.ErrorFieldName
		}
		ev = ev.Interface(k, v)
	}
	ev.Msg(e.Message)
	return nil
}

func (c *zapCore) Sync() error { return nil }

func toZerolog(l zapcore.Level) zerolog.Level {
	switch {
	case l <= zapcore.DebugLevel:
		return zerolog.DebugLevel
	case l == zapcore.InfoLevel:
		return zerolog.InfoLevel
	case l == zapcore.WarnLevel:
		return zerolog.WarnLevel
	}
	return zerolog.ErrorLevel
}
