"""Port numbers for servers that must keep their address over a restart.

They come from below the range that the kernel hands out for outgoing
connections. A port of that range could be taken by any connection while its
server is down for a minute, and the restart would fail for a reason that has
nothing to do with the check.
"""

import random
import socket
import threading

_lock = threading.Lock()
_given = set()


def _lowest_ephemeral():
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as f:
            return int(f.read().split()[0])
    except (OSError, ValueError):
        return 32768


def pick():
    """A loopback TCP port that nobody listens on and that was not given out before."""
    top = _lowest_ephemeral()
    low, high = (10240, top) if top > 12000 else (49152, 65535)
    with _lock:
        for _ in range(1000):
            port = random.randrange(low, high)
            if port in _given:
                continue
            with socket.socket() as s:
                try:
                    s.bind(("127.0.0.1", port))
                except OSError:
                    continue
            _given.add(port)
            return port
    raise RuntimeError("no free port found")
