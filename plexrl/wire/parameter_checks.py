"""Checks of operation parameters. Pure; used by client and router.

The client checks before it sends a request, so that the error is raised at the faulty call. The
router checks again, because it trusts no client.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final

from plexrl.errors import InvalidRequestError
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
SAMPLES_MAX = 65_536
COUNT_MAX = 2**31 - 1
"""Largest count of tokens, samples and so on: engines count in 32 bits."""
BYTES_MAX = 2**63 - 1
REDUCTIONS = ("token_mean", "sequence_mean", "sum", "sequence_sum")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower and upper bound of a finite number."""

    least: float
    most: float = math.inf
    is_open: bool = False
    """The upper bound is exclusive."""
    is_whole: bool = False
    may_be_absent: bool = False

    def check(self, name: str, value: object) -> None:
        """Raises `InvalidRequestError` for a value out of bounds, naming the value and the
        bounds."""
        if value is None and self.may_be_absent:
            return
        kind = Integral if self.is_whole else Real
        if isinstance(value, kind) and not isinstance(value, bool):
            number = float(value) if not isinstance(value, Integral) else int(value)
            inside = self.least <= number <= self.most and not (
                self.is_open and number == self.most
            )
            if inside and math.isfinite(number):
                return
        raise InvalidRequestError(f"{name} is {value!r}; it must be {self}", parameter=name)

    def __str__(self) -> str:
        noun = "a whole number" if self.is_whole else "a finite number"
        if self.most == math.inf:
            return f"{noun}, at least {self.least:g}"
        most = f"below {self.most:g}" if self.is_open else f"at most {self.most}"
        return f"{noun}, at least {self.least:g} and {most}"


_COUNT: Final = Bounds(1, COUNT_MAX, is_whole=True)
_MAYBE_COUNT: Final = Bounds(1, COUNT_MAX, is_whole=True, may_be_absent=True)
_MAYBE_ANY: Final = Bounds(-(2**63), 2**63 - 1, is_whole=True, may_be_absent=True)

BOUNDS: Final[dict[type, dict[str, Bounds]]] = {
    AdamParams: {
        "learning_rate": Bounds(0),
        "beta1": Bounds(0, 1, is_open=True),
        "beta2": Bounds(0, 1, is_open=True),
        "eps": Bounds(0),
        "weight_decay": Bounds(0),
        "grad_clip_norm": Bounds(0),
        "divide_by": Bounds(1e-9),
    },
    LossSpec: {
        "clip_low": Bounds(0),
        "clip_high": Bounds(0),
        "kl_coef": Bounds(0),
        "weight_cap": Bounds(0, may_be_absent=True),
    },
    SamplingParams: {
        "max_tokens": _COUNT,
        "temperature": Bounds(0),
        "top_p": Bounds(0, 1),
        "top_k": Bounds(0, COUNT_MAX, is_whole=True),
        "seed": Bounds(0, 2**63 - 1, is_whole=True, may_be_absent=True),
        "first_sample": Bounds(0, COUNT_MAX, is_whole=True),
        "drawn_tokens": Bounds(0, COUNT_MAX, is_whole=True),
    },
    GenerateParams: {"samples_per_prompt": Bounds(1, SAMPLES_MAX, is_whole=True)},
    ForwardParams: {"micro_batch_tokens": _COUNT},
    ForwardBackwardParams: {"micro_batch_tokens": _COUNT},
    CheckpointParams: {
        "shard_bytes_max": Bounds(1, BYTES_MAX, is_whole=True),
        "keep_last": _MAYBE_COUNT,
        "keep_every": _MAYBE_COUNT,
        "step": _MAYBE_ANY,
    },
}
"""Bounds of every numeric parameter, by parameter type."""

SHOWN: Final[Mapping[str, str]] = {"samples_per_prompt": "samples_per_prompt (n)"}
"""Names shown for parameters that have another name in the SDK."""


def check_parameters(params: object) -> None:
    """Check an operation's parameters.

    Raises:
        InvalidRequestError: `details["parameter"]` names the first invalid parameter.
    """
    for name, bounds in BOUNDS.get(type(params), {}).items():
        bounds.check(SHOWN.get(name, name), getattr(params, name))
    match params:
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
        case CheckpointParams():
            check_name("checkpoint", params.name)
            if params.job is not None:
                check_identifier("job", params.job)


def _check_stops(sampling: SamplingParams) -> None:
    if not _are_tokens(sampling.stop_token_ids):
        raise InvalidRequestError(
            f"stop_token_ids is {short(sampling.stop_token_ids)}: give token ids, such as "
            "(plexrl.EOS,)",
            parameter="stop_token_ids",
        )
    sequences: object = sampling.stop_sequences
    if not isinstance(sequences, list | tuple) or not all(map(_are_tokens, sequences)):
        raise InvalidRequestError(
            f"stop_sequences is {short(sequences)}: give lists of token ids, such as "
            "[tokenizer.encode(text)]",
            parameter="stop_sequences",
        )


def _are_tokens(ids: object) -> bool:
    return isinstance(ids, list | tuple) and all(type(each) is int for each in ids)


def check_loss(loss: object) -> None:
    """Check the loss of a `forward_backward`; the message shows how to write the intended loss.

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
    for name, bounds in BOUNDS[LossSpec].items():
        bounds.check(f"loss.{name}", getattr(loss, name))
    for name in ("token_range", "sequence_range"):
        _check_range(f"loss.{name}", getattr(loss, name))
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
    is_pair = isinstance(bounds, list | tuple) and len(bounds) == 2 and all(map(_is_finite, bounds))
    if not is_pair or not 0 <= bounds[0] <= bounds[1]:
        raise InvalidRequestError(
            f"{name} is {short(bounds)}: give two finite numbers (low, high), 0 <= low <= high, "
            "such as (0.5, 2.0), or leave it out",
            parameter=name,
        )


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


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
