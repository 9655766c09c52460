"""The order of events in a process's life."""
import asyncio
import faulthandler
import gc
import importlib.metadata
import json
import os
import sys
import threading

from . import channel as wire
from . import ending as ends
from . import processes
from .loading import load
from .serve import Options, Server
from .watch import Watch


def main():
    try:
        channel = wire.Channel.from_environment()
    except wire.ProtocolError as e:
        print(e, file=sys.stderr)
        sys.exit(ends.NO_CHANNEL)
    os.dup2(2, 1)  # what libraries print is log text, wherever they print it
    faulthandler.enable()  # a crash in native code leaves at least the Python stacks in the log
    processes.tie_to_parent()
    ending = ends.Ending(channel)
    watch = Watch(ending)
    channel.send_json(wire.HELLO, {"protocol": wire.PROTOCOL, "engine": "tensorrt_llm",
                                   "version": installed_version(), "pid": os.getpid()})
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    server = Server(channel, loop, ending)
    try:
        args, options = configuration(channel)
        server.options, watch.interval = options, options.watch_interval_ms / 1000
        ending.stop_seconds = options.stop_ms / 1000
        threading.Thread(target=server.read, daemon=True).start()
        engine, ready = load(channel, args, options)
    except Exception as e:
        ending.fatal(e, ends.LOAD_FAILED)
        threading.Event().wait()  # the ending's thread ends the process
    server.engine = ending.engine = engine
    gc.collect()
    gc.freeze()  # the engine's modules live as long as the process: no need to look at them again
    channel.send_json(wire.READY, ready)
    loop.run_forever()


def installed_version():
    """The version of the package as its installer wrote it down: importing takes too long."""
    try:
        return importlib.metadata.version("tensorrt_llm")
    except importlib.metadata.PackageNotFoundError:
        return ""


def configuration(channel):
    """The engine's arguments and our options, from the worker's first message."""
    frame = channel.read()
    if frame is None:
        os._exit(ends.WORKER_GONE)
    kind, payload = frame
    if kind == wire.SHUTDOWN:
        channel.send_json(wire.GOODBYE, {"reason": "shutdown"})
        os._exit(ends.STOPPED)
    if kind != wire.CONFIGURE:
        raise wire.ProtocolError(f"frame of kind {kind} came before the configuration")
    message = json.loads(payload)
    if message.get("protocol") != wire.PROTOCOL:
        raise wire.ProtocolError(f"the worker speaks protocol {message.get('protocol')}, "
                                 f"this engine program speaks {wire.PROTOCOL}")
    return message.get("args") or {}, Options(**(message.get("options") or {}))
