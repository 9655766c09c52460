package cli

import "fmt"

// check prints the effective configuration, every setting with its origin, and what is wrong with it.
func (p *Process) check(args []string) int {
	_, report, code := p.load(args)
	for _, warning := range report.Warnings {
		fmt.Fprintln(p.Stderr, "worker: warning: "+warning.String())
	}
	if code != ExitOK {
		return code
	}
	if _, err := report.WriteTo(p.Stdout); err != nil {
		fmt.Fprintln(p.Stderr, "worker: "+err.Error())
		return ExitFailure
	}
	return ExitOK
}
