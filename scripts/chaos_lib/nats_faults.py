"""NATS is gone, stands still, restarts, or does not let the worker in any more."""

import signal
import threading

from .etcd_faults import ready
from .faults import fault
from .scene import FIXED, MOVED, all_of, counted, later, says

BOTH = (MOVED, FIXED)
AWAY = 8
# A server that stands still is found out by two pings without an answer, ten seconds apart.
SILENT = 35


def serving(s, back):
    """A probe: NATS is back, every worker is ready and somebody who asked after that has been answered."""
    answered = None

    def again():
        """every worker to be ready and a request to be answered"""
        nonlocal answered
        if not back.is_set() or not ready(s)():
            return False
        answered = answered or s.answering()
        return answered()
    return again


@fault("pair", quick=True)
def gone(s):
    back = threading.Event()

    def kill():
        s.nats.kill()
        later(AWAY, lambda: (s.nats.restart(), back.set()))
    s.strike(f"NATS: gone for {AWAY} s", kill, says(s.victim, "nats"), serving(s, back), whole=(), struck=BOTH)


@fault("pair")
def restarted(s):
    back = threading.Event()

    def restart():
        s.nats.kill()
        s.nats.restart()
        back.set()
    s.strike("NATS: restarted", restart, counted(s.victim, "dynworker_nats_reconnects_total"), serving(s, back), whole=(), struck=BOTH)


@fault("pair")
def paused(s):
    back = threading.Event()

    def freeze():
        s.nats.freeze()
        later(SILENT, lambda: (s.nats.thaw(), back.set()))
    s.strike(f"NATS: stopped for {SILENT} s (SIGSTOP)", freeze, says(s.victim, "nats"), serving(s, back), whole=(), struck=BOTH)


@fault("pair", quick=True)
def credentials(s):
    back = threading.Event()

    def change():
        s.nats.allow("somebody", "else")
        later(8, lambda: (s.nats.allow("user", "user"), back.set()))
    s.strike("NATS: refuses the credentials for 8 s", change, says(s.victim, "nats"), serving(s, back), whole=(), struck=BOTH)


@fault("pair")
def slow_consumer(s):
    back = threading.Event()
    victim = s.victim

    def stop():
        victim.process.signal(signal.SIGSTOP)
        # More than the server and all buffers on the way hold for a client that does not read.
        s.bad_frontend("flood", 800)
        later(8, lambda: (victim.process.signal(signal.SIGCONT), back.set()))
    s.strike("NATS: worker stopped for 8 s and flooded, server drops it", stop,
             all_of(s.nats.dropped_one(), back.is_set), serving(s, back), at=victim)
