"""The bridge to TensorRT-LLM, on a stand-in for it that has ranks of its own: processes in sessions of their own, deaf to SIGTERM."""

import os
import resource
import signal
from pathlib import Path

from interop_lib.report import expect

from .engine_faults import in_place, noticed
from .faults import fault
from .scene import FIXED
from .worker_faults import died, ended


def ranks(daemon):
    """The engine's rank processes."""
    found = [p for p in daemon.tree() if "multiprocessing" in p.command and "spawn_main" in p.command]
    expect(len(found) >= 2, f"no ranks among {[str(p) for p in daemon.tree()]}")
    return found


def fails(s, title, detector, strike):
    """The engine fails; its ranks must be gone before the next one is there."""
    victim = s.victim
    s.strike(title, strike, noticed(victim, detector), in_place(s, victim), at=victim, whole=(), bites=FIXED)


def poison(s, title, detector, trigger):
    fails(s, title, detector, lambda: s.traffic.aside(FIXED, "poison", [f"trigger:{trigger}"]))


@fault("bridge")
def rank_killed(s):
    rank = ranks(s.victim)[0]
    fails(s, "bridge: a rank is killed", "rank", lambda: os.kill(rank.pid, signal.SIGKILL))


@fault("bridge")
def engine_killed(s):
    engine = s.victim.engine()
    fails(s, "bridge: engine SIGKILL", "exit", lambda: os.kill(engine.pid, signal.SIGKILL))


@fault("bridge", quick=True)
def fatal(s):
    poison(s, "bridge: fatal error of a request", "fatal", 90006)


@fault("bridge")
def engine_dead(s):
    poison(s, "bridge: executor dead, streams hang", "fatal|health", 90007)


@fault("bridge")
def ill(s):
    poison(s, "bridge: health check turns false", "health", 90010)


@fault("bridge", quick=True)
def blocked(s):
    poison(s, "bridge: executor dead, interpreter blocked", "stall|fatal|health", 90013)


@fault("bridge")
def no_memory(s):
    """The engine cannot get any more memory."""
    engine = s.victim.engine()

    def strike():
        # Not its address space, of which the C library keeps a reserve.
        status = Path(f"/proc/{engine.pid}/status").read_text()
        size = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))
        resource.prlimit(engine.pid, resource.RLIMIT_DATA, (size, size))
        # What it has in reserve is used up by this.
        s.traffic.aside(FIXED, "m" * 12000, [None] * 60, tokens=400)
    fails(s, "bridge: engine gets no more memory", "fatal|exit|protocol|health|stall", strike)


@fault("bridge")
def worker_killed(s):
    ranks(s.victim)
    died(s, "bridge: worker SIGKILL, ranks deaf to SIGTERM", signal.SIGKILL, (-9,))


@fault("bridge")
def worker_terminated(s):
    ranks(s.victim)
    s.strike("bridge: worker SIGTERM, budget 30 s", s.victim.worker.terminate, None, ended(s.victim, 0), at=s.victim, whole=(), struck=(FIXED,))
