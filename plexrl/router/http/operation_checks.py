"""Checks of an operation's parameters and batch, before anything changes. Pure.

Each error says what is wrong, in which row, and how to mend it.
"""

from collections.abc import Collection
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
from plexrl.limits import LIMITS, RESULT_BYTES_MAX, SAMPLES_MAX
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.lora import LoraSpec
from plexrl.wire.operations import (
    PARAMS_BY_KIND,
    PROMPT_SAMPLING,
    USER_KINDS,
    VALUE_LOSSES,
    AdamParams,
    ForwardBackwardParams,
    ForwardParams,
    GenerateParams,
    LossSpec,
    OperationKind,
    OperationParams,
    SamplingParams,
    SyncWeightsParams,
    loss_inputs,
)
from plexrl.wire.parameter_checks import check_parameters
from plexrl.wire.tensors import Array, Arrays, check_mask, row_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedOperation:
    """A request that passed all checks."""

    kind: OperationKind
    params: OperationParams | None
    tokens: int
    """Size of the work: tokens of the batch, or the most that can be drawn."""
    has_batch: bool


def check_operation(
    spec: DeploymentSpec, kind_name: str, params: dict[str, Any], arrays: Arrays
) -> CheckedOperation:
    """Check a request and type its parameters.

    Raises:
        InvalidRequestError: or a subclass; the operation could not be executed.
    """
    kind = _kind(spec, kind_name)
    typed = type_params(kind, params)
    check_parameters(typed)
    if spec.pace:
        _check_paced(kind, typed)
    tokens = 0
    match typed:
        case ForwardBackwardParams():
            _check_whole_rows(spec, typed.loss)
            _check_head(spec, typed.loss)
            tokens = _check_batch(spec, arrays, loss_inputs(typed.loss))
            if "mask" in arrays:
                check_mask(arrays["mask"], arrays["lengths"])
        case AdamParams() if typed.optimizer == "muon":
            _check_muon(spec)
        case ForwardParams():
            _check_distribution(spec, typed)
            tokens = _check_batch(spec, arrays, ())
            _check_result(
                tokens * (4 + 4 * typed.entropy + 8 * typed.top_logprobs),
                "send fewer rows at once, or lower top_logprobs",
            )
        case GenerateParams() if spec.preemptible and typed.stream:
            raise InvalidRequestError(
                "a preemptible deployment does not stream, because its generations are "
                "interrupted: leave stream out"
            )
        case SyncWeightsParams() if spec.preemptible and typed.in_flight:
            raise InvalidRequestError(
                "a preemptible deployment generates each operation with one version of the "
                "weights: leave in_flight out"
            )
        case GenerateParams():
            tokens = _check_generate(spec, typed, arrays)
        case SyncWeightsParams() if spec.model.head == "reward":
            raise InvalidRequestError(
                "the deployment's model has head 'reward', and no train deployment publishes such "
                "weights: load a checkpoint instead"
            )
        case SyncWeightsParams() if spec.layers_on_device is not None:
            raise InvalidRequestError(
                "the deployment has its layers in host memory, where no sync writes: create it "
                "without layers_on_device, or load a checkpoint"
            )
    if arrays and not tokens:
        raise BatchShapeError(
            f"{kind.value} takes no arrays, but {sorted(arrays)} were sent: leave them out"
        )
    return CheckedOperation(kind=kind, params=typed, tokens=tokens, has_batch=bool(arrays))


def check_source(spec: DeploymentSpec, source: DeploymentSpec) -> None:
    """Raises `InvalidRequestError` if a deployment cannot use the weights of `source`."""
    if bool(spec.pace) != bool(source.pace):
        raise InvalidRequestError(
            f"{'this deployment' if spec.pace else 'the source'} is paced and has no model, and "
            f"{'the source' if spec.pace else 'this deployment'} computes one, so the published "
            "weights do not fit: create both with a pace, or both without"
        )
    if spec.model.head != source.model.head:
        raise InvalidRequestError(
            f"the source's model has head {source.model.head!r} and this deployment's "
            f"{spec.model.head!r}, so the published weights do not fit: create both with the same "
            "head"
        )
    if spec.lora == source.lora:
        return
    raise InvalidRequestError(
        f"the source has {_adapters(source.lora)} and this deployment {_adapters(spec.lora)}, so "
        "the published weights do not fit: create both with the same lora, or both without"
    )


def _check_paced(kind: OperationKind, params: OperationParams | None) -> None:
    if kind in (OperationKind.SAVE_CHECKPOINT, OperationKind.LOAD_CHECKPOINT):
        raise InvalidRequestError(
            f"a paced deployment has no {kind.value}: its model has no checkpoints; leave the "
            "checkpoint out, or create the deployment without a pace"
        )
    if isinstance(params, ForwardParams) and (params.entropy or params.top_logprobs):
        raise InvalidRequestError(
            "a paced deployment has no distribution of tokens: leave entropy and top_logprobs out",
            parameter="entropy" if params.entropy else "top_logprobs",
        )
    if not isinstance(params, GenerateParams):
        return
    sampling = params.sampling
    if sampling.details_tokens or sampling.scores_prompts:
        raise InvalidRequestError(
            "a paced deployment has no distribution of tokens: leave sampling_logprobs, "
            "top_logprobs, prompt_logprobs and prompt_top_logprobs out",
            parameter="sampling",
        )
    if sampling.stop_token_ids or sampling.stop_sequences or sampling.stop_strings:
        raise InvalidRequestError(
            "a paced deployment draws the lengths of responses by the seed, and stops at no token "
            "or text: leave the stop parameters out",
            parameter="sampling",
        )


def _adapters(lora: LoraSpec | None) -> str:
    return "no adapters" if lora is None else f"adapters of rank {lora.rank} ({lora})"


def type_params(kind: OperationKind, params: dict[str, Any]) -> OperationParams | None:
    """Convert `params` to the kind's own type; an unknown name is an error. None: the kind has no
    parameters.

    Raises:
        InvalidRequestError: a name is unknown or missing, or a value has a wrong type.
    """
    wanted = PARAMS_BY_KIND.get(kind)
    _refuse_unknown(kind.value, params, () if wanted is None else wanted.__struct_fields__)
    if wanted is None:
        return None
    for name, inner in (("loss", LossSpec), ("sampling", SamplingParams)):
        if isinstance(params.get(name), dict):
            known = inner.__dataclass_fields__
            _refuse_unknown(f"{kind.value}.{name}", params[name], known)
    try:
        return msgspec.convert(params, wanted)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{kind.value}: {error}") from error


def _kind(spec: DeploymentSpec, name: str) -> OperationKind:
    allowed = sorted(kind.value for kind in USER_KINDS[spec.kind])
    if name not in allowed:
        raise InvalidRequestError(
            f"{name!r} is not an operation of a {spec.kind} deployment: use {', '.join(allowed)}"
        )
    return OperationKind(name)


def _refuse_unknown(where: str, params: dict[str, Any], known: Collection[str]) -> None:
    unknown = sorted(set(params) - set(known))
    if unknown:
        raise InvalidRequestError(
            f"{where} has no parameter {', '.join(map(repr, unknown))}: it takes "
            + (", ".join(sorted(known)) or "none")
        )


def _check_whole_rows(spec: DeploymentSpec, loss: LossSpec) -> None:
    if loss.name == "gspo" and spec.layout.cp > 1:
        raise InvalidRequestError(
            f"gspo needs whole rows, and parallelism.cp is {spec.layout.cp}, which divides them "
            "over ranks: use another loss, or a deployment with cp=1",
            parameter="loss",
        )


def _check_head(spec: DeploymentSpec, loss: LossSpec) -> None:
    is_critic = spec.model.head == "value"
    if is_critic and loss.name not in VALUE_LOSSES:
        raise InvalidRequestError(
            f"the loss {loss.name} needs logprobs, and the deployment's model has head 'value', "
            f"which computes values: use {' or '.join(VALUE_LOSSES)}, or a model with head "
            "'causal'",
            parameter="loss",
        )
    if loss.name == "value" and not is_critic:
        raise InvalidRequestError(
            f"the loss value needs values, and the deployment's model has head "
            f"{spec.model.head!r}: create the deployment with a model of head 'value'",
            parameter="loss",
        )


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
    unknown = sorted(set(arrays) - {"tokens", "lengths", *PROMPT_SAMPLING})
    if unknown:
        raise BatchShapeError(
            f"generate takes tokens, lengths, {', '.join(PROMPT_SAMPLING)} only: leave "
            f"{', '.join(unknown)} out"
        )
    _check_details(spec, sampling)
    lengths = _check_rows(spec, arrays)
    for name in PROMPT_SAMPLING:
        if name in arrays:
            _check_setting(name, arrays[name], len(lengths))
    rows = len(lengths) * params.samples_per_prompt
    if rows > SAMPLES_MAX:
        raise BatchShapeError(f"{rows} samples at once; at most {SAMPLES_MAX}: split the prompts")
    longest = int(lengths.argmax())
    if int(lengths[longest]) + 1 > spec.max_sequence_tokens:
        raise BatchShapeError(
            f"prompt {longest} has {int(lengths[longest])} tokens and the deployment's "
            f"max_sequence_tokens is {spec.max_sequence_tokens}: shorten the prompt, it leaves no "
            "token for a completion",
            row=longest,
        )
    # No completion is longer than the deployment's limit on a sequence.
    if "max_tokens" in arrays:
        most = np.minimum(arrays["max_tokens"], spec.max_sequence_tokens)
        drawn = params.samples_per_prompt * int(most.sum())
    else:
        drawn = rows * min(sampling.max_tokens, spec.max_sequence_tokens)
    of_drawn = 8 + 4 * sampling.sampling_logprobs + 8 * sampling.top_logprobs
    of_prompts = (4 + 8 * sampling.prompt_top_logprobs) * sampling.scores_prompts
    _check_result(
        drawn * of_drawn + len(arrays["tokens"]) * of_prompts,
        "split the prompts, or lower max_tokens, top_logprobs or prompt_top_logprobs",
    )
    return drawn


def _check_result(size: int, mend: str) -> None:
    """Refuse work whose result may have more bytes than workers hold and send."""
    if size > RESULT_BYTES_MAX:
        raise BatchShapeError(
            f"the result may have {size} bytes; at most {RESULT_BYTES_MAX}: {mend}",
            bytes=size,
        )


def _check_details(spec: DeploymentSpec, sampling: SamplingParams) -> None:
    """Refuse numbers of tokens that the deployment does not compute."""
    _check_top(spec, "top_logprobs", sampling.top_logprobs)
    _check_top(spec, "prompt_top_logprobs", sampling.prompt_top_logprobs)
    if spec.backend == "vllm" and (sampling.details_tokens or sampling.scores_prompts):
        raise InvalidRequestError(
            "backend 'vllm' returns the logprobs of drawn tokens only: leave sampling_logprobs, "
            "top_logprobs, prompt_logprobs and prompt_top_logprobs out, or use backend torch",
            parameter="sampling",
        )
    if spec.tp_sizes and sampling.scores_prompts:
        raise InvalidRequestError(
            "a deployment with tp_sizes computes a prompt in several groups, and returns no "
            "logprobs of it: leave prompt_logprobs and prompt_top_logprobs out, or tp_sizes",
            parameter="sampling",
        )


def _check_muon(spec: DeploymentSpec) -> None:
    obstacles = {
        f"backend {spec.backend!r}": spec.backend == "megatron",
        f"optimizer={spec.optimizer!r}": spec.optimizer != "device",
    }
    found = [name for name, is_there in obstacles.items() if is_there]
    if found and not spec.pace:
        raise InvalidRequestError(
            f"optimizer 'muon' steps whole matrices, which a deployment with {' and '.join(found)} "
            "does not put together: use adamw or sgd, or create the deployment with backend fsdp "
            "or deepspeed, and its optimizer's state on the device",
            parameter="optimizer",
        )


def _check_distribution(spec: DeploymentSpec, params: ForwardParams) -> None:
    _check_top(spec, "top_logprobs", params.top_logprobs)
    if spec.model.head != "causal" and (params.entropy or params.top_logprobs):
        raise InvalidRequestError(
            f"the deployment's model has head {spec.model.head!r}, which predicts no tokens: leave "
            "entropy and top_logprobs out",
            parameter="entropy" if params.entropy else "top_logprobs",
        )


def _check_top(spec: DeploymentSpec, name: str, count: int) -> None:
    size = int(spec.model.config["vocab_size"])
    if count > size:
        raise InvalidRequestError(
            f"{name} is {count} and the vocabulary has {size} tokens: ask for at most {size}",
            parameter=name,
        )


def _check_setting(name: str, values: Array, prompts: int) -> None:
    """Check the values of a field of `SamplingParams`, one for each prompt."""
    if values.dtype != np.int64 or values.shape != (prompts,):
        raise BatchShapeError(
            f"{name} is {values.dtype}{list(values.shape)}; int64[{prompts}] is needed: one value "
            "for each prompt",
            array=name,
        )
    for row in (int(values.argmin()), int(values.argmax())):
        LIMITS["sampling"][name].check(f"{name} of prompt {row}", int(values[row]))


def _check_rows(spec: DeploymentSpec, arrays: Arrays) -> Array:
    """Check `tokens` and `lengths`; return the lengths."""
    for name in ("tokens", "lengths"):
        array = arrays.get(name)
        if array is None or array.dtype != np.int32 or array.ndim != 1:
            found = "missing" if array is None else f"{array.dtype}{list(array.shape)}"
            raise BatchShapeError(f"{name} must be a one-dimensional int32 array; it is {found}")
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
            f"lengths add up to {total} and there are {len(tokens)} tokens: pack all rows end to "
            "end"
        )
    longest = int(lengths.argmax())
    if int(lengths[longest]) > spec.max_sequence_tokens:
        raise BatchShapeError(
            f"row {longest} has {int(lengths[longest])} tokens; the deployment's "
            f"max_sequence_tokens is {spec.max_sequence_tokens}: shorten it",
            row=longest,
        )
    size = int(spec.model.config["vocab_size"])
    # Two fast passes without allocation; the position is searched for only after an error.
    if int(tokens.min()) < 0 or int(tokens.max()) >= size:
        wrong = np.flatnonzero((tokens < 0) | (tokens >= size))
        row, position = row_of(int(wrong[0]), lengths)
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
        row, position = row_of(int(wrong[0]), lengths)
        raise NonFiniteInputError(
            f"{name} is {array[wrong[0]]} in row {row} at position {position}: every value must "
            "be finite; give unused tokens 0. Values that a model computed are not finite once its "
            "training has diverged: look for extreme advantages or learning rates",
            array=name,
            row=row,
            position=position,
        )
