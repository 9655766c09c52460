"""Worker processes as MPI makes them: in sessions of their own, deaf to SIGTERM.

They are spawned with a fresh interpreter that imports the parent's main module again, so a main
module without a guard would start a second engine here.
"""
import multiprocessing
import os
import signal

from ._record import log
from ._switch import WORKERS


def _main(ready):
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    while True:
        signal.pause()


def start():
    if not WORKERS:
        return []
    spawn = multiprocessing.get_context("spawn")
    workers = []
    for _ in range(WORKERS):
        ready = spawn.Event()
        worker = spawn.Process(target=_main, args=(ready,), daemon=True)
        worker.start()
        ready.wait()
        workers.append(worker)
    log("workers", pids=[w.pid for w in workers])
    return workers


def stop(workers):
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join()
