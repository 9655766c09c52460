"""Workers, frontends, servers and clients, and the striking of faults among them."""

import signal
import subprocess
import threading
import time

from interop_lib.frontend import Frontend
from interop_lib.procs import Timeout, wait_for
from interop_lib.report import CheckFailed, expect
from interop_lib.stack import Stack

from . import judge, text
from .daemon import Daemon
from .table import Row
from .traffic import Traffic

# Fewer requests than this in flight prove little about a fault.
ENOUGH = 50
# Nothing waits longer than this for anything to happen on a busy machine.
PATIENCE = 60

# In place of a probe: there is nothing to wait for.
NEVER = object()

# The tags of requests: through a frontend that moves a broken request to
# another worker, and through one that does not.
MOVED = "moved"
FIXED = "fixed"

LEASE = 5

# What all workers of the suite differ in from the defaults: times that are made
# for minutes are made for seconds.
WORKER = {
    "etcd__lease_ttl": f"{LEASE}s",
    "drain__budget": "30s",
    "response_plane__dial_timeout": "3s",
    "engine__stop_timeout": "3s",
    "engine__restart__backoff": "200ms",
    "engine__restart__window": "5s",
    "engine__watch__health_interval": "500ms",
    "engine__watch__health_timeout": "20s",
    "engine__watch__no_progress": "2s",
    "engine__watch__stream_inactivity": "5s",
    "engine__watch__failure_window": "4s",
    # Nothing here asks what the engine was called with, and a soak would fill a disk with it.
    "engine__sim__calls_log": None,
}

# The frontend ends when its own lease does, so that gets time. And it waits ten
# seconds for NATS, which four attempts make forty of: more than a request has.
FRONTEND = {"ETCD_LEASE_TTL": "600", "DYN_NATS_REQUEST_TIMEOUT_SECS": "5"}


class Scene:
    """A set of everything. The first worker is the victim of most faults, the others take over.

    tags says which frontends there are, clients how many clients in all.
    """

    workers = 2
    at = 0   # which of them is the victim
    tags = (MOVED, FIXED)
    clients = 140
    lengths = (20, 45, 70)
    settings = {"engine__sim__token_delay": "50ms"}
    prompts = staticmethod(str)
    expected = staticmethod(text.simulated)

    def __init__(self, setup, table, name, plane):
        self.setup = setup
        self.table = table
        self.name = name
        self.plane = plane
        self.stack = Stack(setup, name, plane)
        self.etcd, self.nats = self.stack.etcd, self.stack.nats
        self.frontends = {}
        self._extras = []      # processes of the present fault
        self.withdrawals = []  # when workers were told to withdraw during the present fault
        self.before_start()
        self.daemons = [self.start_worker() for _ in range(self.workers)]
        starts = [threading.Thread(target=self.start_frontend, args=(tag,)) for tag in self.tags]
        for thread in starts:
            thread.start()
        for thread in starts:
            thread.join()
        expect(set(self.frontends) == set(self.tags), "a frontend did not start")
        self.wait_served()
        self.traffic = self.make_traffic()

    def before_start(self):
        """For scenes whose servers are special."""

    # Parts

    def make_traffic(self):
        ports = {tag: f.api.port for tag, f in self.frontends.items()}
        return Traffic(self.name, ports, self.clients, self.lengths, self.prompts)

    def start_worker(self, log=None, **settings):
        return Daemon(self.stack.worker(log=log, **{**WORKER, **self.settings, **settings}))

    def spare_worker(self, **settings):
        """One more worker that is not waited for; it lives as long as the fault."""
        worker = self.stack.worker(wait=False, **{**WORKER, **self.settings, **settings})
        self._extras.append(worker.process)
        return worker

    def start_frontend(self, tag):
        limit = "3" if tag == MOVED else "0"
        folder = self.stack.folder / f"frontend-{tag}-{time.monotonic_ns()}"
        frontend = Frontend(self.setup.processes, self.setup.python, folder, self.plane, self.etcd, self.nats,
                            ("--migration-limit", limit), FRONTEND, hidden=self.setup.model)
        self.stack.frontends.append(frontend)
        self.frontends[tag] = frontend
        return frontend

    @property
    def victim(self):
        return self.daemons[self.at]

    def replace(self, old, **settings):
        """Puts a new worker in the place of one, which is ended if it still runs."""
        at = self.daemons.index(old)
        old.process.stop(40)
        old.worker.files.close()
        self.daemons[at] = self.start_worker(**settings)
        return self.daemons[at]

    def wait_served(self, daemons=None):
        """Waits until each of the workers has been sent a request by each of the frontends."""
        for frontend in self.frontends.values():
            wait_for("the model to be listed", PATIENCE, lambda f=frontend: "tiny" in (f.api.models() or []))
            for daemon in daemons or self.daemons:
                before = daemon.accepted()

                def answered(f=frontend, d=daemon, n=before):
                    f.api.post("/v1/completions", {"model": "tiny", "prompt": self.prompts("ready?"), "max_tokens": 1})
                    return d.accepted() > n
                wait_for("each worker to be sent a request", PATIENCE, answered)

    # Faults

    def strike(self, title, strike, detected=None, serving=None, at=None, tag=None, count=None, **rules):
        """One fault under load, from the strike to the last answer that it could have touched. Returns the Row.

        strike does it. detected and serving are polled; the first one is true
        when somebody has noticed, the second one when service is whole again.
        at is the worker at which the requests in flight are counted, or tag the
        frontend, or count a function of that kind; without any of them it is the clients.
        strike may return a remark.
        rules are those of _judge.
        """
        row = Row(title)
        try:
            count = count or (at.in_flight if at else lambda: len(self.traffic.in_flight(tag)))
            wait_for(f"{ENOUGH} requests in flight", PATIENCE, lambda: count() >= ENOUGH)
            for daemon in self.daemons:
                daemon.mark_log()
            row.in_flight = count()
            mark = self.traffic.mark()
            remark = strike()
            if isinstance(remark, str):
                row.seen.append(remark)
            if detected:
                row.detected = self._first(row, mark[0], detected)
            if serving is not NEVER:
                row.serving = self._first(row, mark[0], serving or self.answering(mark))
            self._settle(mark)
            self._judge(row, mark, **rules)
        except (CheckFailed, Timeout, OSError) as err:
            row.failed.append(f"{type(err).__name__}: {err}")
        expect_enough(row)
        self.table.add(row)
        self.traffic.forget()
        self.heal()
        return row

    def _first(self, row, since, probe):
        """Seconds until probe returns something true; what it returns as text is a remark."""
        what = (getattr(probe, "__doc__", None) or getattr(probe, "__name__", "it")).strip()
        value = wait_for(what, PATIENCE, probe, pause=0.02)
        if isinstance(value, str):
            row.seen.append(value)
        return time.monotonic() - since

    def answering(self, mark=None):
        """A probe: a request that was sent after the mark (or now) has been answered as a whole."""
        when = mark[0] if mark else time.monotonic()

        def again():
            """requests to be answered again"""
            return any(o.sent > when and o.done and not o.error for o in self.traffic.ended)
        return again

    def served_by(self, daemon):
        """A probe: the worker is ready and has been sent a request since now."""
        before = None

        def again():
            """the worker to serve again"""
            nonlocal before
            if not daemon.ready():
                return False
            if before is None:
                before = daemon.accepted()
            return daemon.accepted() > before
        return again

    def _settle(self, mark):
        """Waits until every request that the fault can have touched has ended or is lost."""
        wait_until = time.monotonic() + judge.PATIENCE + 1
        touched = self.traffic.since(mark)
        wait_for("the last answer", judge.PATIENCE + PATIENCE,
                 lambda: time.monotonic() > wait_until or all(o.ended for o in touched))
        self._touched = touched

    def _judge(self, row, mark, whole=(MOVED,), struck=(), cut=(), bites=None):
        """Counts the outcomes of a fault.

        whole are the tags whose requests must all be answered in full, struck
        those of which this holds for the ones that had text when it struck, cut
        those that may end without a word because their frontend was taken from
        them, bites the tag that must have had errors: a fault that nobody
        notices was none.
        """
        row.tally = tally = judge.Tally(self._touched, mark[0], self.expected)
        for o in mark[1]:
            if o.tag not in struck or not o.first or o.first > mark[0]:
                continue
            kind = judge.verdict(o, mark[0], self.expected)
            if kind != judge.FULL:
                row.failed.append(f"{kind} of those in flight when it struck: {o}")
                break
        for kind in (judge.LOST, judge.WRONG):
            if tally[kind]:
                row.failed.append(f"{tally[kind]} {kind}, such as {tally.sample(kind)}")
        for tag in self.tags:
            if tag in whole:
                broken = [o for o in self._touched if o.tag == tag and judge.verdict(o, mark[0], self.expected) in (judge.TYPED, judge.CUT)]
                back = [o for o in broken if self._taken_back(o)]
                if back:
                    row.seen.append(f"{len(back)} taken back by the frontend")
                if len(broken) > len(back):
                    sample = next(o for o in broken if o not in back)
                    row.failed.append(f"{len(broken) - len(back)} of those that had to be whole are not, such as {sample}")
            elif tag not in cut and tally.by_tag[tag, judge.CUT]:
                row.failed.append(f"{tally.by_tag[tag, judge.CUT]} ended without a word, such as {tally.sample(judge.CUT, tag)}")
        if bites and not tally.by_tag[bites, judge.TYPED] + tally.by_tag[bites, judge.CUT]:
            row.failed.append("no request was hit")
        if not tally[judge.FULL]:
            row.failed.append("no request was answered in full")

    def withdraw(self, daemon, number=signal.SIGTERM):
        """Sends a worker the signal on which it withdraws, and remembers when."""
        self.withdrawals.append(time.monotonic())
        daemon.process.signal(number)

    def _taken_back(self, o):
        """Whether the frontend took a request back by itself because a worker withdrew.

        It does so with every request whose acceptance it has not seen yet when it
        sees the record vanish, and answers 503 if it moves none. Whether the
        worker had a part in it is told by its log, see without_errors.
        """
        return o.status == 503 and not o.text and any(o.sent <= w + 0.5 and w <= o.ended <= w + 2 for w in self.withdrawals)

    def bad_frontend(self, mode, count, *more):
        """Starts internal/chaos/badfrontend against the victim and returns the process; it lives as long as the fault."""
        at = ["-nats", self.nats.url] if self.plane == "nats" else []
        log = self.stack.folder / f"badfrontend-{time.monotonic_ns()}.log"
        record = self.victim.worker.records()[self.victim.worker.key].value.decode()
        process = self.setup.processes.start(
            [self.setup.badfrontend, "-mode", mode, "-count", count, *at, *more, "-instance", record], log, stdin=subprocess.PIPE)
        self._extras.append(process)
        return process

    def heal(self):
        """Makes the scene whole for the next fault, whatever has become of it."""
        self.traffic.salt = None
        for process in self._extras:
            process.kill()
        self._extras.clear()
        self.withdrawals.clear()
        for daemon in list(self.daemons):
            if not daemon.process.running():
                self.replace(daemon)
        for daemon in self.daemons:
            wait_for(f"every worker to be ready ({daemon.reasons()})", PATIENCE, daemon.ready)
        for tag, frontend in self.frontends.items():
            if not frontend.process.running():
                raise CheckFailed(f"the frontend {tag} has ended: {frontend.process.tail(5)}")
        wait_for("load on every worker", PATIENCE, lambda: all(d.in_flight() for d in self.daemons))

    def close(self):
        self.traffic.stop()
        self.stack.close()


def expect_enough(row):
    if row.in_flight < ENOUGH:
        row.failed.append(f"only {row.in_flight} requests were in flight, not {ENOUGH}")


def all_of(*probes):
    """A probe that is true once each of the others has been."""
    seen = [None] * len(probes)

    def each():
        for i, probe in enumerate(probes):
            if not seen[i]:
                seen[i] = probe()
        if all(seen):
            return "; ".join(s for s in seen if isinstance(s, str)) or True
        return False
    each.__doc__ = " and ".join((p.__doc__ or p.__name__).strip() for p in probes)
    return each


def later(seconds, do):
    """Does something after some seconds, in a thread."""
    timer = threading.Timer(seconds, do)
    timer.daemon = True
    timer.start()
    return timer


def says(daemon, part):
    """A probe: /health is 503 and names a part, /live is 200 all the same."""
    def probe():
        reason = daemon.reasons().get(part)
        if reason:
            expect(daemon.live(), "/live is not 200")
            return f"/health: {part}: {reason}"
        return False
    probe.__doc__ = f"/health to name {part}"
    return probe


def counted(daemon, name, by=1, **labels):
    """A probe: a counter of the worker has grown by that much since now."""
    before = daemon.metric(name, **labels)
    shown = name + "".join(f"{{{k}={v}}}" for k, v in labels.items())

    def probe():
        grown = daemon.metric(name, **labels) - before
        return f"{shown} +{grown:.0f}" if grown >= by else False
    probe.__doc__ = f"{shown} to grow by {by}"
    return probe


def gone(processes, within):
    """Waits until none of the processes is there any more. Raises CheckFailed naming those that are."""
    try:
        wait_for("the processes to be gone", within, lambda: not any(p.alive() for p in processes))
    except Timeout:
        raise CheckFailed(f"still there after {within} s: {[str(p) for p in processes if p.alive()]}") from None


def without_errors(daemon):
    """Raises CheckFailed if a worker has ended any request with an error since its log was marked."""
    for words in ("request ended with an error", "cannot call the frontend back"):
        line = daemon.logged(words)
        expect(not line, f"a request was not served: {line}")
