"""Table of all backends and of what each supports. Pure.

The router checks requests against this table before a worker starts. The SDK's documentation shows
the same table.
"""

from dataclasses import dataclass

from plexrl.errors import (
    InvalidRequestError,
    LayoutError,
    UnsupportedDtypeError,
    UnsupportedModelError,
)
from plexrl.model.architecture.families import families_on
from plexrl.model.parallelism import Axis, Parallelism
from plexrl.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendCapabilities:
    """The layouts and models that one backend supports."""

    backend: str
    kind: str
    """`train`, `forward` or `rollout`."""
    axes: tuple[Axis, ...]
    """Axes whose size may exceed 1."""
    optimizers: tuple[str, ...]
    """Locations where it can keep an optimizer's state: `device`, `host`."""
    packs: bool
    """It packs rows end to end, in the micro-batches that the router forms. Otherwise it pads rows
    and forms micro-batches itself. Context parallelism needs packing."""
    dtypes: tuple[str, ...] = ("float32",)
    """Dtypes of weights that it supports, the default first."""
    adapter_axes: tuple[Axis, ...] | None = None
    """Axes whose size may exceed 1 with low-rank adapters; absent: no adapters."""
    compute_dtypes: tuple[str, ...] = ("float32",)
    """Train: dtypes of computation with float32 parameters, the default first."""
    checkpoints_activations: bool = False
    """Train: it can recompute activations instead of keeping them."""
    reduces_once: bool = False
    """Train: it can reduce gradients once for all micro-batches of a call."""
    switches_tp: bool = False
    """Rollout: the size of its tensor-parallel groups can change while it generates."""
    architectures: tuple[str, ...]
    """Model types that it runs."""


BACKENDS: tuple[BackendCapabilities, ...] = (
    BackendCapabilities(
        backend="fsdp",
        kind="train",
        architectures=families_on("fsdp"),
        axes=("dp", "tp"),
        optimizers=("device", "host"),
        packs=False,
        compute_dtypes=("float32", "bfloat16"),
        checkpoints_activations=True,
        reduces_once=True,
        adapter_axes=("dp",),
    ),
    BackendCapabilities(
        backend="megatron",
        kind="train",
        architectures=families_on("megatron"),
        axes=("dp", "tp", "pp", "cp", "ep"),
        optimizers=("device", "host"),
        packs=True,
        compute_dtypes=("float32", "bfloat16"),
        checkpoints_activations=True,
        reduces_once=True,
    ),
    BackendCapabilities(
        backend="deepspeed",
        kind="train",
        architectures=families_on("deepspeed"),
        axes=("dp",),
        optimizers=("device", "host"),
        packs=False,
        compute_dtypes=("float32", "bfloat16"),
        checkpoints_activations=True,
    ),
    BackendCapabilities(
        backend="torch",
        kind="forward",
        architectures=families_on("forward"),
        axes=("dp",),
        optimizers=(),
        packs=False,
        dtypes=("float32", "bfloat16"),
    ),
    BackendCapabilities(
        backend="megatron",
        kind="forward",
        architectures=families_on("megatron"),
        axes=("dp", "tp", "pp", "cp", "ep"),
        optimizers=(),
        packs=True,
        dtypes=("float32", "bfloat16"),
    ),
    BackendCapabilities(
        backend="torch",
        kind="rollout",
        architectures=families_on("torch"),
        axes=("dp", "tp"),
        optimizers=(),
        packs=False,
        adapter_axes=("dp",),
        dtypes=("float32", "bfloat16"),
        switches_tp=True,
    ),
    BackendCapabilities(
        backend="vllm",
        kind="rollout",
        architectures=families_on("vllm"),
        axes=("dp", "tp"),
        optimizers=(),
        packs=False,
        adapter_axes=("dp",),
        dtypes=("float32", "bfloat16"),
    ),
)
"""All backends; the first of each kind is the default."""


def backend_capabilities(kind: str, backend: str | None = None) -> BackendCapabilities:
    """The capabilities of a backend; by default of the kind's default backend.

    Raises:
        InvalidRequestError: this kind of deployment has no such backend.
    """
    known = [each for each in BACKENDS if each.kind == kind]
    for each in known:
        if backend in (None, each.backend):
            return each
    raise InvalidRequestError(
        f"there is no backend {backend!r} for a {kind} deployment: use "
        + (", ".join(each.backend for each in known) or "the kinds train, forward and rollout")
    )


def check_optimizer(capabilities: BackendCapabilities, optimizer: str) -> None:
    """Raises `InvalidRequestError` if the backend cannot keep an optimizer's state there."""
    if optimizer != "device" and optimizer not in capabilities.optimizers:
        able = ", ".join(each.backend for each in BACKENDS if optimizer in each.optimizers)
        raise InvalidRequestError(
            f"backend {capabilities.backend!r} of a {capabilities.kind} deployment cannot keep "
            f"optimizer state in {optimizer!r}: leave optimizer out, or use one of the backends "
            f"{able or 'none'}"
        )


def check_adapters(capabilities: BackendCapabilities, layout: Parallelism) -> None:
    """Raises `InvalidRequestError` if the backend has no low-rank adapters, and `LayoutError` if it
    has none on this layout."""
    rivals = [b for b in BACKENDS if b.kind == capabilities.kind and b.adapter_axes is not None]
    able = "; ".join(f"{b.backend}: {', '.join(b.adapter_axes or ()) or 'none'}" for b in rivals)
    if capabilities.adapter_axes is None:
        raise InvalidRequestError(
            f"backend {capabilities.backend!r} of a {capabilities.kind} deployment has no low-rank "
            f"adapters: leave lora out, or use a backend with adapters (axes by backend: "
            f"{able or 'none'})"
        )
    for axis in layout.axes_used():
        if axis not in capabilities.adapter_axes:
            raise LayoutError(
                f"parallelism.{axis} is {layout.size(axis)}, and backend {capabilities.backend!r} "
                f"supports low-rank adapters only without {axis}: set it to 1 (axes by backend: "
                f"{able})",
                field=axis,
                backend=capabilities.backend,
            )


def check_computation(
    capabilities: BackendCapabilities,
    compute_dtype: str,
    *,
    activation_checkpointing: bool,
    reduce_once: bool,
) -> None:
    """Raises `UnsupportedDtypeError` if the backend cannot train in this dtype, and
    `InvalidRequestError` if it cannot recompute activations, or reduce gradients once for all
    micro-batches of a call."""
    if compute_dtype not in capabilities.compute_dtypes:
        raise UnsupportedDtypeError(
            f"backend {capabilities.backend!r} of a {capabilities.kind} deployment trains in "
            f"{' or '.join(capabilities.compute_dtypes)}, not {compute_dtype}: choose one of these "
            "as compute_dtype",
            backend=capabilities.backend,
            dtype=compute_dtype,
        )
    if activation_checkpointing and not capabilities.checkpoints_activations:
        able = [each.backend for each in BACKENDS if each.checkpoints_activations]
        raise InvalidRequestError(
            f"backend {capabilities.backend!r} of a {capabilities.kind} deployment has no "
            f"activation_checkpointing: leave it out, or train with {' or '.join(able)}"
        )
    if reduce_once and not capabilities.reduces_once:
        able = [each.backend for each in BACKENDS if each.reduces_once]
        raise InvalidRequestError(
            f"backend {capabilities.backend!r} of a {capabilities.kind} deployment has no "
            f"reduce_once: leave it out, or train with {' or '.join(able)}"
        )


def check_layout(capabilities: BackendCapabilities, layout: Parallelism) -> None:
    """Raises `LayoutError` if the backend cannot run a layout, naming the backends that can."""
    for axis in layout.axes_used():
        if axis in capabilities.axes:
            continue
        rivals = [each for each in BACKENDS if each.kind == capabilities.kind]
        able = "; ".join(f"{rival.backend}: {', '.join(rival.axes) or 'none'}" for rival in rivals)
        raise LayoutError(
            f"parallelism.{axis} is {layout.size(axis)}, and backend {capabilities.backend!r} does "
            f"not support {axis}: set it to 1, or choose a backend that supports it (axes by "
            f"{capabilities.kind} backend: {able})",
            field=axis,
            backend=capabilities.backend,
        )


def check_architecture(capabilities: BackendCapabilities, model: ModelSpec) -> None:
    """Raises `UnsupportedModelError` if the backend does not run the model, naming the models that
    it runs and the backends that run this model."""
    named = model.model_type
    if named in capabilities.architectures:
        return
    able = [each for each in BACKENDS if named in each.architectures]
    elsewhere = "; ".join(f"{each.backend} ({each.kind})" for each in able)
    what = (
        "names no architecture (model_type)" if named is None else f"is of architecture {named!r}"
    )
    raise UnsupportedModelError(
        f"the model {what}, which backend {capabilities.backend!r} of a {capabilities.kind} "
        "deployment does not run: use one of "
        f"{', '.join(capabilities.architectures)}"
        + (f", or a backend that runs it: {elsewhere}" if elsewhere else ""),
        architecture=named,
        supported=list(capabilities.architectures),
        backend=capabilities.backend,
    )


def check_dtype(capabilities: BackendCapabilities, dtype: str) -> None:
    """Raises `UnsupportedDtypeError` if the backend does not support weights of this dtype."""
    if dtype not in capabilities.dtypes:
        raise UnsupportedDtypeError(
            f"backend {capabilities.backend!r} computes from weights in "
            f"{' or '.join(capabilities.dtypes)}, not {dtype}: choose one of these as dtype",
            backend=capabilities.backend,
            dtype=dtype,
        )
