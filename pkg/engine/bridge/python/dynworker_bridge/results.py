"""One request: from the engine's result object to output records.

The engine gives the same object at every step, with everything so far in it; a record carries
what is new. Layout: id, choice, flags, token count, tokens, then log probabilities and a JSON
object as the flags say.
"""
import asyncio
import base64
import dataclasses
import functools
import struct

from .channel import MAX_PAYLOAD, encode, warn

META, LAST, LOGPROBS = 1, 2, 4

_RECORD = struct.Struct("<QHHI")
_ONE_TOKEN = struct.Struct("<QHHII")
_SIZE = struct.Struct("<I")
_COUNT = struct.Struct("<H")


@functools.cache
def position_layout(alternatives):
    """Log probabilities at one position: the chosen token's, a count, and that many
    alternatives of token id, rank and value."""
    return struct.Struct("<dH" + "IId" * alternatives)


def record(ident, index, flags, tokens=(), logprobs=b"", meta=None):
    """One output record."""
    parts = [struct.pack(f"<{len(tokens)}I", *tokens), logprobs]
    if logprobs:
        flags |= LOGPROBS
    if meta:
        flags |= META
        text = encode(meta)
        parts += (_SIZE.pack(len(text)), text)
    return b"".join((_RECORD.pack(ident, index, flags, len(tokens)), *parts))


def error_meta(kind, error):
    return {"error": {"kind": kind, "type": type(error).__name__, "message": str(error)}}


def error_record(ident, kind, error):
    """The last record of a request that failed."""
    return record(ident, 0, LAST, meta=error_meta(kind, error))


class Request:
    """A running request. All methods run on the event loop."""

    def __init__(self, ident, result, order, server):
        sampling = order.get("sampling", {})
        disaggregated = order.get("disaggregated") or {}
        self._ident, self._result, self._server = ident, result, server
        self._outbox, self._options = server.outbox, server.options
        self._choices = sampling.get("n") or 1
        self._logprobs = sampling.get("logprobs")
        self._prompt_logprobs = sampling.get("prompt_logprobs") is not None
        # KV blocks that are on their way in must not lose their request
        self._receives = disaggregated.get("request_type") == "generation_only"
        self._sent = [0] * self._choices
        self._reported = [False] * self._choices   # choices whose finish reason is out
        self._started = self._done = False
        self._cancelled = self._aborted = self._muted = False
        self._timer = None
        self._task = server.loop.create_task(self._run())

    async def _run(self):
        ident, sent, add, one = self._ident, self._sent, self._outbox.add, _ONE_TOKEN.pack
        quick = self._choices == 1 and not self._logprobs and not self._prompt_logprobs
        try:
            async for step in self._result:
                outputs = step.outputs
                # nearly every step is one more token of the only choice
                if quick and self._started and outputs and not step.finished:
                    tokens = outputs[0].token_ids
                    count = len(tokens)
                    if count == sent[0] + 1 and outputs[0].finish_reason is None:
                        sent[0] = count
                        if not self._muted:
                            add(one(ident, 0, 0, 1, tokens[-1]))
                        continue
                self._take(step, outputs)
                if self._done:
                    return
            self._end({})
        except asyncio.CancelledError:
            self._end({"finish_reason": "cancelled"})
        except self._server.engine.request_error as e:
            self._fail("request", e)
        except Exception as e:
            if not self._server.ending.begun:  # the first cause is told, not its echoes
                self._fail("fatal", e)
                self._server.fatal(e)

    def _take(self, step, outputs):
        """Sends what is new in a step."""
        if not outputs and not step.finished:
            # nothing more is to be expected of it, so the engine need not go on
            self._end({"no_outputs": True})
            self._abort_quietly()
            return
        records = [new for position, output in enumerate(outputs)
                   if (new := self._new(step, position, output))]
        if step.finished:
            index, tokens, logprobs, meta = records.pop() if records else (0, (), b"", {})
            meta.update(self._final(step, outputs))
        if not self._muted:
            for choice, *content in records:
                self._outbox.add(record(self._ident, choice, 0, *content))
        if step.finished:
            self._last(index, tokens, logprobs, meta)
        elif self._started and self._cancelled and not (self._aborted or self._muted):
            self._abort()

    def _new(self, step, position, output):
        """What is new of one choice, as (index, tokens, logprobs, meta); None for nothing."""
        sent = self._sent[position]
        tokens = output.token_ids[sent:]
        self._sent[position] = sent + len(tokens)
        meta = {}
        if not self._started and (tokens or output.finish_reason):
            self._started = True
            meta.update(_known(cached_tokens=getattr(step, "cached_tokens", None),
                               engine_request_id=getattr(step, "request_id", None)))
        if self._prompt_logprobs and output.prompt_logprobs:
            self._prompt_logprobs = False
            meta["prompt_logprobs"] = [_by_text(p) for p in output.prompt_logprobs]
        if output.finish_reason and not self._reported[position]:
            self._reported[position] = True
            meta.update(self._finish(output), finish_reason=output.finish_reason)
            if self._choices > 1:
                meta["completion_tokens"] = _total(step.outputs)
        if not tokens and not meta:
            return None
        index = getattr(output, "index", None) or 0
        return index, tokens, self._pack_logprobs(output, sent, tokens), meta

    def _finish(self, output):
        return _known(stop_reason=getattr(output, "stop_reason", None),
                      disaggregated_params=handoff(
                          getattr(output, "disaggregated_params", None)))

    def _final(self, step, outputs):
        """What the request's last record tells besides."""
        meta = _known(cached_tokens=getattr(step, "cached_tokens", None),
                      perf=performance(outputs))
        if self._choices > 1:
            meta["completion_tokens"] = _total(outputs)
        return meta

    def _pack_logprobs(self, output, sent, tokens):
        """The new positions' log probabilities; nothing when they do not match the tokens."""
        if not (self._logprobs and tokens and output.logprobs):
            return b""
        positions = output.logprobs[sent:sent + len(tokens)]
        if len(positions) != len(tokens) or None in positions:
            return b""
        parts = [_COUNT.pack(self._logprobs)]
        for token, position in zip(tokens, positions):
            if not isinstance(position, dict):  # the build's simple format
                parts.append(position_layout(0).pack(position, 0))
                continue
            chosen = position.get(token) or next(iter(position.values()))
            flat = [chosen.logprob, len(position)]
            for alternative, found in position.items():
                flat += (alternative, found.rank or 0, found.logprob)
            parts.append(position_layout(len(position)).pack(*flat))
        return b"".join(parts)

    # Ends

    def _last(self, index, tokens, logprobs, meta):
        """Sends the last record, once."""
        if self._done:
            return
        self._done = True
        if self._timer:
            self._timer.cancel()
        data = record(self._ident, index, LAST, tokens, logprobs, meta)
        if len(data) > MAX_PAYLOAD:
            data = error_record(self._ident, "request",
                                ValueError(f"the result has {len(data)} bytes, too many to pass"))
        self._outbox.add(data)
        self._server.forget(self._ident)

    def _end(self, meta):
        self._last(0, (), b"", meta)

    def _fail(self, kind, error):
        self._end(error_meta(kind, error))

    def give_up(self):
        """Ends the request whatever the engine does; what it still says is not read."""
        self._end({"finish_reason": "cancelled", "synthesised": True})
        self._task.cancel()

    def abandon(self):
        """Says nothing more, not even a last record."""
        self._done = True
        if self._timer:
            self._timer.cancel()
        self._task.cancel()

    # Cancellation

    def cancel(self):
        """The worker wants no more of it."""
        if self._cancelled:
            return
        self._cancelled = True
        if self._options.abort == "detach":
            self._muted = True   # runs to its end unheard
        elif self._started or not (self._receives or self._options.abort == "first_token"):
            self._abort()
        else:
            self._timer = self._server.loop.call_later(
                self._options.first_token_wait_ms / 1000, self._abort)

    def _abort(self):
        """Aborts, and waits a while for the engine's own last word: a request that is still
        in its queue is dropped without one."""
        if self._timer:
            self._timer.cancel()
        self._aborted = True
        self._abort_quietly()
        self._timer = self._server.loop.call_later(
            self._options.abort_grace_ms / 1000, self.give_up)

    def _abort_quietly(self):
        try:
            self._result.abort()
        except Exception as e:
            warn(f"abort: {type(e).__name__}: {e}")


def _known(**values):
    return {name: value for name, value in values.items() if value is not None}


def _total(outputs):
    return sum(len(output.token_ids) for output in outputs)


def _by_text(position):
    """One prompt position: token id, as text, to its log probability."""
    if position is None:
        return None
    return {str(token): _known(logprob=p.logprob, rank=getattr(p, "rank", None),
                               decoded_token=getattr(p, "decoded_token", None))
            for token, p in position.items()}


def handoff(params):
    """What a context-only request leaves for its other half, as JSON values."""
    if params is None:
        return None
    fields = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
    for name, value in fields.items():
        if isinstance(value, (bytes, bytearray)):
            fields[name] = base64.b64encode(value).decode()
    if fields.get("first_gen_log_probs") is not None:
        fields["first_gen_log_probs"] = [
            [{"token_id": t, "logprob": p.logprob, "rank": p.rank} for t, p in position.items()]
            for position in fields["first_gen_log_probs"]]
    return fields


def performance(outputs):
    """The KV cache counts of the first choice, where they were asked for."""
    metrics = getattr(outputs[0], "request_perf_metrics", None) if outputs else None
    kv = getattr(metrics, "kv_cache_metrics", None)
    return _known(num_reused_blocks=getattr(kv, "num_reused_blocks", None),
                  num_missed_blocks=getattr(kv, "num_missed_blocks", None)) or None
