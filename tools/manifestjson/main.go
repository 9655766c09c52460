// Command manifestjson prints the documents of a YAML manifest as one JSON array, for scripts that have no parser for YAML.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"sigs.k8s.io/yaml"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "manifestjson:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("one file is expected, not %d", len(args))
	}
	text, err := os.ReadFile(args[0])
	if err != nil {
		return err
	}
	var all []json.RawMessage
	for i, doc := range strings.Split(string(text), "\n---\n") {
		one, err := yaml.YAMLToJSONStrict([]byte(doc))
		if err != nil {
			return fmt.Errorf("%s: document %d: %w", args[0], i, err)
		}
		all = append(all, one)
	}
	return json.NewEncoder(os.Stdout).Encode(all)
}
