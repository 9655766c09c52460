"""Where a request shall run under attention data parallelism."""
from dataclasses import dataclass
from typing import Any, Optional


@dataclass(slots=True, kw_only=True)
class SchedulingParams:
    attention_dp_rank: Optional[int] = None
    attention_dp_relax: bool = True
    agent_hierarchy: Any = None
