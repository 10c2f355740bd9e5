"""Latencies of dense models on GPUs, by the size of their tensor-parallel (TP) groups. Pure.

The coefficients of `EngineCosts` have one source, Qwen3-30B-A3B on an H20 (`costs`). Another model
on another GPU gets them at the same parts of what its hardware can do: the KV cache is read at 34 %
of the memory's bandwidth, weights at 96 %; a decode step computes at 36 % of the peak, a prefill at
half; a step has the same constant time per layer. A TP group has `tp` times the memory and the
speed of a GPU, and two all-reduces per layer.
"""

from dataclasses import dataclass

from plexrl.errors import InvalidRequestError
from plexrl.latency.costs import QWEN3_30B_A3B, EngineCosts
from plexrl.latency.gpus import H800, Gpu

WEIGHTS_READ = 2 * 3.3e9 / QWEN3_30B_A3B.k2 / 4.0e12
"""Part of the bandwidth at which weights are read."""
DECODE_COMPUTE = 2 * 3.3e9 / QWEN3_30B_A3B.k3 / 148e12
PREFILL_COMPUTE = 0.5
MEMORY_PART = 0.9
"""Part of the memory for weights and KV cache."""
TRAIN_PART = 0.077
"""Part of the peak at which training computes. It is what makes training 22 % and rollout 70 % of a
synchronous step with the lengths of `r1`, as measured for veRL (Flexes Tab. 1: the 14B model, at
most 16 384 tokens, 32 GPUs, the mean of three tasks)."""
PPO_OPERATIONS = 18.0
"""Operations of PPO with a critic of the same size: values and both passes of the critic, too."""
PULL_RATE = 61.1e9 / QWEN3_30B_A3B.pull_s
"""Bytes per second at which a GPU receives weights (StaleFlow Tab. 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A dense model in bf16 on a kind of GPU."""

    name: str
    parameters: float
    layers: int
    hidden: int
    kv_heads: int
    gpu: Gpu = H800
    train_part: float = TRAIN_PART
    """Part of the peak at which training computes."""
    train_operations: float = 10.0
    """Operations of training by parameter and token: log-probs of actor and reference, and both
    passes. `PPO_OPERATIONS` with a critic."""
    head_tokens: int = 128

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of a token in all layers."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_tokens

    def kv_tokens(self, tp: int) -> int:
        """Tokens that fit the KV cache of a TP group; below 1 if its weights do not fit."""
        return int((MEMORY_PART * self.gpu.memory * tp - 2 * self.parameters) / self.token_bytes)

    def costs(self, tp: int) -> EngineCosts:
        """Latencies of an instance of `tp` GPUs.

        Raises:
            InvalidRequestError: the group is larger than a node, or the weights do not fit.
        """
        gpu, software = self.gpu, self.gpu.software
        if not 1 <= tp <= gpu.per_node or self.kv_tokens(tp) < 1:
            raise InvalidRequestError(
                f"{self.name} with {tp} GPUs per instance: give 1 to {gpu.per_node} whose memory "
                f"has room for {2 * self.parameters / 1e9:.0f} GB of weights"
            )
        compute = gpu.flops * tp
        reduces = 2 * self.layers if tp > 1 else 0
        token_reduce_s = 2 * self.hidden * 2 * (tp - 1) / tp / gpu.link
        return EngineCosts(
            k1=self.token_bytes / (software.kv_read * gpu.bandwidth * tp),
            k2=2 * self.parameters / (WEIGHTS_READ * gpu.bandwidth * tp),
            k3=2 * self.parameters / (DECODE_COMPUTE * compute) + reduces * token_reduce_s,
            k4=software.layer_s * self.layers
            + reduces * (software.all_reduce_s + 2 * (tp - 1) * software.hop_s),
            kv_tokens=self.kv_tokens(tp),
            gpus=tp,
            prefill_s_per_token=2 * self.parameters / (PREFILL_COMPUTE * compute),
            prefill_s_per_token2=2 * self.layers * self.hidden / (PREFILL_COMPUTE * compute),
            pull_s=2 * self.parameters / tp / PULL_RATE,
            push_s=2 * self.parameters / tp / PULL_RATE,
            train_gpu_s_per_token=self.train_s_per_token(self.train_operations),
        )

    def train_s_per_token(self, operations: float) -> float:
        """GPU-seconds of `operations` for each parameter and token, at the speed of training."""
        return operations * self.parameters / (self.train_part * self.gpu.flops)

    def sizes(self, longest: int) -> list[int]:
        """TP sizes whose KV cache has room for `longest` tokens, in ascending order."""
        powers = [1 << at for at in range(self.gpu.per_node.bit_length())]
        return [
            tp for tp in powers if tp <= self.gpu.per_node and self.kv_tokens(tp) >= longest + 1
        ]


QWEN25_7B = Model(name="qwen2.5-7b", parameters=7.62e9, layers=28, hidden=3584, kv_heads=4)
QWEN25_14B = Model(name="qwen2.5-14b", parameters=14.77e9, layers=48, hidden=5120, kv_heads=8)
QWEN25_32B = Model(name="qwen2.5-32b", parameters=32.76e9, layers=64, hidden=5120, kv_heads=8)
QWEN25_72B = Model(name="qwen2.5-72b", parameters=72.7e9, layers=80, hidden=8192, kv_heads=8)
LLAMA31_8B = Model(name="llama3.1-8b", parameters=8.03e9, layers=32, hidden=4096, kv_heads=8)
QWEN3_14B = Model(name="qwen3-14b", parameters=14.77e9, layers=40, hidden=5120, kv_heads=8)
MODELS = {
    each.name: each
    for each in (QWEN25_7B, QWEN25_14B, QWEN25_32B, QWEN25_72B, LLAMA31_8B, QWEN3_14B)
}
