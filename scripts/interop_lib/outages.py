"""What the daemon must survive: a lost lease, a frozen, a killed and an empty etcd, a stopped NATS.

The frontend exits when its own lease is lost, so it gets a long one; and it
gets no migration, which would hide a broken stream.
"""

import time

from .lane import Lane
from .load import OpenStreams, Probe
from .procs import wait_for
from .report import expect

TTL = 5
STEP = 0.02  # seconds a token


class Outage(Lane):
    def setup(self):
        self.worker = self.stack.worker(engine__sim__token_delay=f"{int(STEP * 1000)}ms", etcd__lease_ttl=f"{TTL}s")
        self.api = self.stack.frontend(ETCD_LEASE_TTL="600").api
        self.stack.wait_served(self.api, [self.worker])

    def open_streams(self, name, seconds):
        return OpenStreams(self.api, name, 3, int(seconds / STEP))

    def check_records(self, before):
        """The records must be there with the bytes that they had. Returns them."""
        now = self.worker.records()
        expect(set(now) == set(before), f"records {sorted(now)}, wanted {sorted(before)}")
        for key, record in before.items():
            expect(now[key].value == record.value, f"{key} has other bytes: {now[key].value!r}, before {record.value!r}")
        return now

    def records_back(self, before, timeout):
        """Waits for the records and returns how long it took."""
        begin = time.monotonic()
        wait_for("the records to be back", timeout, lambda: set(self.worker.records()) == set(before))
        self.check_records(before)
        return time.monotonic() - begin

    def served_again(self, timeout):
        begin = time.monotonic()
        wait_for("a request to be served", timeout, lambda: self.api.post(
            "/v1/completions", {"model": "tiny", "prompt": "back?", "max_tokens": 2}).status == 200, pause=0.1)
        return time.monotonic() - begin

    def same_process(self):
        expect(self.worker.process.running(), f"the worker is gone: {self.worker.process.tail(5)}")


class EtcdOutage(Outage):
    name = "etcd"

    def lease_revoked(self):
        before = self.worker.records()
        losses = self.worker.metric("dynworker_etcd_lease_losses_total")
        streams = self.open_streams("lease revoked", 8)
        watch = self.stack.etcd.watch("v1/")
        self.stack.etcd.revoke(before[self.worker.key].lease)
        gaps = {key: self._gap(watch, key) for key in before}
        watch.close()
        worst = max(gaps.values())
        expect(worst < 3, f"records were away for {gaps}")
        now = self.check_records(before)
        for key in before:
            expect(now[key].lease not in (0, before[key].lease), f"{key} is not under a new lease")
        served = self.served_again(10)
        losses = self.worker.metric("dynworker_etcd_lease_losses_total") - losses
        expect(losses == 1, f"the daemon counted {losses} lost leases")
        wait_for("/health to be 200 again", 5, lambda: self.worker.status.get("/health").status == 200)
        remark = streams.finish(self.reference, 60)
        self.same_process()
        return (f"instance and card seen to vanish, back after at most {worst:.2f} s, byte-equal, under lease "
                f"{now[self.worker.key].lease:x} instead of {before[self.worker.key].lease:x}; served {served:.1f} s later, one loss counted; {remark}")

    def _gap(self, watch, key):
        """Seconds between the last deletion of key and its return."""
        def returned():
            mine = [(t, kind) for t, kind, k in watch.events if k == key]
            gone = [t for t, kind in mine if kind == "DELETE"]
            back = [t for t, kind in mine if gone and kind == "PUT" and t >= gone[0]]
            return back and (back[0] - gone[0],)
        return wait_for(f"{key} to vanish and to return", 15, returned)[0]

    def frozen(self):
        before = self.worker.records()
        streams = self.open_streams("etcd frozen", 26)
        probe = Probe(self.api, self.worker)
        self.stack.etcd.freeze()
        try:
            time.sleep(20)
        finally:
            self.stack.etcd.thaw()
        during = probe.stop()
        expect(not during.failed, f"{len(during.failed)} of {during.answered + len(during.failed)} requests failed "
               f"while etcd stood still, first with {during.failed[:1]}")
        expect(streams.still_open(), "a stream ended while etcd stood still")
        time.sleep(2 * TTL)  # what hung on the old lease is gone by now
        back = self.records_back(before, 10)
        self.served_again(10)
        remark = streams.finish(self.reference, 60)
        self.same_process()
        return (f"{during.answered} requests served meanwhile, records byte-equal {2 * TTL + back:.0f} s after it went on; {remark}")

    def killed(self):
        before = self.worker.records()
        streams = self.open_streams("etcd killed", 18)
        probe = Probe(self.api, self.worker)
        self.stack.etcd.kill()
        time.sleep(12)
        try:
            during = probe.stop()
        finally:
            self.stack.etcd.restart()
        watch = self.stack.etcd.watch(self.worker.key)
        expect(not during.failed, f"{len(during.failed)} of {during.answered + len(during.failed)} requests failed "
               f"while etcd was down, first with {during.failed[:1]}")
        remark = streams.finish(self.reference, 60)
        time.sleep(30)
        watch.close()
        now = self.check_records(before)
        self.served_again(10)
        self.same_process()
        vanished = sum(kind == "DELETE" for _, kind, _ in watch.events)
        lease = "its old lease" if now[self.worker.key].lease == before[self.worker.key].lease else "a new lease"
        return (f"{during.answered} requests served while it was down; over 30 s after the restart the records "
                f"were deleted {vanished} times and exist byte-equal under {lease}; {remark}")

    def empty(self):
        before = self.worker.records()
        streams = self.open_streams("etcd empty", 12)
        self.stack.etcd.kill()
        self.stack.etcd.forget()
        self.stack.etcd.restart()
        expect(self.stack.etcd.get("interop/none") is None, "etcd does not answer")
        back = self.records_back(before, 20)
        served = self.served_again(30)
        remark = streams.finish(self.reference, 60)
        time.sleep(2 * TTL)
        self.check_records(before)
        self.served_again(5)
        self.same_process()
        return (f"records back byte-equal after {back:.1f} s, requests served {served:.1f} s later, "
                f"records still there after {2 * TTL} s; {remark}")

    checks = [
        ("lease revoked", lease_revoked),
        ("etcd frozen 20 s", frozen),
        ("etcd killed for 12 s", killed),
        ("etcd restarted empty", empty),
    ]


class NatsOutage(Outage):
    name = "nats"

    def stopped(self):
        before = self.worker.records()
        streams = self.open_streams("NATS stopped", 66)
        probe = Probe(self.api, self.worker) if self.plane == "tcp" else None
        self.stack.nats.kill()
        time.sleep(60)
        expect(streams.still_open(), "a stream ended while NATS was away")
        meanwhile = ""
        if probe:
            # On this plane no request goes over NATS, so its absence must not be felt.
            probe.stop()
            expect(not probe.failed, f"{len(probe.failed)} of {probe.answered + len(probe.failed)} requests failed "
                   f"without NATS, first with {probe.failed[:1]}")
            meanwhile = f"{probe.answered} requests served meanwhile, "
        self.stack.nats.restart()
        served = self.served_again(30)
        self.check_records(before)
        self.same_process()
        remark = streams.finish(self.reference, 60)
        return f"{meanwhile}served {served:.1f} s after it was back, same process, records unchanged; {remark}"

    checks = [("NATS stopped 60 s", stopped)]
