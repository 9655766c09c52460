"""etcd is gone, slow, empty, or takes away what the worker has there."""

import threading

from interop_lib.report import expect

from .faults import fault
from .scene import FIXED, LEASE, MOVED, all_of, counted, later, says

BOTH = (MOVED, FIXED)
AWAY = 1.6 * LEASE   # longer than any lease lives


def registered(s):
    """A probe: the records of all workers are in etcd with the bytes that they have now."""
    wanted = [(d, {k: r.value for k, r in d.worker.records().items()}) for d in s.daemons]
    expect(all(len(records) == 2 for _, records in wanted), "not every worker has its two records")

    def back():
        """the records to be back"""
        return all({k: r.value for k, r in d.worker.records().items()} == records for d, records in wanted)
    return back


def ready(s):
    def probe():
        """every worker to be ready"""
        return all(d.ready() for d in s.daemons)
    return probe


@fault("etcd", quick=True)
def lease_revoked(s):
    lease = s.etcd.get(s.victim.worker.key).lease
    s.strike("etcd: lease revoked", lambda: s.etcd.revoke(lease), counted(s.victim, "dynworker_etcd_lease_losses_total"),
             all_of(registered(s), ready(s)), at=s.victim, struck=BOTH)


@fault("etcd")
def record_deleted(s):
    key = s.victim.worker.key
    s.strike("etcd: instance record deleted by hand", lambda: s.etcd.delete(key),
             counted(s.victim, "dynworker_etcd_reregistrations_total"), all_of(registered(s), ready(s)), at=s.victim, struck=BOTH)


@fault("etcd", quick=True)
def paused(s):
    back = threading.Event()

    def freeze():
        s.etcd.freeze()
        later(AWAY, lambda: (s.etcd.thaw(), back.set()))
    records = registered(s)
    s.strike(f"etcd: stopped for {AWAY:.0f} s (SIGSTOP)", freeze, says(s.victim, "etcd"),
             all_of(back.is_set, records, ready(s), s.answering()), whole=(), struck=BOTH)


@fault("etcd")
def killed(s):
    back = threading.Event()

    def kill():
        s.etcd.kill()
        later(AWAY, lambda: (s.etcd.restart(), back.set()))
    records = registered(s)
    s.strike(f"etcd: gone for {AWAY:.0f} s", kill, says(s.victim, "etcd"), all_of(back.is_set, records, ready(s)), whole=(), struck=BOTH)


@fault("etcd", quick=True)
def empty(s):
    def restart():
        s.etcd.kill()
        s.etcd.forget()
        s.etcd.restart()
    s.strike("etcd: restarted with an empty store", restart, counted(s.victim, "dynworker_etcd_lease_losses_total"),
             all_of(registered(s), ready(s), s.answering()), whole=(), struck=BOTH)


@fault("etcd")
def slow(s):
    over = threading.Event()

    def crawl():
        # Awake for a tenth of the time.
        for _ in range(12):
            s.etcd.freeze()
            over.wait(0.45)
            s.etcd.thaw()
            over.wait(0.05)
        over.set()
    records = registered(s)
    s.strike("etcd: awake for a tenth of 6 s", lambda: threading.Thread(target=crawl, daemon=True).start(), None,
             all_of(over.is_set, records, ready(s)), whole=BOTH)
