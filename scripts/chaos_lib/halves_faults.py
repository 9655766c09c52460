"""A prefill or a decode worker, or its engine, ends while requests go through both."""

import os
import signal

from .engine_faults import in_place, noticed
from .faults import fault
from .scene import FIXED, MOVED, gone
from .worker_faults import ended, withdrawn


def _of(s, role):
    return next(d for d in s.daemons if d.role == role)


def _killed(s, role):
    victim = _of(s, role)
    tree = victim.tree()

    def detected():
        """the worker and its engine to be gone"""
        if victim.process.running():
            return False
        gone(tree, 10)
        return f"{len(tree)} processes of the engine gone"
    s.strike(f"{role} worker: SIGKILL", lambda: os.kill(victim.pid, signal.SIGKILL), detected, whole=(MOVED,), bites=FIXED)


def _engine_killed(s, role):
    victim = _of(s, role)
    engine = victim.engine()
    s.strike(f"{role} worker: its engine SIGKILL", lambda: os.kill(engine.pid, signal.SIGKILL),
             noticed(victim, "exit"), in_place(s, victim), whole=(MOVED,), bites=FIXED)


def _terminated(s, role):
    victim = _of(s, role)
    s.strike(f"{role} worker: SIGTERM, budget 30 s", lambda: s.withdraw(victim), withdrawn(victim),
             ended(victim, 0, clean=True), whole=(MOVED, FIXED))


@fault("halves", quick=True)
def prefill_killed(s):
    _killed(s, "prefill")


@fault("halves", quick=True)
def decode_killed(s):
    _killed(s, "decode")


@fault("halves")
def prefill_engine_killed(s):
    _engine_killed(s, "prefill")


@fault("halves")
def decode_engine_killed(s):
    _engine_killed(s, "decode")


@fault("halves")
def prefill_terminated(s):
    _terminated(s, "prefill")


@fault("halves")
def decode_terminated(s):
    _terminated(s, "decode")


@fault("halves")
def transfers_lost(s):
    """One KV transfer in ten ends half-way, with two prefill workers of that kind."""
    for victim in [d for d in s.daemons if d.role == "prefill"]:
        s.replace(victim, engine__sim__kv_transfer_lose_every=10)
    s.heal()
    try:
        s.strike("KV: one transfer in ten is lost", lambda: None, whole=(MOVED,), bites=FIXED)
    finally:
        for victim in [d for d in s.daemons if d.role == "prefill"]:
            s.replace(victim)
