"""Policies of `Job.rollout`: which weights may draw what is trained.

A policy is a set of modes. `EXCLUSIONS` is the one list of those that exclude each other. The
coordinator's settings follow from `PolicyFields` (`plexrl.rollout.coordinator.policy_settings`).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import assert_never

import msgspec

from plexrl.client.data.decode_profile import DecodeProfile
from plexrl.errors import InvalidRequestError
from plexrl.limits import check_numbers

OVER_LAUNCH = 1.25
"""How many times what is trained a short round of tail batching starts (Flexes §3: η)."""


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

    over_launch: float = OVER_LAUNCH
    """How many times the trained prompts, and the trained samples of each, a short round starts;
    rounded up. 1: as many, as `BoundedStaleness(0)` does."""
    over_launch_prompts: float | None = None
    """The same for prompts; absent: `over_launch`."""
    over_launch_responses: float | None = None
    """The same for the samples of a prompt; absent: `over_launch`."""
    fixed_over_launch: bool = False
    """Every short round starts so much, as in the paper. Otherwise the factors are the most that it
    starts: both of them, one or none, by what makes batches soonest with the lengths seen so far.
    So the first round starts no more than is trained."""
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
        for name in ("over_launch", "over_launch_prompts", "over_launch_responses"):
            value = getattr(self, name)
            if value is not None:
                check_numbers("rollout", {name: value})


RolloutPolicy = BoundedStaleness | TailBatching
"""Any policy."""
SYNCHRONOUS = BoundedStaleness(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFields:
    """The fields of a rollout's order that make its policy.

    Raises:
        InvalidRequestError: a number is out of its bounds, or two modes exclude each other.
    """

    staleness: int
    """η."""
    over_launch_prompts: float = 1.0
    """Prompts that a short round starts, as a multiple of those that are trained (Flexes §3)."""
    over_launch_responses: float = 1.0
    """The same for the samples of a prompt."""
    fixed_over_launch: bool = True
    """Every short round starts so much; False: at most so much, as makes batches soonest."""
    plans_parallelism: bool = False
    """The instances' GPUs are divided anew between rounds (Flexes §4.2)."""
    scale_down: bool = False
    """Half of the instances are freed before a round is complete, if the rest of it fits on the
    others (Flexes Alg. 1)."""
    adaptive_tp: DecodeProfile | None = None
    """The tensor-parallel groups of the instances' engines change while the last samples of a batch
    end (PAT §4), by this profile of the engines."""
    length_aware: bool = False
    """Prompts whose samples are expected to be long are generated on instances of their own
    (StreamRL §5)."""
    instances_min: int = 0
    """Least number of instances, if their number follows the times of generation and training
    (StreamRL §4.2)."""
    instances_max: int = 0
    """Greatest number of them; 0: their number does not change."""

    def __post_init__(self) -> None:
        check_numbers("rollout", {name: getattr(self, name) for name in _NUMBERS})
        for (one, other), reason in EXCLUSIONS.items():
            if MODES[one](self) and MODES[other](self):
                raise InvalidRequestError(
                    f"the policy has both {one} and {other}: {reason}; set only one of them"
                )


_NUMBERS = (
    "staleness",
    "over_launch_prompts",
    "over_launch_responses",
    "instances_min",
    "instances_max",
)
MODES: dict[str, Callable[[PolicyFields], bool]] = {
    "staleness": lambda policy: policy.staleness > 0,
    "over_launch": lambda policy: max(policy.over_launch_prompts, policy.over_launch_responses) > 1,
    "scale_down": lambda policy: policy.scale_down,
    "plans_parallelism": lambda policy: policy.plans_parallelism,
    "length_aware": lambda policy: policy.length_aware,
    "adaptive_tp": lambda policy: policy.adaptive_tp is not None,
    "elastic": lambda policy: bool(policy.instances_min or policy.instances_max),
}
"""Whether a policy has each mode on."""
EXCLUSIONS: dict[tuple[str, str], str] = {
    ("staleness", "over_launch"): "rounds are short and long only if nothing is generated ahead",
    ("staleness", "scale_down"): "instances are freed at the end of a round, and without rounds "
    "what is generated ahead keeps them busy",
    ("staleness", "plans_parallelism"): "the ranks are divided between rounds, and there are none",
    ("staleness", "adaptive_tp"): "groups of ranks grow while the last samples of a batch end, and "
    "others follow them if some are generated ahead",
    ("plans_parallelism", "adaptive_tp"): "a profile belongs to one division of the GPUs",
    ("over_launch", "length_aware"): "rounds defer what is long, so nothing is left to place apart",
    (
        "over_launch",
        "elastic",
    ): "the number follows the time of a whole generation, and a short round ends before it",
    ("scale_down", "elastic"): "both decide how many instances a round has",
    ("plans_parallelism", "elastic"): "both change the instances between rounds",
}
"""Why two modes exclude each other. All other pairs combine."""


def policy_fields(policy: RolloutPolicy) -> PolicyFields:
    """The fields that a policy sets in a rollout's order. Raises as `PolicyFields`."""
    match policy:
        case BoundedStaleness():
            return PolicyFields(
                staleness=policy.staleness,
                length_aware=policy.length_aware,
                instances_min=0 if policy.elastic is None else policy.elastic.min,
                instances_max=0 if policy.elastic is None else policy.elastic.max,
                adaptive_tp=policy.adaptive_tp,
            )
        case TailBatching():
            prompts, responses = policy.over_launch_prompts, policy.over_launch_responses
            return PolicyFields(
                staleness=0,
                over_launch_prompts=policy.over_launch if prompts is None else prompts,
                over_launch_responses=policy.over_launch if responses is None else responses,
                fixed_over_launch=policy.fixed_over_launch,
                plans_parallelism=policy.plans_parallelism,
                scale_down=policy.scale_down,
                adaptive_tp=policy.adaptive_tp,
            )
        case _:
            assert_never(policy)


def plain_fields(policy: RolloutPolicy) -> dict[str, object]:
    """`policy_fields` as JSON values, for the order of a rollout."""
    found = policy_fields(policy)
    plain: dict[str, object] = {field.name: getattr(found, field.name) for field in fields(found)}
    return plain | {"adaptive_tp": msgspec.to_builtins(found.adaptive_tp)}
