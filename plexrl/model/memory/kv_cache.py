"""Size of a rollout's KV cache, computed before a process starts. Pure."""

from plexrl.errors import InvalidRequestError
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.spec import WEIGHT_BYTES

BLOCK_TOKENS = {"torch": 16, "vllm": 32}
"""Tokens per block, the unit of allocation, by rollout backend. vLLM's kernels for CPUs need
multiples of 32."""

KV_BYTES = 1 << 30
"""Default budget of the KV cache, unless all slots need less or one sequence needs more."""

GATHERED_BYTES_MAX = 256 << 20
"""Keys and values of one layer that a decode step in a CUDA graph may copy together. Longer steps
run without a graph: their kernels take longer than their launches."""


def kv_token_bytes(spec: DeploymentSpec) -> int:
    """Cache bytes per token on each worker. The model must be one that `parameter_count`
    supports."""
    sizes = spec.model.dimensions
    own_heads = -(-sizes.kv_heads // spec.shares)
    values = 2 * sizes.layers * own_heads * sizes.head_dim
    return values * WEIGHT_BYTES[spec.dtype]


def check_cache_budget(spec: DeploymentSpec) -> None:
    """Check the budget of a deployment's KV cache.

    Raises:
        InvalidRequestError: the longest sequence does not fit, or the deployment has no cache.
    """
    budget = spec.kv_cache_bytes
    if budget is None:
        return
    if spec.kind != "rollout":
        raise InvalidRequestError(
            f"kv_cache_bytes is {budget}, and a {spec.kind} deployment has no cache: leave it out"
        )
    block_tokens = BLOCK_TOKENS[spec.backend]
    blocks = -(-spec.max_sequence_tokens // block_tokens)
    least = blocks * block_tokens * kv_token_bytes(spec)
    if budget < least:
        raise InvalidRequestError(
            f"kv_cache_bytes is {budget}; one sequence of max_sequence_tokens "
            f"({spec.max_sequence_tokens}) needs {least} bytes on each worker: raise "
            "kv_cache_bytes or lower max_sequence_tokens",
            least=least,
        )
