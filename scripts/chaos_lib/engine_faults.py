"""The engine dies, stands still, or goes on and is of no use. The worker starts it again in place."""

import os
import signal

from interop_lib.procs import wait_for
from interop_lib.report import expect

from .faults import fault
from .scene import FIXED, MOVED, PATIENCE, gone


def noticed(daemon, detectors):
    """A probe: one of the detectors has counted a failure of the engine since now, and has named itself in log and health.

    Where several are given, which one is first is a matter of milliseconds.
    """
    detectors = detectors.split("|")
    before = {d: daemon.failures(d) for d in detectors}
    named = []

    def probe():
        reason = daemon.reasons().get("engine")
        if reason and not named:
            expect(daemon.live(), "/live is not 200")
            named.append(reason)
        for d in detectors:
            if daemon.failures(d) > before[d]:
                expect(daemon.logged(f'"detector":"{d}"'), f"no log line names the detector {d}")
                return f"{d}" + (f" (/health: {named[0][:80]})" if named else "")
        return False
    probe.__doc__ = f"the detector {' or '.join(detectors)} to count a failure"
    return probe


def in_place(s, daemon):
    """A probe: the same process serves again, under the same identity, with an engine that was started again."""
    key = daemon.worker.key
    before = daemon.metric("dynworker_engine_restarts_total")
    old = [p for p in daemon.tree() if "engine-keeper" not in p.command]
    back = None

    def again():
        """the engine to serve again in place"""
        nonlocal back
        expect(daemon.process.running(), f"the worker ended with {daemon.process.code()}: {daemon.process.tail(3)}")
        if daemon.metric("dynworker_engine_restarts_total") == before:
            return False
        back = back or s.served_by(daemon)
        if not back():
            return False
        expect(key in daemon.worker.records(), "the worker has another identity")
        gone(old, 10)
        return "restarted in place"
    return again


def fails(s, title, detector, strike, whole=(MOVED,), bites=FIXED):
    victim = s.victim
    s.strike(title, strike, noticed(victim, detector), in_place(s, victim), at=victim, whole=whole, bites=bites)


@fault("pair", quick=True)
def killed(s):
    engine = s.victim.engine()
    fails(s, "engine: SIGKILL (as out of memory)", "exit", lambda: os.kill(engine.pid, signal.SIGKILL))


@fault("pair")
def terminated(s):
    engine = s.victim.engine()
    fails(s, "engine: ends by itself on SIGTERM", "exit", lambda: os.kill(engine.pid, signal.SIGTERM))


@fault("pair", quick=True)
def stopped(s):
    engine = s.victim.engine()
    fails(s, "engine: stands still (SIGSTOP)", "stall", lambda: os.kill(engine.pid, signal.SIGSTOP))


@fault("pair", quick=True)
def fatal(s):
    poison(s, "engine: fatal error", "fatal", "sim:fatal:3")


@fault("pair")
def crash(s):
    poison(s, "engine: exits with 134 in a request", "exit", "sim:crash:3")


@fault("pair")
def exit_zero(s):
    poison(s, "engine: exits with 0 in a request", "exit", "sim:exit:3")


@fault("pair")
def unhealthy(s):
    poison(s, "engine: says that it is ill", "health", "sim:unhealthy:3")


def poison(s, title, detector, salt):
    """One request makes the engine fail. It goes to the victim, as it is sent until the victim's engine has failed."""
    victim = s.victim
    instance = victim.worker.instance_id

    def strike():
        s.traffic.aside(FIXED, "poison", [salt], worker=instance)
    fails(s, title, detector, strike)


def all_salted(s, title, detector, salt):
    """From the strike on every request is such, until the detector has seen it."""
    victim = s.victim
    seen = noticed(victim, detector)

    def detected():
        value = seen()
        if value:
            s.traffic.salt = None
        return value
    detected.__doc__ = seen.__doc__
    s.strike(title, lambda: setattr(s.traffic, "salt", salt), detected, in_place(s, victim), at=victim, whole=(), bites=FIXED)


@fault("solo", quick=True)
def no_output(s):
    all_salted(s, "engine: alive, gives nothing for any request", "stall", "sim:stall:5")


@fault("solo", quick=True)
def failure_rate(s):
    all_salted(s, "engine: every request fails in it", "failures", "sim:request-error:2")


@fault("pair")
def one_stream_hangs(s):
    """60 requests get nothing more while all others go on. They alone are ended."""
    before = s.victim.metric("dynworker_engine_stream_stalls_total")

    def taken():
        """the hanging requests to be taken from the engine"""
        grown = s.victim.metric("dynworker_engine_stream_stalls_total") - before
        return f"{grown:.0f} requests taken from the engine" if grown >= 60 else False
    s.strike("engine: gives nothing for 60 of its requests", lambda: s.traffic.aside(FIXED, "hang", ["sim:stall:5"] * 60, worker=s.victim.worker.instance_id),
             taken, s.answering(), at=s.victim, bites=FIXED)


@fault("pair")
def not_restarted(s):
    """A worker that must not start its engine again."""
    ends_with_its_engine(s, "engine: SIGKILL, restart policy never", 1, engine__restart__policy="never")


@fault("pair")
def restarted_too_often(s):
    """A worker that may start its engine again once in an hour."""
    ends_with_its_engine(s, "engine: SIGKILL, again as soon as it is back, one restart allowed", 2, engine__restart__max=1, engine__restart__window="1h")


def ends_with_its_engine(s, title, kills, **settings):
    """The engine is killed so many times, of which the worker survives all but the last."""
    victim = s.replace(s.victim, **settings)
    s.heal()
    tree = victim.tree()

    def strike():
        for kill in range(kills):
            wait_for("the engine to be back", PATIENCE, lambda k=kill: victim.metric("dynworker_engine_restarts_total") == k and victim.ready())
            tree[:] = victim.tree()
            os.kill(victim.engine().pid, signal.SIGKILL)

    def ended():
        """the worker to end"""
        if victim.process.running():
            return False
        expect(victim.process.code() == 1, f"exit code {victim.process.code()}, wanted 1")
        expect(victim.logged('"detector":"exit"'), "no log line names the detector")
        expect(victim.worker.records() == {}, f"left in etcd: {list(victim.worker.records())}")
        gone(tree, 10)
        return "exit 1"
    s.strike(title, strike, ended, at=victim, bites=FIXED)


@fault("pair", quick=True)
def load_stands_still(s):
    """A third worker whose engine does not get ready."""
    started = []

    def strike():
        started.append(s.spare_worker(engine__sim__load_time="1h", engine__start_inactivity="2s", engine__restart__policy="never"))

    def detected():
        """the worker to end"""
        process = started[0].process
        if process.running():
            return False
        expect(process.code() == 1, f"exit code {process.code()}, wanted 1")
        line = next((x for x in process.log.read_text().splitlines() if "2s" in x and "engine" in x), None)
        expect(line, f"the log does not say how long the engine was silent: {process.tail(3)}")
        return "exit 1, the log says how long it was silent"
    s.strike("engine: load makes no progress", strike, detected, whole=(MOVED, FIXED))
