"""One rank of Megatron's GPT model for a Hugging Face configuration, on packed rows.

Its parameters are on `meta`; `plexrl.worker.training.megatron.model` gives them memory and values.
"""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from plexrl.errors import InvalidRequestError
from plexrl.model.architecture.cut import splits_tokens, stage_layers
from plexrl.model.architecture.dimensions import Dimensions
from plexrl.model.layout import padded_vocabulary
from plexrl.model.parallelism import Coordinates, Parallelism
from plexrl.model.spec import Head
from plexrl.worker.models import parameters_on_meta
from plexrl.worker.training.megatron.network.attention import PackedAttention
from plexrl.worker.training.megatron.network.experts import GroupedExperts
from plexrl.worker.training.megatron.network.norm import RowNorm
from plexrl.worker.training.megatron.network.scalar_head import ScalarHead


class GptNetwork(GPTModel):  # type: ignore[misc]  # megatron-core has no types
    """A GPT model whose input is `position_ids` `[1, T]` of packed rows, with a `RowMap` in place
    of the `attention_mask`."""

    def __init__(self, frequencies: torch.Tensor, **options: Any) -> None:
        super().__init__(position_embedding_type="none", **options)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def _preprocess(self, input_ids: Any, position_ids: Any, *args: Any, **options: Any) -> Any:
        found = super()._preprocess(input_ids, position_ids, *args, **options)
        # Megatron's own rotary embedding supports only one row that begins at position 0.
        angles = torch.outer(position_ids[0].float(), self.frequencies)
        rotary = torch.cat([angles, angles], dim=-1)[:, None, None, :]
        return (found[0], rotary, *found[2:])

    def _is_in_embd_group(self) -> bool:
        """False: both stages fill tied embeddings with the same bits, so none are exchanged."""
        return False


def make_network(
    sizes: Dimensions,
    layout: Parallelism,
    coordinates: Coordinates,
    rotary: Any,
    dtype: torch.dtype,
    head: Head,
) -> GptNetwork:
    """One rank's part of the model. `rotary` is the Hugging Face model's rotary embedding, and
    `dtype` that of parameters, activations and messages between pipeline stages. With a `head`
    other than `causal` the last stage gives one number for each token (`ScalarHead`).

    Raises:
        InvalidRequestError: the rotary embedding depends on the row's length.
    """
    if rotary.rope_type not in ("default", "linear", "llama3") or rotary.attention_scaling != 1.0:
        raise InvalidRequestError(
            f"the megatron backend does not run a rotary embedding of type {rotary.rope_type!r}: "
            "use default, linear or llama3, or backend fsdp"
        )
    if not hasattr(moe_utils, "te_general_gemm"):
        # megatron-core 0.16 compares this with None, but without Transformer Engine never sets it.
        moe_utils.te_general_gemm = None
    spec = get_gpt_layer_local_spec(
        num_experts=sizes.experts or None,
        qk_layernorm=sizes.has_qk_norm,
        normalization="RMSNorm",
    )
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if sizes.has_qk_norm:
        attention.q_layernorm = attention.k_layernorm = RowNorm
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RowNorm
    layers = len(stage_layers(sizes.layers, layout.pp)[coordinates.pp])
    if sizes.experts:
        spec.submodules.mlp.submodules.experts = GroupedExperts
    with parameters_on_meta():
        network = GptNetwork(
            rotary.inv_freq.float(),
            config=_transformer_config(sizes, layout, dtype),
            transformer_layer_spec=TransformerBlockSubmodules(
                layer_specs=[spec] * layers, layer_norm=RowNorm
            ),
            vocab_size=padded_vocabulary(sizes, layout),
            max_sequence_length=1,
            pre_process=coordinates.pp == 0,
            post_process=coordinates.pp == layout.pp - 1,
            share_embeddings_and_output_weights=sizes.is_tied and head == "causal",
        )
        if head != "causal" and network.post_process:
            network.output_layer = ScalarHead(network.config, network.pg_collection.tp)
    for parameter in network.parameters():
        # Megatron makes norms in float32.
        parameter.data = parameter.data.to(dtype)
    return network


def place_parameters(network: GptNetwork, device: torch.device) -> None:
    """Replace the parameters by zeros on the device, each of which takes the memory of one number,
    and move the buffers there. Megatron's attributes of parameters are kept."""
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                zeros = torch.zeros((), dtype=parameter.dtype, device=device)
                placed = torch.nn.Parameter(zeros.expand(parameter.shape))
                placed.__dict__.update(parameter.__dict__)
                module._parameters[name] = placed
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _transformer_config(
    sizes: Dimensions, layout: Parallelism, dtype: torch.dtype
) -> TransformerConfig:
    experts: dict[str, Any] = {}
    if sizes.experts:
        experts = {
            "num_moe_experts": sizes.experts,
            "moe_ffn_hidden_size": sizes.mlp,
            "moe_router_topk": sizes.experts_per_token,
            # Qwen3 takes the softmax over all experts, and may then normalise over the chosen ones.
            # That equals a softmax over the chosen experts' logits.
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
        # Parameters are placed and read later; otherwise Megatron would allocate them on a GPU.
        perform_initialization=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # Micro-batches differ in their number of tokens.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Losses are divided by the batch's denominator already, so Megatron must not average.
        calculate_per_token_loss=True,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
        sequence_parallel=splits_tokens(sizes, layout),
        pipeline_model_parallel_layout=_stages(sizes, layout),
        **experts,
    )


def _stages(sizes: Dimensions, layout: Parallelism) -> list[list[str]] | None:
    """The layers of each pipeline stage, in Megatron's words; None for one stage."""
    if layout.pp == 1:
        return None
    found = [["decoder"] * len(layers) for layers in stage_layers(sizes.layers, layout.pp)]
    found[0].insert(0, "embedding")
    found[-1].append("loss")
    return found
