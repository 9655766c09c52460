"""The operating system's side: the parent, the process table, signals. Linux only."""
import ctypes
import os
import signal
import sys
import time
from collections import namedtuple

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

# A signal of its own, because this one also comes when only the thread that started us has
# ended; whoever gets it has to look whether the parent is really gone.
PARENT_SIGNAL = signal.SIGRTMIN + 4

Process = namedtuple("Process", "pid parent start_time ticks")


def tie_to_parent():
    """Asks the kernel for a signal when the parent ends, and for the orphans of our children:
    ranks that a launcher starts in the background then stay in our tree."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        for option, value in ((_PR_SET_PDEATHSIG, int(PARENT_SIGNAL)),
                              (_PR_SET_CHILD_SUBREAPER, 1)):
            if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
                print(f"prctl {option}: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
    except (OSError, AttributeError) as e:
        print(f"prctl: {e}; the end of the channel remains", file=sys.stderr)


def entry(pid):
    """The process with this number, or None. Zombies do not count."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            text = f.read()
    except OSError:
        return None
    # the name, in parentheses, may hold anything; what follows is counted from its end
    fields = text[text.rindex(b")") + 2:].split()
    if fields[0] in (b"Z", b"X"):
        return None
    return Process(pid, int(fields[1]), int(fields[19]), int(fields[11]) + int(fields[12]))


def table():
    """All processes of this machine."""
    found = (entry(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [process for process in found if process]


def descendants(root=None):
    """The processes below root (default: this one), parents before their children."""
    children = {}
    for process in table():
        children.setdefault(process.parent, []).append(process)
    below, todo = [], [root or os.getpid()]
    for pid in todo:
        for child in children.get(pid, ()):
            below.append(child)
            todo.append(child.pid)
    return below


def kill_descendants(seconds):
    """Kills everything below this process, leaves first, until nothing is left, not even an
    exit status, or time is up. Returns what is left."""
    until = time.monotonic() + seconds
    while True:
        below = descendants()
        for process in reversed(below):
            _kill(process)
        # what loses its parent becomes our child, so no child means nobody at all
        if _reap() and not below or time.monotonic() > until:
            return below
        time.sleep(0.01)


def _kill(process):
    """Kills exactly this process: a descriptor cannot come to mean another one."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        now = entry(process.pid)
        if now and now.start_time == process.start_time:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        pass
    finally:
        os.close(handle)


def _reap():
    """Takes the exit status of dead children, our own and adopted ones. True when there are no
    children any more."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return False
    except ChildProcessError:
        return True
