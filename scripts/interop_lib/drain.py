"""SIGTERM of one of two workers under load."""

import time

from .lane import Lane
from .load import Traffic
from .procs import wait_for
from .report import expect

CLIENTS = 8
TOKENS = 200   # at 10 ms a token: two seconds a request


class Drain(Lane):
    name = "drain"

    def setup(self):
        self.stays = self._worker()
        self.api = self.stack.frontend("--migration-limit", "3").api
        self.stack.wait_served(self.api, [self.stays])

    def _worker(self, **settings):
        return self.stack.worker(engine__sim__token_delay="10ms", **settings)

    def _terminated(self, name, leaves):
        """Ends the worker leaves in the middle of traffic. Returns (remark, number of requests that moved)."""
        self.stack.wait_served(self.api, [self.stays, leaves])
        # Long texts are what can be cut; short requests are what arrives at the
        # very moment at which the worker leaves.
        traffic = Traffic(self.api, name, CLIENTS, TOKENS)
        short = Traffic(self.api, name + ", short", 4, 2)
        wait_for("requests on both workers", 20, lambda: all(
            [c for c in w.calls() if c.finish is None and c.prompt_tokens > 10] for w in (leaves, self.stays)))
        time.sleep(0.7)  # so that the open requests are in the middle of their text
        begin = leaves.terminate()
        code = leaves.process.wait(60)
        took = time.monotonic() - begin
        total = short.stop() + traffic.stop()
        expect(code is not None, "the worker did not end within 60 s")
        traffic.compare(self.reference)
        short.compare(self.reference)
        expect(code == 0, f"the worker ended with exit code {code}")
        expect(leaves.records() == {}, f"left in etcd: {list(leaves.records())}")
        moved = self._moved(leaves)
        return f"{total} texts equal, worker ended with 0 after {took:.1f} s, {moved} requests moved", moved

    def _moved(self, leaves):
        """How many requests went on in the middle of their text on the worker that stays.

        Such a request comes there with a longer prompt. One that comes with
        the same prompt was withdrawn by the frontend itself: it does so with a
        request whose answer has not begun when the worker's record vanishes.
        """
        began = {c.request_id: c.prompt_tokens for c in leaves.calls()}
        return sum(c.prompt_tokens > began.get(c.request_id, c.prompt_tokens) for c in self.stays.calls())

    def with_time(self):
        leaves = self._worker(drain__budget="30s")
        seen, moved = self._terminated("drained with time", leaves)
        expect(moved == 0, f"{seen}, although there was time to finish them")
        return seen

    def without_time(self):
        leaves = self._worker(drain__budget="0s")
        seen, moved = self._terminated("drained without time", leaves)
        expect(moved > 0, f"{seen}: some must have")
        return seen

    checks = [
        ("SIGTERM with time to drain", with_time),
        ("SIGTERM with drain budget 0", without_time),
    ]
