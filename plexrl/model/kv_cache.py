"""What a rollout's cache of keys and values takes, known before a process is started. Pure."""

from plexrl.errors import InvalidRequestError
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.spec import WEIGHT_BYTES

BLOCK_TOKENS = 16
"""Tokens of a block: the cache is handed out in these."""


def kv_token_bytes(spec: DeploymentSpec) -> int:
    """Bytes of one token on each worker. The model must be one that `parameter_count` knows."""
    config = spec.model.config
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    own_heads = -(-kv_heads // spec.layout.tp)
    values = 2 * int(config["num_hidden_layers"]) * own_heads * head_dim
    return values * WEIGHT_BYTES[spec.dtype]


def check_cache_budget(spec: DeploymentSpec) -> None:
    """Refuse a budget that one sequence of the deployment's length would not fit into.

    Raises:
        InvalidRequestError: or of a deployment that keeps no cache.
    """
    budget = spec.kv_cache_bytes
    if budget is None:
        return
    if spec.kind != "rollout":
        raise InvalidRequestError(
            f"kv_cache_bytes is {budget} and a {spec.kind} deployment keeps no cache: leave it out"
        )
    blocks = -(-spec.max_sequence_tokens // BLOCK_TOKENS)
    least = blocks * BLOCK_TOKENS * kv_token_bytes(spec)
    if budget < least:
        raise InvalidRequestError(
            f"kv_cache_bytes is {budget}; one sequence of max_sequence_tokens "
            f"({spec.max_sequence_tokens}) takes {least} bytes on each worker: raise the budget or "
            "lower max_sequence_tokens",
            least=least,
        )
