package modelcard

import (
	"errors"
	"fmt"
)

// What can be wrong with a model folder, for errors.Is.
var (
	// ErrNoFolder: the folder is missing, is no folder or cannot be read.
	ErrNoFolder = errors.New("no model folder")
	// ErrNoConfig: there is no config.json.
	ErrNoConfig = errors.New("no model config")
	// ErrNoTokenizer: there is neither tokenizer.json nor a tiktoken file.
	ErrNoTokenizer = errors.New("no tokenizer")
	// ErrAmbiguousTokenizer: there are several tiktoken files to choose from.
	ErrAmbiguousTokenizer = errors.New("ambiguous tokenizer")
	// ErrNoEOS: no file says which token ends a text.
	ErrNoEOS = errors.New("no end-of-sequence token")
	// ErrNoChatTemplate: the chat endpoint has no template.
	ErrNoChatTemplate = errors.New("no chat template")
	// ErrBadFile: a file is there and cannot be read or understood.
	ErrBadFile = errors.New("unusable model file")
	// ErrTooLarge: a needed file is larger than the bound in Options.
	ErrTooLarge = errors.New("model file too large")
	// ErrDuplicateName: two needed files would have one name at the frontend.
	ErrDuplicateName = errors.New("two model files of one name")
)

// Error is a model folder that cannot be served.
type Error struct {
	Kind        error  // one of the sentinels of this package
	Dir         string // the model folder
	File        string // the file in question, relative to Dir where it is inside
	Problem     string // what is wrong with it
	Consequence string // what a frontend would do with such a card; may be empty
	Err         error  // the cause; may be nil
}

func (e *Error) Error() string {
	s := fmt.Sprintf("model folder %s: %s: %s", e.Dir, e.File, e.Problem)
	if e.File == "" {
		s = fmt.Sprintf("model folder %s: %s", e.Dir, e.Problem)
	}
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	if e.Consequence != "" {
		s += " (" + e.Consequence + ")"
	}
	return s
}

// Unwrap gives the sentinel and the cause.
func (e *Error) Unwrap() []error {
	if e.Err == nil {
		return []error{e.Kind}
	}
	return []error{e.Kind, e.Err}
}

// SpecError is a [Spec] that no valid card can be made of.
type SpecError struct {
	Field   string // name of the field in Spec
	Problem string
}

func (e *SpecError) Error() string {
	return fmt.Sprintf("model card: %s: %s", e.Field, e.Problem)
}
