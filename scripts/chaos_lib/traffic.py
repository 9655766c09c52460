"""Clients that ask one question after another until they are told to stop."""

import asyncio
import itertools
import threading
import time

from . import client
from .judge import PATIENCE

# A client that was refused asks again after this many seconds.
PAUSE = 0.25
# Every request is given up by then; long before that it counts as lost.
LIMIT = 4 * PATIENCE


class Traffic:
    """Many clients in a thread of their own.

    ports maps a tag (which kind of frontend) to the port of that frontend; the
    clients are spread evenly over the tags. lengths are the numbers of tokens
    that requests ask for in turn.
    """

    def __init__(self, name, ports, clients, lengths, prompts=str):
        self._name = name
        self.ports = ports
        self.lengths(lengths)
        self._prompts = prompts
        self._numbers = itertools.count()
        self.salt = None     # of the requests that are sent from now on
        self.paused = False
        self.open = set()
        self.ended = []
        self._asides = set()
        self._stopping = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        tags = itertools.cycle(ports)
        self._tasks = [asyncio.run_coroutine_threadsafe(self._client(next(tags), 2 * n / clients), self._loop) for n in range(clients)]

    def lengths(self, lengths):
        """How many tokens the requests ask for from now on, in turn."""
        self._lengths = itertools.cycle(lengths)

    async def _client(self, tag, delay):
        # All of them at once would be a burst that no fleet of clients makes.
        await asyncio.sleep(delay)
        while not self._stopping:
            if self.paused:
                await asyncio.sleep(0.05)
                continue
            prompt = self._prompts(f"{self._name}-{tag}-{next(self._numbers)}:")
            outcome = client.Outcome(tag, prompt, next(self._lengths), self.salt)
            self.open.add(outcome)
            await self._once(outcome)
            if not outcome.done or outcome.error:
                await asyncio.sleep(PAUSE)

    def aside(self, tag, name, salts, tokens=40, worker=None):
        """Sends one more request for each of the salts, through the frontend with that tag. They are accounted for like all others.

        worker is the instance that they shall be sent to; such a request is never moved.
        """
        async def send():
            for i, salt in enumerate(salts):
                outcome = client.Outcome(tag, self._prompts(f"{self._name}-{name}-{i}-{next(self._numbers)}:"), tokens, salt, worker)
                self.open.add(outcome)
                task = self._loop.create_task(self._once(outcome))
                self._asides.add(task)
                task.add_done_callback(self._asides.discard)
        asyncio.run_coroutine_threadsafe(send(), self._loop).result(LIMIT)

    async def _once(self, outcome):
        await client.ask(self.ports[outcome.tag], outcome, LIMIT)
        self.open.discard(outcome)
        self.ended.append(outcome)

    def start(self, coroutine):
        """Starts something in the clients' thread and returns its future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine):
        """Runs something in the clients' thread and returns what it returns."""
        return self.start(coroutine).result()

    def in_flight(self, tag=None):
        """The requests whose text has begun and not ended."""
        return [o for o in list(self.open) if o.first and (tag is None or o.tag == tag)]

    def mark(self):
        """A point in time: (when, what was open at it)."""
        now = time.monotonic()
        return now, list(self.open)

    def since(self, mark):
        """All requests that were open at a mark or were sent after it."""
        when, were_open = mark
        later = [o for o in [*self.ended, *list(self.open)] if o.sent > when]
        return list(dict.fromkeys([*were_open, *later]))

    def forget(self):
        """Drops what has ended, so that a run of hours does not grow."""
        ended, self.ended = self.ended, []
        return ended

    def stop(self):
        """Lets the open requests end, at most for the time in which they have to."""
        self._stopping = True
        deadline = time.monotonic() + LIMIT
        for task in self._tasks:
            try:
                task.result(max(0.0, deadline - time.monotonic()))
            except (TimeoutError, asyncio.CancelledError):
                task.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
