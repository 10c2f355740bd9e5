"""The built-in `torch` rollout engine: continuous batching over any `transformers` decoder."""

from plexrl.worker.engine.backend import TorchRolloutBackend
from plexrl.worker.engine.engine import Engine

__all__ = ["Engine", "TorchRolloutBackend"]
