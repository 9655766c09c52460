"""Names of the executor package that callers import."""
from .._switch import HIDE, LATER

if LATER and "EngineDeadError" not in HIDE:
    from .utils import EngineDeadError  # noqa: F401
