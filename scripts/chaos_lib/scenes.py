"""The scenes by name, and the modules with the faults for them."""

import copy
import json
import sys

from interop_lib import frontend, model
from interop_lib.affinity import NO_SIMULATOR, STANDIN

from . import (abandon_faults, bridge_faults, engine_faults, etcd_faults, frontend_faults, halves_faults, machine_faults,  # noqa: F401
               nats_faults, rolling_faults, worker_faults)
from . import broker, text
from .scene import FIXED, Scene


class Pair(Scene):
    """Two workers with simulated engines; requests come over NATS."""

    def before_start(self):
        self.nats = broker.guard(self.stack, self.stack.folder / "guarded")


class OverTCP(Scene):
    """Two workers with simulated engines; requests come over TCP."""


class Solo(Scene):
    """One worker; nobody takes over."""

    workers = 1
    tags = (FIXED,)
    clients = 70


class Swift(Solo):
    """One worker with an engine that is faster than anybody reads."""

    clients = 6
    lengths = (300,)
    settings = {"engine__sim__token_delay": "2ms", "response_plane__write_timeout": "2s"}


class Fleet(Scene):
    """Three workers and 200 clients."""

    workers = 3
    clients = 200
    lengths = (16, 28, 40)


class Halves(Scene):
    """Two prefill and two decode workers with simulated engines, between which KV travels."""

    workers = 4
    settings = {"engine__sim__token_delay": "40ms", "engine__sim__first_token_delay": "200ms", "engine__sim__kv_transfer_delay": "100ms",
                "engine__sim__kv_transfer_timeout": "5s"}
    roles = ("prefill", "prefill", "decode", "decode")

    def start_worker(self, log=None, role=None, **settings):
        role = role or self.roles[len(self.stack.workers)]
        daemon = super().start_worker(log, role=role, **settings)
        daemon.role = role
        return daemon

    def replace(self, old, **settings):
        return super().replace(old, role=old.role, **settings)


class Bridge(Solo):
    """One worker with the Python bridge and two ranks of a stand-in for tensorrt_llm."""

    clients = 64
    prompts = staticmethod(text.readable)
    expected = staticmethod(text.standin)

    def __init__(self, setup, table, name, plane):
        own = copy.copy(setup)
        own.model = setup.folder / f"{name}-model"
        model.write(own.model)
        config = own.model / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": text.STANDIN_VOCABULARY}))
        frontend.take_away(own.model)
        extra = setup.folder / f"{name}-engine.yaml"
        extra.write_text(json.dumps({"max_seq_len": model.CONTEXT, "max_num_tokens": model.CONTEXT}))
        env = [f"PYTHONPATH={STANDIN}", "PYTHONDONTWRITEBYTECODE=1", "STANDIN_API=rc29", "STANDIN_DELAY_MS=50", "STANDIN_STEPPED=1", "STANDIN_WORKERS=2"]
        self.settings = {**NO_SIMULATOR, "engine__kind": "trtllm", "engine__command": f"[{sys.executable}, -B]",
                         "engine__env": "[" + ", ".join(env) + "]", "engine__trtllm__extra_engine_args": extra}
        super().__init__(own, table, name, plane)


SCENES = {"pair": (Pair, "nats"), "etcd": (OverTCP, "tcp"), "solo": (Solo, "tcp"), "swift": (Swift, "tcp"), "bridge": (Bridge, "tcp"), "fleet": (Fleet, "nats"),
          "halves": (Halves, "nats")}


def make(name, setup, table, round_):
    kind, plane = SCENES[name]
    return kind(setup, table, f"{name}-{round_}-{len(list(setup.folder.glob(f'{name}-*')))}", plane)
