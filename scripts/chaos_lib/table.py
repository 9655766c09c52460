"""The table of what was struck and what came of it."""

import threading
import time

COLUMNS = ("fault", "in flight", "full", "typed", "cut", "lost", "wrong", "detected", "serving again", "seen")


class Row:
    """One fault."""

    def __init__(self, title):
        self.title = title
        self.in_flight = 0
        self.tally = None
        self.detected = None   # seconds after the strike
        self.serving = None
        self.seen = []         # remarks
        self.failed = []       # what is not as it must be

    def cells(self):
        def count(kind):
            return str(self.tally[kind]) if self.tally else "-"

        def seconds(value):
            return "-" if value is None else f"{value:.1f} s"
        return (self.title, str(self.in_flight), *(count(k) for k in ("full", "typed", "cut", "lost", "wrong")),
                seconds(self.detected), seconds(self.serving), "; ".join([*(["**FAIL**"] if self.failed else []), *self.seen]))


class Table:
    """Prints rows as they come in and all of them at the end."""

    def __init__(self, out, markdown=None):
        self._out = out
        self._markdown = markdown
        self._lock = threading.Lock()
        self._begin = time.monotonic()
        self.rows = []

    def say(self, text):
        with self._lock:
            print(f"{time.monotonic() - self._begin:7.1f}s      {text}", file=self._out, flush=True)

    def add(self, row):
        self.rows.append(row)
        # A run of hours has thousands of rows; the outcomes that they show are not needed any more.
        if row.tally:
            row.tally.samples.clear()
        word = "FAIL" if row.failed else "ok  "
        cells = [f"{name} {value}" for name, value in zip(COLUMNS[1:-1], row.cells()[1:-1])]
        with self._lock:
            print(f"{time.monotonic() - self._begin:7.1f}s {word} {row.title}: {', '.join(cells)}; {row.cells()[-1]}",
                  file=self._out, flush=True)
            for why in row.failed:
                print(f"                {why}", file=self._out, flush=True)

    def summary(self):
        """Prints the whole table and the count. Returns the exit code."""
        cells = [COLUMNS, *(row.cells() for row in self.rows)]
        widths = [max(len(c[i]) for c in cells) for i in range(len(COLUMNS) - 1)]
        for line in cells:
            fixed = "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths)))
            print(f"{fixed}  {line[-1]}".rstrip(), file=self._out)
        if self._markdown:
            with open(self._markdown, "w") as f:
                f.write("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS) + "\n")
                for row in self.rows:
                    f.write("| " + " | ".join(c.replace("|", "\\|") for c in row.cells()) + " |\n")
        bad = [row for row in self.rows if row.failed]
        for row in bad:
            print(f"FAIL {row.title}: {' / '.join(row.failed)}", file=self._out)
        print(f"{len(self.rows) - len(bad)} faults passed, {len(bad)} failed", file=self._out, flush=True)
        # A run that struck nothing has proved nothing.
        return 0 if self.rows and not bad else 1
