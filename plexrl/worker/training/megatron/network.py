"""Megatron's GPT model for a Hugging Face configuration, one rank of it, with packed rows.

Its parameters are as they were allocated; `plexrl.worker.training.megatron.state` fills them.
"""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

from plexrl.errors import InvalidRequestError
from plexrl.model.megatron_dimensions import Dimensions, padded_vocabulary
from plexrl.model.parallelism import Coordinates, Parallelism
from plexrl.worker.training.megatron.attention import PackedAttention


class Network(GPTModel):  # type: ignore[misc]  # megatron-core has no types
    """Takes `position_ids` `[1, T]` of packed rows, and a `RowMap` as `attention_mask`."""

    def __init__(self, frequencies: torch.Tensor, **options: Any) -> None:
        super().__init__(position_embedding_type="none", **options)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def _preprocess(self, input_ids: Any, position_ids: Any, *args: Any, **options: Any) -> Any:
        found = super()._preprocess(input_ids, position_ids, *args, **options)
        # Megatron's own rotary embedding knows one row from its beginning, not many end to end.
        angles = torch.outer(position_ids[0].float(), self.frequencies)
        rotary = torch.cat([angles, angles], dim=-1)[:, None, None, :]
        return (found[0], rotary, *found[2:])

    def _is_in_embd_group(self) -> bool:
        """No: tied embeddings get the same bits on both stages, so none are exchanged here."""
        return False


def make_network(
    sizes: Dimensions, layout: Parallelism, place: Coordinates, rotary: Any
) -> Network:
    """One rank's part. `rotary` is the Hugging Face model's rotary embedding.

    Raises:
        InvalidRequestError: the rotary embedding changes with the row's length.
    """
    if rotary.rope_type not in ("default", "linear", "llama3") or rotary.attention_scaling != 1.0:
        raise InvalidRequestError(
            f"the megatron backend does not run a rotary embedding of type {rotary.rope_type!r}: "
            "use default, linear or llama3, or backend fsdp"
        )
    if not hasattr(moe_utils, "te_general_gemm"):
        # megatron-core 0.16 asks whether it is None, and without Transformer Engine never says so.
        moe_utils.te_general_gemm = None
    spec = get_gpt_layer_local_spec(
        num_experts=sizes.experts or None,
        qk_layernorm=sizes.has_qk_norm,
        normalization="RMSNorm",
    )
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return Network(
        rotary.inv_freq.float(),
        config=_transformer_config(sizes, layout),
        transformer_layer_spec=spec,
        vocab_size=padded_vocabulary(sizes, layout),
        max_sequence_length=1,
        pre_process=place.pp == 0,
        post_process=place.pp == layout.pp - 1,
        share_embeddings_and_output_weights=sizes.is_tied,
    )


def _transformer_config(sizes: Dimensions, layout: Parallelism) -> TransformerConfig:
    experts: dict[str, Any] = {}
    if sizes.experts:
        experts = {
            "num_moe_experts": sizes.experts,
            "moe_ffn_hidden_size": sizes.mlp,
            "moe_router_topk": sizes.experts_per_token,
            # Qwen3 takes the softmax over all experts and then, where it normalizes, over those
            # chosen; a softmax over the chosen ones' logits is the same.
            "moe_router_pre_softmax": not sizes.normalizes_top_k,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
        }
    return TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.kv_heads,
        kv_channels=sizes.head_dim,
        ffn_hidden_size=sizes.mlp,
        normalization="RMSNorm",
        layernorm_epsilon=sizes.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=sizes.has_qkv_bias,
        qk_layernorm=sizes.has_qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # The bits come from the Hugging Face model.
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        # Micro-batches differ in their tokens.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Losses come divided by the batch's denominator: nothing is to be averaged.
        calculate_per_token_loss=True,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.tp,
        **experts,
    )
