"""Processes as the kernel shows them in /proc."""

import os
from pathlib import Path


class Seen:
    """A process at the moment at which it was looked at. Its start time guards against the pid's next owner."""

    def __init__(self, pid):
        self.pid = pid
        # The name in parentheses may hold anything, blanks and parentheses included.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        self.state, self.parent, self.started = fields[0], int(fields[1]), int(fields[19])
        self.command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()

    def alive(self):
        """Whether this very process still runs. A zombie does not."""
        try:
            now = Seen(self.pid)
        except (OSError, IndexError):
            return False
        return now.started == self.started and now.state not in "ZX"

    def __str__(self):
        return f"{self.pid} ({self.command[:60]})"


def processes():
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                found.append(Seen(int(name)))
            except (OSError, IndexError):
                pass  # it has ended meanwhile
    return found


def descendants(pid):
    """Everything below a process, parents first."""
    children = {}
    for p in processes():
        children.setdefault(p.parent, []).append(p)
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(0), [])
        found += below
        todo += [p.pid for p in below]
    return found


def open_files(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident(pid):
    """Resident memory in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
