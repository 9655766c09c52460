"""The only module that touches tensorrt_llm."""
import base64
import dataclasses
import enum
import inspect
import json
import os
import pathlib
import time

from . import probes

_STATS_SECONDS = 0.5   # the engine may make rows faster than they can be read
_STATS_ROWS = 1024


class Refused(Exception):
    """This request only: the engine, or a parameter class before it, said no."""

    def __init__(self, kind, cause):
        super().__init__(str(cause))
        self.kind, self.cause = kind, cause


class Engine:
    """One LLM and what this build offers around it."""

    def __init__(self, llm, version):
        self._llm, self.version = llm, version
        self.capabilities = probes.capabilities(llm)
        self._accepted = probes.parameters(llm.generate_async)
        self._arrays = self.capabilities["array_prompts"] and probes.int32_inputs()
        self._sampling = probes.lookup("tensorrt_llm:SamplingParams")
        self._guided = probes.lookup("tensorrt_llm.llmapi:GuidedDecodingParams")
        self._disaggregated = probes.lookup("tensorrt_llm.llmapi:DisaggregatedParams")
        self._conversation = probes.lookup("tensorrt_llm.llmapi:ConversationParams")
        self._scheduling = probes.lookup("tensorrt_llm.scheduling_params:SchedulingParams")
        self._lora = probes.lookup("tensorrt_llm.executor.request:LoRARequest")
        self._request_id, self._machines = probes.request_ids()
        self._logprob = probes.lookup("tensorrt_llm.executor.result:Logprob")
        self.request_error = (probes.lookup("tensorrt_llm.executor.utils:RequestError")
                              or probes.lookup("tensorrt_llm.executor:RequestError")
                              or Refused)

    @classmethod
    def build(cls, args):
        import tensorrt_llm
        return cls(tensorrt_llm.LLM(**args), getattr(tensorrt_llm, "__version__", ""))

    # Requests

    def submit(self, prompt, order):
        """Starts a request and returns the engine's result object. prompt holds the bytes of
        32-bit token ids, order what the worker wants passed. Raises Refused for an error of
        this request; any other exception means that the engine is broken."""
        try:
            call = self._call(prompt, order)
        except MemoryError:
            raise  # says nothing about the request
        except Exception as e:
            raise Refused("params", e) from e
        try:
            return self._llm.generate_async(**call)
        except self.request_error as e:
            raise Refused("request", e) from e
        except NotImplementedError as e:
            raise Refused("not_implemented", e) from e
        except ValueError as e:
            raise Refused("value", e) from e
        except TypeError as e:
            if self._fits(call):
                raise Refused("type", e) from e
            raise  # the call itself does not fit this build, and the next one will not either

    def _call(self, prompt, order):
        """The arguments of generate_async. An argument that is ordered as null, or that today's
        worker always passes, is passed as None as long as the build knows it."""
        call = {
            "inputs": self._inputs(prompt),
            "sampling_params": self._sampling_params(order),
            "streaming": order.get("streaming", False),
            "disaggregated_params": self._disaggregated_params(order.get("disaggregated")),
            "trace_headers": order.get("trace_headers"),
        }
        scheduling = order.get("scheduling")
        optional = {
            "scheduling_params": scheduling and self._scheduling(**scheduling),
            "cache_salt": order.get("cache_salt"),
            "priority": order.get("priority"),
        }
        for name, value in optional.items():
            if value is not None or self._accepted is None or name in self._accepted:
                call[name] = value
        if "conversation" in order:
            ident = order["conversation"]["id"]
            call["conversation_params"] = (
                self._conversation(conversation_id=ident)
                if ident is not None and self._conversation else None)
        lora = order.get("lora")
        if lora:
            call["lora_request"] = self._lora(lora["name"], lora["id"], lora["path"])
        return call

    def _inputs(self, prompt):
        if self._arrays:
            return self._arrays(prompt_token_ids=probes.int32_array(prompt))
        return memoryview(prompt).cast("i").tolist()

    def _sampling_params(self, order):
        """A new object for each request, since the engine writes into it."""
        fields = {"detokenize": False, **order.get("sampling", {})}
        guided = order.get("guided")
        if guided is not None:
            fields["guided_decoding"] = self._guided(**guided)
        return self._sampling(**fields)

    def _disaggregated_params(self, order):
        if order is None:
            return None
        fields = dict(order)
        machine = fields.pop("machine_id", None)
        if machine is not None:
            fields["disagg_request_id"] = self._request_id(machine)
        if fields.get("opaque_state") is not None:
            fields["opaque_state"] = base64.b64decode(fields["opaque_state"])
        if fields.get("first_gen_log_probs") is not None:
            fields["first_gen_log_probs"] = [
                {e["token_id"]: self._logprob(logprob=e["logprob"], rank=e["rank"])
                 for e in position} for position in fields["first_gen_log_probs"]]
        return self._disaggregated(**fields)

    def _fits(self, call):
        if self._accepted is None:
            return False
        try:
            inspect.signature(self._llm.generate_async).bind(**call)
            return True
        except TypeError:
            return False

    # Questions

    def fatal_error(self):
        """The error that ended the engine, if it recorded one."""
        return getattr(getattr(self._llm, "_executor", None), "_fatal_error", None)

    def check_health(self):
        """The engine's own opinion; None when this build offers none. May block."""
        check = getattr(self._llm, "_check_health", None)
        if check is None:
            check = getattr(getattr(self._llm, "_executor", None), "check_health", None)
        return None if check is None else bool(check())

    async def stats(self):
        """The rows of iteration statistics since the last call."""
        rows, until = [], time.monotonic() + _STATS_SECONDS
        source = self._llm.get_stats_async(timeout=0.05)
        if inspect.isawaitable(source):
            source = await source
        async for row in source:
            rows.append(json.loads(row) if isinstance(row, str) else row)
            if len(rows) >= _STATS_ROWS or time.monotonic() > until:
                break
        return rows

    def shutdown(self):
        self._llm.shutdown()

    # The handshake

    def describe(self):
        """The body of the ready message."""
        args = getattr(self._llm, "args", None)
        config = resolved(args)
        ready = {
            "engine": "tensorrt_llm",
            "version": self.version,
            "config_readable": config is not None,
            "capabilities": self.capabilities,
            "bounds": self._bounds(args),
            "attention_dp_size": attention_dp_size(args),
            "kv": self._kv(),
        }
        if config is not None:
            ready["resolved_config"] = config
        return ready

    def _bounds(self, args):
        bounds = {"vocab_size": self._vocabulary(args), "machine_ids": self._machines}
        for name in ("max_seq_len", "max_num_tokens", "max_batch_size", "max_beam_width"):
            bounds[name] = getattr(args, name, None)
        return {name: v for name, v in bounds.items() if isinstance(v, int) and v > 0}

    def _vocabulary(self, args):
        """The number of rows of the embedding: the model's own figure, which may be larger than
        the tokenizer's, then the tokenizer's."""
        model = getattr(self._llm, "_hf_model_config", None) or _config_file(args)
        for config in (model, _get(model, "text_config")):
            size = _get(config, "vocab_size")
            if isinstance(size, int):
                return size
        try:
            tokenizer = self._llm.tokenizer
            return getattr(tokenizer, "vocab_size", None) or len(tokenizer)
        except Exception:  # there need not be one
            return None

    def _kv(self):
        try:
            capacity = self._llm.get_kv_cache_capacity()
            return {"total_blocks": int(capacity["maxNumBlocks"]),
                    "block_size": int(capacity["tokensPerBlock"])}
        except Exception:  # new in rc21 and still beta
            return {}


def attention_dp_size(args):
    """The number of attention-DP ranks: with attention DP one for each tensor-parallel rank."""
    if getattr(args, "enable_attention_dp", False) is not True:
        return 1
    size = (getattr(getattr(args, "parallel_config", None), "tp_size", None)
            or getattr(args, "tensor_parallel_size", None))
    return size if isinstance(size, int) else 1


def resolved(args):
    """The engine's configuration as JSON values, or None when it cannot be read. Booleans stay
    booleans and 1 stays 1: whoever reads this must be able to tell them apart."""
    try:
        config = plain(args)
        return config if isinstance(config, dict) else None
    except Exception:
        return None


def plain(value):
    """JSON form of a configuration object."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    names = getattr(type(value), "model_fields", None)
    if names is not None:  # models may hold what their own dump cannot take
        extra = getattr(value, "model_extra", None) or {}
        return {name: plain(getattr(value, name, None)) for name in (*names, *extra)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return repr(value)


def _config_file(args):
    """config.json of a model folder, or None."""
    try:
        with open(os.path.join(str(args.model), "config.json"), encoding="utf-8") as f:
            return json.load(f)
    except Exception:
        return None


def _get(config, name):
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)
