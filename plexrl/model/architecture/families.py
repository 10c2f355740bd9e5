"""Table of model families: what each is made of, and which backends run it. Pure.

A family is a model type of `transformers`. `docs/models.md` shows the table and says how to add a
family.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Backend = Literal["fsdp", "megatron", "deepspeed", "forward", "torch", "vllm"]
"""Backends by name; `forward` is the backend of reference, teacher and reward deployments."""

EVERY: tuple[Backend, ...] = ("fsdp", "megatron", "deepspeed", "forward", "torch", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model type: a decoder of pre-norm blocks with rotary grouped-query attention and a gated
    MLP, or with experts instead of the MLP."""

    model_type: str
    backends: tuple[Backend, ...] = EVERY
    """Backends that run it; others refuse it by name."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Sizes of the configuration class, if it has others than `dimensions` would assume."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Options of the configuration that no backend computes, and why."""
    has_experts: bool = False
    expert_width: str = "intermediate_size"
    """Option of the configuration with the width of an expert's MLP."""
    qkv_bias: Literal["never", "always", "by option"] = "never"
    """Biases of queries, keys and values. By option: `attention_bias` of the configuration decides
    about these."""
    has_output_bias_option: bool = False
    """`attention_bias` decides about the bias of the attention's output too."""
    has_mlp_bias_option: bool = False
    """`mlp_bias` of the configuration decides about biases of the MLP."""
    has_qk_norm: bool = False
    """Queries and keys are normed, each head alone."""
    sandwich_norms: tuple[str, str, str] | None = None
    """Names of the norms of the attention's output, of the MLP's input and of its output. Absent:
    only inputs are normed, and outputs are added as they are."""
    norm_adds_one: bool = False
    """A norm multiplies by 1 + weight, and its initial weight is 0."""
    interleaves_rotation: bool = False
    """A rotation turns neighbouring elements of a head, instead of one of each half."""
    has_sinks: bool = False
    """Each query head has a logit of its own in its softmax, which takes weight from the tokens."""
    has_expert_biases: bool = False
    """Router and experts have biases."""
    has_linear_layers: bool = False
    """`layer_types` of the configuration may name layers of linear attention."""
    gates_attention: bool = False
    """Queries' matrix has as many rows more, for a gate of the attention's output."""
    has_shared_expert: bool = False
    """Besides a token's own experts one computes for all tokens."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """The attention of `transformers` with which trainers and forward deployments compute."""
    has_half_rotation: bool = False
    """The module of rotations returns one of two equal halves."""
    fuses_qkv: bool = False
    """Queries, keys and values have one matrix, `qkv_proj`."""
    fuses_gate_and_up: bool = False
    """Gate and up projection have one matrix, `gate_up_proj`."""


_GEMMA3_SIZES = {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
_GPT_OSS_SIZES = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}
_QWEN3_5_SIZES = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

_QWEN3_5 = Family(
    model_type="qwen3_5_text",
    backends=("fsdp", "deepspeed", "forward"),
    defaults=_QWEN3_5_SIZES,
    qkv_bias="by option",
    has_output_bias_option=True,
    has_qk_norm=True,
    norm_adds_one=True,
    has_linear_layers=True,
    gates_attention=True,
)

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="llama",
            qkv_bias="by option",
            has_output_bias_option=True,
            has_mlp_bias_option=True,
        ),
        Family(model_type="qwen2", qkv_bias="always"),
        Family(
            model_type="qwen3",
            qkv_bias="by option",
            has_output_bias_option=True,
            has_qk_norm=True,
        ),
        Family(model_type="mistral"),
        Family(
            model_type="gemma3_text",
            backends=("fsdp", "deepspeed", "forward", "torch"),
            defaults=_GEMMA3_SIZES,
            refused={
                "attn_logit_softcapping": "transformers leaves it out with PyTorch's attention",
                "use_bidirectional_attention": "a model that sees later tokens generates no text",
            },
            qkv_bias="by option",
            has_output_bias_option=True,
            has_qk_norm=True,
            sandwich_norms=(
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ),
            norm_adds_one=True,
        ),
        Family(
            model_type="glm4",
            backends=("fsdp", "deepspeed", "forward", "torch"),
            defaults={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
            qkv_bias="by option",
            sandwich_norms=(
                "post_self_attn_layernorm",
                "post_attention_layernorm",
                "post_mlp_layernorm",
            ),
            interleaves_rotation=True,
            fuses_gate_and_up=True,
        ),
        Family(
            model_type="phi3",
            backends=("fsdp", "deepspeed", "forward", "torch"),
            fuses_qkv=True,
            fuses_gate_and_up=True,
        ),
        _QWEN3_5,
        Family(
            model_type="qwen3_moe",
            backends=("fsdp", "megatron", "deepspeed", "forward", "torch"),
            has_experts=True,
            expert_width="moe_intermediate_size",
            qkv_bias="by option",
            has_output_bias_option=True,
            has_qk_norm=True,
        ),
        Family(
            model_type="mixtral",
            backends=("fsdp", "megatron", "deepspeed", "forward", "torch"),
            has_experts=True,
        ),
        Family(
            model_type="gpt_oss",
            backends=("fsdp", "deepspeed", "forward", "torch"),
            defaults=_GPT_OSS_SIZES,
            has_experts=True,
            qkv_bias="by option",
            has_output_bias_option=True,
            has_half_rotation=True,
            has_sinks=True,
            has_expert_biases=True,
            # Its attention has no sinks in PyTorch's.
            attention="eager",
        ),
        replace(
            _QWEN3_5,
            model_type="qwen3_5_moe_text",
            defaults={
                **_QWEN3_5_SIZES,
                "num_key_value_heads": 2,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
                "num_experts_per_tok": 8,
                "num_experts": 256,
            },
            has_experts=True,
            expert_width="moe_intermediate_size",
            has_shared_expert=True,
        ),
    )
}
"""All families by model type; dense ones first."""

ARCHITECTURES: tuple[str, ...] = tuple(FAMILIES)
"""Model types of `transformers` that some backend runs."""


def families_on(backend: Backend) -> tuple[str, ...]:
    """Model types that a backend runs."""
    return tuple([f.model_type for f in FAMILIES.values() if backend in f.backends])
