// Command worker is a Dynamo worker for TensorRT-LLM. "worker help" shows its commands.
package main

import (
	"fmt"
	"os"

	"dynworker/internal/cli"
)

func main() {
	p, err := cli.OSProcess()
	if err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		os.Exit(cli.ExitFailure)
	}
	os.Exit(p.Run())
}
