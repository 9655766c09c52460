package deploytest

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// image is what the Dockerfile says about the image of one target. The Dockerfile's form is checked in tools/dockerfile with BuildKit's own parser; here a few of its lines are enough.
type image struct {
	target     string
	exposed    []string
	user       string
	home       string
	entryPoint []string
	cmd        []string
}

// images are those that the Dockerfile's own comment builds, by name and tag.
func images(t *testing.T) map[string]*image {
	text, err := os.ReadFile(filepath.Join(root, "Dockerfile"))
	require.NoError(t, err)
	targets := map[string]*image{}
	for stage := range strings.SplitSeq(string(text), "\nFROM ") {
		first, lines, _ := strings.Cut(stage, "\n")
		if _, name, named := strings.Cut(first, " AS "); named {
			targets[name] = readImage(t, name, lines)
		}
	}
	out := map[string]*image{}
	for _, line := range regexp.MustCompile(`(?m)^#   docker build --target (\S+) -t (\S+) .*$`).FindAllStringSubmatch(string(text), -1) {
		require.Contains(t, targets, line[1])
		out[line[2]] = targets[line[1]]
	}
	require.Len(t, out, 2)
	return out
}

func readImage(t *testing.T, target, lines string) *image {
	i := &image{target: target}
	for line := range strings.Lines(lines) {
		word, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch word {
		case "EXPOSE":
			i.exposed = strings.Fields(rest)
		case "USER":
			i.user = rest
		case "ENV":
			for setting := range strings.FieldsSeq(rest) {
				if value, ok := strings.CutPrefix(setting, "HOME="); ok {
					i.home = value
				}
			}
		case "ENTRYPOINT":
			require.NoError(t, json.Unmarshal([]byte(rest), &i.entryPoint))
		case "CMD":
			require.NoError(t, json.Unmarshal([]byte(rest), &i.cmd))
		}
	}
	return i
}
