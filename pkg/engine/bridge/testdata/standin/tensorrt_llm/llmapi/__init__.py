"""The public names; builds up to rc20 have BuildConfig, later ones ConversationParams."""
from .._switch import CONVERSATION
from ..disaggregated_params import DisaggregatedParams  # noqa: F401
from ..sampling_params import GuidedDecodingParams, SamplingParams  # noqa: F401
from ..scheduling_params import SchedulingParams  # noqa: F401
from .llm_args import (AttentionDpConfig, CapacitySchedulerPolicy,  # noqa: F401
                       DynamicBatchConfig, KvCacheConfig, KvCacheConnectorConfig,
                       SchedulerConfig)

if CONVERSATION:
    from ..conversation_params import ConversationParams  # noqa: F401
else:
    from .llm_args import BaseLlmArgs as BuildConfig  # noqa: F401
