"""A lane: checks that share a stack and run one after another."""

import re
import traceback

from .procs import Timeout
from .report import CheckFailed
from .stack import Stack


class Lane:
    """Subclasses prepare a stack in setup() and name their checks in order.

    checks is a list of (name, method); a method returns what was seen and
    raises CheckFailed or Timeout when that is not what it should be.
    """

    name = ""
    checks = []

    def __init__(self, setup, plane, reference):
        self.shared = setup
        self.plane = plane
        self.reference = reference
        self.stack = None

    def setup(self):
        raise NotImplementedError

    def run(self, report):
        title = f"{self.plane}-{self.name}"
        try:
            self.stack = Stack(self.shared, title, self.plane)
            self.setup()
        except Exception as err:
            self._note(title)
            for name, _ in self.checks:
                report.fail(self.plane, name, f"could not prepare: {err}")
            return
        for name, method in self.checks:
            try:
                report.ok(self.plane, name, method(self))
            except (CheckFailed, Timeout) as err:
                report.fail(self.plane, name, _one_line(str(err)))
            except Exception as err:
                self._note(title)
                report.fail(self.plane, name, _one_line(f"{type(err).__name__}: {err}"))
        self.stack.close()

    def _note(self, title):
        with open(self.shared.folder / f"{title}.trace", "a") as f:
            traceback.print_exc(file=f)


def _one_line(text):
    return re.sub(r"\s*\n\s*", " | ", text)[:1500]
