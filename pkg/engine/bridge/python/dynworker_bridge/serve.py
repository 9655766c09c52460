"""The event loop's side: messages in, records out, questions answered."""
import json
import struct
import threading
from dataclasses import dataclass

from . import channel as wire
from . import processes
from .engine import Refused
from .results import Request, error_record

_GENERATE = struct.Struct("<QI")
_CANCEL = struct.Struct("<Q")


@dataclass
class Options:
    """What the worker may set besides the engine's own arguments."""
    abort: str = "abort"                # "first_token": only once one came; "detach": never
    abort_grace_ms: int = 2000          # how long to wait for an aborted request's last word
    first_token_wait_ms: int = 60_000   # how long an abort waits for KV blocks on their way in
    progress_interval_ms: int = 5000    # between signs of life while the engine loads
    watch_interval_ms: int = 250        # between looks at the engine's fatal error and the parent
    stop_ms: int = 3000                 # for the engine's shutdown, where nobody gave a deadline


class Server:
    """Knows the running requests. Its methods run on the event loop unless they say otherwise."""

    def __init__(self, channel, loop, ending):
        self.loop, self.outbox = loop, wire.Outbox(channel, loop)
        self.engine, self.options = None, Options()
        self._channel, self.ending = channel, ending
        self._requests = {}
        self._asked = set()          # questions that are not answered yet
        self._handlers = {wire.GENERATE: self._generate, wire.CANCEL: self._cancel,
                          wire.QUERY: self._query}
        ending.last_words = self.last_words

    def read(self):
        """Reads messages until the worker is gone. Runs in a thread of its own, so that a
        shutdown is obeyed while the event loop is stuck or does not run yet."""
        try:
            while frame := self._channel.read():
                kind, payload = frame
                if kind == wire.SHUTDOWN:
                    millis = json.loads(payload).get("deadline_ms") or 0
                    self.ending.shutdown(millis / 1000, "shutdown")
                elif kind in self._handlers:
                    self.loop.call_soon_threadsafe(self._handle, kind, payload)
                else:
                    raise wire.ProtocolError(f"frame of kind {kind} is not for an engine")
        except (wire.ProtocolError, ValueError) as e:
            self.ending.fatal(e)
        except OSError as e:
            wire.warn(f"engine channel: receive: {e}")
        except Exception as e:  # such as no memory: an engine that hears nothing more is of no use
            self.ending.fatal(e)
        self.ending.orphaned()

    def _handle(self, kind, payload):
        try:
            self._handlers[kind](payload)
        except Exception as e:
            self.fatal(e)

    def fatal(self, error):
        """The engine is broken. What was produced so far still goes out."""
        self.outbox.flush()
        self.ending.fatal(error)

    # Requests

    def _generate(self, payload):
        ident, count = _GENERATE.unpack_from(payload)
        end = _GENERATE.size + 4 * count
        order = json.loads(payload[end:])
        if self.ending.begun:
            return
        try:
            result = self.engine.submit(payload[_GENERATE.size:end], order)
        except Refused as e:
            self.outbox.add(error_record(ident, e.kind, e.cause))
        except Exception as e:
            self.outbox.add(error_record(ident, "fatal", e))
            self.fatal(e)
        else:
            self._requests[ident] = Request(ident, result, order, self)

    def _cancel(self, payload):
        request = self._requests.get(_CANCEL.unpack(payload)[0])
        if request is not None:
            request.cancel()

    def forget(self, ident):
        self._requests.pop(ident, None)

    def last_words(self, seconds):
        """Sends what is there and lets go of the requests. They get no last record: an answer
        that was cut off must not look complete, and the worker knows that it ordered the end.
        Called by another thread, which does not wait longer than the given time for a loop
        that is stuck."""
        said = threading.Event()

        def say():
            self.outbox.flush()
            for request in self._requests.values():
                request.abandon()
            said.set()

        self.loop.call_soon_threadsafe(say)
        said.wait(seconds)

    # Questions

    def _query(self, payload):
        query = json.loads(payload)
        self.loop.create_task(self._answer(query["seq"], query["what"]))

    async def _answer(self, seq, what):
        ask = {"stats": self._stats, "health": self._health,
               "descendants": self._descendants}.get(what)
        try:
            if ask is None:
                raise ValueError(f"no such question: {what}")
            if what in self._asked:
                raise RuntimeError("the question before this one is still being answered")
            self._asked.add(what)
            try:
                answer = {"seq": seq, "ok": True, **await ask()}
            finally:
                self._asked.discard(what)
        except Exception as e:
            answer = {"seq": seq, "ok": False, "error": f"{type(e).__name__}: {e}"}
        self._channel.send_json(wire.ANSWER, answer)

    async def _stats(self):
        return {"stats": await self.engine.stats()}

    async def _health(self):
        """In a thread, because the check may wait for a rank that is gone."""
        healthy = await self.loop.run_in_executor(None, self.engine.check_health)
        if healthy is None:
            return {"healthy": True, "detail": "this build has no health check"}
        return {"healthy": healthy, "detail": "" if healthy else "the engine's check says no"}

    async def _descendants(self):
        below = await self.loop.run_in_executor(None, processes.descendants)
        return {"descendants": [{"pid": p.pid, "start_time": p.start_time, "parent": p.parent}
                                for p in below]}
