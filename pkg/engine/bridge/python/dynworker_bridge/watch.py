"""A thread that notices what the event loop may be too busy to notice: signals, the death of
the parent, and a fatal error that the engine recorded without telling any request."""
import os
import select
import signal
import threading

from . import processes


class Watch:
    """Signal handlers run in the main thread, which native code can hold for minutes; the
    wake-up descriptor is written at once, so this thread acts instead."""

    def __init__(self, ending):
        self._ending, self._parent = ending, os.getppid()
        self.interval = 0.25
        self._wakeup, sink = os.pipe()
        os.set_blocking(sink, False)
        for number in (signal.SIGTERM, signal.SIGINT, processes.PARENT_SIGNAL):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while not self._ending.begun:
            readable, _, _ = select.select([self._wakeup], [], [], self.interval)
            signals = os.read(self._wakeup, 64) if readable else b""
            if os.getppid() != self._parent:
                self._ending.orphaned()
            elif signal.SIGTERM in signals or signal.SIGINT in signals:
                self._ending.shutdown(None, "signal")
            elif self._ending.engine is not None:
                error = self._ending.engine.fatal_error()
                if error is not None:
                    self._ending.fatal(error)
