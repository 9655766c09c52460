package cli

import (
	"errors"
	"fmt"

	"dynworker/pkg/config"
)

// check prints what a worker with these options would do: every setting and every argument of its engine with its origin, and the facts that follow. Mistakes end it.
//
// What is missing on this machine, or cannot be served yet, is only a warning here: a configuration is often checked elsewhere than where it is served.
func (p *Process) check(args []string) int {
	l, err := p.load(args)
	if errors.Is(err, config.ErrHelp) {
		return p.complain(err)
	}
	for _, warning := range l.warnings() {
		fmt.Fprintln(p.Stderr, "worker: warning: "+warning.String())
	}
	if err != nil {
		return p.complain(err)
	}
	var missing config.Errors
	if errors.As(l.servable(), &missing) {
		for _, problem := range missing {
			fmt.Fprintln(p.Stderr, "worker: warning: worker serve would end here: "+problem.Error())
		}
	}
	if _, err = l.report.WriteTo(p.Stdout); err == nil {
		_, err = l.resolved.WriteTo(p.Stdout)
	}
	if err != nil {
		fmt.Fprintln(p.Stderr, "worker: "+err.Error())
		return ExitFailure
	}
	return ExitOK
}
