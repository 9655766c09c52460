// Command dockersteps prints, as JSON, the steps that build one target of a Dockerfile, for scripts/image-steps.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"dynworker/tools/dockerfile"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "dockersteps:", err)
		os.Exit(1)
	}
}

func run() error {
	root := flag.String("context", ".", "folder with the Dockerfile and .dockerignore")
	target := flag.String("target", "", "stage to build")
	args := map[string]string{}
	flag.Func("build-arg", "NAME=VALUE, any number of times", func(s string) error {
		name, value, ok := strings.Cut(s, "=")
		if !ok {
			return fmt.Errorf("%q is not NAME=VALUE", s)
		}
		args[name] = value
		return nil
	})
	flag.Parse()
	text, err := os.ReadFile(filepath.Join(*root, "Dockerfile"))
	if err != nil {
		return err
	}
	plan, err := dockerfile.MakePlan(text, *target, args)
	if err != nil {
		return err
	}
	if plan.Context, err = dockerfile.Context(*root); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(plan)
}
