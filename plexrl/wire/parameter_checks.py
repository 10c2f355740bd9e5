"""Checks of operation parameters. Pure; used by client and router.

The client checks before it sends a request, so that the error is raised at the faulty call. The
router checks again, because it trusts no client.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from plexrl.errors import InvalidRequestError
from plexrl.limits import LIMITS
from plexrl.wire.operations import (
    LOSS_INPUTS,
    AdamParams,
    CheckpointParams,
    ForwardBackwardParams,
    ForwardParams,
    GenerateParams,
    LossSpec,
    SamplingParams,
)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}")
RANGES = ("token_range", "sequence_range")
STOPS = ("stop_token_ids", "stop_sequences", "stop_strings")
OPTIMIZERS = ("adamw", "sgd", "muon")
REDUCTIONS = ("token_mean", "sequence_mean", "sum", "sequence_sum")

SHOWN_MAX = 60
"""Characters of a value in a message."""

GROUPS: Final[Mapping[type, str]] = {
    AdamParams: "optim_step",
    LossSpec: "loss",
    SamplingParams: "sampling",
    GenerateParams: "generate",
    ForwardParams: "forward",
    ForwardBackwardParams: "forward_backward",
    CheckpointParams: "save_checkpoint",
}
"""The group of `LIMITS` that bounds the numbers of each parameter type."""

SHOWN: Final[Mapping[str, str]] = {"samples_per_prompt": "samples_per_prompt (n)"}
"""Names shown for parameters that have another name in the SDK."""


def check_parameters(params: object) -> None:
    """Check an operation's parameters.

    Raises:
        InvalidRequestError: `details["parameter"]` names the first invalid parameter.
    """
    _check_numbers(params)
    match params:
        case AdamParams():
            _check_decay(params)
            _check_optimizer(params)
        case ForwardBackwardParams():
            check_loss(params.loss)
        case GenerateParams():
            if not isinstance(params.sampling, SamplingParams):
                raise InvalidRequestError(
                    f"sampling is {short(params.sampling)}: give a "
                    "plexrl.SamplingParams(temperature=…, max_tokens=…)",
                    parameter="sampling",
                )
            check_parameters(params.sampling)
        case SamplingParams():
            _check_stops(params)
            for name in ("sampling_logprobs", "prompt_logprobs"):
                _check_flag(name, getattr(params, name))
        case ForwardParams():
            _check_flag("entropy", params.entropy)
        case CheckpointParams():
            check_name("checkpoint", params.name)
            if params.job is not None:
                check_identifier("job", params.job)


def check_rollout_sampling(sampling: SamplingParams) -> None:
    """Check how an asynchronous rollout draws tokens.

    Raises:
        InvalidRequestError: `details["parameter"]` names the first invalid parameter.
    """
    check_parameters(sampling)
    if sampling.seed is None:
        raise InvalidRequestError(
            "sampling.seed is missing: a trajectory's samples need one", parameter="seed"
        )
    if sampling.top_logprobs or sampling.scores_prompts:
        raise InvalidRequestError(
            "an asynchronous rollout keeps the logprobs and sampling_logprobs of drawn tokens "
            "only: leave top_logprobs, prompt_logprobs and prompt_top_logprobs out, or use "
            "generate",
            parameter="sampling",
        )


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} is {short(value)}: give True or False", parameter=name)


def _check_stops(sampling: SamplingParams) -> None:
    ids: object = sampling.stop_token_ids
    if not _are_tokens(ids):
        raise InvalidRequestError(
            f"stop_token_ids is {short(ids)}: give token ids, such as (plexrl.EOS,)",
            parameter="stop_token_ids",
        )
    sequences: Any = sampling.stop_sequences
    is_list = isinstance(sequences, list | tuple)
    if not is_list or not all(_are_tokens(sequence) and len(sequence) for sequence in sequences):
        raise InvalidRequestError(
            f"stop_sequences is {short(sequences)}: give lists of one or more token ids, such as "
            "[tokenizer.encode(text)]",
            parameter="stop_sequences",
        )
    strings: Any = sampling.stop_strings
    is_list = isinstance(strings, list | tuple)
    if not is_list or not all(isinstance(text, str) and text for text in strings):
        raise InvalidRequestError(
            f"stop_strings is {short(strings)}: give texts of one or more characters, such as "
            '["</answer>"]',
            parameter="stop_strings",
        )


def _are_tokens(ids: object) -> bool:
    limit = LIMITS["sampling"]["stop_token_ids"]
    return isinstance(ids, list | tuple) and all(map(limit.holds, ids))


def check_loss(loss: object) -> None:
    """Check the loss of a training batch; the message shows how to write the intended loss.

    Raises:
        InvalidRequestError: `details["parameter"]` names the invalid parameter.
    """
    known = ", ".join(f"{name}()" for name in LOSS_INPUTS)
    if not isinstance(loss, LossSpec):
        name = loss if isinstance(loss, str) else getattr(loss, "__name__", "")
        is_known = name in LOSS_INPUTS
        meant = f"plexrl.losses.{name}()" if is_known else f"one of plexrl.losses: {known}"
        what = f"the function {name} itself" if callable(loss) and is_known else short(loss)
        raise InvalidRequestError(f"loss is {what}: write {meant}", parameter="loss")
    if loss.name not in LOSS_INPUTS:
        raise InvalidRequestError(
            f"there is no loss {loss.name!r}: use one of plexrl.losses: {known}", parameter="loss"
        )
    _check_numbers(loss, "loss.")
    if loss.entropy_coef and "advantages" not in LOSS_INPUTS[loss.name]:
        raise InvalidRequestError(
            f"loss.entropy_coef is {loss.entropy_coef:g}, and {loss.name} is no loss of a policy: "
            "leave it out, or use a loss with advantages",
            parameter="loss.entropy_coef",
        )
    for name in RANGES:
        _check_range(name, getattr(loss, name))
    if loss.reduction is not None and loss.reduction not in REDUCTIONS:
        raise InvalidRequestError(
            f"loss.reduction is {loss.reduction!r}: use {', '.join(REDUCTIONS)}, or leave it out",
            parameter="loss.reduction",
        )
    if loss.name == "custom" and loss.reduction not in (None, "sum"):
        raise InvalidRequestError(
            f"loss.reduction of a custom loss is {loss.reduction!r}: leave it out; a custom loss "
            "is a sum, so include any mean in its weights",
            parameter="loss.reduction",
        )


def _check_range(name: str, bounds: Any) -> None:
    if bounds is None:
        return
    limit = LIMITS["loss"][name]
    is_pair = isinstance(bounds, list | tuple) and len(bounds) == 2
    if not is_pair or not all(map(limit.holds, bounds)) or not bounds[0] <= bounds[1]:
        raise InvalidRequestError(
            f"loss.{name} is {short(bounds)}: give two numbers (low, high), low <= high, each "
            f"{limit}, such as (0.5, 2.0), or leave it out",
            parameter=f"loss.{name}",
        )


def _check_numbers(params: object, prefix: str = "") -> None:
    group = GROUPS.get(type(params))
    for name, bounds in LIMITS[group].items() if group is not None else ():
        if name not in (*RANGES, *STOPS):
            bounds.check(prefix + SHOWN.get(name, name), getattr(params, name))


def _check_decay(params: AdamParams) -> None:
    if params.learning_rate * params.weight_decay > 1:
        raise InvalidRequestError(
            f"weight_decay is {params.weight_decay:g} and learning_rate {params.learning_rate:g}: "
            "every parameter is multiplied by 1 - learning_rate · weight_decay, which must not be "
            "negative: lower one of them",
            parameter="weight_decay",
        )


def _check_optimizer(params: AdamParams) -> None:
    if params.optimizer not in OPTIMIZERS:
        raise InvalidRequestError(
            f"optimizer is {short(params.optimizer)}: use {', '.join(OPTIMIZERS)}",
            parameter="optimizer",
        )
    if params.optimizer == "adamw" and params.momentum is not None:
        raise InvalidRequestError(
            f"momentum is {params.momentum:g}, and AdamW has none: set beta1, or use optimizer sgd "
            "or muon",
            parameter="momentum",
        )


def check_name(what: str, name: object) -> None:
    """Raises `InvalidRequestError` for a name that cannot be a file name."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{what} name {short(name)}: use up to 100 letters, digits, '.', '_' and '-'; begin "
            "with a letter or digit"
        )


def check_identifier(what: str, name: object) -> None:
    """Raises `InvalidRequestError` for an invalid id."""
    if not isinstance(name, str) or not IDENTIFIER.fullmatch(name):
        raise InvalidRequestError(
            f"{what} id {short(name)}: use up to 200 letters, digits and any of ._:/-; begin with "
            "a letter or digit"
        )


def short(value: Any) -> str:
    """A value as quoted in messages; values that are not plain also show their type."""
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}…"
    is_plain = value is None or isinstance(value, str | int | float)
    return shown if is_plain else f"a {type(value).__name__} ({shown})"


def differing_settings(known: Mapping[str, object], asked: Mapping[str, object]) -> str:
    """The settings that differ, with both values: `workers (1, not 2), model.layers (2, not 4)`.
    Settings within a setting are named by both."""
    return ", ".join(_differences("", known, asked))


def _differences(prefix: str, known: object, asked: object) -> Iterator[str]:
    if isinstance(known, Mapping) and isinstance(asked, Mapping):
        for name in [*known, *(each for each in asked if each not in known)]:
            within = f"{prefix}.{name}" if prefix else str(name)
            yield from _differences(within, known.get(name), asked.get(name))
    elif known != asked:
        yield f"{prefix} ({_brief(known)}, not {_brief(asked)})"


def _brief(value: object) -> str:
    text = "none" if value is None else repr(value)
    return text if len(text) <= SHOWN_MAX else f"{text[: SHOWN_MAX - 1]}…"
