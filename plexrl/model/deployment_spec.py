"""What a worker needs to know to build its part of a deployment."""

from dataclasses import dataclass

import msgspec

from plexrl.model.lora import LoraSpec
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSpec:
    """One deployment as its controller asked for it; checked by the router."""

    model: ModelSpec
    kind: str
    """`train`, `forward` (weights only: a reference, a teacher, a reward model) or `rollout`."""
    backend: str
    """`fsdp`, `deepspeed` or `megatron` (train), `torch` (forward, rollout) or `vllm` (rollout)."""
    workers: int
    """Worker processes, one per GPU: `layout.world_size`."""
    parallelism: Parallelism | None = None
    """How the model lies over the workers. Absent: rows are split over all of them."""
    optimizer: str = "device"
    """Train: `device`, or `host` for optimizer state that stays in host memory, where the CPU steps
    it: a context switch then moves parameters only."""
    dtype: str = "float32"
    """Of the weights that a forward or rollout deployment computes from; what a trainer has is cast
    on the way."""
    compute_dtype: str = "float32"
    """Train: that a model computes in, `float32` or `bfloat16`. Its parameters are float32 either
    way."""
    activation_checkpointing: bool = False
    """Train: compute the activations of a layer again in the backward pass instead of keeping
    them."""
    max_sequence_tokens: int = 512
    """Longest row: prompt and completion together."""
    max_concurrent_samples: int = 256
    """Rollout: samples decoded together; more wait for a free slot."""
    kv_cache_bytes: int | None = None
    """Rollout: budget of each worker's cache of keys and values, in device memory beside the
    weights. Samples that it has no room for wait, and are computed anew. Absent: the engine's own
    default."""

    lora: LoraSpec | None = None
    """Train: only adapters are trained, the model itself is frozen. Rollout: what the adapters of a
    train deployment are merged into is the model. Absent: all parameters are trained."""

    @property
    def layout(self) -> Parallelism:
        """`parallelism`, or what its absence means."""
        return self.parallelism or Parallelism(dp=self.workers)

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()


def deployment_spec_from_json(text: str) -> DeploymentSpec:
    """Raises `msgspec.ValidationError` for text that `to_json` did not make."""
    return msgspec.json.decode(text, type=DeploymentSpec)
