"""Clients that leave: a thousand in every phase of an answer, and nothing of them may be left in the worker."""

import asyncio

from interop_lib.procs import wait_for
from interop_lib.report import expect

from . import client, host
from .faults import fault
from .scene import ENOUGH, MOVED, PATIENCE
from .table import Row

COUNT = 1000
ABREAST = 120
TOKENS = 16

# By the number of characters after which the client leaves; None is before anything has come.
PHASES = {"before the answer begins": None, "after the first token": 1, "in the middle": TOKENS // 2, "before the end is said": TOKENS}


async def leave(port, prompt, characters):
    """Sends a request and hangs up at that point of its answer."""
    outcome = client.Outcome(MOVED, prompt, TOKENS)
    connection = client.Connection(port, outcome)
    try:
        await connection.send()
        if characters is None:
            return
        await connection.head()
        expect(outcome.status == 200, f"HTTP {outcome.status} {outcome.error}")
        async for _ in connection.events():
            expect(outcome.error is None, f"an error: {outcome.error}")
            if len(outcome.text) >= characters:
                return
    finally:
        connection.hang_up()


async def crowd(port, name, characters, count):
    """count clients, ABREAST at a time."""
    room = asyncio.Semaphore(ABREAST)

    async def one(i):
        async with room:
            await asyncio.wait_for(leave(port, f"{name}-{i}:", characters), PATIENCE)
    await asyncio.gather(*(one(i) for i in range(count)))


class Footprint:
    """What a worker and its engine hold."""

    def __init__(self, daemon):
        self.goroutines = int(daemon.metric("go_goroutines"))
        self.files = host.open_files(daemon.pid)
        engine = daemon.engine().pid
        self.engine_files = host.open_files(engine)
        self.memory = host.resident(daemon.pid)
        self.engine_memory = host.resident(engine)

    def within(self, before):
        return (self.goroutines <= before.goroutines + 2 and self.files <= before.files + 2 and self.engine_files <= before.engine_files + 2
                and flat(self.memory, before.memory) and flat(self.engine_memory, before.engine_memory))

    def __str__(self):
        return (f"{self.goroutines} goroutines, {self.files} + {self.engine_files} files, "
                f"{self.memory / 1e6:.0f} + {self.engine_memory / 1e6:.0f} MB")


def flat(now, before):
    """The heap of a garbage-collected program breathes; what leaks a thousandfold shows all the same."""
    return now <= before * 1.2 + 8e6


@fault("solo", quick=True)
def abandoned(s):
    """One row for each phase."""
    s.traffic.paused = True
    try:
        wait_for("the clients to be quiet", PATIENCE, lambda: not s.traffic.open)
        port = s.frontends[s.tags[0]].api.port
        # What is made once and kept, such as connections and buffers, is there after this.
        s.traffic.run(crowd(port, f"{s.name}-warm", TOKENS // 2, COUNT // 2))
        for phase, characters in PHASES.items():
            row = Row(f"clients: {COUNT} streams left {phase}")
            before = at_rest(s, None)
            peak = [0]
            task = s.traffic.start(crowd(port, f"{s.name}-{characters}", characters, COUNT))

            def over():
                peak[0] = max(peak[0], s.victim.in_flight())
                return task.done()
            wait_for("the clients to have left", 4 * PATIENCE, over, pause=0.02)
            try:
                task.result()
                after = at_rest(s, before)
                row.seen.append(f"before {before}; after {after}")
                if not after.within(before):
                    row.failed.append("it is not where it was")
            except Exception as err:
                row.failed.append(f"{type(err).__name__}: {err}")
            row.in_flight = peak[0]
            if row.in_flight < ENOUGH:
                row.failed.append(f"only {peak[0]} requests were in flight, not {ENOUGH}")
            s.table.add(row)
    finally:
        s.traffic.paused = False
    s.heal()


def at_rest(s, before):
    """The footprint once nothing is in flight; if it has to be like another one, it gets the time to be."""
    wait_for("nothing to be in flight", PATIENCE, lambda: s.victim.in_flight() == 0 and s.victim.metric("dynamo_engine_request") == 0)
    if before is None:
        return Footprint(s.victim)
    try:
        wait_for("the worker to be where it was", PATIENCE, lambda: Footprint(s.victim).within(before), pause=0.25)
    except Exception:
        pass  # what it is like then is the finding
    return Footprint(s.victim)
