"""Kinds of GPU, and what engines take on them besides their limits. Pure."""

from dataclasses import dataclass, field

from plexrl.latency.costs import QWEN3_30B_A3B

GPUS_PER_NODE = 8
HOST_LINK = 50e9
"""Bytes per second between a GPU on PCIe 5 x16 and pinned host memory."""
NVME_RATE = 20e9
"""Bytes per second of a node's NVMe, which its GPUs share."""
MOVE_FIXED_S = 0.5
"""Seconds of each move of a model's state that do not depend on its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Costs of an engine besides the limits of the hardware."""

    kv_read: float = 98_304 / QWEN3_30B_A3B.k1 / 4.0e12
    """Part of the bandwidth at which the KV cache is read."""
    layer_s: float = QWEN3_30B_A3B.k4 / 48
    """Constant seconds of a decode step per layer."""
    all_reduce_s: float = 15e-6
    """Seconds of an all-reduce of few bytes between GPUs of a node: an assumption."""
    hop_s: float = 0.0
    """The same for each of the 2·(tp - 1) hops of a ring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switching:
    """Costs of a change of the tensor-parallel size during generation (PAT §4.3)."""

    fixed_s: float = 3.16
    """Seconds without KV cache: weights, CUDA graphs, control. By default those of an A40: 5.52 s
    less 2.36 s for KV cache (PAT §5.4)."""
    kv_bytes_per_s: float = 0.77e9
    """One-way bandwidth of each GPU for KV cache. By default that of an A40: 9 responses of 12 288
    tokens of LLaMA3.1-8B move from groups of 2 to groups of 8 in 2.36 s, of which the group with
    most sends 3, three quarters of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Limits of one GPU."""

    name: str
    flops: float
    """Dense bf16 operations per second."""
    bandwidth: float
    """Bytes per second of its memory."""
    memory: float
    """Bytes."""
    link: float
    """Bytes per second to the other GPUs of its node, in one direction."""
    per_node: int = GPUS_PER_NODE
    host_link: float = HOST_LINK
    """Bytes per second between its memory and pinned host memory, in one direction."""
    software: Software = field(default_factory=Software)
    switching: Switching = field(default_factory=Switching)


H20 = Gpu(name="H20", flops=148e12, bandwidth=4.0e12, memory=96e9, link=450e9)
"""StreamRL Tab. 1, with half of its NVLink bandwidth in each direction."""
H800 = Gpu(name="H800", flops=989e12, bandwidth=3.35e12, memory=80e9, link=200e9)
A40 = Gpu(
    name="A40",
    flops=149.7e12,
    bandwidth=696e9,
    memory=48e9,
    link=11.3e9,
    host_link=25e9,
    software=Software(layer_s=87.5e-6, all_reduce_s=0.0, hop_s=4.28e-6),
)
"""Three constants follow from latencies of LLaMA3.1-8B (PAT §3.1): `layer_s` and `hop_s` from 15.37
and 9.64 ms with 2 and 8 GPUs and one response, `link` from the 6.46 ms between 24.41 and 30.87 ms
with 128 responses. At 128 responses the rest is that of contexts of 1020 tokens."""
H100 = Gpu(
    name="H100",
    flops=989e12,
    bandwidth=3.35e12,
    memory=80e9,
    link=450e9,
    software=Software(kv_read=0.9, layer_s=36e-6),
    switching=Switching(fixed_s=2.2, kv_bytes_per_s=10.8e9),
)
"""With `kv_read` and `layer_s`, groups of 2 take the 134.3 and 133.9 s of veRL (PAT §5.3), for
LLaMA3.1-8B with at most 24 576 and Qwen3-14B with at most 16 384 tokens. Of a switch on an H100 the
paper has no times: what its links decide is here as many times faster than on an A40 as NVLink is
than PCIe."""
GPUS = {each.name.lower(): each for each in (H800, H100, H20, A40)}
