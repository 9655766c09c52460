"""The list of faults, in the order in which they are to be injected."""


class Fault:
    """A function that injects one fault into a scene, or a few that belong together."""

    def __init__(self, run, scene, area, quick):
        self.run = run
        self.scene = scene
        self.area = area
        self.name = run.__name__
        self.quick = quick

    def __str__(self):
        return f"{self.area}.{self.name}"


ALL = []


def fault(scene, quick=False):
    """Marks a function of a scene as a fault of the kind of scene with that name."""
    def mark(run):
        area = run.__module__.rsplit(".", 1)[1].removesuffix("_faults")
        ALL.append(Fault(run, scene, area, quick))
        return run
    return mark
