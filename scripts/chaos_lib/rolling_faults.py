"""Three workers are restarted one after another, again and again, as a rollout does it."""

import time

from interop_lib.procs import wait_for
from interop_lib.report import expect

from .faults import fault
from .scene import FIXED, MOVED, NEVER, PATIENCE, without_errors

ROUNDS = 10


def rounds(s, count, budget, clean):
    """Restarts all workers so many times. Each must end with 0 and leave nothing; the next one goes when the new one is sent requests."""
    begin = time.monotonic()
    for daemon in s.daemons:
        # The budget is that of the process that ends, so the ones from before come first and are not counted.
        expect(daemon.budget == budget, f"a worker with a budget of {daemon.budget}")
    for _ in range(count):
        for daemon in list(s.daemons):
            struck = list(s.traffic.open)
            s.withdraw(daemon)
            code = daemon.process.wait(PATIENCE)
            expect(code == 0, f"a worker ended with {code}: {daemon.process.tail(3)}")
            expect(daemon.worker.records() == {}, f"left in etcd: {list(daemon.worker.records())}")
            if FIXED in clean:
                without_errors(daemon)
            new = s.replace(daemon, drain__budget=budget)
            new.budget = budget
            wait_for("the new worker to be sent requests", PATIENCE, lambda d=new: d.accepted() > 0)
            # A rollout that goes on sooner moves one request more often than the frontend's limit allows.
            wait_for("what was in flight to end", PATIENCE, lambda: all(o.ended for o in struck))
    return f"{count * len(s.daemons)} restarts in {time.monotonic() - begin:.0f} s"


def prepared(s, budget):
    """Puts workers with that budget in the place of those that are there."""
    for daemon in list(s.daemons):
        if getattr(daemon, "budget", None) != budget:
            s.replace(daemon, drain__budget=budget).budget = budget
    s.heal()


def roll(s, count, budget, whole, bites=None):
    prepared(s, budget)
    s.strike(f"rolling restart of 3 workers, {count} rounds, budget {budget}", lambda: rounds(s, count, budget, whole), None, NEVER,
             whole=whole, bites=bites)


@fault("fleet", quick=True)
def in_budget_once(s):
    roll(s, 1, "30s", (MOVED, FIXED))


@fault("fleet")
def without_budget_once(s):
    roll(s, 1, "0s", (MOVED,), FIXED)


@fault("fleet")
def in_budget(s):
    roll(s, ROUNDS, "30s", (MOVED, FIXED))


@fault("fleet")
def without_budget(s):
    roll(s, ROUNDS, "0s", (MOVED,), FIXED)
