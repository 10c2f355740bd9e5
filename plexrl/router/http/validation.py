"""Everything about a request that can be checked before anything changes. Pure.

Each refusal says what is wrong, in which row, and how to mend it.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from plexrl.errors import (
    BatchShapeError,
    InvalidRequestError,
    NonFiniteInputError,
    TokenRangeError,
)
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.lora import LoraSpec
from plexrl.wire.masks import check_mask
from plexrl.wire.operations import (
    LOSS_INPUTS,
    PARAMS_BY_KIND,
    USER_KINDS,
    ForwardBackwardParams,
    ForwardParams,
    GenerateParams,
    LossSpec,
    OperationKind,
    SamplingParams,
    SyncWeightsParams,
)
from plexrl.wire.parameter_checks import SAMPLES_MAX, check_parameters
from plexrl.wire.tensors import Array, Arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A request that can be carried out."""

    kind: OperationKind
    params: Any
    """An instance of `PARAMS_BY_KIND[kind]`."""
    tokens: int
    """Size of the work: tokens of the batch, or the most that can be drawn."""
    has_batch: bool


def check_operation(
    spec: DeploymentSpec, kind_name: str, params: dict[str, Any], arrays: Arrays
) -> Checked:
    """The request as typed parameters.

    Raises:
        InvalidRequestError: or one of its kinds, for whatever cannot be carried out.
    """
    kind = _kind(spec, kind_name)
    typed = decode_params(kind, params)
    check_parameters(typed)
    tokens = 0
    match typed:
        case ForwardBackwardParams():
            tokens = _check_batch(spec, arrays, _loss_arrays(typed.loss))
            if "mask" in arrays:
                check_mask(arrays["mask"], arrays["lengths"])
        case ForwardParams():
            tokens = _check_batch(spec, arrays, ())
        case GenerateParams():
            tokens = _check_generate(spec, typed, arrays)
        case SyncWeightsParams() if spec.model.head != "causal":
            raise InvalidRequestError(
                f"the deployment's model has head {spec.model.head!r}, which no train deployment "
                "publishes: load a checkpoint instead"
            )
    if arrays and not tokens:
        raise BatchShapeError(f"{kind.value} takes no arrays, {sorted(arrays)} were sent")
    return Checked(kind=kind, params=typed, tokens=tokens, has_batch=bool(arrays))


def check_source(spec: DeploymentSpec, source: DeploymentSpec) -> None:
    """Raises `InvalidRequestError` where a deployment cannot take over the other's weights."""
    if spec.lora == source.lora:
        return
    raise InvalidRequestError(
        f"the source has {_adapters(source.lora)} and this deployment {_adapters(spec.lora)}: what "
        "the one publishes the other cannot use; make both with the same lora, or both without"
    )


def _adapters(lora: LoraSpec | None) -> str:
    return "no adapters" if lora is None else f"adapters of rank {lora.rank} ({lora})"


def decode_params(kind: OperationKind, params: dict[str, Any]) -> Any:
    """`params` as the kind's own type; unknown names are refused, not ignored.

    Raises:
        InvalidRequestError: a name is unknown or missing, or a value is of a wrong type.
    """
    wanted = PARAMS_BY_KIND[kind]
    _refuse_unknown(kind.value, params, wanted)
    for name, inner in (("loss", LossSpec), ("sampling", SamplingParams)):
        if isinstance(params.get(name), dict):
            _refuse_unknown(f"{kind.value}.{name}", params[name], inner)
    try:
        return msgspec.convert(params, wanted)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{kind.value}: {error}") from error


def _kind(spec: DeploymentSpec, name: str) -> OperationKind:
    allowed = sorted(kind.value for kind in USER_KINDS[spec.kind])
    if name not in allowed:
        raise InvalidRequestError(
            f"{name!r} is no operation of a {spec.kind} deployment: use {', '.join(allowed)}"
        )
    return OperationKind(name)


def _refuse_unknown(where: str, params: dict[str, Any], wanted: type) -> None:
    known = wanted.__dataclass_fields__  # type: ignore[attr-defined]
    unknown = sorted(set(params) - set(known))
    if unknown:
        raise InvalidRequestError(
            f"{where} has no parameter {', '.join(map(repr, unknown))}: it takes "
            + (", ".join(sorted(known)) or "none")
        )


def _loss_arrays(loss: LossSpec) -> tuple[str, ...]:
    extra = ("ref_logprobs",) if loss.kl_coef > 0 else ()
    return (*LOSS_INPUTS[loss.name], *extra)


def _check_batch(spec: DeploymentSpec, arrays: Arrays, per_token: tuple[str, ...]) -> int:
    lengths = _check_rows(spec, arrays)
    tokens = len(arrays["tokens"])
    missing = [name for name in per_token if name not in arrays]
    if missing:
        raise BatchShapeError(
            f"the loss needs the per-token arrays {', '.join(missing)}: add them to the batch"
        )
    known = {"tokens", "lengths", *per_token}
    unknown = sorted(set(arrays) - known)
    if unknown:
        raise BatchShapeError(
            f"the arrays {', '.join(unknown)} are not used here: leave them out, or choose the "
            "loss that needs them"
        )
    for name in per_token:
        array = arrays[name]
        if array.dtype != np.float32 or array.shape != (tokens,):
            raise BatchShapeError(
                f"{name} is {array.dtype}{list(array.shape)}; float32[{tokens}] is needed: one "
                "value for each token of every row",
                array=name,
            )
        _check_finite(name, array, lengths)
    return tokens


def _check_generate(spec: DeploymentSpec, params: GenerateParams, arrays: Arrays) -> int:
    sampling = params.sampling
    if params.stream and spec.layout.dp > 1:
        raise InvalidRequestError(
            f"the deployment has {spec.layout.dp} replicas (dp), and a stream tells of one: leave "
            "`stream` out, or make a deployment with dp=1"
        )
    unknown = sorted(set(arrays) - {"tokens", "lengths"})
    if unknown:
        raise BatchShapeError(f"generate takes tokens and lengths; {unknown} were sent too")
    lengths = _check_rows(spec, arrays)
    rows = len(lengths) * params.samples_per_prompt
    if rows > SAMPLES_MAX:
        raise BatchShapeError(f"{rows} samples at once; at most {SAMPLES_MAX}: split the prompts")
    longest = int(lengths.argmax())
    if int(lengths[longest]) + 1 > spec.max_sequence_tokens:
        raise BatchShapeError(
            f"prompt {longest} has {int(lengths[longest])} tokens and the deployment's "
            f"max_sequence_tokens is {spec.max_sequence_tokens}: no room for an answer",
            row=longest,
        )
    # No answer is longer than the model's context, whatever was asked for.
    return rows * min(sampling.max_tokens, spec.max_sequence_tokens)


def _check_rows(spec: DeploymentSpec, arrays: Arrays) -> Array:
    """Checks `tokens` and `lengths`; returns the lengths."""
    for name in ("tokens", "lengths"):
        array = arrays.get(name)
        if array is None or array.dtype != np.int32 or array.ndim != 1:
            found = "missing" if array is None else f"{array.dtype}{list(array.shape)}"
            raise BatchShapeError(f"{name} must be int32 of one dimension; it is {found}")
    tokens, lengths = arrays["tokens"], arrays["lengths"]
    if not len(lengths):
        raise BatchShapeError("the batch has no rows: send at least one")
    if int(lengths.min()) < 1:
        raise BatchShapeError(
            f"row {int(lengths.argmin())} has {int(lengths.min())} tokens: every row needs one",
            row=int(lengths.argmin()),
        )
    total = int(lengths.sum(dtype=np.int64))
    if total != len(tokens):
        raise BatchShapeError(
            f"lengths add up to {total} and there are {len(tokens)} tokens: rows are laid end to "
            "end, none cut off"
        )
    longest = int(lengths.argmax())
    if int(lengths[longest]) > spec.max_sequence_tokens:
        raise BatchShapeError(
            f"row {longest} has {int(lengths[longest])} tokens; the deployment's "
            f"max_sequence_tokens is {spec.max_sequence_tokens}: shorten it",
            row=longest,
        )
    size = int(spec.model.config["vocab_size"])
    # Two quick passes that allocate nothing; where is only looked for once something is wrong.
    if int(tokens.min()) < 0 or int(tokens.max()) >= size:
        wrong = np.flatnonzero((tokens < 0) | (tokens >= size))
        row, position = _row_of(int(wrong[0]), lengths)
        raise TokenRangeError(
            f"row {row} has token {int(tokens[wrong[0]])} at position {position}; the vocabulary "
            f"is 0 to {size - 1}: is this the model's own tokenizer?",
            row=row,
            position=position,
        )
    return lengths


def _check_finite(name: str, array: Array, lengths: Array) -> None:
    if not np.isfinite((array.min(), array.max())).all():
        wrong = np.flatnonzero(~np.isfinite(array))
        row, position = _row_of(int(wrong[0]), lengths)
        raise NonFiniteInputError(
            f"{name} is {array[wrong[0]]} in row {row} at position {position}: every value must "
            "be finite; give unused tokens 0. Values that a model computed are not finite once its "
            "training has diverged: look for extreme advantages or learning rates",
            array=name,
            row=row,
            position=position,
        )


def _row_of(place: int, lengths: Array) -> tuple[int, int]:
    ends = np.cumsum(lengths, dtype=np.int64)
    row = int(np.searchsorted(ends, place, side="right"))
    return row, place - int(ends[row] - lengths[row])
