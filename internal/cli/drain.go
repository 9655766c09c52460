package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"time"

	"dynworker/internal/app"
	"dynworker/pkg/config"
	"dynworker/pkg/status"
)

const drainUsage = `worker drain takes the worker on this host out of service: it leaves discovery, finishes what it has, and then waits for the signal to end.
Asking again changes nothing. It talks to the worker's system server, whose address comes from the same settings as for serve.

  --wait                return when nothing is left in flight, or the worker has ended
  --timeout DURATION    give up waiting after this (drain.budget and one minute)
  --address HOST:PORT   the system server, when its port is not in the settings

`

// drainOrder is what drain was asked to do.
type drainOrder struct {
	wait    bool
	timeout time.Duration
	address string
}

func parseDrain(args []string) (o drainOrder, rest []string, err error) {
	for i := 0; i < len(args); i++ {
		name, value, inline := strings.Cut(args[i], "=")
		switch {
		case name == "--wait" && !inline:
			o.wait = true
			continue
		case name != "--timeout" && name != "--address":
			rest = append(rest, args[i])
			continue
		}
		if !inline {
			if i++; i == len(args) {
				return o, nil, fmt.Errorf("%s needs a value", name)
			}
			value = args[i]
		}
		if name == "--address" {
			o.address = value
			continue
		}
		if o.timeout, err = time.ParseDuration(value); err != nil {
			return o, nil, fmt.Errorf("%s: %w", name, err)
		}
		if o.timeout <= 0 {
			return o, nil, fmt.Errorf("%s: %s is no time to wait", name, value)
		}
	}
	return o, rest, nil
}

func (p *Process) drain(args []string) int {
	if len(args) > 0 && (args[0] == "--help" || args[0] == "-h") {
		fmt.Fprint(p.Stdout, drainUsage)
		return ExitOK
	}
	o, rest, err := parseDrain(args)
	if err != nil {
		fmt.Fprintf(p.Stderr, "worker drain: %v\n\n%s", err, drainUsage)
		return ExitConfig
	}
	cfg, code := p.loadClient(rest)
	if code != ExitOK {
		return code
	}
	if o.address == "" {
		if o.address, err = systemAddress(&cfg.System); err != nil {
			fmt.Fprintln(p.Stderr, "worker drain: "+err.Error())
			return ExitConfig
		}
	}
	if o.timeout == 0 {
		o.timeout = cfg.Drain.Budget + time.Minute
	}
	ctx, stop := p.signals(func() {})
	defer stop()
	ctx, cancel := context.WithTimeoutCause(ctx, o.timeout, fmt.Errorf("not drained within %v", o.timeout))
	defer cancel()
	if err := p.awaitDrain(ctx, &o); err != nil {
		fmt.Fprintln(p.Stderr, "worker drain: "+err.Error())
		return ExitFailure
	}
	return ExitOK
}

// systemAddress is where the system server of a worker with these settings is reached from its own host.
func systemAddress(c *config.System) (string, error) {
	switch {
	case !c.Enabled():
		return "", errors.New("system.port is off, and with it the way to drain; SIGTERM drains as well")
	case c.Port == 0:
		return "", errors.New("system.port takes any free port; give it with --address")
	}
	host := strings.Trim(c.Host, "[]")
	if ip, err := netip.ParseAddr(host); err == nil && ip.IsUnspecified() {
		host = "127.0.0.1"
		if ip.Is6() {
			host = "::1"
		}
	}
	return net.JoinHostPort(host, strconv.Itoa(c.Port)), nil
}

// askAgain is the pause between two questions how far the drain has come.
const askAgain = 250 * time.Millisecond

// awaitDrain asks for the drain and, if that is wanted, until it is over. A worker that is gone after it was asked has drained.
func (p *Process) awaitDrain(ctx context.Context, o *drainOrder) error {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for asked := false; ; asked = true {
		answer, err := askDrain(ctx, client, o.address)
		switch {
		case err != nil && ctx.Err() != nil:
			return context.Cause(ctx)
		case asked && (errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.EOF)):
			fmt.Fprintln(p.Stdout, "ended")
			return nil
		case err != nil:
			return err
		}
		if !o.wait || answer.Status == app.Drained {
			fmt.Fprintf(p.Stdout, "%s, %d in flight\n", answer.Status, answer.InFlight)
			return nil
		}
		pause := time.NewTimer(askAgain)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return context.Cause(ctx)
		}
	}
}

func askDrain(ctx context.Context, client *http.Client, address string) (answer app.DrainAnswer, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+address+status.EnginePrefix+app.DrainPath, nil)
	if err != nil {
		return answer, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return answer, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<16))
	if err != nil {
		return answer, fmt.Errorf("answer of %s: %w", address, err)
	}
	if resp.StatusCode != http.StatusOK {
		return answer, fmt.Errorf("%s answers %s: %s", address, resp.Status, strings.TrimSpace(string(body)))
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return answer, fmt.Errorf("answer of %s: %w", address, err)
	}
	if answer.Status != app.Draining && answer.Status != app.Drained {
		return answer, fmt.Errorf("answer of %s: status %q is unknown", address, answer.Status)
	}
	return answer, nil
}
