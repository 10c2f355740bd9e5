"""The `deepspeed` training backend: ZeRO-2, and ZeRO-Offload with a host optimizer."""

from plexrl.worker.training.deepspeed.model import DeepSpeedModel

__all__ = ["DeepSpeedModel"]
