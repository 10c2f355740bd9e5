"""Sizes of a model for the `megatron` backend, and whether a layout can cut them. Pure.

The backend runs dense decoders of the Llama family, and Mixture-of-Experts with Qwen3's block
(`qwen3_moe`). The router checks this before a worker starts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plexrl.errors import InvalidRequestError, LayoutError, UnsupportedModelError
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import ARCHITECTURES, size_of

ALIGNED_ELEMENTS = 16
"""A tensor's row must have a multiple of this many float32 elements, because a slice begins at a
multiple of 64 bytes (`plexrl.statemanager.layout.keys.ARENA_ALIGNMENT`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """A model's sizes and variants, as Megatron needs them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    """Width of a dense layer's MLP, or of one expert's."""
    vocabulary: int
    experts: int
    """Experts per layer; 0 in a dense model."""
    experts_per_token: int
    normalizes_top_k: bool
    """The weights of a token's experts are normalised to the sum 1."""
    has_qkv_bias: bool
    has_qk_norm: bool
    is_tied: bool
    """Input embedding and output layer are one parameter."""
    norm_eps: float


def dimensions(config: Mapping[str, Any]) -> Dimensions:
    """The sizes of the model with this configuration (`PretrainedConfig.to_dict()`).

    Raises:
        InvalidRequestError: the `megatron` backend does not run such a model, or a size is missing.
    """
    architecture = str(config.get("model_type"))
    _check_supported(architecture, config)
    is_moe = architecture == "qwen3_moe"
    heads = size_of(config, "num_attention_heads")
    hidden = size_of(config, "hidden_size")
    all_experts = config.get("num_local_experts")
    return Dimensions(
        layers=size_of(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=size_of(config, "num_key_value_heads", default=heads),
        head_dim=size_of(config, "head_dim", default=hidden // heads),
        mlp=size_of(config, "moe_intermediate_size" if is_moe else "intermediate_size"),
        vocabulary=size_of(config, "vocab_size"),
        experts=size_of(config, "num_experts", default=all_experts) if is_moe else 0,
        experts_per_token=size_of(config, "num_experts_per_tok") if is_moe else 0,
        normalizes_top_k=bool(config.get("norm_topk_prob", False)),
        has_qkv_bias=architecture == "qwen2",
        has_qk_norm=architecture.startswith("qwen3"),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        norm_eps=_norm_eps(config),
    )


def _norm_eps(config: Mapping[str, Any]) -> float:
    found = config.get("rms_norm_eps", 1e-6)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found < 1:
        raise InvalidRequestError(
            f"config.json: rms_norm_eps is {found!r}: give a number of at least 0 and below 1"
        )
    return float(found)


def check_cut(sizes: Dimensions, layout: Parallelism) -> None:
    """Raises `LayoutError`, naming the axis, if a layout cannot cut the model evenly."""
    for axis, name, size in (
        ("tp", "attention heads", sizes.heads),
        ("tp", "key and value heads", sizes.kv_heads),
        ("tp", "MLP columns", sizes.mlp),
        ("pp", "layers", sizes.layers),
    ):
        parts = getattr(layout, axis)
        if size % parts:
            raise LayoutError(
                f"parallelism.{axis} is {parts} and the model has {size} {name}: choose a "
                f"{axis} that divides {size}",
                field=axis,
            )
    if layout.tp > 1 and sizes.experts:
        raise LayoutError(
            f"parallelism.tp is {layout.tp} and the model has experts: Megatron needs sequence "
            "parallelism for that, which the megatron backend does not support; set tp to 1 and "
            "use ep",
            field="tp",
        )
    if layout.ep > 1 and (sizes.experts == 0 or sizes.experts % layout.ep):
        raise LayoutError(
            f"parallelism.ep is {layout.ep} and the model has {sizes.experts} experts in a layer: "
            "choose an ep that divides their number, 1 for a dense model",
            field="ep",
        )
    for name, size in (
        ("hidden size", sizes.hidden),
        ("head size", sizes.head_dim),
        ("MLP columns of one rank", sizes.mlp // layout.tp),
    ):
        if size % ALIGNED_ELEMENTS:
            raise LayoutError(
                f"the model's {name} is {size}: the megatron backend needs a multiple of "
                f"{ALIGNED_ELEMENTS}; use a smaller tp or backend fsdp",
                field="tp",
            )


def megatron_state_bytes(sizes: Dimensions, layout: Parallelism, parameters: int) -> int:
    """State bytes of all ranks together, for a model with `parameters` parameters.

    Every replica holds all its parameters and a buffer to reduce their gradients. The gradients and
    the two moments are sharded over the replicas.
    """
    expert_parameters = sizes.layers * sizes.experts * 3 * sizes.hidden * sizes.mlp
    replicas = layout.dp * layout.cp
    replica_bytes = 8 if replicas > 1 or layout.pp > 1 else 4
    copies = (parameters - expert_parameters) * replicas + expert_parameters * layout.expert_dp
    return replica_bytes * copies + 12 * parameters


def padded_vocabulary(sizes: Dimensions, layout: Parallelism) -> int:
    """Size of the vocabulary, padded to a multiple of the tensor ranks."""
    return -(-sizes.vocabulary // layout.tp) * layout.tp


def _check_supported(architecture: str, config: Mapping[str, Any]) -> None:
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"the megatron backend does not run architecture {architecture!r}: use one of "
            f"{', '.join(ARCHITECTURES)}",
            architecture=architecture,
            supported=list(ARCHITECTURES),
        )
    refused = {
        "attention_bias": architecture != "qwen2",
        "mlp_bias": True,
        "mlp_only_layers": True,
        "sliding_window": config.get("use_sliding_window", architecture == "mistral"),
    }
    for field, matters in refused.items():
        if matters and config.get(field):
            raise InvalidRequestError(
                f"the megatron backend does not run a model with {field}={config[field]!r}: "
                "use backend fsdp"
            )
    if config.get("hidden_act", "silu") != "silu" or config.get("decoder_sparse_step", 1) != 1:
        raise InvalidRequestError(
            "the megatron backend runs models whose activation is silu and whose layers are all "
            "alike: use backend fsdp"
        )
