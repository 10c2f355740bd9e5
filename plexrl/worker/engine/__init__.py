"""The built-in `torch` rollout engine: continuous batching over a block cache."""

from plexrl.worker.engine.backend import TorchRolloutBackend
from plexrl.worker.engine.engine import Engine
from plexrl.worker.engine.generation import Generation, Segment
from plexrl.worker.engine.protocol import EngineStats, RolloutEngine

__all__ = [
    "Engine",
    "EngineStats",
    "Generation",
    "RolloutEngine",
    "Segment",
    "TorchRolloutBackend",
]
