package tcpplane

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
)

// advertised works out the address that frontends shall connect to. They do not resolve names, so it is an IP address.
func advertised(cfg Config, bound net.Addr) (netip.AddrPort, error) {
	tcp, ok := bound.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}, fmt.Errorf("tcp request plane listens on %s, which is no tcp address", bound)
	}
	port := tcp.AddrPort().Port()
	if cfg.Advertise != "" {
		ip, err := netip.ParseAddr(cfg.Advertise)
		if err != nil {
			return netip.AddrPort{}, fmt.Errorf("advertised host of the tcp request plane: %w", err)
		}
		return netip.AddrPortFrom(ip, port), nil
	}
	if ip := tcp.AddrPort().Addr().Unmap(); !ip.IsUnspecified() {
		return netip.AddrPortFrom(ip, port), nil
	}
	return netip.AddrPortFrom(machineAddress(), port), nil
}

// machineAddress picks an address under which other machines may reach this one: the first global IPv4 address, else the first global IPv6 address, else loopback.
func machineAddress() netip.Addr {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return loopback
	}
	return pickAddress(addrs)
}

var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})

func pickAddress(addrs []net.Addr) netip.Addr {
	var v6 netip.Addr
	for _, a := range addrs {
		prefix, err := netip.ParsePrefix(a.String())
		if err != nil {
			continue
		}
		ip := prefix.Addr().Unmap()
		if !ip.IsGlobalUnicast() {
			continue
		}
		if ip.Is4() {
			return ip
		}
		if !v6.IsValid() {
			v6 = ip
		}
	}
	if v6.IsValid() {
		return v6
	}
	return loopback
}

var errNoTLSPair = errors.New("certificate and key of the tcp request plane must be given together")
