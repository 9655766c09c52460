"""The real, unmodified frontend."""

import os
import shutil
import subprocess

from . import ports
from .environment import clean
from .http_client import Api
from .procs import Timeout, wait_for


class Frontend:
    """One `python -m dynamo.frontend` with a home folder of its own.

    extra are further command line arguments, env further variables. hidden is
    a folder that the process shall be unable to read.
    """

    def __init__(self, processes, python, folder, plane, etcd, nats, extra=(), env=None, hidden=None):
        home = folder / "home"
        home.mkdir(parents=True)
        wrapper = without_access(hidden) if hidden else []
        self.api = None
        for attempt in range(5):
            port = ports.pick()
            self.process = processes.start(
                [*wrapper, python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", port,
                 "--discovery-backend", "etcd", "--request-plane", plane, "--event-plane", "nats", *extra],
                folder / "frontend.log",
                env=clean(HOME=home, HF_HUB_OFFLINE=1, ETCD_ENDPOINTS=etcd.url, NATS_SERVER=nats.url,
                          DYN_TCP_RESPONSE_STREAM_HOST="127.0.0.1", DYN_SDK_DISABLE_ANSI_LOGGING=1, **(env or {})),
                cwd=home)
            api = Api(port)
            try:
                wait_for("the frontend to answer", 60, lambda: not self.process.running() or api.models() is not None)
            except Timeout:
                pass
            if self.process.running():
                self.api = api
                return
            if attempt == 4 or "in use" not in self.process.tail(40):
                break
        raise RuntimeError(f"the frontend does not start:\n{self.process.tail()}")

    def stop(self):
        return self.process.stop()


def without_access(folder):
    """Command words that run a program which cannot read folder.

    As root the program loses the right to ignore file modes, and the folder
    must belong to somebody else (see take_away). As another user it gets a
    mount namespace in which the folder is covered.
    """
    if os.geteuid() == 0:
        return [shutil.which("setpriv"), "--bounding-set=-dac_override,-dac_read_search"]
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
            'mount -t tmpfs none "$0" && exec "$@"', str(folder)]


def take_away(folder):
    """Prepares folder for without_access and proves that it works.

    Raises RuntimeError when a program started that way can still read it.
    """
    if os.geteuid() == 0:
        for path in [*folder.iterdir(), folder]:
            os.chown(path, 65534, 65534)
            os.chmod(path, 0o700 if path.is_dir() else 0o600)
    for path in folder.iterdir():
        done = subprocess.run([*without_access(folder), "cat", str(path)], capture_output=True, text=True)
        if done.returncode == 0:
            raise RuntimeError(f"{path.name} could still be read by a program that should not be able to")
    return done.stderr.strip()
