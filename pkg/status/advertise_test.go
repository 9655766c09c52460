package status

import (
	"errors"
	"net"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
)

func ipNet(s string) net.Addr { return &net.IPNet{IP: net.ParseIP(s)} }

func TestAdvertiseAddr(t *testing.T) {
	pod := []net.Addr{ipNet("127.0.0.1"), ipNet("::1"), ipNet("fe80::1"), ipNet("2001:db8::7"), ipNet("10.1.2.3"), ipNet("10.9.9.9")}
	v6only := []net.Addr{ipNet("::1"), ipNet("fe80::1"), ipNet("2001:db8::7")}
	for _, c := range []struct {
		bound, override string
		interfaces      []net.Addr
		want            string
	}{
		{"127.0.0.1:9090", "", nil, "127.0.0.1:9090"},
		{"0.0.0.0:9090", "", pod, "10.1.2.3:9090"},
		{"[::]:9090", "", pod, "10.1.2.3:9090"},
		{"[::]:9090", "", v6only, "[2001:db8::7]:9090"},
		{"0.0.0.0:9090", "", nil, "127.0.0.1:9090"},
		{"[2001:db8::1]:9090", "", nil, "[2001:db8::1]:9090"},
		{"0.0.0.0:9090", "worker-0.svc", nil, "worker-0.svc:9090"},
		{"0.0.0.0:9090", "worker-0.svc:80", nil, "worker-0.svc:80"},
		{"0.0.0.0:9090", "2001:db8::7", nil, "[2001:db8::7]:9090"},
		{"0.0.0.0:9090", "[2001:db8::7]", nil, "[2001:db8::7]:9090"},
		{"0.0.0.0:9090", "[2001:db8::7]:81", nil, "[2001:db8::7]:81"},
	} {
		got, err := advertiseAddr(netip.MustParseAddrPort(c.bound), c.override, func() ([]net.Addr, error) { return c.interfaces, nil })
		require.NoError(t, err, "%+v", c)
		require.Equal(t, c.want, got, "%+v", c)
	}
	for _, bad := range []string{":9090", "host:", "host:0", "host:70000", "host:http", "http://host", "a:b:c", "user@host", " "} {
		_, err := AdvertiseAddr(netip.MustParseAddrPort("127.0.0.1:9090"), bad)
		if bad == "host:" { // a forgotten port means the bound one
			require.NoError(t, err)
			continue
		}
		require.Error(t, err, bad)
		require.ErrorContains(t, err, bad)
	}
	broken := errors.New("no interfaces")
	_, err := advertiseAddr(netip.MustParseAddrPort("0.0.0.0:1"), "", func() ([]net.Addr, error) { return nil, broken })
	require.ErrorIs(t, err, broken)
}

func TestAdvertiseRealInterfaces(t *testing.T) {
	got, err := AdvertiseAddr(netip.MustParseAddrPort("0.0.0.0:9090"), "")
	require.NoError(t, err)
	ap, err := netip.ParseAddrPort(got)
	require.NoError(t, err)
	require.False(t, ap.Addr().IsUnspecified())
	require.EqualValues(t, 9090, ap.Port())
}
