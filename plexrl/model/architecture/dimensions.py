"""Sizes and variants of a decoder of the Llama family, from its configuration. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.model.architecture.families import FAMILIES, Family
from plexrl.wire.parameter_checks import short

SIZE_MAX = 2**31 - 1
"""Largest size of one dimension."""

EXPERT_UNIT = 8
"""Hidden size and width of an expert are multiples of this: rows of grouped matrix products begin
at multiples of 16 bytes, in bfloat16 too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Layers of a gated delta rule (Yang et al. 2025), which keep a matrix for each value head
    instead of keys and values."""

    layers: int
    keys: int
    """Size of all key heads."""
    values: int
    """Size of all value heads."""
    value_heads: int
    value_head_dim: int
    kernel: int
    """Tokens of the convolution before it."""


QUANTIZED = {"quantization_config": "weights are float32 or bfloat16"}
"""Refused in every family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """A model's sizes and variants."""

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
    has_output_bias: bool = False
    """The attention's output layer has a bias."""
    has_mlp_bias: bool = False
    has_qk_norm: bool
    linear: LinearAttention | None = None
    """Of some layers, instead of attention; absent: all layers have attention."""
    gates_attention: bool = False
    """The queries' matrix has as many rows more, for a gate."""
    shared_expert: int = 0
    """Width of an expert that computes for all tokens; 0: there is none."""
    has_sinks: bool = False
    """A logit of each query head besides those of the keys."""
    has_expert_biases: bool = False
    """Router and experts have biases."""
    layer_norms: int = 2
    """Norms of a layer over the hidden size."""
    fuses_qkv: bool = False
    """Queries, keys and values have one matrix."""
    fuses_gate_and_up: bool = False
    """Gate and up projection have one matrix."""
    is_tied: bool
    """Input embedding and output layer are one parameter."""
    norm_eps: float

    @property
    def attention_layers(self) -> int:
        """Layers with attention over keys and values."""
        return self.layers - (0 if self.linear is None else self.linear.layers)


def dimensions(config: Mapping[str, Any]) -> Dimensions:
    """The sizes of the model with this configuration (`PretrainedConfig.to_dict()`).

    Raises:
        InvalidRequestError: a size is missing or invalid, only some layers have experts, or an
            option is set that no backend computes.
    """
    architecture = str(config.get("model_type"))
    family = FAMILIES.get(architecture, Family(model_type=architecture))
    _check_options(config, family)
    config = {**family.defaults, **config}
    is_moe = family.has_experts
    is_biased = family.qkv_bias == "by option" and bool(config.get("attention_bias", False))
    hidden = size_of(config, "hidden_size")
    heads = size_of(config, "num_attention_heads")
    found = Dimensions(
        layers=size_of(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=size_of(config, "num_key_value_heads", default=heads),
        head_dim=size_of(config, "head_dim", default=hidden // heads),
        mlp=size_of(config, family.expert_width),
        vocabulary=size_of(config, "vocab_size"),
        experts=_experts(config) if is_moe else 0,
        experts_per_token=size_of(config, "num_experts_per_tok") if is_moe else 0,
        normalizes_top_k=bool(config.get("norm_topk_prob", architecture == "mixtral")),
        has_qkv_bias=is_biased or family.qkv_bias == "always",
        has_output_bias=is_biased and family.has_output_bias_option,
        has_mlp_bias=family.has_mlp_bias_option and bool(config.get("mlp_bias", False)),
        has_qk_norm=family.has_qk_norm,
        linear=_linear_attention(config) if family.has_linear_layers else None,
        gates_attention=family.gates_attention,
        shared_expert=(
            size_of(config, "shared_expert_intermediate_size") if family.has_shared_expert else 0
        ),
        has_sinks=family.has_sinks,
        has_expert_biases=family.has_expert_biases,
        layer_norms=4 if family.sandwich_norms else 2,
        fuses_qkv=family.fuses_qkv,
        fuses_gate_and_up=family.fuses_gate_and_up,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        norm_eps=config.get("rms_norm_eps", 1e-6),
    )
    if is_moe:
        _check_experts(config, found)
    return found


def size_of(config: Mapping[str, Any], name: str, *, default: object = None) -> int:
    """A size in a model's configuration; `default` if it is missing or 0.

    Raises:
        InvalidRequestError: the size is missing, or is not a whole number above 0.
    """
    found = config.get(name) or default
    if isinstance(found, int) and not isinstance(found, bool) and 0 < found <= SIZE_MAX:
        return found
    given = f"is {short(config[name])}" if name in config else "is missing"
    raise InvalidRequestError(
        f"{name} of the model's configuration {given}: it must be a whole number, at least 1",
        parameter=name,
    )


def _check_options(config: Mapping[str, Any], family: Family) -> None:
    for option, reason in {**QUANTIZED, **family.refused}.items():
        if config.get(option):
            raise InvalidRequestError(
                f"the model's configuration has {option}={short(config[option])}, which no backend "
                f"computes ({reason}): use a model without it",
                parameter=option,
            )


def _linear_attention(config: Mapping[str, Any]) -> LinearAttention | None:
    count = size_of(config, "num_hidden_layers")
    interval = size_of(config, "full_attention_interval", default=4)
    kinds = config.get("layer_types") or [
        "full_attention" if (index + 1) % interval == 0 else "linear_attention"
        for index in range(count)
    ]
    layers = list(kinds).count("linear_attention")
    if not layers:
        return None
    key_heads, value_heads = (size_of(config, f"linear_num_{of}_heads") for of in ("key", "value"))
    return LinearAttention(
        layers=layers,
        keys=key_heads * size_of(config, "linear_key_head_dim"),
        values=value_heads * size_of(config, "linear_value_head_dim"),
        value_heads=value_heads,
        value_head_dim=size_of(config, "linear_value_head_dim"),
        kernel=size_of(config, "linear_conv_kernel_dim"),
    )


def _experts(config: Mapping[str, Any]) -> int:
    # `transformers` gives both families' number of experts the second name when it saves them.
    name = "num_experts" if config.get("num_experts") else "num_local_experts"
    return size_of(config, name)


def _check_experts(config: Mapping[str, Any], sizes: Dimensions) -> None:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise InvalidRequestError(
            "the model has layers with experts and layers without (mlp_only_layers, "
            "decoder_sparse_step): use a model whose layers all have experts"
        )
    if sizes.experts_per_token > sizes.experts:
        raise InvalidRequestError(
            f"num_experts_per_tok is {sizes.experts_per_token} and the model has {sizes.experts} "
            "experts in a layer: a token's experts are some of them",
            parameter="num_experts_per_tok",
        )
    for what, size in (("hidden size", sizes.hidden), ("experts' width", sizes.mlp)):
        if size % EXPERT_UNIT:
            raise InvalidRequestError(
                f"the model's {what} is {size}: grouped matrix products of experts need a multiple "
                f"of {EXPERT_UNIT}"
            )
