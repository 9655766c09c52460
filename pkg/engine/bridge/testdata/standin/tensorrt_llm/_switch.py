"""Which build of the package this stand-in plays, and what it is told to do wrong.

Everything is read once from the environment, so a test chooses by setting variables:

  STANDIN_API        rc19, hybrid, rc21 (default), rc29 or 1.4
  STANDIN_LOG        file that gets one JSON line per call, abort, finish and placement
  STANDIN_DELAY_MS   time per token
  STANDIN_STEPPED    1: all requests advance together, as a real engine's step makes them
  STANDIN_VOCAB      vocabulary size to report (default: the model's); tokens keep to the model's
  STANDIN_GPUS       visible GPUs (default 8)
  STANDIN_HIDE       comma-separated names this build shall not have, for instance
                     get_kv_cache_capacity, _check_health, adp_router, args, EngineDeadError
  STANDIN_NOISE      1: write to file descriptor 1 at import, at load and at every step
  STANDIN_LOAD_MS    time the constructor takes
  STANDIN_LOAD_FAIL  text of an error the constructor raises
  STANDIN_WORKERS    number of worker processes, each in a session of its own, deaf to SIGTERM
  STANDIN_SHUTDOWN   hang: shutdown() never returns; fail: it raises
  STANDIN_TRANSFER   1: generation_only goes on from KV that it gets from the other engine; else
                     any hand-off will do, as when the recordings were made
  STANDIN_TRANSFER_DELAY_MS  what a transfer takes longer, half-way
  STANDIN_HEALTH     hang: the health check never returns; fail: it raises
"""
import os

BUILDS = {
    # name: (version, ConversationParams, affinity field, binds an explicit rank, array prompts)
    "rc19": ("1.3.0rc19", False, False, False, False),
    "hybrid": ("1.3.0rc20", False, True, False, False),
    "rc21": ("1.3.0rc21", True, True, False, False),
    "rc29": ("1.3.0rc29", True, True, True, False),
    "1.4": ("1.4.0rc4", True, True, True, True),
}

API = os.environ.get("STANDIN_API", "rc21")
if API not in BUILDS:
    raise ImportError(f"STANDIN_API must be one of {', '.join(BUILDS)}, not {API!r}")
VERSION, CONVERSATION, AFFINITY_FIELD, BINDS_RANK, ARRAYS = BUILDS[API]
LATER = API in ("rc29", "1.4")        # names that came after rc21
LOG = os.environ.get("STANDIN_LOG", "")
DELAY = float(os.environ.get("STANDIN_DELAY_MS", "0")) / 1000.0
STEPPED = os.environ.get("STANDIN_STEPPED", "") == "1"
VOCAB = int(os.environ.get("STANDIN_VOCAB", "0"))
GPUS = int(os.environ.get("STANDIN_GPUS", "8"))
HIDE = frozenset(filter(None, os.environ.get("STANDIN_HIDE", "").split(",")))
NOISE = os.environ.get("STANDIN_NOISE", "") == "1"
LOAD_SECONDS = float(os.environ.get("STANDIN_LOAD_MS", "0")) / 1000.0
LOAD_FAIL = os.environ.get("STANDIN_LOAD_FAIL", "")
WORKERS = int(os.environ.get("STANDIN_WORKERS", "0"))
SHUTDOWN = os.environ.get("STANDIN_SHUTDOWN", "")
TRANSFER = os.environ.get("STANDIN_TRANSFER", "") == "1"
TRANSFER_DELAY = float(os.environ.get("STANDIN_TRANSFER_DELAY_MS", "0")) / 1000.0
HEALTH = os.environ.get("STANDIN_HEALTH", "")


def noise(where):
    """Native code under the real package writes to the descriptor, past sys.stdout."""
    if NOISE:
        os.write(1, f"[stand-in noise] {where} \x00\xff\n".encode("latin-1"))
