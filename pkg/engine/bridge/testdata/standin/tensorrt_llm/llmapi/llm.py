"""The real package defines LLM here; PreprocessedInputs came with rc21."""
from dataclasses import dataclass
from typing import Any

from .._switch import CONVERSATION
from ..engine import LLM, BaseLLM  # noqa: F401
from ..sampling_params import SamplingParams  # noqa: F401

if CONVERSATION:
    @dataclass
    class PreprocessedInputs:
        prompt_token_ids: Any
        query_token_ids: Any = None
        multimodal_params: Any = None
        encoder_input_token_ids: Any = None
