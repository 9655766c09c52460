"""The log of calls that tests read: one JSON object a line."""
import dataclasses
import json
import threading
import time

from ._switch import LOG

_lock = threading.Lock()


def plain(value):
    """JSON form of an argument; dataclasses shrink to their non-default fields."""
    if dataclasses.is_dataclass(value):
        out = {"_type": type(value).__name__}
        for f in dataclasses.fields(value):
            got = getattr(value, f.name)
            if got != f.default:
                out[f.name] = plain(got)
        return out
    if isinstance(value, (bytes, bytearray)):
        return {"_bytes": value.hex()}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, memoryview):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        if len(value) > 80 and all(isinstance(v, int) for v in value):
            return {"_len": len(value), "_sum": sum(value), "head": list(value[:8])}
        return [plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(exclude_unset=True))
    return repr(value)


def log(event, **fields):
    if LOG:
        line = json.dumps({"event": event, "t": round(time.time(), 4), **fields})
        with _lock, open(LOG, "a") as f:
            f.write(line + "\n")
