"""The record of one trajectory: its tokens by version, and the table of its states.

A trajectory begins as a prompt alone (StaleFlow §2.1). `V_traj`, its `version`, is assigned when it
is first routed and is the oldest policy version that any of its tokens may have (StaleFlow §4.1).

Invariants:
- every segment has `version <= kv_version <= policy_version`;
- `instance` is set exactly in the states `ROUTED`, `INTERRUPTING` and `ABORTING`;
- an initial trajectory has no version, and every other state than `WAITING` and `ABORTED` has one.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from plexrl.errors import ConflictError, InvalidRequestError

TrajectoryId = NewType("TrajectoryId", int)
"""`group * samples per group + index of the sample`, so that the group follows from it."""
SampleGroupId = NewType("SampleGroupId", int)
"""Number of a prompt in the order of sampling, from 0: all samples of a prompt are one group."""
InstanceId = NewType("InstanceId", str)
"""A rollout instance."""


def trajectory_ids(group: SampleGroupId, samples: int) -> tuple[TrajectoryId, ...]:
    """Ids of the trajectories of a group of so many samples."""
    first = group * samples
    return tuple(TrajectoryId(first + index) for index in range(samples))


def group_of(trajectory: TrajectoryId, samples: int) -> SampleGroupId:
    """The group of a trajectory, where groups have so many samples."""
    return SampleGroupId(trajectory // samples)


class TrajectoryState(StrEnum):
    WAITING = "waiting"
    """On the trajectory server, to be routed."""
    ROUTED = "routed"
    """On an instance: running, preempted, or on its way there."""
    INTERRUPTING = "interrupting"
    """On an instance that is to return it."""
    ABORTING = "aborting"
    """On an instance that is to discard it."""
    GENERATED = "generated"
    """Generation is complete; the reward is not."""
    REWARDED = "rewarded"
    CONSUMED = "consumed"
    ABORTED = "aborted"


GENERATED = (TrajectoryState.GENERATED, TrajectoryState.REWARDED)
"""The states of a trajectory of a batch that is not trained."""


class TrajectoryChange(StrEnum):
    """A change of a trajectory."""

    ROUTE = "route"
    INTERRUPT = "interrupt"
    RETURN = "return"
    GENERATE = "generate"
    REWARD = "reward"
    CONSUME = "consume"
    ABORT = "abort"
    DISCARD = "discard"


_S = TrajectoryState
TRANSITIONS: dict[tuple[TrajectoryState, TrajectoryChange], TrajectoryState] = {
    (_S.WAITING, TrajectoryChange.ROUTE): _S.ROUTED,
    (_S.ROUTED, TrajectoryChange.INTERRUPT): _S.INTERRUPTING,
    # An instance that is lost or fails to generate returns what it was not asked to return.
    (_S.ROUTED, TrajectoryChange.RETURN): _S.WAITING,
    (_S.INTERRUPTING, TrajectoryChange.RETURN): _S.WAITING,
    (_S.ROUTED, TrajectoryChange.GENERATE): _S.GENERATED,
    # The last token came before the interrupt.
    (_S.INTERRUPTING, TrajectoryChange.GENERATE): _S.GENERATED,
    (_S.GENERATED, TrajectoryChange.REWARD): _S.REWARDED,
    (_S.REWARDED, TrajectoryChange.CONSUME): _S.CONSUMED,
    (_S.WAITING, TrajectoryChange.ABORT): _S.ABORTED,
    (_S.ROUTED, TrajectoryChange.ABORT): _S.ABORTING,
    # The interrupt is already on its way and has the same effect on the instance.
    (_S.INTERRUPTING, TrajectoryChange.ABORT): _S.ABORTING,
    (_S.GENERATED, TrajectoryChange.ABORT): _S.ABORTED,
    (_S.REWARDED, TrajectoryChange.ABORT): _S.ABORTED,
    (_S.ABORTING, TrajectoryChange.DISCARD): _S.ABORTED,
}
ON_INSTANCE = frozenset({_S.ROUTED, _S.INTERRUPTING, _S.ABORTING})
"""States in which an instance holds the trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySegment:
    """Consecutive response tokens that one policy version sampled."""

    tokens: int
    """Number of response tokens, at least 1."""
    policy_version: int
    """Version of the weights that sampled the tokens."""
    kv_version: int
    """Oldest version whose keys and values the tokens attended to. It equals `policy_version` when
    the engine computed the KV cache again after the update, and is older when the engine kept
    it."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InvalidRequestError(f"a segment has {self.tokens} tokens: report at least 1")
        if not 0 <= self.kv_version <= self.policy_version:
            raise InvalidRequestError(
                f"a segment has KV version {self.kv_version} and policy version "
                f"{self.policy_version}: the KV version must be in 0..policy version"
            )


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """One sample of one prompt. Only the trajectory server writes it."""

    id: TrajectoryId
    group: SampleGroupId
    prompt_tokens: int
    state: TrajectoryState = TrajectoryState.WAITING
    version: int | None = None
    """V_traj; None before the first routing."""
    instance: InstanceId | None = None
    """The instance that holds it; None on the trajectory server and after generation."""
    segments: list[TrajectorySegment] = field(default_factory=list)
    response_tokens: int = 0
    """Number of tokens of `segments`."""
    failures: int = 0
    """Failed generations so far."""
    reward: float | None = None
    """Absent until the reward is computed."""

    @property
    def length(self) -> int:
        """Number of tokens, prompt included."""
        return self.prompt_tokens + self.response_tokens

    def change(self, what: TrajectoryChange) -> None:
        """Moves to the next state of `TRANSITIONS`. Raises ConflictError: there is none."""
        after = TRANSITIONS.get((self.state, what))
        if after is None:
            raise ConflictError(
                f"trajectory {self.id} is {self.state}: it cannot {what}", trajectory=self.id
            )
        self.state = after
        if after not in ON_INSTANCE:
            self.instance = None

    def check_segments(self, segments: tuple[TrajectorySegment, ...]) -> None:
        """Raises InvalidRequestError: a segment is older than V_traj. (A later segment may
        be of an older version than an earlier one, if both are within the bound.)"""
        for segment in segments:
            if self.version is None or segment.kv_version < self.version:
                raise InvalidRequestError(
                    f"trajectory {self.id} has version {self.version} and cannot have tokens of "
                    f"policy version {segment.policy_version} over KV version "
                    f"{segment.kv_version}: route it to instances of its version or newer ones only"
                )

    def extend(self, segments: tuple[TrajectorySegment, ...]) -> None:
        """Appends generated segments. Raises InvalidRequestError: see `check_segments`."""
        self.check_segments(segments)
        self.segments.extend(segments)
        self.response_tokens += sum(segment.tokens for segment in segments)
