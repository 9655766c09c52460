// Package testdata carries the small tokenizer model of this project, for programs that need a model folder and have no disk to rely on. model/ is described in its README.
package testdata

import (
	"embed"
	"os"
	"path"
	"path/filepath"
)

//go:embed model/*.json
var model embed.FS

// ModelFiles are the names of the model's files.
func ModelFiles() ([]string, error) {
	entries, err := model.ReadDir("model")
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, err
}

// ModelFile is the content of one of the model's files.
func ModelFile(name string) ([]byte, error) { return model.ReadFile(path.Join("model", name)) }

// WriteModel puts the model's files into a folder that exists.
func WriteModel(dir string) error {
	names, err := ModelFiles()
	if err != nil {
		return err
	}
	for _, name := range names {
		data, err := ModelFile(name)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			return err
		}
	}
	return nil
}
