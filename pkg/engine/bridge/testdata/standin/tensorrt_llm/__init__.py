"""Stand-in for the tensorrt_llm package: our own code, standard library only, no GPU.

It has the names that the bridge calls and probes, and tokens that a test can predict. With V
the model's vocabulary size, p the prompt and c the choice index:

    token[k] = (sum(p) + 7*k + 13*c) % V        cached_tokens = 32 * (len(p) // 64)

_switch.py lists the environment variables, engine.py the prompts that make it misbehave. What
it decides by itself is no evidence about TensorRT-LLM.
"""
from ._switch import VERSION as __version__, noise
from .engine import LLM
from .sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
noise("import")
