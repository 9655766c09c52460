"""Every way this process ends, each of them bounded in time.

The engine's own shutdown can wait for ever for a rank that is gone, and the event loop may be
stuck in native code, so the end is run by a thread of its own and finishes with os._exit.
"""
import os
import threading
import time

from . import channel as wire
from . import processes

# Exit codes. 1 is what today's worker uses for an engine that failed.
STOPPED = 0         # ordered by the worker, done in time
ENGINE_FAILED = 1
NO_CHANNEL = 2      # not started by a worker
LOAD_FAILED = 3     # configuration refused, or the engine could not be built
WORKER_GONE = 4
STOP_TOO_SLOW = 5   # ordered by the worker, cut off at the deadline

_SEND_SECONDS = 2.0
_KILL_SECONDS = 2.0


class Ending:
    """The first cause wins; later ones are ignored."""

    def __init__(self, channel):
        self.engine = None                    # set once it is built
        self.last_words = lambda seconds: None  # sends what is there, stops the streams
        self.stop_seconds = 3.0               # for the engine, where nobody gave a deadline
        self.begun = False
        self._channel = channel
        self._lock = threading.Lock()

    def shutdown(self, seconds, reason):
        """Ordered: stop within the given time and say goodbye."""
        self._begin(self._shutdown, seconds or self.stop_seconds, reason)

    def fatal(self, error, code=ENGINE_FAILED):
        """The engine cannot go on, or never came up."""
        self._begin(self._fatal, error, code)

    def orphaned(self):
        """The worker is gone, so nobody is left to tell."""
        self._begin(self._orphaned)

    def _begin(self, run, *args):
        with self._lock:
            if self.begun:
                return
            self.begun = True
        try:
            threading.Thread(target=self._guard, args=(run, *args), daemon=True).start()
        except (RuntimeError, MemoryError):  # no memory for a thread, so not for a good order either
            os._exit(ENGINE_FAILED)

    def _guard(self, run, *args):
        code = ENGINE_FAILED
        try:
            code = run(*args)
        finally:
            os._exit(code)

    def _shutdown(self, seconds, reason):
        until = time.monotonic() + seconds
        self.last_words(min(1.0, seconds / 4))
        clean = self._stop_engine(until - time.monotonic() - seconds / 5)
        left = processes.kill_descendants(max(until - time.monotonic(), 0.1))
        self._say(wire.GOODBYE, {"reason": reason})
        return STOPPED if clean and not left else STOP_TOO_SLOW

    def _fatal(self, error, code):
        self._say(wire.FATAL, {"error_type": type(error).__name__, "message": str(error),
                               "recoverable": False})
        self._stop_engine(self.stop_seconds)
        processes.kill_descendants(_KILL_SECONDS)
        return code

    def _orphaned(self):
        self._stop_engine(self.stop_seconds)
        processes.kill_descendants(_KILL_SECONDS)
        return WORKER_GONE

    def _stop_engine(self, seconds):
        """True when the engine's own shutdown came back. An engine that recorded a fatal error
        is not asked: its shutdown would wait for ranks that do not answer."""
        if self.engine is None:
            return True
        stopped = threading.Event()

        def stop():
            try:
                self.engine.shutdown()
            except Exception as e:
                wire.warn(f"engine shutdown: {type(e).__name__}: {e}")
            stopped.set()

        until = time.monotonic() + seconds
        if self.engine.fatal_error() is None:
            threading.Thread(target=stop, daemon=True).start()
        while self.engine.fatal_error() is None and time.monotonic() < until:
            if stopped.wait(0.02):
                return True
        return stopped.is_set()

    def _say(self, kind, value):
        """Sends, but does not wait for a worker that does not read."""
        sender = threading.Thread(target=self._channel.send_json, args=(kind, value), daemon=True)
        sender.start()
        sender.join(_SEND_SECONDS)
