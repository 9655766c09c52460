// Package dockerlint is BuildKit's linter for Dockerfiles. It is apart from package dockerfile, since it needs most of BuildKit, and dockersteps does not.
package dockerlint

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/moby/buildkit/client/llb"
	"github.com/moby/buildkit/client/llb/sourceresolver"
	"github.com/moby/buildkit/frontend/dockerfile/dockerfile2llb"
	digest "github.com/opencontainers/go-digest"
	ocispecs "github.com/opencontainers/image-spec/specs-go/v1"
)

// Lint is what BuildKit's own linter, "docker build --check", has to say about a Dockerfile. Base images are not looked up.
func Lint(ctx context.Context, text []byte) ([]string, error) {
	source := llb.NewSourceMap(nil, "Dockerfile", "Dockerfile", text)
	source.Definition = &llb.Definition{} // only what shows warnings to people would look into it
	results, err := dockerfile2llb.DockerfileLint(ctx, text, dockerfile2llb.ConvertOpt{SourceMap: source, MetaResolver: plainImages{}})
	if err != nil {
		return nil, err
	}
	if results.Error != nil {
		return []string{results.Error.Message}, nil
	}
	var out []string
	for _, w := range results.Warnings {
		line := int32(0)
		if len(w.Location.Ranges) > 0 {
			line = w.Location.Ranges[0].Start.Line
		}
		out = append(out, fmt.Sprintf("line %d: %s: %s", line, w.RuleName, w.Detail))
	}
	return out, nil
}

// plainImages takes every image for one without settings of its own.
type plainImages struct{}

func (plainImages) ResolveImageConfig(_ context.Context, ref string, _ sourceresolver.Opt) (string, digest.Digest, []byte, error) {
	config, err := json.Marshal(ocispecs.Image{Platform: ocispecs.Platform{OS: "linux", Architecture: "amd64"}, Config: ocispecs.ImageConfig{Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}}})
	return ref, digest.FromBytes(config), config, err
}
