"""A plan of reservations: what could be reserved one after the other, with nothing changed.

Strategies decide on many trajectories, and on what would happen after a pull, before anything is
reserved (StaleFlow §4.2, discriminator). A plan counts the room of buffers and moves no other
entry, so that it takes O(staleness) a question. What a plan admits, the buffers admit in the same
order.
"""

from collections.abc import Callable

from plexrl.rollout.trajectories.record import SampleGroupId


class ReservationPlan:
    """Reservations on top of the buffers as they are when the plan is made."""

    def __init__(
        self,
        rooms: list[int],
        *,
        first: int,
        staleness: int,
        entry: Callable[[SampleGroupId], tuple[int, int] | None],
    ) -> None:
        """`rooms` from buffer `first` on; `entry`: the group's version and buffer, or None."""
        self._rooms = rooms
        self._first = first
        self._staleness = staleness
        self._entry = entry
        self._planned: dict[SampleGroupId, tuple[int, int]] = {}

    def admits(self, group: SampleGroupId, version: int) -> bool:
        """True if a trajectory of the group may get this version."""
        entry = self._planned.get(group) or self._entry(group)
        if entry is not None and (entry[0] <= version or entry[1] <= version + self._staleness):
            return True
        return self._latest(version) is not None

    def reserve(self, group: SampleGroupId, version: int) -> None:
        """Takes the room that the version needs. The plan must admit it."""
        entry = self._planned.get(group) or self._entry(group)
        if entry is not None:
            if entry[0] <= version:
                return
            if entry[1] <= version + self._staleness:
                self._planned[group] = (version, entry[1])
                return
            self._rooms[entry[1] - self._first] += 1
        place = self._latest(version)
        assert place is not None, "the plan admits the version"
        self._rooms[place - self._first] -= 1
        self._planned[group] = (version, place)

    def _latest(self, version: int) -> int | None:
        latest = min(version + self._staleness - self._first, len(self._rooms) - 1)
        for index in range(latest, -1, -1):
            if self._rooms[index]:
                return index + self._first
        return None
