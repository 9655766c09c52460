"""The machine lets the worker down: a full disk, a pause of everything."""

import os
import signal
import subprocess
import threading
import time

from interop_lib.report import expect

from .etcd_faults import registered
from .faults import fault
from .scene import FIXED, LEASE, MOVED, all_of, counted, later

BOTH = (MOVED, FIXED)


class SmallDisk:
    """A folder with room for very little; without the right to mount one, a log that never has room."""

    def __init__(self, folder):
        folder.mkdir()
        self.folder = folder
        self.mounted = os.geteuid() == 0 and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(folder)], capture_output=True).returncode == 0
        self.log = folder / "worker.log"
        if not self.mounted:
            self.log.symlink_to("/dev/full")

    def fill(self):
        if self.mounted:
            with open(self.folder / "fill", "wb", buffering=0) as f:
                try:
                    while True:
                        f.write(b"x" * 512)
                except OSError:
                    pass

    def free(self):
        if self.mounted:
            (self.folder / "fill").unlink(missing_ok=True)

    def close(self):
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], capture_output=True, check=False)


@fault("pair", quick=True)
def disk_full(s):
    disk = SmallDisk(s.stack.folder / f"disk-{time.monotonic_ns()}")
    try:
        victim = s.replace(s.victim, log=disk.log)
        s.heal()
        over = threading.Event()

        def strike():
            disk.fill()
            later(6, over.set)
        size = []

        def no_room():
            """the log to stand still"""
            size.append(disk.log.stat().st_size if disk.mounted else 0)
            return len(size) > 20 and size[-20] == size[-1]

        def logs_again():
            """the log to go on"""
            if not over.is_set():
                return False
            disk.free()
            grown = not disk.mounted or disk.log.stat().st_size > size[-1]
            lost = victim.metric("dynworker_log_lines_lost_total")
            return f"log stood still and went on, {lost:.0f} lines lost" if grown else False
        s.strike("machine: no room for the log for 6 s", strike, no_room, all_of(logs_again, s.answering()), at=victim, whole=BOTH)
        s.replace(victim)
        s.heal()
    finally:
        disk.close()


@fault("etcd", quick=True)
def suspended(s):
    """Worker and engine stand still for longer than the lease, as with a machine that is suspended or moved."""
    victim = s.victim
    processes = [victim.pid, *(p.pid for p in victim.tree())]
    stalls = victim.failures("stall")
    over = threading.Event()
    away = 1.8 * LEASE

    def wake():
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
        over.set()

    def strike():
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        later(away, wake)
    losses = counted(victim, "dynworker_etcd_lease_losses_total")
    back = all_of(over.is_set, registered(s), s.served_by(victim))
    s.strike(f"machine: worker and engine stand still for {away:.0f} s", strike, all_of(over.is_set, losses), back, at=victim)
    expect(victim.failures("stall") == stalls, "the pause counted as a stall of the engine")
