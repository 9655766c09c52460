"""etcd and NATS, each with the ways of failing that the checks need."""

import base64
import http.client
import json
import signal
import socket
import subprocess
import threading
import time

from . import ports, provision
from .procs import Timeout, wait_for


class StartError(Exception):
    """A server ended instead of serving."""


def _listening(port):
    with socket.create_connection(("127.0.0.1", port), timeout=1):
        return True


class _Server:
    """A server on ports that stay the same over restarts."""

    name = ""

    def __init__(self, processes, folder):
        self.folder = folder
        self.folder.mkdir(parents=True)
        self._processes = processes
        self._proc = None
        self._generation = 0

    def start(self):
        """Starts with new ports; tries others when somebody else was quicker."""
        for attempt in range(5):
            self._choose_ports()
            try:
                self._launch()
                return self
            except (StartError, Timeout):
                self._proc.kill()
                if attempt == 4:
                    raise RuntimeError(f"{self.name} does not start:\n{self._proc.tail()}") from None
        return self

    def _launch(self):
        self._proc = self._processes.start(self._argv(), self.folder / f"{self.name}.log")

        def up_or_gone():
            return not self._proc.running() or self._ready()
        wait_for(f"{self.name} to answer", 20, up_or_gone)
        if not self._proc.running():
            raise StartError(f"{self.name} ended while it started")

    def freeze(self):
        self._proc.signal(signal.SIGSTOP)

    def thaw(self):
        self._proc.signal(signal.SIGCONT)

    def kill(self):
        self._proc.kill()

    def restart(self):
        """Starts again on the same ports, with whatever data are there."""
        self._launch()


class Nats(_Server):
    name = "nats"

    def _choose_ports(self):
        self.port = ports.pick()
        self.url = f"nats://127.0.0.1:{self.port}"

    def _argv(self):
        return [provision.find("nats-server"), "-a", "127.0.0.1", "-p", self.port]

    def _ready(self):
        return _listening(self.port)


class Etcd(_Server):
    name = "etcd"

    def _choose_ports(self):
        self.port, self._peer = ports.pick(), ports.pick()
        self.url = f"http://127.0.0.1:{self.port}"

    def _argv(self):
        peer = f"http://127.0.0.1:{self._peer}"
        return [provision.find("etcd"), "--data-dir", self.folder / f"data-{self._generation}",
                "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                "--initial-cluster", f"default={peer}", "--log-level", "warn"]

    def _ready(self):
        # A listener is not enough: without a leader every request waits.
        self._call("kv/range", {"key": _b64(b"x")}, timeout=2)
        return True

    def forget(self):
        """Makes the next restart begin with an empty store."""
        self._generation += 1

    # Reading. The JSON gateway is used instead of etcdctl where many reads
    # follow each other or the time of arrival matters.

    def _call(self, path, body, timeout=5):
        conn = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            conn.request("POST", f"/v3/{path}", json.dumps(body))
            answer = conn.getresponse()
            data = answer.read()
            if answer.status != 200:
                raise OSError(f"etcd answered {answer.status} to {path}")
            return json.loads(data)
        except http.client.HTTPException as err:
            raise OSError(f"etcd did not answer: {err}") from err
        finally:
            conn.close()

    def list(self, prefix):
        """All records below prefix: {key: Record}."""
        prefix = prefix.encode()
        end = prefix[:-1] + bytes([prefix[-1] + 1])
        answer = self._call("kv/range", {"key": _b64(prefix), "range_end": _b64(end)})
        records = (Record(kv) for kv in answer.get("kvs", []))
        return {r.key: r for r in records}

    def get(self, key):
        """The record of one key, or None."""
        answer = self._call("kv/range", {"key": _b64(key.encode())})
        return Record(answer["kvs"][0]) if answer.get("kvs") else None

    def revoke(self, lease):
        """etcdctl lease revoke."""
        subprocess.run([provision.find("etcdctl"), f"--endpoints={self.url}", "lease", "revoke", f"{lease:x}"],
                       check=True, capture_output=True, env={"ETCDCTL_API": "3", "PATH": "/usr/bin:/bin"}, timeout=20)

    def delete(self, key):
        """Deletes one key, as an operator with etcdctl would."""
        self._call("kv/deleterange", {"key": _b64(key.encode())})

    def watch(self, prefix):
        return Watch(self.port, prefix)


class Record:
    """A key with its value and the lease it hangs on."""

    def __init__(self, kv):
        self.key = base64.b64decode(kv["key"]).decode()
        self.value = base64.b64decode(kv.get("value", ""))
        self.lease = int(kv.get("lease", 0))


class Watch:
    """Notes every change below a prefix with the time at which it arrived."""

    def __init__(self, port, prefix):
        self.events = []  # (monotonic time, "PUT" or "DELETE", key)
        self._conn = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        prefix = prefix.encode()
        end = prefix[:-1] + bytes([prefix[-1] + 1])
        body = {"create_request": {"key": _b64(prefix), "range_end": _b64(end)}}
        self._conn.request("POST", "/v3/watch", json.dumps(body))
        self._socket = self._conn.sock
        self._answer = self._conn.getresponse()
        self._answer.readline()  # the watch exists from here on
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        try:
            while True:
                line = self._answer.readline()
                if not line:
                    return
                now = time.monotonic()
                for event in json.loads(line).get("result", {}).get("events", []):
                    key = base64.b64decode(event["kv"]["key"]).decode()
                    self.events.append((now, event.get("type", "PUT"), key))
        except (OSError, ValueError, http.client.HTTPException):
            pass

    def close(self):
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._thread.join(5)
        self._conn.close()


def _b64(data):
    return base64.b64encode(data).decode()
