"""Building the engine, with signs of life for the worker while it takes minutes."""
import os
import sys
import threading
import time

from . import channel as wire
from . import processes
from .engine import Engine

_TICKS = os.sysconf("SC_CLK_TCK")


class Progress:
    """Tells the worker what is going on. Between phases it speaks only when this process and
    its ranks used processor time, or became more or fewer: a load that is stuck has to look
    stuck."""

    def __init__(self, channel, seconds):
        self._channel, self._seconds = channel, seconds
        # the process table rounds to ticks, and somebody always polls something
        self._least = max(seconds / 100, 2 / _TICKS)
        self._phase, self._done = "", threading.Event()
        self._before = self.usage()

    def __enter__(self):
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._done.set()

    def phase(self, name):
        self._phase = name
        self._tell("")

    def _run(self):
        while not self._done.wait(self._seconds):
            self.beat()

    def beat(self):
        """Looks once, and speaks if something moved."""
        (used, count), (used_before, count_before) = now, _ = self.usage(), self._before
        if count != count_before or used - used_before >= self._least:
            self._tell(f"{used:.0f} s of processor time in {count} processes")
        self._before = now

    @staticmethod
    def usage():
        """Seconds of processor time, without this thread's own, and number of processes."""
        tree = [processes.entry(os.getpid()), *processes.descendants()]
        return sum(p.ticks for p in tree) / _TICKS - time.thread_time(), len(tree)

    def _tell(self, detail):
        self._channel.send_json(wire.PROGRESS, {"phase": self._phase, "detail": detail})


def load(channel, args, options):
    """Builds the engine from the arguments as the worker gave them. Any exception means that it
    could not be built; a library that calls exit() counts as one."""
    with Progress(channel, options.progress_interval_ms / 1000) as progress:
        progress.phase("import")
        try:
            import tensorrt_llm  # noqa: F401  (a phase of its own: it can take a minute)
            progress.phase("load")
            engine = Engine.build(args)
            progress.phase("describe")
            return engine, engine.describe()
        except SystemExit as e:
            raise RuntimeError(f"the engine called exit({e.code}) while loading") from e
        except Exception as e:
            sys.excepthook(type(e), e, e.__traceback__)  # the log gets what the message leaves out
            raise
