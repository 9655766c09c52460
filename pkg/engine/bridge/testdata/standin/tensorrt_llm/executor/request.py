"""Request objects."""
import os
from dataclasses import dataclass

from .._switch import ARRAYS

DEFAULT_REQUEST_PRIORITY = 0.5


@dataclass(slots=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_ckpt_source: str = "hf"

    def __post_init__(self):
        if self.lora_path and not os.path.exists(self.lora_path):
            raise ValueError(f"lora_path {self.lora_path!r} does not exist")


class GenerationRequest:
    """Builds that take int32 arrays keep the buffer; the others rebuild a list from it."""

    def __init__(self, prompt_token_ids, sampling_params, **_ignored):
        self._prompt_token_ids_i32 = None
        if not isinstance(prompt_token_ids, list):
            if ARRAYS:
                self._prompt_token_ids_i32 = prompt_token_ids
            prompt_token_ids = prompt_token_ids.tolist()
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
