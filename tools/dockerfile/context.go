package dockerfile

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/moby/patternmatcher"
	"github.com/moby/patternmatcher/ignorefile"
)

// Context lists the files below root that a build gets to see, as paths with slashes, relative to root.
func Context(root string) ([]string, error) {
	text, err := os.ReadFile(filepath.Join(root, ".dockerignore"))
	if err != nil {
		return nil, err
	}
	patterns, err := ignorefile.ReadAll(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf(".dockerignore: %w", err)
	}
	matcher, err := patternmatcher.New(patterns)
	if err != nil {
		return nil, fmt.Errorf(".dockerignore: %w", err)
	}
	var out []string
	err = filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			return nil
		}
		rel, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		ignored, err := matcher.MatchesOrParentMatches(rel)
		if err == nil && !ignored {
			out = append(out, filepath.ToSlash(rel))
		}
		return err
	})
	return out, err
}
