"""Tensor parallelism of a `transformers` decoder of the Llama family, with DTensor.

Attention is cut by heads, the MLP by its inner dimension, embedding and head by the vocabulary.
Between these layers every tensor rank has the whole activations, with one all-reduce after
attention and one after the MLP. Every tensor rank computes the parts that are not cut (norms,
biases of outputs) from the same activations, so replicas stay bit-equal.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from plexrl.statemanager.layout.boxes import Box
from plexrl.worker.models import named_parameters

HEADS_DIM = 2
"""Dimension of the heads in the input of head norms: [rows, tokens, heads, head_dim]."""
GEMMA_HEADS_DIM = 1
"""Dimension of the heads in Gemma, which swaps tokens and heads before the norms."""


def parallelize(model: Any, mesh: DeviceMesh) -> None:
    """Cut a model over a one-dimensional mesh, in place; tied weights stay tied."""
    decoder: Any = model.model
    scale = getattr(decoder.embed_tokens, "embed_scale", None)
    if scale is not None:
        # A factor of one tensor rank's partial embeddings is no DTensor: multiply their sum.
        decoder.embed_tokens.forward = partial(nn.Embedding.forward, decoder.embed_tokens)
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate())
    }
    tied = False
    if hasattr(model, "lm_head"):
        # Every tensor rank has a whole value head: one row is not cut.
        plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1))
        tied = model.lm_head.weight is decoder.embed_tokens.weight
    parallelize_module(model, mesh, plan)
    if scale is not None:
        decoder.embed_tokens.register_forward_hook(partial(_scaled, scale))
    if tied:
        # Both are cut by the vocabulary, so they are the same shard; each was copied.
        model.lm_head.weight = decoder.embed_tokens.weight
    for layer in decoder.layers:
        parallelize_module(layer, mesh, _layer_plan(layer, model.config))


def local_box(parameter: torch.Tensor) -> Box:
    """This rank's part of a parameter, before it is sharded over data-parallel ranks."""
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Box(offset=(0,) * len(shape), shape=shape)
    (placement,) = parameter.placements
    offset, extent = [0] * len(shape), list(shape)
    if isinstance(placement, Shard):
        rank, ranks = parameter.device_mesh.get_local_rank(), parameter.device_mesh.size()
        chunk = -(-shape[placement.dim] // ranks)
        offset[placement.dim] = min(rank * chunk, shape[placement.dim])
        extent[placement.dim] = parameter.to_local().shape[placement.dim]
    return Box(offset=tuple(offset), shape=tuple(extent))


def cut_parameters(model: nn.Module) -> frozenset[str]:
    """The parameters that are cut, so that each tensor rank holds another part."""
    return frozenset(
        name
        for name, parameter in named_parameters(model)
        if isinstance(parameter, DTensor) and parameter.placements[0].is_shard()
    )


def _scaled(scale: torch.Tensor, module: Any, _: Any, output: torch.Tensor) -> torch.Tensor:
    return output * scale.to(module.weight.dtype)


def _layer_plan(layer: Any, config: Any) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        # One all-reduce of gradients for all projections of an input, instead of one for each.
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Replicate()},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
        "mlp": PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
        ),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    is_gemma = config.model_type == "gemma3_text"
    for name in ("q_norm", "k_norm"):
        if hasattr(layer.self_attn, name):
            # Each rank norms its own heads with the same weights; this style sums their gradients.
            plan[f"self_attn.{name}"] = SequenceParallel(
                sequence_dim=GEMMA_HEADS_DIM if is_gemma else HEADS_DIM, use_local_output=True
            )
    return plan
