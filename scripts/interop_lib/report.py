"""One line per check, and the count."""

import sys
import threading
import time


class CheckFailed(Exception):
    """What was seen is not what had to be seen; the text says both."""


def expect(condition, message):
    """Raises CheckFailed with message unless condition holds."""
    if not condition:
        raise CheckFailed(message)


class Report:
    """Prints results as they come in, from several threads."""

    def __init__(self, out=sys.stdout):
        self._out = out
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self.passed = 0
        self.failed = []

    def say(self, text):
        """A remark about what the harness is doing."""
        self._print(f"     {text}")

    def ok(self, plane, name, seen):
        self.passed += 1
        self._print(f"ok   {plane:4} {name}: {seen}")

    def fail(self, plane, name, why):
        self.failed.append(f"{plane} {name}")
        self._print(f"FAIL {plane:4} {name}: {why}")

    def _print(self, text):
        with self._lock:
            print(f"{time.monotonic() - self._start:6.1f}s {text}", file=self._out, flush=True)

    def summary(self):
        """Prints the count and returns the exit code."""
        print(f"{self.passed} passed, {len(self.failed)} failed", file=self._out, flush=True)
        # A run that checked nothing has proved nothing.
        return 0 if self.passed and not self.failed else 1
