"""Routing by expected lengths: long samples on instances of their own (StreamRL §5.3).

Whether instances are divided is chosen when prompts are added or the number of instances changes
(`divide_instances`), and kept until then. If they are, the longest part of the prompts in flight,
by their expected lengths, is marked as long in each cycle, and the first instances by id serve it.
Within a side the longest come first, and go to the instance with the largest gain in throughput,
as without expected lengths. An instance without work takes also what belongs to the other side, if
nothing of its own side waits; the paper, whose batch is dispatched at once, leaves it idle.

A prompt without an expected length, such as one of the first batch, is not long.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plexrl.rollout.coordinator.settings import CoordinatorSettings
from plexrl.rollout.coordinator.strategies.routing import (
    CountRouter,
    Router,
    RoutingCandidate,
    RoutingChoice,
    ThroughputRouter,
)
from plexrl.rollout.instances.cost_model import CostModel
from plexrl.rollout.instances.snapshot import InstanceLoad
from plexrl.rollout.policies.length_dispatch import LONG_PART, DispatchedBatch, choose_division
from plexrl.rollout.staleness.buffers import Buffers
from plexrl.rollout.trajectories.record import SampleGroupId, Trajectory
from plexrl.rollout.trajectories.server import TrajectoryServer


@dataclass(frozen=True, slots=True)
class Sides:
    """The trajectories that are expected to be long, and the instances that serve them."""

    groups: frozenset[SampleGroupId]
    """Long prompts."""
    instances: int
    """The first so many of the loads serve long prompts, the others the rest."""
    waiting: tuple[bool, bool]
    """Whether trajectories of prompts that are not long wait to be routed, and of long ones."""


def divide_instances(
    model: CostModel, server: TrajectoryServer, kv_budgets: Sequence[float], samples: int
) -> None:
    """Chooses the division anew, if prompts were added or other instances serve; it is part of the
    server's state. `kv_budgets`: of the instances that serve."""
    held = server.lengths.division
    if (held.prompts, held.instances) == (server.prompts_added, len(kv_budgets)):
        return
    expected = server.lengths.expected
    prompts = [group.prompt_tokens for group in server.groups.values()]
    held.long = 0
    if prompts and kv_budgets:
        batch = DispatchedBatch(
            expected=sorted((expected.get(group, 0) for group in server.groups), reverse=True),
            samples=samples,
            prompt_tokens=sum(prompts) / len(prompts),
            instances=len(kv_budgets),
            kv_budget=min(kv_budgets),
        )
        held.long = choose_division(model, batch, server.lengths.ranked)
    held.prompts, held.instances = server.prompts_added, len(kv_budgets)


def sides(loads: Sequence[InstanceLoad], server: TrajectoryServer) -> Sides | None:
    """How the instances are divided; None: all of them serve all prompts."""
    expected, division = server.lengths.expected, server.lengths.division
    known = sorted((-expected[each], each) for each in server.groups if each in expected)
    long = frozenset(group for _, group in known[: int(LONG_PART * len(known))])
    if not long or not 0 < division.long < len(loads):
        return None
    waits = {
        trajectory.group in long
        for trajectory in (*server.initial.values(), *server.returned.values())
    }
    return Sides(long, division.long, (False in waits, True in waits))


def longest_first(server: TrajectoryServer) -> list[Trajectory]:
    """Initial trajectories in the order in which they are routed; those without an expected length
    last."""
    expected = server.lengths.expected
    return sorted(
        server.initial.values(),
        key=lambda trajectory: (-expected.get(trajectory.group, 0), trajectory.id),
    )


def make_router(
    settings: CoordinatorSettings,
    model: CostModel,
    loads: Iterable[InstanceLoad],
    buffers: Buffers,
    found: Sides | None = None,
) -> Router:
    """The router that the settings name; `found` are the sides of `length-aware`."""
    if settings.routing == "count":
        return CountRouter(loads, buffers, model)
    if found is not None:
        return LengthAwareRouter(loads, buffers, model, found, settings)
    return ThroughputRouter(
        loads,
        buffers,
        model,
        gain_part_min=settings.gain_part_min,
        length_step=settings.length_step_tokens,
    )


class LengthAwareRouter:
    """A `ThroughputRouter` for each side; its lanes are the sides, 1 that of long prompts."""

    lanes = 2

    def __init__(
        self,
        loads: Iterable[InstanceLoad],
        buffers: Buffers,
        model: CostModel,
        found: Sides,
        settings: CoordinatorSettings,
    ) -> None:
        parts: tuple[list[InstanceLoad], list[InstanceLoad]] = ([], [])
        for load in loads:
            parts[self._is_for_long(found, load)].append(load)
        self._sides = found
        self._routers = tuple(
            ThroughputRouter(
                part,
                buffers,
                model,
                gain_part_min=settings.gain_part_min,
                length_step=settings.length_step_tokens,
            )
            for part in parts
        )

    @staticmethod
    def _is_for_long(found: Sides, load: InstanceLoad) -> bool:
        return load.index < found.instances

    def lane(self, candidate: RoutingCandidate) -> int:
        """The side of the prompt."""
        return int(candidate.group in self._sides.groups)

    def choose(self, candidate: RoutingCandidate) -> RoutingChoice | None:
        """An instance of the prompt's side; or one of the other side that has nothing to do."""
        lane = self.lane(candidate)
        choice = self._routers[lane].choose(candidate)
        if choice is None and not self._sides.waiting[1 - lane]:
            other = self._routers[1 - lane].choose(candidate)
            return other if other is not None and not other.load.count else None
        return choice

    def comparable_length(self, length: int) -> int:
        """As `ThroughputRouter`."""
        return self._routers[0].comparable_length(length)

    def score(self, load: InstanceLoad, length: int) -> float | None:
        """As `ThroughputRouter`."""
        return self._routers[self._is_for_long(self._sides, load)].score(load, length)

    def would_replace(self, version: int, choice: RoutingChoice | None) -> bool:
        """As `ThroughputRouter`."""
        return self._routers[0].would_replace(version, choice)

    def take(self, candidate: RoutingCandidate, choice: RoutingChoice) -> None:
        """Adds one trajectory, which runs at once."""
        self._routers[self._is_for_long(self._sides, choice.load)].take(candidate, choice)
