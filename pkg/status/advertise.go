package status

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// AdvertiseAddr gives the "host:port" under which others reach a listener that
// is bound to bound.
//
// override is what the operator configured: empty, a host, or "host:port"; an
// IPv6 address may stand with or without brackets. Without it the bound
// address is taken, and where that is "all addresses", the first address of
// this host that is not loopback, IPv4 before IPv6 (Dynamo's choice is the
// same); a host without any gets loopback, which is right for one machine.
func AdvertiseAddr(bound netip.AddrPort, override string) (string, error) {
	return advertiseAddr(bound, override, net.InterfaceAddrs)
}

func advertiseAddr(bound netip.AddrPort, override string, interfaces func() ([]net.Addr, error)) (string, error) {
	port := strconv.Itoa(int(bound.Port()))
	if override != "" {
		host, p, err := splitHostPort(override)
		if err != nil {
			return "", fmt.Errorf("advertised address %q: %w", override, err)
		}
		if p != "" {
			port = p
		}
		return net.JoinHostPort(host, port), nil
	}
	if ip := bound.Addr(); ip.IsValid() && !ip.IsUnspecified() {
		return net.JoinHostPort(ip.String(), port), nil
	}
	addrs, err := interfaces()
	if err != nil {
		return "", fmt.Errorf("own address for %s: %w", bound, err)
	}
	return net.JoinHostPort(pickAddr(addrs).String(), port), nil
}

// splitHostPort is net.SplitHostPort with an optional port.
func splitHostPort(s string) (host, port string, err error) {
	if ip, err := netip.ParseAddr(strings.Trim(s, "[]")); err == nil {
		return ip.String(), "", nil
	}
	if !strings.Contains(s, ":") {
		host = s
	} else if host, port, err = net.SplitHostPort(s); err != nil {
		return "", "", err
	}
	if host == "" || strings.ContainsAny(host, "/?#@ ") {
		return "", "", errors.New("want a host name or an address, with or without a port")
	}
	if port != "" {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return "", "", fmt.Errorf("port %q is not between 1 and 65535", port)
		}
	}
	return host, port, nil
}

// pickAddr chooses among the addresses of the interfaces.
func pickAddr(addrs []net.Addr) netip.Addr {
	best := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	for _, a := range addrs {
		n, ok := a.(*net.IPNet)
		if !ok {
			continue
		}
		ip, ok := netip.AddrFromSlice(n.IP)
		if !ok {
			continue
		}
		switch ip = ip.Unmap(); {
		case ip.IsLoopback(), ip.IsLinkLocalUnicast(), ip.IsMulticast():
		case ip.Is4():
			return ip
		case best.IsLoopback():
			best = ip
		}
	}
	return best
}
