"""The staleness manager beside the search through all arrangements.

Each action takes a number and chooses by it, so that hypothesis and a seeded generator can both
lead the same history.
"""

from random import Random
from typing import TYPE_CHECKING, TypeVar

import pytest

from plexrl.errors import ConflictError
from plexrl.rollout.staleness.manager import StalenessManager, StalenessSettings
from plexrl.rollout.trajectories.record import SampleGroupId, TrajectoryId
from tests.rollout.oracle import Entry, earliest

if TYPE_CHECKING:
    from collections.abc import Callable

ENTRIES_MAX = 9
"""So few that the oracle tries all arrangements quickly."""

T = TypeVar("T")


def chosen(options: list[T], number: int) -> T:
    return options[number % len(options)]


class Protocol:
    """A manager, and what a reader of the paper would write down beside it."""

    def __init__(self, settings: StalenessSettings) -> None:
        self.settings = settings
        self.manager = StalenessManager(settings)
        self.versions: dict[SampleGroupId, dict[TrajectoryId, int]] = {}
        """Versions of all members of each group that has an entry."""
        self.done: dict[SampleGroupId, set[TrajectoryId]] = {}
        """Complete members of each group that has an entry."""
        self.next_group = 0

    @property
    def started(self) -> list[SampleGroupId]:
        size = self.settings.group_size
        return [group for group, done in self.done.items() if len(done) < size]

    def entries(self, *, without: SampleGroupId | None = None) -> list[Entry]:
        started = {*self.started}
        return [
            (min(versions.values()), group not in started)
            for group, versions in self.versions.items()
            if group != without
        ]

    def best(self, entries: list[Entry]) -> tuple[int, ...] | None:
        return earliest(
            entries,
            first=self.manager.buffers.next_version,
            staleness=self.settings.staleness,
            size=self.settings.batch_groups,
            extra=self.settings.extra_groups,
        )

    def version(self, number: int) -> int:
        """From too old for every buffer to the newest one that exists."""
        first = self.manager.buffers.next_version
        return max(0, first - number % (self.settings.staleness + 2))

    def may_reserve(self, group: SampleGroupId, version: int) -> bool:
        """True if the entries fit with the member, and no complete entry has to move back."""
        own = min([version, *self.versions.get(group, {}).values()])
        return self.best([*self.entries(without=group), (own, False)]) == self.best(self.entries())

    def reserve(self, group: SampleGroupId, version: int) -> None:
        members = self.versions.get(group, {})
        trajectory = TrajectoryId(group * self.settings.samples + len(members))
        is_allowed = self.may_reserve(group, version)
        assert self.manager.buffers.admits(group, version) == is_allowed
        if not is_allowed:
            with pytest.raises(ConflictError):
                self.manager.reserve(group, trajectory, version)
            return
        self.manager.reserve(group, trajectory, version)
        self.versions.setdefault(group, {})[trajectory] = version
        self.done.setdefault(group, set())

    def group_to_reserve(self, number: int) -> SampleGroupId | None:
        """A new group, or one that lacks members."""
        lacking = [g for g in self.started if len(self.versions[g]) < self.settings.samples]
        if len(self.versions) < ENTRIES_MAX:
            lacking.append(SampleGroupId(self.next_group))
        if not lacking:
            return None
        group = chosen(lacking, number)
        self.next_group = max(self.next_group, group + 1)
        return group

    def start(self, number: int) -> None:
        group = self.group_to_reserve(number)
        if group is not None:
            self.reserve(group, self.version(number // 7))

    def try_out(self, number: int) -> None:
        """Copies of the buffers change on their own."""
        buffers = self.manager.buffers.copy()
        for step in range(4):
            group = self.group_to_reserve(number // (step + 1))
            if group is not None and buffers.admits(group, self.version(number // (step + 3))):
                buffers.assign(group, self.version(number // (step + 3)))
        buffers.check_invariants()

    def complete(self, number: int) -> None:
        running = [
            (group, each)
            for group in self.started
            for each in self.versions[group]
            if each not in self.done[group]
        ]
        if not running:
            return
        group, member = chosen(running, number)
        surplus = self.manager.complete(group, member)
        self.done[group].add(member)
        assert (surplus is None) == (len(self.done[group]) < self.settings.group_size)
        for each in surplus or ():
            self.forget(each)

    def drop(self, number: int) -> None:
        if self.versions:
            group = chosen(list(self.versions), number)
            surplus = self.manager.drop(group)
            for each in (group, *surplus):
                self.forget(each)

    def consume(self, number: int) -> None:
        del number
        first = self.manager.buffers.next_version
        best = self.best(self.entries())
        is_ready = best is not None and best[0] == self.settings.batch_groups
        assert self.manager.is_ready() == is_ready
        if not is_ready:
            with pytest.raises(ConflictError):
                self.manager.consume()
            return
        for group, members in self.manager.consume().items():
            assert set(members) == self.done[group]
            assert min(self.versions[group].values()) + self.settings.staleness >= first
            self.forget(group)
        assert self.manager.buffers.next_version == first + 1

    def forget(self, group: SampleGroupId) -> None:
        del self.versions[group], self.done[group]

    def check(self) -> None:
        """Buffers are as ready as they can be, and the manager's own invariants hold."""
        self.manager.check_invariants()
        buffers = self.manager.buffers
        first = buffers.next_version
        held = range(first, first + self.settings.staleness + 1)
        found = tuple(len(buffers.buffer(version).occupied) for version in held)
        assert found == self.best(self.entries())
        assert len(buffers) == len(self.versions)


def run_protocol(seed: int, actions: int) -> None:
    """One history, the same for the same seed."""
    random = Random(seed)
    protocol = Protocol(
        StalenessSettings(
            staleness=random.randint(0, 3),
            batch_groups=random.randint(1, 3),
            group_size=random.randint(1, 2),
            extra_groups=random.choice((0, 0, 1)),
            extra_samples=random.randint(0, 1),
        )
    )
    likely: list[Callable[[int], None]] = [
        *[protocol.start] * 4,
        *[protocol.complete] * 5,
        *[protocol.drop] * 2,
        protocol.try_out,
        protocol.consume,
    ]
    for _ in range(actions):
        random.choice(likely)(random.randrange(1 << 16))
        protocol.check()
