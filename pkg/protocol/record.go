package protocol

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// RecordError tells that the value of an etcd record cannot be used.
type RecordError struct {
	// Record names the kind of record.
	Record string
	Err    error
}

func (e *RecordError) Error() string { return e.Record + ": " + e.Err.Error() }

// Unwrap returns what is wrong.
func (e *RecordError) Unwrap() error { return e.Err }

// parseRecord decodes a value into to and checks the tag that it has read.
// Integers go straight into 64-bit fields and raw members stay text, so no id
// becomes a float.
func parseRecord(what string, value []byte, tag string, got *string, to any) error {
	if err := json.Unmarshal(value, to); err != nil {
		return &RecordError{Record: what, Err: err}
	}
	if *got != tag {
		return &RecordError{Record: what, Err: &FieldError{Field: "type", Reason: "not " + tag}}
	}
	return nil
}

// recordJSON encodes a record. It panics when a raw member of a card is not JSON;
// Card.Validate finds that beforehand.
func recordJSON(v any) []byte {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	// The frontend's own records do not escape <, > and & either.
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(fmt.Sprintf("protocol: record has no JSON form: %v", err))
	}
	return bytes.TrimSuffix(buf.Bytes(), []byte("\n"))
}
