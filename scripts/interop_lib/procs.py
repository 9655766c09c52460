"""Child processes that cannot outlive the harness.

Every child gets a session (and so a process group) of its own and a log file.
Three things end children: their owner's stop(), the end of this program in
any way that Python notices, and, for the ways it does not notice (SIGKILL,
a crash), a keeper process that watches the other end of a pipe.
"""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

KEEPER = r"""
import os, signal, sys
groups = set()
for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(sig, signal.SIG_IGN)
for line in sys.stdin:
    word, pgid = line.split()
    (groups.add if word == "+" else groups.discard)(int(pgid))
for pgid in groups:
    try:
        os.killpg(pgid, signal.SIGKILL)
    except OSError:
        pass
"""


class Keeper:
    """Kills the registered process groups when this program is gone."""

    def __init__(self):
        self._lock = threading.Lock()
        self._proc = subprocess.Popen(
            [sys.executable, "-c", KEEPER],
            stdin=subprocess.PIPE, text=True, start_new_session=True)

    def add(self, pgid):
        self._say("+", pgid)

    def discard(self, pgid):
        self._say("-", pgid)

    def _say(self, word, pgid):
        with self._lock:
            try:
                self._proc.stdin.write(f"{word} {pgid}\n")
                self._proc.stdin.flush()
            except (OSError, ValueError):
                pass

    def close(self):
        with self._lock:
            try:
                self._proc.stdin.close()
            except OSError:
                pass
            self._proc.wait()


class Processes:
    """All children of one run of the harness."""

    def __init__(self):
        self._lock = threading.Lock()
        self._running = set()
        self._closed = False
        self._keeper = Keeper()
        atexit.register(self.close)

    def start(self, argv, log, env=None, cwd=None, stdin=subprocess.DEVNULL):
        """Starts argv with stdout and stderr appended to the file log."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the harness is ending")
            child = Process(self, [str(a) for a in argv], Path(log), env, cwd, stdin)
            self._running.add(child)
            self._keeper.add(child.pid)
        return child

    def forget(self, child):
        with self._lock:
            if child in self._running:
                self._running.discard(child)
                self._keeper.discard(child.pid)

    def close(self):
        """Kills what still runs. Safe to call more than once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            left = list(self._running)
        for child in left:
            child.kill()
        self._keeper.close()


class Process:
    """One child. stop() and kill() act on its whole process group."""

    def __init__(self, owner, argv, log, env, cwd, stdin):
        self.argv = argv
        self.log = log
        self._owner = owner
        with open(log, "ab") as out:
            self._popen = subprocess.Popen(
                argv, stdin=stdin, stdout=out, stderr=subprocess.STDOUT,
                env=env, cwd=cwd, start_new_session=True)
        self.pid = self._popen.pid

    def running(self):
        return self._popen.poll() is None

    def code(self):
        """The exit code, negative for a signal; None while it runs."""
        return self._popen.poll()

    def signal(self, number):
        """Signals the process alone, as a supervisor would."""
        if self.running():
            self._popen.send_signal(number)

    def signal_group(self, number):
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass

    def wait(self, timeout):
        """Waits for the end and returns the exit code, or None if it still runs."""
        try:
            code = self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        self._reap()
        return code

    def stop(self, timeout=15):
        """SIGTERM, then SIGKILL to what is left. Returns the exit code."""
        self.signal(signal.SIGTERM)
        self.signal_group(signal.SIGCONT)
        code = self.wait(timeout)
        if code is None:
            self.kill()
            code = self._popen.returncode
        return code

    def kill(self):
        self.signal_group(signal.SIGKILL)
        self._popen.wait()
        self._reap()

    def _reap(self):
        # Grandchildren may be left in the group of a dead leader.
        self.signal_group(signal.SIGKILL)
        self._owner.forget(self)

    def tail(self, lines=12):
        """The last lines of the log, for a message that has to explain something."""
        try:
            text = self.log.read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


class Timeout(Exception):
    """A condition did not become true in time."""


def wait_for(what, timeout, probe, pause=0.05):
    """Calls probe until it returns something true and returns that.

    Raises Timeout naming what otherwise. Exceptions of probe that mean "not
    yet" (OSError) are swallowed, the last one goes into the message.
    """
    deadline = time.monotonic() + timeout
    last = None
    while True:
        try:
            value = probe()
            if value:
                return value
        except OSError as err:
            last = err
        if time.monotonic() >= deadline:
            raise Timeout(f"{what}: not within {timeout} s" + (f" ({last})" if last else ""))
        time.sleep(pause)
