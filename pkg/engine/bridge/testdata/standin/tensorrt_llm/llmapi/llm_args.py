"""Engine arguments: strict where strictness is visible."""
from enum import Enum

from .._strict import (Strict, anything, boolean, choice, integer, model, number, optional,
                       section, text)
from .._switch import AFFINITY_FIELD, API, LATER


class CapacitySchedulerPolicy(str, Enum):
    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class LoadFormat(Enum):
    AUTO = "auto"
    DUMMY = "dummy"

    @classmethod
    def _missing_(cls, value):
        return next((m for m in cls if str(value).lower() == m.value), None)


@model
class DynamicBatchConfig(Strict):
    FIELDS = {
        "enable_batch_size_tuning": (boolean, None),
        "enable_max_num_tokens_tuning": (boolean, None),
        "dynamic_batch_moving_average_window": (integer, None),
    }


@model
class SchedulerConfig(Strict):
    FIELDS = {
        "capacity_scheduler_policy": (CapacitySchedulerPolicy,
                                      CapacitySchedulerPolicy.GUARANTEED_NO_EVICT),
        "context_chunking_policy": (anything, None),
        "dynamic_batch_config": (optional(section(DynamicBatchConfig)), None),
        "waiting_queue_policy": (anything, None),
    }


@model
class KvCacheConfig(Strict):
    """Open for extra keys: the real one has dozens that the stand-in does not read."""
    EXTRA = True
    FIELDS = {
        "enable_block_reuse": (boolean, True),
        "max_tokens": (optional(integer), None),
        "free_gpu_memory_fraction": (optional(number), 0.9),
        "enable_partial_reuse": (boolean, True),
        "event_buffer_max_size": (integer, 0),
        "tokens_per_block": (integer, 32),
    }


@model
class KvCacheConnectorConfig(Strict):
    FIELDS = {
        "connector_module": (text, ""),
        "connector_scheduler_class": (text, ""),
        "connector_worker_class": (text, ""),
    }


@model
class SleepConfig(Strict):
    pass


_ADP = {
    "enable_balance": (boolean, False),
    "timeout_iters": (integer, 50),
    "batching_wait_iters": (integer, 10),
    "enable_kv_cache_aware_routing": (boolean, False),
    "kv_cache_routing_load_balance_weight": (number, 1.0),
}
if AFFINITY_FIELD:
    _ADP |= {
        "kv_cache_routing_conversation_affinity": (boolean, False),
        "kv_cache_routing_max_sessions": (integer, 65536),
    }
if LATER:
    _ADP |= {
        "kv_cache_routing_fair_share_multiplier": (number, 2.0),
        "kv_cache_routing_new_conv_placement": (choice("round_robin", "least_queued"),
                                                "round_robin"),
    }
if API == "1.4":
    _ADP |= {"kv_cache_routing_strict_conversation_affinity": (boolean, False)}


@model
class AttentionDpConfig(Strict):
    FIELDS = _ADP


@model
class BaseLlmArgs(Strict):
    """Unknown top-level keys are kept, not refused, so that any engine YAML can be tried."""
    EXTRA = True
    FIELDS = {
        "model": (text, ""),
        "tensor_parallel_size": (integer, 1),
        "pipeline_parallel_size": (integer, 1),
        "moe_expert_parallel_size": (optional(integer), None),
        "gpus_per_node": (optional(integer), None),
        "enable_attention_dp": (boolean, False),
        "attention_dp_config": (optional(section(AttentionDpConfig)), None),
        "kv_cache_config": (section(KvCacheConfig), KvCacheConfig),
        "enable_chunked_prefill": (boolean, False),
        "max_batch_size": (optional(integer), 2048),
        "max_num_tokens": (optional(integer), 8192),
        "max_seq_len": (optional(integer), None),
        "max_beam_width": (optional(integer), 1),
        "backend": (text, "pytorch"),
    }
