"""Disaggregated serving: what a prefill worker hands to a decode worker."""
from dataclasses import dataclass
from typing import Any, Optional

KINDS = ("context_only", "generation_only", "context_and_generation")


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    request_type: Optional[str] = None
    first_gen_tokens: Optional[list] = None
    first_gen_log_probs: Optional[list] = None
    first_gen_logits: Optional[list] = None
    ctx_request_id: Optional[int] = None
    opaque_state: Any = None
    draft_tokens: Optional[list] = None
    disagg_request_id: Optional[int] = None
    ctx_dp_rank: Optional[int] = None
    ctx_info_endpoint: Optional[str] = None
    schedule_style: Any = None
    multimodal_embedding_handles: Optional[list] = None
    multimodal_hashes: Optional[list] = None
    mrope_position_ids_handle: Any = None
    mrope_position_deltas_handle: Any = None

    def __post_init__(self):
        if self.request_type is not None:
            self.request_type = self.request_type.lower()
            if self.request_type not in KINDS:
                raise ValueError(f"request_type {self.request_type!r} is none of {KINDS}")
