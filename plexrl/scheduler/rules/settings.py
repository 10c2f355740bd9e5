"""The settings in force, the strategies that they name, and the pass objects that hold both.

A `Step` is made where the core begins to handle an event, or the steps that follow one, and is
thrown away after it. Functions that decide or change something take the step and what they work
on. Functions that only read, also for queries, take a `Situation`: a step is one, and so is a
cluster.
"""

from dataclasses import dataclass, field
from typing import Protocol

from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.rules.ordering import Ordering, make_ordering
from plexrl.scheduler.rules.policies import (
    PlacementMode,
    PlacementPolicy,
    make_policy,
)
from plexrl.scheduler.state.messages.effects import Effects
from plexrl.scheduler.state.records import State


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerConfig:
    """Conditions for a complete and for an outdated profile."""

    cycles: int
    """Measured cycles that complete a profile."""
    first: int
    """Measured cycles that begin one, where nothing else is known."""
    drift_tolerance: float
    """Relative change of period or busy time that counts as drift."""


@dataclass(slots=True)
class Settings:
    """Settings of the core. `SchedulerStarted` may change them."""

    config: SchedulerConfig
    policy: PlacementPolicy = field(init=False)
    ordering: Ordering = field(init=False)
    anticipates: bool = field(init=False)
    """Whether an idle group is switched to the member that is expected next."""
    anybody_shares: bool = field(init=False)
    """Whether the policy ever puts two deployments on one group."""
    divides_groups: bool = field(init=False)
    """Whether a deployment may use a part of a larger one's GPUs."""
    profiles_while_sharing: bool = field(init=False)
    """Whether deployments are planned before their profile is complete."""
    profiler: ProfilerConfig = field(init=False)

    def __post_init__(self) -> None:
        self.change(self.config)

    @property
    def learns(self) -> tuple[bool, bool]:
        """Whether (lengths, demands) of earlier jobs are used."""
        return self.config.learns_from_jobs, self.profiles_while_sharing

    def change(self, config: SchedulerConfig) -> None:
        """Use these settings from now on."""
        self.config = config
        self.policy = make_policy(config.policy)
        modes = self.policy.modes(has_profile=True, is_patience_over=True, is_scarce=False)
        self.anybody_shares = modes != (PlacementMode.DEDICATED,)
        self.divides_groups = config.mixed_sizes and self.policy.repacks
        self.ordering = make_ordering(config.ordering)
        wanted = config.anticipation
        self.anticipates = self.ordering.anticipates if wanted is None else wanted
        self.profiles_while_sharing = config.learns_from_jobs and self.policy.repacks
        self.profiler = ProfilerConfig(
            cycles=config.profile_cycles,
            first=1 if self.profiles_while_sharing else config.profile_cycles,
            drift_tolerance=config.drift_tolerance,
        )


class Situation(Protocol):
    """What decisions read."""

    @property
    def state(self) -> State: ...

    @property
    def settings(self) -> Settings: ...


class Step:
    """One step of the core, at `now` (seconds)."""

    __slots__ = ("effects", "now", "settings", "state")

    def __init__(self, state: State, settings: Settings, effects: Effects, now: float) -> None:
        self.state = state
        self.settings = settings
        self.effects = effects
        self.now = now
