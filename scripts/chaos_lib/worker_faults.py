"""The worker process ends, one way or another."""

import os
import signal
import subprocess
import time

from interop_lib.procs import wait_for
from interop_lib.report import expect

from .faults import fault
from .scene import FIXED, MOVED, PATIENCE, gone, without_errors

# Seconds in which nothing of an engine may be left.
TREE_GONE = 10


def died(s, title, number, wanted):
    """A signal that ends the worker at once. Whole engine tree away, a bystander untouched, another worker takes over."""
    victim = s.victim
    tree = victim.tree()
    expect(tree, "the worker has no engine")
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    alone = len(s.daemons) == 1

    def detected():
        """the engine's processes to be gone"""
        if victim.process.running():
            return False
        code = victim.process.code()
        expect(code in wanted, f"exit code {code}, wanted {wanted}")
        gone(tree, TREE_GONE)
        expect(bystander.poll() is None, "an unrelated process was ended")
        return f"exit {code}, {len(tree)} processes of the engine gone"
    try:
        s.strike(title, lambda: os.kill(victim.pid, number), detected, replaced(s, victim) if alone else None,
                 at=victim, whole=() if alone else (MOVED,), bites=FIXED)
    finally:
        bystander.kill()
        bystander.wait()


def replaced(s, victim):
    """A probe that starts a new worker, as a supervisor does, and is true when that one serves."""
    serves = None

    def again():
        """a new worker to serve"""
        nonlocal serves
        serves = serves or s.served_by(s.replace(victim))
        return serves()
    return again


@fault("pair", quick=True)
def sigkill(s):
    died(s, "worker: SIGKILL", signal.SIGKILL, (-9,))


@fault("pair")
def panic(s):
    # What the Go runtime does when the program panics is what it does on this signal: all stacks to stderr, exit code 2.
    died(s, "worker: ends as by a panic (SIGQUIT)", signal.SIGQUIT, (2,))


@fault("pair")
def abort(s):
    died(s, "worker: SIGABRT", signal.SIGABRT, (2, -6))


def ended(victim, code, clean=False):
    """A probe: the worker has ended with that code and left nothing behind. clean: nor has it ended any request with an error."""
    tree = victim.tree()

    def probe():
        """the worker to end"""
        if victim.process.running():
            return False
        got = victim.process.code()
        expect(got == code, f"exit code {got}, wanted {code}")
        gone(tree, TREE_GONE)
        expect(victim.worker.records() == {}, f"left in etcd: {list(victim.worker.records())}")
        if clean:
            without_errors(victim)
        return f"exit {code}"
    return probe


@fault("pair", quick=True)
def sigterm_in_budget(s):
    s.strike("worker: SIGTERM, budget 30 s", lambda: s.withdraw(s.victim), withdrawn(s.victim),
             ended(s.victim, 0, clean=True), at=s.victim, whole=(MOVED, FIXED))


def withdrawn(victim):
    key = victim.worker.key

    def probe():
        """the instance record to be withdrawn"""
        return key not in victim.worker.records()
    return probe


@fault("pair")
def sigint(s):
    s.strike("worker: SIGINT, budget 30 s", lambda: s.withdraw(s.victim, signal.SIGINT), withdrawn(s.victim),
             ended(s.victim, 0, clean=True), at=s.victim, whole=(MOVED, FIXED))


@fault("pair")
def drained_over_http(s):
    """The drain that a preStop hook orders; the process stays until it is told to end."""
    victim = s.victim
    order = []

    def strike():
        s.withdrawals.append(time.monotonic())
        order.append(ask_drain(victim))

    def drained():
        """the worker to say that it is drained"""
        answer = ask_drain(victim)
        if answer["status"] != "drained":
            return False
        expect(victim.live() and not victim.ready(), "a drained worker is to be live and not ready")
        expect(victim.worker.records() == {}, f"left in etcd: {list(victim.worker.records())}")
        without_errors(victim)
        victim.worker.terminate()
        code = victim.process.wait(PATIENCE)
        expect(code == 0, f"exit code {code} on SIGTERM after the drain")
        return f"{order[0]['in_flight']} in flight when ordered, exit 0 on SIGTERM after it"
    s.strike("worker: drain ordered over HTTP", strike, withdrawn(victim), drained, at=victim, whole=(MOVED, FIXED))


def ask_drain(daemon):
    answer = daemon.worker.status.post("/engine/control/drain", {})
    expect(answer.status in (200, 202) and isinstance(answer.body, dict), f"the drain route answers {answer}")
    return answer.body


@fault("pair", quick=True)
def sigterm_without_budget(s):
    victim = s.replace(s.victim, drain__budget="300ms")
    s.heal()
    s.strike("worker: SIGTERM, budget 0.3 s", victim.worker.terminate, withdrawn(victim),
             ended(victim, 0), at=victim, whole=(MOVED,), bites=FIXED)


@fault("pair")
def second_signal(s):
    victim = s.victim

    def twice():
        victim.worker.terminate()
        wait_for("the drain to begin", 10, lambda: victim.logged('"draining"'), pause=0.02)
        victim.worker.terminate()
    s.strike("worker: SIGTERM twice", twice, ended_hard(victim, 3), at=victim, whole=(MOVED,), bites=FIXED)


def ended_hard(victim, code):
    """Like ended; what is in etcd is left to the lease."""
    tree = victim.tree()

    def probe():
        """the worker to end"""
        if victim.process.running():
            return False
        got = victim.process.code()
        expect(got == code, f"exit code {got}, wanted {code}")
        gone(tree, TREE_GONE)
        return f"exit {code}, {len(tree)} processes of the engine gone"
    return probe

