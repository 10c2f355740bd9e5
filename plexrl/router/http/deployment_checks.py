"""Checks of a deployment request, and the specification that results. Pure."""

from bisect import bisect_right
from dataclasses import replace
from typing import Any

from plexrl.errors import InvalidRequestError, LayoutError, ModelDoesNotFitError
from plexrl.latency.pace import parse_pace
from plexrl.model.architecture.dimensions import Dimensions
from plexrl.model.capabilities import (
    backend_capabilities,
    check_adapters,
    check_architecture,
    check_computation,
    check_dtype,
    check_layout,
    check_optimizer,
)
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.layout import (
    check_cut,
    check_equal_parts,
    check_tensor_parallel,
    check_tp_sizes,
    check_trained_experts,
    megatron_copies,
    megatron_dimensions,
    megatron_state_bytes,
)
from plexrl.model.lora import LoraSpec, adapter_parameter_count
from plexrl.model.memory.device_memory import device_memory
from plexrl.model.memory.kv_cache import BLOCK_TOKENS, check_cache_budget, kv_token_bytes
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import (
    TRAIN_BYTES_PER_PARAMETER,
    WEIGHT_BYTES,
    ModelSpec,
    parameter_count,
)
from plexrl.router.http.schemas import DeploymentRequest, LoraRequest

SEQUENCE_TOKENS_DEFAULT = 8192
SCHEDULED_NAME_MAX = 80
"""A checkpoint's name has at most 100 characters; `-step-` and a number follow."""
"""Most tokens of a row whose deployment names no bound. Models have up to a million positions, and
a row of that length fits few GPUs."""


def check_deployment(body: DeploymentRequest) -> tuple[DeploymentSpec, int]:
    """Return the deployment's specification and its model's parameter count.

    Raises:
        InvalidRequestError: the backend does not exist, or the model cannot be built.
        LayoutError: the layout is invalid, does not match `workers`, or the backend cannot run it.
    """
    model = ModelSpec(**body.model.model_dump())
    if (model.path is None) == (model.architecture is None):
        raise InvalidRequestError("a model has either a path or an architecture: give one of them")
    capabilities = backend_capabilities(body.kind, body.backend or None)
    check_architecture(capabilities, model)
    parameters = parameter_count(model)
    layout = _layout(body)
    check_layout(capabilities, layout)
    check_optimizer(capabilities, body.optimizer)
    check_dtype(capabilities, body.dtype)
    check_computation(
        capabilities,
        body.compute_dtype,
        activation_checkpointing=body.activation_checkpointing,
        reduce_once=body.reduce_once,
    )
    _check_kind(body, model, layout, capabilities.backend)
    lora = None
    if body.lora is not None:
        check_adapters(capabilities, layout)
        lora = LoraSpec(**_lora_fields(body.lora))
        adapter_parameter_count(model, lora)
    if capabilities.backend == "megatron":
        check_cut(_dimensions(model), layout, body.dtype)
    spec = DeploymentSpec(
        model=model,
        kind=body.kind,
        backend=capabilities.backend,
        workers=layout.world_size,
        parallelism=layout,
        tp_sizes=body.tp_sizes,
        optimizer=body.optimizer,
        dtype=body.dtype,
        lora=lora,
        compute_dtype=body.compute_dtype,
        activation_checkpointing=body.activation_checkpointing,
        reduce_once=body.reduce_once,
        max_sequence_tokens=body.max_sequence_tokens or SEQUENCE_TOKENS_DEFAULT,
        max_concurrent_samples=body.max_concurrent_samples,
        kv_cache_bytes=body.kv_cache_bytes,
        cuda_graphs=body.cuda_graphs,
        layers_on_device=body.layers_on_device,
        preemptible=body.preemptible,
        pace=body.pace,
    )
    check_tp_sizes(spec)
    _check_pace(spec)
    if body.max_sequence_tokens is None:
        spec = replace(spec, max_sequence_tokens=_default_sequence_tokens(spec))
    _check_sequence_length(spec)
    check_cache_budget(spec)
    return spec, parameters


def _check_kind(
    body: DeploymentRequest, model: ModelSpec, layout: Parallelism, backend: str
) -> None:
    check_tensor_parallel(model, layout)
    if body.kind == "rollout":
        check_equal_parts(model, layout)
    if body.kind == "train":
        check_trained_experts(model, layout, backend)
    _check_head(body, model)
    if body.kind == "forward" and model.head == "reward" and layout.cp > 1:
        raise LayoutError(
            "a reward model scores the last token of a row, which cp would cut; only logprobs and "
            "values come from parts of rows: use tp, pp or ep",
            field="cp",
        )
    if body.kind != "forward" and body.layers_on_device is not None:
        raise InvalidRequestError(
            f"layers_on_device is for reference and reward deployments; a {body.kind} deployment "
            "has all layers on the device: leave it out",
            parameter="layers_on_device",
        )
    if backend == "megatron" and body.layers_on_device is not None:
        raise InvalidRequestError(
            "layers_on_device is for the torch backend; megatron has all layers of a rank's stage "
            "on the device: leave it out, or use a larger pp, tp or ep",
            parameter="layers_on_device",
        )
    if body.checkpoint_every is not None and (body.kind != "train" or body.pace):
        raise InvalidRequestError(
            "checkpoint_every is for train deployments that compute; a "
            f"{'paced' if body.pace else body.kind} deployment has no weights to save: "
            "leave it out",
            parameter="checkpoint_every",
        )
    if body.checkpoint_every is not None and len(body.name) > SCHEDULED_NAME_MAX:
        raise InvalidRequestError(
            f"checkpoints of {body.name!r} would have names that are too long: with "
            f"checkpoint_every, a deployment's name has at most {SCHEDULED_NAME_MAX} characters",
            parameter="name",
        )
    for name in ("checkpoint_keep", "checkpoint_bytes"):
        if body.checkpoint_every is None and getattr(body, name) is not None:
            raise InvalidRequestError(
                f"{name} says which scheduled checkpoints to keep, and none are scheduled: give "
                "checkpoint_every, too",
                parameter=name,
            )
    if body.kind != "rollout" and not body.cuda_graphs:
        raise InvalidRequestError(
            f"cuda_graphs is for rollout deployments; a {body.kind} deployment captures nothing: "
            "leave it out",
            parameter="cuda_graphs",
        )
    if body.kind != "rollout" and body.shares_gpus:
        raise InvalidRequestError(
            f"shares_gpus is for rollout deployments; a {body.kind} deployment shares its GPUs in "
            "turns unless it is exclusive: leave it out",
            parameter="shares_gpus",
        )
    if body.preemptible and (body.kind != "rollout" or body.exclusive or body.shares_gpus):
        raise InvalidRequestError(
            "preemptible is for rollout deployments that use the idle time of others: leave it "
            "out, or leave out exclusive and shares_gpus",
            parameter="preemptible",
        )
    is_alone = body.exclusive or body.preemptible or body.shares_gpus is False
    if body.kind == "rollout" and body.trace is not None and is_alone:
        raise InvalidRequestError(
            "a rollout deployment that never shares its GPUs needs no demand trace: leave the "
            "trace out, or let it share"
        )


def _check_head(body: DeploymentRequest, model: ModelSpec) -> None:
    if model.head == "causal" or body.kind == "forward":
        return
    if body.kind == "rollout":
        raise InvalidRequestError(
            f"a model with head {model.head!r} predicts no tokens, so no rollout backend generates "
            "with it: use head 'causal', or create a "
            f"{'reward' if model.head == 'reward' else 'train or reference'} deployment",
            parameter="head",
        )
    if model.head == "reward":
        raise InvalidRequestError(
            "a model with head 'reward' only scores rows: create a reward deployment for it, not a "
            f"{body.kind} deployment, or train it as a critic, with head 'value'",
            parameter="head",
        )
    if body.lora is not None:
        raise InvalidRequestError(
            "with lora only adapters are trained, so a value head would stay as it is: leave lora "
            "out, or use head 'causal'",
            parameter="lora",
        )


def _check_pace(spec: DeploymentSpec) -> None:
    if not spec.pace:
        return
    pace = parse_pace(spec.pace)
    lacks = {
        f"kind {spec.kind!r}": spec.kind == "forward",
        f"backend {spec.backend!r}": spec.backend == "vllm",
        f"head {spec.model.head!r}": spec.model.head != "causal",
        "lora": spec.lora is not None,
        "tp_sizes": bool(spec.tp_sizes),
        "optimizer='host'": spec.optimizer == "host",
        "kv_cache_bytes": spec.kv_cache_bytes is not None,
        "cuda_graphs=False": not spec.cuda_graphs,
        "activation_checkpointing": spec.activation_checkpointing,
        "reduce_once": spec.reduce_once,
        f"dtype {spec.dtype!r}": spec.dtype != "float32",
        f"compute_dtype {spec.compute_dtype!r}": spec.compute_dtype != "float32",
    }
    for name, is_asked in lacks.items():
        if is_asked:
            raise InvalidRequestError(
                f"a paced deployment has no {name}: leave it out, or leave pace out",
                parameter="pace",
            )
    if spec.kind == "rollout":
        pace.decoding(spec.layout.tp)


def _default_sequence_tokens(spec: DeploymentSpec) -> int:
    positions = spec.model.config.get("max_position_embeddings")
    found = SEQUENCE_TOKENS_DEFAULT
    if isinstance(positions, int):
        found = min(found, max(2, positions))
    if spec.kind == "rollout" and spec.kv_cache_bytes is not None:
        block = BLOCK_TOKENS[spec.backend]
        blocks = spec.kv_cache_bytes // (block * kv_token_bytes(spec))
        # A budget without room for one block is refused by its own check.
        found = min(found, max(2, blocks * block))
    return found


def _check_sequence_length(spec: DeploymentSpec) -> None:
    positions = spec.model.config.get("max_position_embeddings")
    if isinstance(positions, int) and spec.max_sequence_tokens > positions:
        raise InvalidRequestError(
            f"max_sequence_tokens is {spec.max_sequence_tokens}; the model has {positions} "
            "positions: lower it"
        )


def with_fitting_length(
    error: ModelDoesNotFitError, spec: DeploymentSpec, *, is_default: bool
) -> ModelDoesNotFitError:
    """The scheduler's refusal of this deployment, with the longest rows that would fit its GPUs.

    The default of `max_sequence_tokens` cannot be lowered to that before: the scheduler alone knows
    the GPUs, they change, and a request that is sent again has to mean the same deployment.

    Args:
        error: says the GPU's memory, unless the deployment was refused for another reason.
        spec: the deployment.
        is_default: whether the request left `max_sequence_tokens` out.
    """
    memory = error.details.get("gpu_memory_bytes")
    if "terms" not in error.details or not isinstance(memory, int):
        return error

    def excess(tokens: int) -> int:
        return device_memory(replace(spec, max_sequence_tokens=tokens)).need_bytes - memory

    lengths = range(2, spec.max_sequence_tokens)
    fitting = bisect_right(lengths, 0, key=excess) + 1
    asked = f"{spec.max_sequence_tokens}{', the default' if is_default else ''}"
    if fitting < 2:
        advice = f"max_sequence_tokens is {asked}: no smaller one makes it fit"
    else:
        advice = f"max_sequence_tokens is {asked}: with {fitting} or less it fits"
    found = ModelDoesNotFitError(f"{error.message}. {advice}")
    found.details = {**error.details, "max_sequence_tokens": fitting if fitting >= 2 else None}
    return found


def state_bytes(spec: DeploymentSpec, parameters: int) -> int:
    """Bytes of model state over all ranks: a trainer shards its state over data ranks; in other
    kinds each data rank has all weights, or each of an engine's smallest groups (`tp_sizes`)."""
    adapters = adapter_parameter_count(spec.model, spec.lora) if spec.lora is not None else 0
    if spec.kind == "train" and spec.lora is not None:
        # The frozen weights are on the device too, once for all adapters of the model.
        return parameters * WEIGHT_BYTES["float32"] + adapters * TRAIN_BYTES_PER_PARAMETER
    if spec.backend == "megatron":
        sizes = _dimensions(spec.model)
        if spec.kind == "forward":
            return megatron_copies(sizes, spec.layout, parameters) * WEIGHT_BYTES[spec.dtype]
        return megatron_state_bytes(sizes, spec.layout, parameters, spec.compute_dtype)
    if spec.kind == "train":
        return parameters * TRAIN_BYTES_PER_PARAMETER
    # With adapters, both the frozen weights and the merged weights are kept.
    copies = 2 if spec.lora is not None else 1
    weights = parameters * WEIGHT_BYTES[spec.dtype] * copies
    return (weights + adapters * WEIGHT_BYTES["float32"]) * (spec.workers // spec.shares)


def _lora_fields(body: LoraRequest) -> dict[str, Any]:
    fields = body.model_dump(exclude_none=True)
    if "targets" in fields:
        fields["targets"] = tuple(fields["targets"])
    return fields


def _dimensions(model: ModelSpec) -> Dimensions:
    return megatron_dimensions({"model_type": model.architecture, **model.config})


def _layout(body: DeploymentRequest) -> Parallelism:
    if body.parallelism is None:
        return Parallelism(dp=body.workers or 1)
    layout = Parallelism(**body.parallelism.model_dump())
    if body.workers not in (None, layout.world_size):
        raise LayoutError(
            f"workers is {body.workers}, but {layout.describe()} needs {layout.world_size} "
            "(dp·tp·pp·cp): leave workers out, or make them equal",
            field="workers",
        )
    return layout
