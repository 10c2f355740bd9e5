"""Several ranks that compute with one copy of the weights, in groups whose size may change."""

from plexrl.worker.rollout.engine.tensor_parallel.ranks import (
    CALLS_TIMEOUT,
    EngineCall,
    EngineCalls,
    LeadingEngine,
    RankGroup,
    is_lost_rank_error,
    rank_group,
)

__all__ = [
    "CALLS_TIMEOUT",
    "EngineCall",
    "EngineCalls",
    "LeadingEngine",
    "RankGroup",
    "is_lost_rank_error",
    "rank_group",
]
