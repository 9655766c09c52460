"""The engine: LLM, its executor with queue and ranks, and the stream of one request.

A prompt whose first token is one of these, all outside the vocabulary, makes it misbehave; for
clients that can only send text the cache salt "trigger:ID" does the same:

  90001  RequestError on the first step           90002  RequestError after 3 tokens
  90003  ValueError from generate_async           90004  TypeError from generate_async
  90005  NotImplementedError from generate_async  90006  RuntimeError after 3 tokens (fatal)
  90007  executor records a fatal error after 3 tokens and the stream hangs (engine dead)
  90008  a step with no outputs, not finished     90009  finishes with no finish_reason
  90010  health check turns false after 3 tokens, stream hangs, no fatal error recorded
  90011  finishes with 'timeout' after 3 tokens   90012  abort() is ignored
  90013  as 90007, and the event loop is blocked for good
  90014  the stream hangs after 3 tokens until it is aborted
  90015  hangs before its first token, and abort() is ignored
  90016  hangs before its first token until it is aborted
  90017  the transfer of its KV ends half-way     90018  its KV arrives changed
  90019  its KV is never sent
"""
import asyncio
import itertools
import json
import os
import threading
import time

from . import _routing, _transfer, _workers
from ._record import log, plain
from ._switch import (AFFINITY_FIELD, CONVERSATION, DELAY, GPUS, HEALTH, HIDE, LOAD_FAIL,
                      LOAD_SECONDS, SHUTDOWN, STEPPED, TRANSFER, VOCAB, noise)
from .disaggregated_params import DisaggregatedParams
from .executor.utils import EngineDeadError, RequestError
from .sampling_params import SamplingParams

_ABSENT = object()


def trigger_of(prompt, cache_salt):
    if isinstance(cache_salt, str) and cache_salt.startswith("trigger:"):
        return int(cache_salt[8:])
    return prompt[0] if prompt[0] >= 90000 else 0


class GenerationResult:
    """Async iterable that yields itself after each step, outputs being cumulative.

    A request that waits in the executor's queue yields nothing. When it is aborted there, it is
    dropped without a last word, as the real engine does it: whoever awaits it waits for ever.
    """

    def __init__(self, llm, prompt, params, call):
        from .executor.result import CompletionOutput
        scheduling, conversation = call.get("scheduling_params"), call.get("conversation_params")
        self.llm, self.request_id = llm, next(llm._ids)
        self.params, self.streaming = params, call.get("streaming", False)
        self.prompt, self.prompt_token_ids, self.tokens = None, prompt, len(prompt)
        self.disagg, self.salt = call.get("disaggregated_params"), call.get("cache_salt")
        self.asked_rank = scheduling.attention_dp_rank if scheduling else None
        self.relax = scheduling.attention_dp_relax if scheduling else True
        self.conversation = conversation.conversation_id if conversation else None
        self.rank = self.asked_rank if llm._executor.adp else None     # as the routers see it
        self.outputs = [CompletionOutput(index=i, token_ids=[]) for i in range(params.n)]
        self.finished = self.aborted = False
        self.cached_tokens = 32 * (len(prompt) // 64)
        self.steps, self.base = 0, sum(prompt)
        self.receives = (TRANSFER and self.disagg is not None
                         and self.disagg.request_type == "generation_only")
        if self.receives:
            self.base = None            # comes with the KV
        self.trigger = trigger_of(prompt, self.salt)
        self.metrics_dict = {}
        self.wake, self.placed = asyncio.Event(), asyncio.Event()
        self.serving_rank = None
        llm._executor.submit(self)

    def abort(self):
        log("abort", request_id=self.request_id, tokens=self._tokens_so_far(),
            finished=self.finished)
        if self.trigger in (90012, 90015):
            return
        if not self.llm._executor.drop(self):
            self.aborted = True
            self.wake.set()

    def _tokens_so_far(self):
        return len(self.outputs[0].token_ids) if self.outputs else 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self.finished:
            raise StopAsyncIteration
        if self.serving_rank is None:
            await self.placed.wait()
        if self.receives:
            await self._receive()
        while True:
            await self._step()
            if self.streaming or self.finished:
                return self

    async def _receive(self):
        """Gets the prompt's KV. An abort ends it, and the other engine is not told."""
        self.receives = False
        d, executor = self.disagg, self.llm._executor
        context = d.ctx_request_id if d.disagg_request_id is None else d.disagg_request_id
        transfer = asyncio.ensure_future(_transfer.fetch(
            d.opaque_state or b"", context, self.prompt_token_ids, executor.transfer_timeout))
        aborted = asyncio.ensure_future(self.wake.wait())
        try:
            await asyncio.wait((transfer, aborted), return_when=asyncio.FIRST_COMPLETED)
            if not transfer.done():
                log("dangling", request_id=self.request_id, context=context)
                return
            self.base = await transfer
        except _transfer.TransferError as e:
            self._finish("error")
            raise RequestError(f"KV transfer: {e}") from e
        finally:
            transfer.cancel()
            aborted.cancel()

    async def _step(self):
        if STEPPED and not self.aborted:
            await self.llm._executor.next_step()
        else:
            await asyncio.sleep(0 if self.aborted else DELAY)
        if self.aborted:
            for out in self.outputs:
                out.finish_reason = out.finish_reason or "cancelled"
            return self._finish("cancelled")
        if self.trigger:
            outcome = await self._misbehave()
            if outcome:
                return None
        k = self.steps
        self.steps += 1
        for out in self.outputs:
            if out.finish_reason is None:
                self._extend(out, k)
        if all(out.finish_reason for out in self.outputs):
            self._finish(self.outputs[0].finish_reason)
        return None

    def _extend(self, out, k):
        p, vocab = self.params, self.llm.vocab_size
        token = (self.base + 7 * k + 13 * out.index) % vocab
        d = self.disagg
        if k == 0 and d and d.request_type == "generation_only" and d.first_gen_tokens:
            token = d.first_gen_tokens[0]
        out.token_ids.append(token)
        if p.logprobs:
            out.logprobs = out.logprobs or []
            given = d.first_gen_log_probs if TRANSFER and k == 0 and d else None
            out.logprobs.append(given[0] if given else _logprobs(token, k, p.logprobs, vocab))
        if p.prompt_logprobs and out.prompt_logprobs is None:
            ids = self.prompt_token_ids
            out.prompt_logprobs = [None] + [
                _logprobs(t, i, p.prompt_logprobs, vocab) for i, t in enumerate(ids[1:], 1)]
        may_stop = not p.ignore_eos and k + 1 >= (p.min_tokens or 0)
        if may_stop and token == p.end_id:
            out.finish_reason = "stop"                     # the EOS token stays in the output
        elif k + 1 >= p.max_tokens:
            out.finish_reason = "length"
        elif may_stop and token in (p.stop_token_ids or ()):
            out.finish_reason, out.stop_reason = "stop", token
            del out.token_ids[-1:]                         # a stop word is trimmed
            if out.logprobs:
                del out.logprobs[-1:]
        if d and d.request_type == "context_only":
            out.disaggregated_params = DisaggregatedParams(
                request_type="context_only", first_gen_tokens=list(out.token_ids),
                first_gen_log_probs=out.logprobs, ctx_request_id=self.request_id,
                opaque_state=self._hand_over(out),
                disagg_request_id=d.disagg_request_id, ctx_dp_rank=self._context_rank(),
                ctx_info_endpoint="tcp://standin:0")

    def _hand_over(self, out):
        if not TRANSFER or out.finish_reason == "stop":
            return b"standin-%d" % self.request_id
        own = self.disagg.disagg_request_id
        try:
            return self.llm._executor.holder.hold(
                self.request_id if own is None else own, self.serving_rank,
                self.prompt_token_ids, self.trigger)
        except _transfer.TransferError as e:
            self._finish("error")
            raise RequestError(f"KV transfer: {e}") from e

    def _context_rank(self):
        return self.serving_rank if self.llm._executor.adp else self.asked_rank or 0

    async def _misbehave(self):
        at, executor = self._tokens_so_far(), self.llm._executor
        if self.trigger == 90001 or (self.trigger == 90002 and at == 3):
            self._finish("error")
            raise RequestError(f"stand-in request error after {at} tokens")
        if self.trigger == 90006 and at == 3:
            self._finish("error")
            raise RuntimeError("stand-in engine failure")
        if self.trigger in (90007, 90010, 90013) and at == 3:
            executor.healthy = False
            if self.trigger != 90010:
                executor.fail(EngineDeadError("stand-in engine died"))
            if self.trigger == 90013:
                threading.Event().wait()
            await self.wake.wait()
        hangs = self.trigger == 90014 and (at == 3 or not self.outputs)
        if hangs or self.trigger in (90015, 90016):
            await self.wake.wait()
            return await self._step() or True
        if self.trigger == 90008 and at == 2:
            self.outputs = []
            self.trigger = 90014                           # nothing comes after it
            return True
        if self.trigger == 90009 and at == 3:
            self._finish(None)
            return True
        if self.trigger == 90011 and at == 3:
            self.outputs[0].finish_reason = "timeout"
            self._finish("timeout")
            return True
        return False

    def _finish(self, reason):
        self.finished = True
        self.llm._executor.ended(self)
        log("finish", request_id=self.request_id, reason=reason,
            tokens=[len(o.token_ids) for o in self.outputs])


def _logprobs(token, k, count, vocab):
    """The chosen token at rank 1, then count-1 alternatives; values depend only on k."""
    from .executor.result import Logprob
    top = -0.25 * (k % 3 + 1)
    return {(token + r) % vocab: Logprob(logprob=top - r, rank=r + 1) for r in range(count)}


class Executor:
    """Waiting queue, ranks, and the book-keeping a worker reads: health, statistics, events."""
    BLOCKS = 1024

    def __init__(self, args):
        self.args, self.healthy = args, True
        if "_fatal_error" not in HIDE:
            self._fatal_error = None
        self.adp = args.enable_attention_dp
        self.ranks = args.tensor_parallel_size if self.adp else 1
        self.cap = args.max_batch_size or 2048
        self.block = args.kv_cache_config.tokens_per_block
        self.waiting, self.load = [], [0] * self.ranks
        self.router = _router(args, self.ranks)
        self.active, self.iterations, self.reported = {}, 0, 0
        self.stored = [set() for _ in range(self.ranks)]
        self.event_ids = [itertools.count() for _ in range(self.ranks)]
        self.events = []
        self.step = None
        transceiver = getattr(args, "cache_transceiver_config", None) or {}
        self.transfer_timeout = transceiver.get("kv_transfer_timeout_ms", 60000) / 1000
        self.holder = _transfer.Holder(self.block, self.transfer_timeout)
        if args.kv_cache_config.event_buffer_max_size:
            for rank in range(self.ranks):
                self._event(rank, {"type": "created",
                                   "num_blocks_per_cache_level": [self.BLOCKS, 0]})

    def check_health(self):
        if HEALTH == "hang":
            threading.Event().wait()
        if HEALTH == "fail":
            raise RuntimeError("stand-in health check failed")
        return self.healthy

    def fail(self, error):
        if "_fatal_error" not in HIDE:
            self._fatal_error = error

    def submit(self, result):
        """Queues the request; a rank that does not exist kills the engine, as upstream."""
        if result.rank is not None and not 0 <= result.rank < self.ranks:
            self.healthy = False
            return self.fail(IndexError(f"stand-in has no rank {result.rank}"))
        self.waiting.append(result)
        return self.schedule()

    def schedule(self):
        batch = _routing.admit(self.waiting, self.load, self.cap)
        for result, rank in self.router.route(batch, self.load, self.cap):
            self.active[result.request_id] = result
            self.iterations += 1
            result.serving_rank = rank
            result.placed.set()
            log("placed", request_id=result.request_id, rank=rank,
                conversation=result.conversation)
            if self.args.kv_cache_config.event_buffer_max_size:
                self._store(rank, result.prompt_token_ids, result.salt)

    def drop(self, result):
        """Forgets a request that still waits."""
        if result not in self.waiting:
            return False
        self.waiting.remove(result)
        return True

    def ended(self, result):
        if self.active.pop(result.request_id, None):
            self.load[result.serving_rank] -= 1
            self.router.ended(result, result.serving_rank)
        self.iterations += 1
        self.schedule()

    def next_step(self):
        """A future that all active requests share, so that they advance together."""
        if self.step is None:
            loop = asyncio.get_running_loop()
            self.step = loop.create_future()
            loop.call_later(DELAY, self._end_step)
        return self.step

    def _end_step(self):
        step, self.step = self.step, None
        noise("step")
        step.set_result(None)

    def _event(self, rank, data):
        self.events.append({"event_id": next(self.event_ids[rank]), "data": data,
                            "window_size": 8192, "attention_dp_rank": rank})

    def _store(self, rank, prompt, salt):
        """One 'stored' event with the full blocks of the prompt that are new on this rank."""
        parent, first_parent, blocks = None, None, []
        for i in range(0, len(prompt) - self.block + 1, self.block):
            tokens = prompt[i:i + self.block]
            digest = hash((parent, tuple(tokens), salt)) & (2**64 - 1)
            if digest not in self.stored[rank]:
                self.stored[rank].add(digest)
                if not blocks:
                    first_parent = parent
                block = {"type": "stored_block", "block_hash": digest, "cache_level": 0,
                         "priority": 35, "mm_keys": [], "tokens": [
                             {"type": "unique_token", "token_id": t, "token_extra_id": 0}
                             for t in tokens]}
                if salt:
                    block["cache_salt"] = salt
                blocks.append(block)
            parent = digest
        if blocks:
            self._event(rank, {"type": "stored", "parent_hash": first_parent, "blocks": blocks})

    def stats(self, rank):
        mine = [r for r in self.active.values() if r.serving_rank == rank]
        used = min(self.BLOCKS, len(self.stored[rank]) + len(mine))
        kv_tokens = sum(len(r.prompt_token_ids) + r.steps for r in mine)
        return {
            "iter": self.iterations, "iterLatencyMS": 1.5, "attentionDpRank": rank,
            "numActiveRequests": len(mine) + self.holder.on(rank),
            "numQueuedRequests": len(self.waiting) if rank == 0 else 0,
            "maxNumActiveRequests": self.args.max_batch_size,
            "kvCacheStats": {"maxNumBlocks": self.BLOCKS, "usedNumBlocks": used,
                             "freeNumBlocks": self.BLOCKS - used, "tokensPerBlock": self.block,
                             "reusedBlocks": 0, "missedBlocks": used, "cacheHitRate": 0.0},
            "inflightBatchingStats": {
                "numContextRequests": 0, "numCtxTokens": 0, "numCtxKvTokens": 0,
                "numGenRequests": len(mine), "numGenKvTokens": kv_tokens,
                "numQueuedContextRequests": 0, "numQueuedCtxTokens": 0,
                "numQueuedGenRequests": 0, "numQueuedGenKvTokens": 0,
                "numPausedRequests": 0, "numPausedKvTokens": 0}}


def _router(args, ranks):
    config = args.attention_dp_config
    if not (AFFINITY_FIELD and config and config.kv_cache_routing_conversation_affinity):
        return _routing.DefaultADPRouter(ranks)
    return _routing.ConversationAwareADPRouter(
        ranks, config.kv_cache_routing_max_sessions,
        getattr(config, "kv_cache_routing_fair_share_multiplier", 2.0),
        getattr(config, "kv_cache_routing_new_conv_placement", "round_robin"))


class ModelConfig:
    """The model folder's config.json, with the vocabulary size that was asked for."""

    def __init__(self, folder):
        with open(os.path.join(folder, "config.json")) as f:
            self.__dict__.update(json.load(f))
        self.own_vocab_size = self.vocab_size
        self.vocab_size = VOCAB or self.vocab_size


class Tokenizer:
    def __init__(self, config):
        self.vocab_size = config.vocab_size
        self.eos_token_id = self.pad_token_id = config.eos_token_id


class BaseLLM:
    def __init__(self, model, **kwargs):
        from .llmapi.llm_args import BaseLlmArgs
        for key, value in list(kwargs.items()):      # config objects and dicts are both fine
            if key in ("kv_cache_config", "attention_dp_config") and hasattr(value, "model_dump"):
                kwargs[key] = value.model_dump(exclude_unset=True)
        args = BaseLlmArgs(model=str(model), **kwargs)
        if "args" not in HIDE:
            self.args = args
        noise("load")
        log("llm_init", args=plain({"model": str(model), **kwargs}))
        world = args.tensor_parallel_size * args.pipeline_parallel_size
        if world > GPUS:
            raise RuntimeError(f"{world} ranks asked for, but only {GPUS} GPUs are available")
        self._hf_model_config = ModelConfig(str(model))
        self.vocab_size = self._hf_model_config.own_vocab_size
        self.tokenizer = Tokenizer(self._hf_model_config)
        time.sleep(LOAD_SECONDS)
        if LOAD_FAIL:
            raise RuntimeError(LOAD_FAIL)
        self._executor = Executor(args)
        self._limits = args
        self._ids = itertools.count(1)
        self._workers = _workers.start()

    def _submit(self, call):
        """call: the keyword arguments actually passed to generate_async."""
        log("generate_async", **{k: plain(v) for k, v in call.items()},
            _inputs_type=type(call["inputs"]).__name__)
        if self._executor is None:
            raise RuntimeError("stand-in engine is shut down")
        params = call.get("sampling_params") or SamplingParams()
        if params.end_id is None:
            params.end_id = self.tokenizer.eos_token_id
            params.pad_id = params.end_id
        disagg = call.get("disaggregated_params")
        if disagg is not None and disagg.request_type == "context_only":
            params.max_tokens = 1
        prompt = self._prompt(call["inputs"])
        trigger = trigger_of(prompt, call.get("cache_salt"))
        for code, kind in ((90003, ValueError), (90004, TypeError), (90005, NotImplementedError)):
            if trigger == code:
                raise kind(f"stand-in {kind.__name__} from generate_async")
        gen_only = disagg is not None and disagg.request_type == "generation_only"
        limit = self._limits.max_num_tokens
        chunked = self._limits.enable_chunked_prefill
        if limit and len(prompt) > limit and not gen_only and not chunked:
            # raised as ValueError up to rc19, as RequestError afterwards
            raise (RequestError if CONVERSATION else ValueError)(
                f"prompt of {len(prompt)} tokens exceeds max_num_tokens {limit}")
        return GenerationResult(self, prompt, params, call)

    @staticmethod
    def _prompt(inputs):
        if hasattr(inputs, "prompt_token_ids"):
            return [int(t) for t in inputs.prompt_token_ids]
        if isinstance(inputs, dict):
            return list(inputs["prompt_token_ids"])
        if isinstance(inputs, list):
            first = inputs[0]                   # IndexError for an empty prompt, as upstream
            if not isinstance(first, int):
                raise AssertionError            # as upstream
            return inputs
        raise TypeError(f"inputs must be text or token ids, not {type(inputs).__name__}")

    def _check_health(self):
        return self._executor is not None and self._executor.check_health()

    def get_kv_cache_capacity(self):
        ex = self._executor
        return {"maxNumBlocks": ex.BLOCKS, "tokensPerBlock": ex.block,
                "maxNumTokens": ex.BLOCKS * ex.block}

    async def get_stats_async(self, timeout=2):
        """One row per rank when an iteration happened since the last call (or timeout >= 1)."""
        ex = self._executor
        if ex.iterations != ex.reported or timeout >= 1:
            ex.reported = ex.iterations
            for rank in range(ex.ranks):
                yield ex.stats(rank)

    async def get_kv_cache_events_async(self, timeout=2):
        events, self._executor.events = self._executor.events, []
        for event in events:
            yield event

    def shutdown(self):
        log("shutdown")
        if SHUTDOWN == "hang":
            threading.Event().wait()
        if SHUTDOWN == "fail":
            raise RuntimeError("stand-in shutdown failed")
        _workers.stop(self._workers)
        self._executor.holder.close()
        self._executor = None


for _name in HIDE & set(vars(BaseLLM)):
    delattr(BaseLLM, _name)


def _passed(values):
    return {k: v for k, v in values.items() if k != "self" and v is not _ABSENT}


class LLM(BaseLLM):
    if CONVERSATION:
        def generate_async(self, inputs, sampling_params=_ABSENT, lora_request=_ABSENT,
                           prompt_adapter_request=_ABSENT, streaming=_ABSENT,
                           kv_cache_retention_config=_ABSENT, disaggregated_params=_ABSENT,
                           trace_headers=_ABSENT, _postproc_params=_ABSENT,
                           scheduling_params=_ABSENT, conversation_params=_ABSENT,
                           cache_salt=_ABSENT, priority=_ABSENT):
            return self._submit(_passed(locals()))
    else:
        def generate_async(self, inputs, sampling_params=_ABSENT, lora_request=_ABSENT,
                           prompt_adapter_request=_ABSENT, streaming=_ABSENT,
                           kv_cache_retention_config=_ABSENT, disaggregated_params=_ABSENT,
                           trace_headers=_ABSENT, _postproc_params=_ABSENT,
                           scheduling_params=_ABSENT, cache_salt=_ABSENT, priority=_ABSENT):
            return self._submit(_passed(locals()))
