"""The built-in `torch` rollout engine: continuous batching over a paged KV cache."""

from plexrl.worker.rollout.engine.backend import TorchRolloutBackend
from plexrl.worker.rollout.engine.engine import Engine
from plexrl.worker.rollout.generation import Generation, WeightSpan
from plexrl.worker.rollout.rollout_engine import EngineStats, RolloutEngine

__all__ = [
    "Engine",
    "EngineStats",
    "Generation",
    "RolloutEngine",
    "TorchRolloutBackend",
    "WeightSpan",
]
