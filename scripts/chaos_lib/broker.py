"""A NATS server with users and little patience."""

import http.client
import json
import signal

from interop_lib import ports, provision
from interop_lib.servers import Nats

# What the runtime uses when it is told nothing.
USER = PASSWORD = "user"


class GuardedNats(Nats):
    """Lets in one user, and drops a client that does not read."""

    def __init__(self, processes, folder):
        super().__init__(processes, folder)
        self._config = folder / "nats.conf"
        self._write(USER, PASSWORD)

    def _choose_ports(self):
        super()._choose_ports()
        self._monitor = ports.pick()

    def _argv(self):
        return [*super()._argv(), "-m", self._monitor, "-c", self._config]

    def _write(self, user, password):
        self._config.write_text(f'authorization {{ user: "{user}", password: "{password}" }}\nwrite_deadline: "2s"\nmax_pending: 8MB\n')

    def allow(self, user, password):
        """From now on only that user is let in; who is there as somebody else is shown out."""
        self._write(user, password)
        self._proc.signal(signal.SIGHUP)

    def _dropped(self):
        conn = http.client.HTTPConnection("127.0.0.1", self._monitor, timeout=5)
        try:
            conn.request("GET", "/varz")
            return json.loads(conn.getresponse().read())["slow_consumers"]
        finally:
            conn.close()

    def dropped_one(self):
        """A probe: the server has dropped a client because it did not read."""
        before = self._dropped()

        def dropped():
            """the server to drop a slow consumer"""
            return f"{self._dropped() - before} slow consumer dropped" if self._dropped() > before else False
        return dropped


def guard(stack, folder):
    """Puts such a server in the place of the stack's."""
    stack.nats.kill()
    stack.nats = GuardedNats(stack.setup.processes, folder).start()
    return stack.nats
