"""Weights, gradients, optimizer, gathered parameters and KV cache of one rank. Pure.

The terms follow the arenas' layouts (`plexrl.worker.training.flat_state`, `…megatron.state`,
`…deepspeed.partitions`, `plexrl.worker.forward.hosted_layers`): every tensor begins at a multiple
of 64 bytes, and FSDP pads each part to the rows of its largest one.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

from plexrl.model.architecture.cut import reduces_gradients
from plexrl.model.architecture.dimensions import Dimensions
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.lora import adapter_parameter_count
from plexrl.model.memory.kv_cache import BLOCK_TOKENS, KV_BYTES, kv_token_bytes
from plexrl.model.spec import WEIGHT_BYTES, Head, output_parameters, parameter_count

ALIGNED_BYTES: Final = 64

LAYERWISE_PARAMETERS: Final = 50_000_000
"""Parameters above which FSDP gathers a model layer by layer. For a smaller model that costs more
than it saves."""

PREFETCHED_LAYERS: Final = 2
"""Layers that FSDP2 has gathered at once: one computes, the next is prefetched."""

BUCKET_ELEMENTS_MAX: Final = 50_000_000
"""Elements of the scratch buffer in which DeepSpeed reduces gradients during a backward. Its
default is ten times that, too much for a node with several tenants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTerms:
    """Bytes of one rank."""

    weights: int
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    """Copies of parameters in the form in which the model computes, and gradients that wait for a
    reduction."""
    kv_cache: int = 0
    start: int = 0
    """Bytes that a process that starts allocates besides the state, before it computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """Equal parameters of the model."""

    shape: tuple[int, ...]
    count: int
    tp_axis: int | None = None
    """The axis that tensor parallelism cuts; None: every tensor rank has the whole."""


def state_terms(spec: DeploymentSpec) -> StateTerms:
    """The terms of a deployment's fullest rank."""
    if spec.kind == "rollout":
        return _rollout(spec)
    if spec.kind == "forward":
        return _forward(spec)
    if spec.backend == "megatron":
        return _megatron(spec)
    if spec.backend == "deepspeed":
        return _deepspeed(spec)
    return _fsdp(spec)


def _fsdp(spec: DeploymentSpec) -> StateTerms:
    """FSDP2 (ZeRO-3): all state is sharded by rows; a layer's parameters are gathered in the dtype
    of the computation, for a small model all at once. With adapters the base has no gradients."""
    layout, sizes = spec.layout, spec.model.dimensions
    own = tensors(sizes, spec.model.head)
    shard = sum([_shard_bytes(each, layout.tp, layout.dp) * each.count for each in own])
    compute = WEIGHT_BYTES[spec.compute_dtype]
    parameters = parameter_count(spec.model)
    # Without other data ranks and a cast FSDP computes from the shard itself.
    copies = layout.dp > 1 or compute != 4
    most = parameters
    if parameters >= LAYERWISE_PARAMETERS:
        most = embedding_parameters(sizes, spec.model.head) + PREFETCHED_LAYERS * layer_parameters(
            sizes
        )
    gathered = most // layout.tp * compute if copies else 0
    trained = parameters
    if spec.lora is not None:
        trained = adapter_parameter_count(spec.model, spec.lora)
    if spec.reduce_once and layout.dp > 1:
        gathered += trained * 4 // layout.tp
    if spec.lora is None:
        return _trained(spec, shard, gathered)
    found = _trained(spec, trained * 4 // layout.dp, gathered)
    return StateTerms(
        weights=shard + found.weights,
        gradients=found.gradients,
        optimizer=found.optimizer,
        gathered=gathered,
    )


def _trained(spec: DeploymentSpec, shard: int, gathered: int) -> StateTerms:
    """Float32 parameters and gradients, two AdamW moments and a step count."""
    moments = 2 * shard + ALIGNED_BYTES if spec.optimizer == "device" else 0
    return StateTerms(weights=shard, gradients=shard, optimizer=moments, gathered=gathered)


def _deepspeed(spec: DeploymentSpec) -> StateTerms:
    """ZeRO-2: a rank owns an equal partition of the state; the model computes from a whole copy in
    the dtype of the computation, in which gradients are reduced in a bucket. ZeRO-Offload: the
    moments are in host memory. When a process starts, DeepSpeed copies the partition of that whole
    copy, then casts the copy to float32, before the arena takes its place."""
    parameters, compute = parameter_count(spec.model), WEIGHT_BYTES[spec.compute_dtype]
    partition = _up(-(-parameters * 4 // spec.layout.dp))
    bucket = min(parameters, BUCKET_ELEMENTS_MAX)
    copies = partition if compute == 4 else partition + partition // 4 * compute
    return replace(
        _trained(spec, partition, (parameters + bucket) * compute),
        start=parameters * compute + copies,
    )


def _megatron(spec: DeploymentSpec) -> StateTerms:
    """ZeRO-1: every replica has all parameters of its pipeline stage and tensor part, and if
    something is reduced a gradient buffer of that size; gradients and moments are sharded over the
    replicas. If the model computes in another dtype, every replica has the parameters in that one,
    and float32 parameters are sharded too. Experts have other replicas than dense layers
    (`plexrl.model.parallelism`)."""
    layout, sizes = spec.layout, spec.model.dimensions
    dense, own_experts = _megatron_rank(spec)
    replicas = layout.dp * layout.cp
    shares = (dense // replicas + own_experts // layout.expert_dp) * 4
    buffers = (dense + own_experts) * 4
    compute = WEIGHT_BYTES[spec.compute_dtype]
    return StateTerms(
        weights=buffers if compute == 4 else shares + buffers // 4 * compute,
        gradients=shares + (buffers if reduces_gradients(sizes, layout) else 0),
        optimizer=2 * shares + ALIGNED_BYTES if spec.optimizer == "device" else 0,
    )


def _megatron_rank(spec: DeploymentSpec) -> tuple[int, int]:
    """Parameters of the fullest rank: those outside of experts, and those of its experts."""
    layout, sizes = spec.layout, spec.model.dimensions
    experts = expert_parameters(sizes)
    # The first stage has the embedding and the last one the output layer, besides their layers.
    layers = -(-sizes.layers // layout.pp)
    dense_layers = (layer_parameters(sizes) - experts // sizes.layers) * layers
    ends = sizes.vocabulary * sizes.hidden
    if layout.pp == 1:
        ends += output_parameters(sizes, spec.model.head)
    dense = (dense_layers + ends + sizes.hidden) // layout.tp
    return dense, experts // sizes.layers * layers // layout.ep


def _forward(spec: DeploymentSpec) -> StateTerms:
    """Every data rank has all weights, or with hosted layers those outside of the layers and slots
    for `layers_on_device` of them. Megatron's ranks have their part."""
    sizes, each = spec.model.dimensions, WEIGHT_BYTES[spec.dtype]
    if spec.backend == "megatron":
        return StateTerms(weights=sum(_megatron_rank(spec)) * each)
    parameters = parameter_count(spec.model)
    slots = spec.layers_on_device
    if slots is not None and slots < sizes.layers:
        parameters -= (sizes.layers - slots) * layer_parameters(sizes)
    return StateTerms(weights=parameters * each // spec.shares)


def _rollout(spec: DeploymentSpec) -> StateTerms:
    """Each tensor rank has its part of the weights for the smallest group. With adapters both the
    frozen and the merged weights are kept. The KV cache has the blocks of the budget, or as
    many as the engine chooses."""
    weights = parameter_count(spec.model) * WEIGHT_BYTES[spec.dtype] // spec.shares
    if spec.lora is not None:
        weights = 2 * weights + adapter_parameter_count(spec.model, spec.lora) * 4
    block_tokens = BLOCK_TOKENS[spec.backend]
    block = block_tokens * kv_token_bytes(spec)
    row = -(-spec.max_sequence_tokens // block_tokens)
    if spec.kv_cache_bytes is None:
        blocks = min(max(KV_BYTES // block, row), spec.max_concurrent_samples * row)
    else:
        blocks = spec.kv_cache_bytes // block
    # One more is for padding.
    return StateTerms(weights=weights, kv_cache=(blocks + 1) * block)


# Parameters


def expert_parameters(sizes: Dimensions) -> int:
    """Parameters of all experts of all layers."""
    return sizes.layers * sizes.experts * 3 * sizes.hidden * sizes.mlp


def layer_parameters(sizes: Dimensions) -> int:
    """Parameters of one decoder layer."""
    found = [math.prod(each.shape) * each.count for each in _of_layers(sizes)]
    return sum(found) // sizes.layers


def embedding_parameters(sizes: Dimensions, head: Head) -> int:
    """Parameters of the embedding and the output layer."""
    return sizes.vocabulary * sizes.hidden + output_parameters(sizes, head)


def tensors(sizes: Dimensions, head: Head) -> list[_Tensor]:
    """The parameters of a decoder, as `transformers` has them."""
    hidden = sizes.hidden
    found = [
        *_of_layers(sizes),
        _Tensor(shape=(hidden,), count=1),
        _Tensor(shape=(sizes.vocabulary, hidden), count=1, tp_axis=0),
    ]
    if head != "causal":
        found.append(_Tensor(shape=(1, hidden), count=1))
    elif not sizes.is_tied:
        found.append(_Tensor(shape=(sizes.vocabulary, hidden), count=1, tp_axis=0))
    return found


def _of_layers(sizes: Dimensions) -> list[_Tensor]:
    hidden, layers = sizes.hidden, sizes.layers
    found = [
        *_of_attention(sizes),
        *_of_linear_attention(sizes),
        _Tensor(shape=(hidden,), count=sizes.layer_norms * layers),
    ]
    if sizes.has_mlp_bias:
        found.append(_Tensor(shape=(sizes.mlp,), count=2 * layers, tp_axis=0))
        found.append(_Tensor(shape=(hidden,), count=layers))
    if sizes.has_expert_biases:
        found.append(_Tensor(shape=(sizes.experts,), count=layers))
        found.append(_Tensor(shape=(sizes.experts, 2 * sizes.mlp), count=layers))
        found.append(_Tensor(shape=(sizes.experts, hidden), count=layers))
    if sizes.shared_expert:
        found.append(_Tensor(shape=(sizes.shared_expert, hidden), count=2 * layers))
        found.append(_Tensor(shape=(hidden, sizes.shared_expert), count=layers))
        found.append(_Tensor(shape=(1, hidden), count=layers))
    if sizes.experts:
        experts = sizes.experts
        found.append(_Tensor(shape=(experts, hidden), count=layers))
        found.append(_Tensor(shape=(experts, 2 * sizes.mlp, hidden), count=layers))
        found.append(_Tensor(shape=(experts, hidden, sizes.mlp), count=layers))
    else:
        if sizes.fuses_gate_and_up:
            found.append(_Tensor(shape=(2 * sizes.mlp, hidden), count=layers))
        else:
            found.append(_Tensor(shape=(sizes.mlp, hidden), count=2 * layers, tp_axis=0))
        found.append(_Tensor(shape=(hidden, sizes.mlp), count=layers, tp_axis=1))
    return found


def _of_attention(sizes: Dimensions) -> list[_Tensor]:
    hidden, layers = sizes.hidden, sizes.attention_layers
    outputs, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    queries = outputs * (2 if sizes.gates_attention else 1)
    found = [_Tensor(shape=(hidden, outputs), count=layers, tp_axis=1)]
    if sizes.fuses_qkv:
        found.append(_Tensor(shape=(queries + 2 * keys, hidden), count=layers))
    else:
        found.append(_Tensor(shape=(queries, hidden), count=layers, tp_axis=0))
        found.append(_Tensor(shape=(keys, hidden), count=2 * layers, tp_axis=0))
    if sizes.has_qkv_bias:
        found.append(_Tensor(shape=(queries,), count=layers, tp_axis=0))
        found.append(_Tensor(shape=(keys,), count=2 * layers, tp_axis=0))
    if sizes.has_output_bias:
        found.append(_Tensor(shape=(hidden,), count=layers))
    if sizes.has_qk_norm:
        found.append(_Tensor(shape=(sizes.head_dim,), count=2 * layers))
    if sizes.has_sinks:
        found.append(_Tensor(shape=(sizes.heads,), count=layers, tp_axis=0))
    return found


def _of_linear_attention(sizes: Dimensions) -> list[_Tensor]:
    linear, hidden = sizes.linear, sizes.hidden
    if linear is None:
        return []
    joint = 2 * linear.keys + linear.values
    shapes = [
        *((joint, hidden), (linear.values, hidden), (hidden, linear.values)),
        *((linear.value_heads, hidden),) * 2,
        (joint, 1, linear.kernel),
        *((linear.value_heads,),) * 2,
        (linear.value_head_dim,),
    ]
    return [_Tensor(shape=shape, count=linear.layers) for shape in shapes]


def _shard_bytes(tensor: _Tensor, tp: int, dp: int) -> int:
    """Float32 bytes of the largest part: cut by tensor ranks, then its rows by data ranks."""
    shape = list(tensor.shape)
    if tensor.tp_axis is not None:
        shape[tensor.tp_axis] = -(-shape[tensor.tp_axis] // tp)
    shape[0] = -(-shape[0] // dp)
    return _up(math.prod(shape) * 4)


def _up(nbytes: int) -> int:
    return -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
