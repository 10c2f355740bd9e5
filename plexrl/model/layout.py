"""Whether a backend can run a model on a layout: tensor ranks, and the `megatron` backend. Pure.

The router checks this before a worker starts. The `megatron` backend runs dense decoders of the
Llama family, and those with experts (`qwen3_moe`, `mixtral`).
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from plexrl.errors import InvalidRequestError, LayoutError, UnsupportedModelError
from plexrl.model.architecture.cut import reduces_gradients
from plexrl.model.architecture.dimensions import Dimensions, dimensions
from plexrl.model.architecture.families import families_on
from plexrl.model.capabilities import (
    BACKENDS,
    backend_capabilities,
    check_adapters,
    check_layout,
)
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.memory.kv_cache import check_cache_budget
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import WEIGHT_BYTES, ModelSpec

ALIGNED_ELEMENTS = 16
"""A tensor's row must have a multiple of this many float32 elements, because a slice begins at a
multiple of 64 bytes (`plexrl.statemanager.layout.keys.ARENA_ALIGNMENT`)."""


def check_tensor_parallel(model: ModelSpec, layout: Parallelism) -> None:
    """Check that every tensor rank gets whole heads, a part of the MLP and of the vocabulary.
    Experts are whole.

    Raises:
        LayoutError: `tp` does not divide the query or key-value heads, or a rank would get no part
            of the MLP or of the vocabulary, or the model has joint matrices.
        InvalidRequestError: the configuration lacks a size.
    """
    if layout.tp == 1:
        return
    sizes = model.dimensions
    if sizes.fuses_qkv or sizes.fuses_gate_and_up:
        raise LayoutError(
            f"parallelism.tp is {layout.tp} and architecture {model.model_type!r} has one matrix "
            "for several projections, which tensor ranks do not cut: set tp to 1, and use dp",
            field="tp",
        )
    if sizes.gates_attention or sizes.linear is not None:
        raise LayoutError(
            f"parallelism.tp is {layout.tp} and architecture {model.model_type!r} has linear "
            "attention, which tensor ranks do not cut: set tp to 1, and use dp",
            field="tp",
        )
    heads, kv_heads = sizes.heads, sizes.kv_heads
    for name, count in (("num_attention_heads", heads), ("num_key_value_heads", kv_heads)):
        if count % layout.tp:
            raise LayoutError(
                f"parallelism.tp is {layout.tp} and the model's {name} is {count}: tp must divide "
                f"the number of heads; use {_best(layout.tp, heads, kv_heads)} and a larger size "
                "of another axis",
                field="tp",
            )
    cut = [("vocab_size", sizes.vocabulary)]
    if not sizes.experts:
        cut.append(("intermediate_size", sizes.mlp))
    for name, size in cut:
        # All parts have equal size, except a smaller last one.
        if -(-size // layout.tp) * (layout.tp - 1) >= size:
            raise LayoutError(
                f"parallelism.tp is {layout.tp} and the model's {name} is {size}: the last rank "
                "would get no part of it; lower tp",
                field="tp",
            )


def check_equal_parts(model: ModelSpec, layout: Parallelism) -> None:
    """Check that all tensor ranks of an engine get equal shapes. After `check_tensor_parallel`.

    Raises:
        LayoutError: `tp` does not divide the MLP's columns, or the experts, of which each tensor
            rank has its own.
    """
    sizes = model.dimensions
    columns = sizes.mlp
    if sizes.experts % layout.tp:
        raise LayoutError(
            f"parallelism.tp is {layout.tp} and the model has {sizes.experts} experts in a layer: "
            "every tensor rank has as many; choose a tp that divides their number",
            field="tp",
        )
    if not sizes.experts and columns % layout.tp:
        raise LayoutError(
            f"parallelism.tp is {layout.tp} and the model's intermediate_size is {columns}: the "
            "ranks of a rollout have parts of equal size; choose a tp that divides it",
            field="tp",
        )


def check_trained_experts(model: ModelSpec, layout: Parallelism, backend: str) -> None:
    """Check that a training backend runs a model with experts on tensor ranks. Only Megatron does,
    whose sequence parallelism gives each tensor rank other tokens between the cut matrices.

    Raises:
        LayoutError: `tp` is above 1, the model has experts, and the backend is another one.
    """
    if layout.tp > 1 and model.dimensions.experts and backend != "megatron":
        other = ", or use backend megatron" if model.model_type in families_on("megatron") else ""
        raise LayoutError(
            f"parallelism.tp is {layout.tp} and the model has experts, which backend {backend!r} "
            f"does not combine: set tp to 1{other}",
            field="tp",
        )


def check_tp_sizes(spec: DeploymentSpec) -> None:
    """Check the sizes between which an engine's tensor-parallel groups switch. After
    `check_tensor_parallel`, since what `tp` divides, its divisors divide too.

    Raises:
        InvalidRequestError: the backend's groups cannot change while it generates.
        LayoutError: a size does not divide the next, or the last is not `tp`.
    """
    sizes = spec.tp_sizes
    if not sizes:
        return
    able = [b.backend for b in BACKENDS if b.kind == spec.kind and b.switches_tp]
    if spec.backend not in able:
        raise InvalidRequestError(
            f"tp_sizes is {list(sizes)}, and the tensor-parallel groups of backend "
            f"{spec.backend!r} of a {spec.kind} deployment do not change: leave it out"
            + (f", or use backend {' or '.join(able)}" if able else ""),
            parameter="tp_sizes",
        )
    pairs = pairwise(sizes)
    if len(sizes) < 2 or sizes[0] < 1 or any(b <= a or b % a for a, b in pairs):
        raise LayoutError(
            f"tp_sizes is {list(sizes)}: give at least two ascending sizes, of which each divides "
            "the next, such as [1, 2, 4]",
            field="tp_sizes",
        )
    if sizes[-1] != spec.layout.tp:
        raise LayoutError(
            f"tp_sizes is {list(sizes)} and parallelism.tp is {spec.layout.tp}: the largest group "
            f"has all tensor-parallel ranks of an engine; set parallelism.tp to {sizes[-1]}, or "
            f"end tp_sizes with {spec.layout.tp}",
            field="tp_sizes",
        )


def with_layout(spec: DeploymentSpec, layout: Parallelism) -> DeploymentSpec:
    """The specification of a rollout deployment whose ranks have another layout.

    Raises:
        LayoutError: the layout has another number of ranks, or the backend cannot run it, or its
            `tp` is not the largest of `tp_sizes`.
        InvalidRequestError: it is no rollout deployment, or one sequence does not fit into the KV
            cache.
    """
    if spec.kind != "rollout":
        raise InvalidRequestError(
            f"this is a {spec.kind} deployment: only the layout of a rollout deployment can change"
        )
    if layout.world_size != spec.workers:
        raise LayoutError(
            f"{layout.describe()} needs {layout.world_size} workers (dp·tp·pp·cp), and the "
            f"deployment has {spec.workers}: give a layout of as many",
            field="workers",
        )
    capabilities = backend_capabilities(spec.kind, spec.backend)
    check_layout(capabilities, layout)
    check_tensor_parallel(spec.model, layout)
    check_equal_parts(spec.model, layout)
    if spec.lora is not None:
        check_adapters(capabilities, layout)
    changed = replace(spec, parallelism=layout)
    check_tp_sizes(changed)
    check_cache_budget(changed)
    return changed


def _best(requested: int, heads: int, kv_heads: int) -> int:
    """The largest valid `tp` up to `requested`."""
    return max(n for n in range(1, requested + 1) if heads % n == 0 and kv_heads % n == 0)


def megatron_dimensions(config: Mapping[str, Any]) -> Dimensions:
    """The sizes of the model with this configuration (`PretrainedConfig.to_dict()`).

    Raises:
        InvalidRequestError: the `megatron` backend does not run such a model, or a size is missing.
    """
    _check_supported(str(config.get("model_type")), config)
    sizes = dimensions(config)
    eps = sizes.norm_eps
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < 1:
        raise InvalidRequestError(
            f"config.json: rms_norm_eps is {eps!r}: give a number of at least 0 and below 1"
        )
    return sizes


def check_cut(sizes: Dimensions, layout: Parallelism, dtype: str = "float32") -> None:
    """Raises `LayoutError`, naming the axis, if a layout cannot cut the model evenly, with weights
    in `dtype`."""
    for axis, name, size in (
        ("tp", "attention heads", sizes.heads),
        ("tp", "key and value heads", sizes.kv_heads),
        ("tp", "MLP columns", 0 if sizes.experts else sizes.mlp),
    ):
        parts = getattr(layout, axis)
        if size % parts:
            raise LayoutError(
                f"parallelism.{axis} is {parts} and the model has {size} {name}: choose a "
                f"{axis} that divides {size}",
                field=axis,
            )
    if layout.pp > sizes.layers:
        raise LayoutError(
            f"parallelism.pp is {layout.pp} and the model has {sizes.layers} layers: every stage "
            f"needs one; choose a pp of at most {sizes.layers}",
            field="pp",
        )
    if layout.ep > 1 and (sizes.experts == 0 or sizes.experts % layout.ep):
        raise LayoutError(
            f"parallelism.ep is {layout.ep} and the model has {sizes.experts} experts in a layer: "
            "choose an ep that divides their number, 1 for a dense model",
            field="ep",
        )
    aligned = ALIGNED_ELEMENTS * WEIGHT_BYTES["float32"] // WEIGHT_BYTES[dtype]
    for name, size in (
        ("hidden size", sizes.hidden),
        ("head size", sizes.head_dim),
        ("MLP columns of one rank", sizes.mlp // (1 if sizes.experts else layout.tp)),
    ):
        if size % aligned:
            raise LayoutError(
                f"the model's {name} is {size}: the megatron backend needs a multiple of "
                f"{aligned} with weights in {dtype}; use a smaller tp or another backend",
                field="tp",
            )


def megatron_state_bytes(
    sizes: Dimensions, layout: Parallelism, parameters: int, compute_dtype: str = "float32"
) -> int:
    """State bytes of all ranks together, for a model with `parameters` parameters.

    Every replica holds all its parameters and a buffer to reduce their gradients. The gradients and
    the two moments are sharded over the replicas, and so are float32 parameters if the model
    computes in another dtype.
    """
    replica_bytes = WEIGHT_BYTES[compute_dtype]
    sharded_bytes = 12 if replica_bytes == 4 else 16
    if reduces_gradients(sizes, layout):
        replica_bytes += 4
    copies = megatron_copies(sizes, layout, parameters)
    return replica_bytes * copies + sharded_bytes * parameters


def megatron_copies(sizes: Dimensions, layout: Parallelism, parameters: int) -> int:
    """Parameters of all ranks together, for a model with `parameters` parameters."""
    experts = sizes.layers * sizes.experts * 3 * sizes.hidden * sizes.mlp
    return (parameters - experts) * layout.dp * layout.cp + experts * layout.expert_dp


def padded_vocabulary(sizes: Dimensions, layout: Parallelism) -> int:
    """Size of the vocabulary, padded to a multiple of the tensor ranks."""
    return -(-sizes.vocabulary // layout.tp) * layout.tp


def _check_supported(architecture: str, config: Mapping[str, Any]) -> None:
    supported = families_on("megatron")
    if architecture not in supported:
        raise UnsupportedModelError(
            f"the megatron backend does not run architecture {architecture!r}: use one of "
            f"{', '.join(supported)}",
            architecture=architecture,
            supported=list(supported),
        )
    refused = {
        "attention_bias": architecture != "qwen2",
        "mlp_bias": True,
        "sliding_window": config.get("use_sliding_window", architecture in ("mistral", "mixtral")),
    }
    for field, matters in refused.items():
        if matters and config.get(field):
            raise InvalidRequestError(
                f"the megatron backend does not run a model with {field}={config[field]!r}: "
                "use backend fsdp"
            )
    if config.get("hidden_act", "silu") != "silu":
        raise InvalidRequestError(
            "the megatron backend runs models whose activation is silu: use backend fsdp"
        )
