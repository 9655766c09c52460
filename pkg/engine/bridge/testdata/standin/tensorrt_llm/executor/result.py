"""What a request yields."""
from dataclasses import dataclass
from typing import Any, Optional

from ..engine import GenerationResult  # noqa: F401  (the real package has it here)


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: Optional[int] = None


@dataclass(slots=True)
class CompletionOutput:
    index: int
    token_ids: list
    text: str = ""
    logprobs: Any = None
    prompt_logprobs: Any = None
    finish_reason: Optional[str] = None
    stop_reason: Any = None
    disaggregated_params: Any = None
    request_perf_metrics: Any = None
