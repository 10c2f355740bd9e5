"""The specification from which a worker builds its part of a deployment."""

from dataclasses import dataclass

import msgspec

from plexrl.model.lora import LoraSpec
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSpec:
    """One deployment as its controller requested it; the router has checked it."""

    model: ModelSpec
    kind: str
    """`train`, `forward` (weights only: a reference, a teacher, a reward model) or `rollout`."""
    backend: str
    """`fsdp`, `deepspeed` or `megatron` (train), `torch` (forward, rollout) or `vllm` (rollout)."""
    workers: int
    """Worker processes, one per GPU: `layout.world_size`."""
    parallelism: Parallelism | None = None
    """Parallel layout. Absent: data parallelism over all workers."""
    tp_sizes: tuple[int, ...] = ()
    """Rollout: sizes of the tensor-parallel groups between which the engine switches while it
    generates (PAT §4), ascending; each divides the next, and the last is `parallelism.tp`. The
    `tp` ranks are one engine: 4 groups of 1, 2 of 2 or 1 of 4. Empty: always one group."""
    optimizer: str = "device"
    """Train: location of the optimizer's state, `device` or `host`. In host memory the CPU steps
    it, and a context switch moves parameters only."""
    dtype: str = "float32"
    """Forward, rollout: dtype of the weights; a weight sync casts the trainer's weights."""
    compute_dtype: str = "float32"
    """Train: dtype of the computation, `float32` or `bfloat16`. Parameters are always float32."""
    activation_checkpointing: bool = False
    """Train: recompute a layer's activations in the backward pass instead of keeping them."""
    reduce_once: bool = False
    """Train: reduce gradients over data ranks once for all micro-batches of a call, instead of for
    each micro-batch. Until then each rank has the gradients of its whole tensor part in float32."""
    max_sequence_tokens: int = 512
    """Longest row: prompt and completion together."""
    max_concurrent_samples: int = 256
    """Rollout: most samples that run at once; others wait for a free slot."""
    kv_cache_bytes: int | None = None
    """Rollout: budget of each worker's KV cache in device memory, in addition to the weights.
    Samples that do not fit wait and are recomputed. Absent: the engine's default."""
    cuda_graphs: bool = True
    """Rollout: decode steps on GPUs are captured as CUDA graphs and replayed."""
    preemptible: bool = False
    """Rollout: its generations are interrupted and continued."""
    layers_on_device: int | None = None
    """Forward: decoder layers that device memory has room for. All layers stay in host memory, and
    are copied to the device one after another while others compute. Absent: all are on the device.
    """
    lora: LoraSpec | None = None
    """Train: only adapters are trained, and the model is frozen. Rollout: the adapters of a train
    deployment are merged into the model. Absent: all parameters are trained."""
    pace: str = ""
    """Train, rollout: no model is computed, and each step lasts what it would on this GPU with this
    model, as `plexrl.latency.pace` reads it. Empty: the model is computed."""

    @property
    def layout(self) -> Parallelism:
        """`parallelism`, or its default."""
        return self.parallelism or Parallelism(dp=self.workers)

    @property
    def shares(self) -> int:
        """Parts into which the tensor-parallel ranks divide the weights and the KV cache: a rank
        has its part for the smallest group."""
        return self.tp_sizes[0] if self.tp_sizes else self.layout.tp

    @property
    def steps_in_host(self) -> bool:
        """Whether an optimizer step needs no GPU: its state is in host memory."""
        return self.kind == "train" and self.optimizer == "host" and not self.pace

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()


def deployment_spec_from_json(text: str) -> DeploymentSpec:
    """The specification that `to_json` encoded. Raises `msgspec.ValidationError` for other text."""
    return msgspec.json.decode(text, type=DeploymentSpec)
