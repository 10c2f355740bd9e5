"""Policies of `Job.rollout`: which weights may draw what is trained.

A policy is a set of modes. `EXCLUSIONS` is the one list of those that exclude each other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, assert_never

import msgspec

from plexrl.client.data.decode_profile import DecodeProfile
from plexrl.errors import InvalidRequestError
from plexrl.limits import check_numbers


@dataclass(frozen=True, slots=True)
class Elastic:
    """The number of instances follows the times of generation and training (StreamRL §4.2).

    An instance is added while generation, with it, still takes at least as long as training. One is
    removed when training takes longer than generation would without it.

    Raises:
        InvalidRequestError: `min` is less than 1, or more than `max`.
    """

    min: int
    """Least number of instances."""
    max: int
    """Greatest number. More are asked for only while GPUs bring something; nobody waits for them if
    the cluster has none."""

    def __post_init__(self) -> None:
        check_numbers("elastic", {"min": self.min, "max": self.max})
        if self.min > self.max:
            raise InvalidRequestError(
                f"min is {self.min} and max {self.max}: set them in ascending order"
            )


@dataclass(frozen=True, slots=True)
class BoundedStaleness:
    """Generation may run ahead of training, within a bound (StaleFlow §4).

    Raises:
        InvalidRequestError: `staleness` is negative.
    """

    staleness: int = 0
    """η: no trained token was drawn with weights that are more than so many batches older than
    those that it trains. 0: synchronous training."""
    length_aware: bool = False
    """Samples that are expected to be long are generated in small batches on instances of their own
    (StreamRL §5). The cluster learns from each batch which prompts have long responses."""
    adaptive_tp: DecodeProfile | None = None
    """The tensor-parallel groups of the instances grow while the last samples of a batch are
    generated, when that saves time by this profile of `RolloutDeployment.profile_decoding` (PAT).
    It needs instances with `tp_sizes`, and a staleness of 0."""
    elastic: Elastic | None = None
    """Instances are added and removed while the job runs; absent: their number does not change."""

    def __post_init__(self) -> None:
        check_numbers("rollout", {"staleness": self.staleness})


@dataclass(frozen=True, slots=True)
class TailBatching:
    """Synchronous training whose steps rarely wait for long samples (Flexes §3).

    A short round starts more prompts, and more samples of each, than are trained. It keeps the
    first samples of each prompt and the first complete prompts. The other prompts are queued; when
    there are enough for a batch, a long round trains exactly these. Every prompt is trained once,
    on samples of the weights that it trains.

    Raises:
        InvalidRequestError: a factor is less than 1.
    """

    eta: float = 1.25
    """How many times the trained prompts, and the trained samples of each, a short round starts;
    rounded up. 1: as many, as `BoundedStaleness(0)` does."""
    eta_prompts: float | None = None
    """The same for prompts; absent: `eta`."""
    eta_responses: float | None = None
    """The same for the samples of a prompt; absent: `eta`."""
    scale_down: bool = False
    """Once between 20 % and 50 % of a round are generated, half of the instances are freed, if the
    rest fits into the KV cache of the others (Flexes Alg. 1). With
    `shares_gpus` theirs serve other deployments until the next round."""

    plans_parallelism: bool = False
    """The GPUs of each instance are divided anew between rounds (Flexes §4.2): a larger `tp` after
    a short round with more preemptions than the one before, a smaller one after four without any.
    It needs instances with several ranks (`parallelism`)."""
    adaptive_tp: DecodeProfile | None = None
    """As in `BoundedStaleness`; not with `plans_parallelism`."""

    def __post_init__(self) -> None:
        for name in ("eta", "eta_prompts", "eta_responses"):
            value = getattr(self, name)
            if value is not None:
                check_numbers("rollout", {name: value})


RolloutPolicy = BoundedStaleness | TailBatching
"""Any policy."""
SYNCHRONOUS = BoundedStaleness(0)


MODES: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "staleness": lambda fields: fields["staleness"] > 0,
    "eta": lambda fields: max(fields["eta_prompts"], fields["eta_responses"]) > 1,
    "scale_down": lambda fields: bool(fields["scale_down"]),
    "plans_parallelism": lambda fields: bool(fields["plans_parallelism"]),
    "length_aware": lambda fields: bool(fields["length_aware"]),
    "adaptive_tp": lambda fields: fields["adaptive_tp"] is not None,
    "elastic": lambda fields: bool(fields["instances_min"] or fields["instances_max"]),
}
"""Whether the fields of a rollout's order have each mode on."""
EXCLUSIONS: dict[tuple[str, str], str] = {
    ("staleness", "eta"): "rounds are short and long only if nothing is generated ahead",
    ("staleness", "scale_down"): "instances are freed at the end of a round, and without rounds "
    "what is generated ahead keeps them busy",
    ("staleness", "plans_parallelism"): "the ranks are divided between rounds, and there are none",
    ("staleness", "adaptive_tp"): "groups of ranks grow while the last samples of a batch end, and "
    "others follow them if some are generated ahead",
    ("plans_parallelism", "adaptive_tp"): "a profile belongs to one division of the GPUs",
    ("eta", "length_aware"): "rounds defer what is long, so nothing is left to place apart",
    ("eta", "elastic"): "the number follows the time of a whole generation, and a short round ends "
    "before it",
    ("scale_down", "elastic"): "both decide how many instances a round has",
    ("plans_parallelism", "elastic"): "both change the instances between rounds",
}
"""Why two modes exclude each other. All other pairs combine."""


def check_modes(fields: Mapping[str, Any]) -> None:
    """Check that the modes of a rollout's order combine; `fields` are those of `policy_fields`.

    Raises:
        InvalidRequestError: two of them exclude each other.
    """
    for (one, other), reason in EXCLUSIONS.items():
        if MODES[one](fields) and MODES[other](fields):
            raise InvalidRequestError(
                f"the policy has both {one} and {other}: {reason}; set only one of them"
            )


def policy_fields(policy: RolloutPolicy) -> dict[str, object]:
    """The fields of a rollout's order that a policy sets. Raises as `check_modes`."""
    fields = _fields(policy)
    check_modes(fields)
    return fields


def _fields(policy: RolloutPolicy) -> dict[str, object]:
    match policy:
        case BoundedStaleness():
            return {
                "staleness": policy.staleness,
                "eta_prompts": 1.0,
                "eta_responses": 1.0,
                "plans_parallelism": False,
                "scale_down": False,
                "length_aware": policy.length_aware,
                "instances_min": 0 if policy.elastic is None else policy.elastic.min,
                "instances_max": 0 if policy.elastic is None else policy.elastic.max,
                "adaptive_tp": _plain(policy.adaptive_tp),
            }
        case TailBatching():
            prompts, responses = policy.eta_prompts, policy.eta_responses
            return {
                "staleness": 0,
                "eta_prompts": policy.eta if prompts is None else prompts,
                "eta_responses": policy.eta if responses is None else responses,
                "plans_parallelism": policy.plans_parallelism,
                "scale_down": policy.scale_down,
                "length_aware": False,
                "instances_min": 0,
                "instances_max": 0,
                "adaptive_tp": _plain(policy.adaptive_tp),
            }
        case _:
            assert_never(policy)


def _plain(profile: DecodeProfile | None) -> Any:
    return None if profile is None else msgspec.to_builtins(profile)
