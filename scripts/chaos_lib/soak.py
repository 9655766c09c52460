"""Mixed load with random faults for as long as one likes, and a verdict on whether memory stays flat.

The second worker of the scene is never ended: engine, servers, frontends and
the other worker fail around it, and its engine is started again in place. What
it holds at rest, between two faults, is what is judged.
"""

import argparse
import random
import statistics
import time

from interop_lib.procs import Timeout, wait_for
from interop_lib.report import CheckFailed

from . import faults, host, scenes
from .scene import PATIENCE

# Faults that end the victim are for the first worker, which is made anew; the others find either.
ENDS_WORKER = ("worker", "machine")
# Their workers or their clients are special.
NOT_IN_A_SOAK = ("machine.disk_full", "worker.sigterm_without_budget", "engine.not_restarted", "engine.restarted_too_often", "engine.load_stands_still")


def duration(text):
    """Seconds of a text such as 90s, 30m or 2h."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    try:
        return float(text[:-1]) * unit
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 90s, 30m or 2h") from None


class Sample:
    """What the worker that is never ended holds while nobody asks anything."""

    def __init__(self, begin, daemon):
        self.minutes = (time.monotonic() - begin) / 60
        self.memory = host.resident(daemon.pid) / 1e6
        self.goroutines = int(daemon.metric("go_goroutines"))
        self.files = host.open_files(daemon.pid)

    def __str__(self):
        return f"{self.minutes:7.1f} min: {self.memory:6.1f} MB, {self.goroutines} goroutines, {self.files} files"


def slope(samples, what):
    """The least-squares line through the samples: change per hour."""
    x = [s.minutes / 60 for s in samples]
    return statistics.linear_regression(x, [getattr(s, what) for s in samples]).slope


class Flatness:
    """The verdict on a series of samples, of which the first quarter is warming up."""

    def __init__(self, samples):
        self.failed = []
        self.lines = []
        rest = samples[len(samples) // 4:]
        if len(rest) < 6:
            self.failed.append(f"{len(samples)} samples are too few for a verdict; let it run for longer")
            return
        hours = (rest[-1].minutes - rest[0].minutes) / 60
        for what, unit, slack in (("memory", "MB", 12), ("goroutines", "goroutines", 4), ("files", "files", 4)):
            third = len(rest) // 3
            early = statistics.median(getattr(s, what) for s in rest[:third])
            late = statistics.median(getattr(s, what) for s in rest[-third:])
            grown = slope(rest, what) * hours
            flat = late <= early * 1.1 + slack and grown <= early * 0.15 + slack
            self.lines.append(f"{what}: median {early:.1f} in the first third, {late:.1f} {unit} in the last; "
                              f"fitted line {grown:+.1f} {unit} over {hours * 60:.0f} min: {'flat' if flat else 'NOT FLAT'}")
            if not flat:
                self.failed.append(f"{what} is not flat")


def sample(scene, begin):
    """Lets the clients pause until nothing is in flight, and looks."""
    steady = scene.daemons[1]
    scene.traffic.paused = True
    try:
        wait_for("the clients to be quiet", PATIENCE, lambda: not scene.traffic.open)
        wait_for("nothing to be in flight", PATIENCE, lambda: steady.in_flight() == 0)
        return Sample(begin, steady)
    finally:
        scene.traffic.paused = False


def run(setup, table, seconds):
    """Returns the exit code."""
    begin = time.monotonic()
    chance = random.Random()
    kinds = [f for f in faults.ALL if f.scene == "pair" and str(f) not in NOT_IN_A_SOAK]
    scene = scenes.make("pair", setup, table, "soak")
    steady = scene.daemons[1]
    samples, problems = [sample(scene, begin)], []
    table.say(str(samples[0]))
    while time.monotonic() - begin < seconds and not problems:
        fault = chance.choice(kinds)
        scene.at = 0 if fault.area in ENDS_WORKER else chance.randrange(2)
        scene.traffic.lengths(chance.choice([(20, 45, 70), (5, 10, 200), (80,), (1, 2, 3, 120)]))
        try:
            scene.heal()
            fault.run(scene)
            samples.append(sample(scene, begin))
            table.say(str(samples[-1]))
        except (CheckFailed, Timeout, OSError, RuntimeError) as err:
            problems.append(f"{fault}: {type(err).__name__}: {err}")
        if scene.daemons[1] is not steady:
            problems.append("the worker that had to live on has ended")
    code = table.summary()
    if not problems:
        verdict = Flatness(samples)
        problems += verdict.failed
        for line in verdict.lines:
            print(line)
    for problem in problems:
        print(f"FAIL {problem}")
    print(f"{len(table.rows)} faults in {(time.monotonic() - begin) / 60:.1f} min, {'FAIL' if problems or code else 'ok'}", flush=True)
    scene.close()
    return 1 if problems or code else 0
