"""What the installed build of tensorrt_llm can do, found out by looking, not by its version.

Every probe gives true, false or None for "cannot tell".
"""
import importlib
import inspect


def lookup(path):
    """The object at "module:name", or None when this build does not have it."""
    module, name = path.split(":")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def parameters(function):
    """The names of a function's parameters, or None when it does not tell them."""
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.values()):
        return None
    return frozenset(found)


def capabilities(llm):
    """The probes' answers under the protocol's names."""
    accepted = parameters(llm.generate_async)

    def takes(name):
        return None if accepted is None else name in accepted

    has_class = lookup("tensorrt_llm.llmapi:ConversationParams") is not None
    return {
        "conversation_params": has_class and takes("conversation_params"),
        "scheduling_params": takes("scheduling_params"),
        "cache_salt": takes("cache_salt"),
        "priority": takes("priority"),
        "binds_explicit_rank": binds_explicit_rank(),
        "array_prompts": array_prompts(),
        "engine_dead_error": lookup("tensorrt_llm.executor:EngineDeadError") is not None,
        "kv_cache_capacity": hasattr(llm, "get_kv_cache_capacity"),
        "guided_decoding": lookup("tensorrt_llm.llmapi:GuidedDecodingParams") is not None,
        # a cancel goes to the engine at once, except while KV blocks are on their way in
        "abort_before_first_token": True,
    }


# A request id holds ten bits of machine id, of which the frontends' world uses the first 1021; from
# rc22 on eight bits of node and six of process.
_MACHINES, _PROCESSES, _NODES = 1021, 64, 256


def request_ids():
    """The build's maker of global request ids as a function of one machine id, and the number of
    machine ids; (None, 0) when it has none."""
    make = lookup("tensorrt_llm.llmapi.disagg_utils:get_global_disagg_request_id")
    names = parameters(make) if make else None
    if names is None:
        return None, 0
    if len(names) == 1:
        return make, _MACHINES
    if len(names) == 2:
        return lambda machine: make(*divmod(machine, _PROCESSES)), _NODES * _PROCESSES
    return None, 0


def binds_explicit_rank():
    """Whether a rank given with a conversation's first turn becomes its home (TensorRT-LLM
    #16815). There is no public sign of it; the router's private method came with it."""
    try:
        module = importlib.import_module(
            "tensorrt_llm._torch.pyexecutor.scheduler.adp_router")
    except Exception:  # a module deep inside the package may fail in many ways
        return None
    router = getattr(module, "ConversationAwareADPRouter", None)
    return hasattr(router, "_assign_new_conversation_explicit_dp_ranks")


def array_prompts():
    """Whether a prompt may stay an int32 array all the way (TensorRT-LLM #19658)."""
    request, params = (lookup("tensorrt_llm.executor.request:GenerationRequest"),
                       lookup("tensorrt_llm:SamplingParams"))
    if request is None or params is None or int32_inputs() is None:
        return False
    try:
        kept = request(int32_array(b"\x01\0\0\0\x02\0\0\0"), params())
        return getattr(kept, "_prompt_token_ids_i32", None) is not None
    except Exception:  # an older build refuses the array in its own way
        return False


def int32_inputs():
    """The class that carries an array prompt into generate_async."""
    if lookup("numpy:frombuffer") is None:
        return None
    return lookup("tensorrt_llm.llmapi.llm:PreprocessedInputs")


def int32_array(data):
    """An array over the bytes of 32-bit integers, without copying them."""
    import numpy
    return numpy.frombuffer(data, dtype=numpy.int32)
