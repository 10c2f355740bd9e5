"""Staleness buffers: which entry is trained at which version (StaleFlow §4.2).

Buffer `v` is trained as the model advances from version `v` to `v + 1`. Its entries are *reserved*
(generation is not complete) or *occupied* (complete). An entry of version `V` may be in the buffers
up to `V + staleness`, its *deadline*. `next_version` is the first buffer that is not consumed; a
model of a newer version does not exist yet, so `V <= next_version`, and `V` itself bounds nothing.

A buffer has `size` entries, and `extra` more for redundancy at batch level, which only reserved
entries may use. A buffer with `size` occupied entries is full: it has no room for others.

Invariants:
- every entry of version `V` in buffer `v` has `V + staleness >= v >= next_version`;
- reserved entries are as late as possible: none could move to a later buffer with room;
- occupied entries are as early as possible: none could move to an earlier buffer with room;
- no reserved entry could change places with an occupied entry of a later buffer.

So the number of occupied entries in the first buffer, then in the second and so on, is the largest
that any arrangement of the same entries has: the buffers become ready as early as possible, and a
reservation is refused only if every arrangement that keeps these numbers has no place for it.

Two rules that the paper leaves open: among the reserved entries of one buffer that can move to a
free place, the one with the earliest deadline moves; when an occupied entry is removed, the newest
occupied entry of the last buffer that holds one moves forward into its place.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from plexrl.errors import ConflictError, InvariantError
from plexrl.rollout.trajectories.record import SampleGroupId


class BufferState(StrEnum):
    WAITING = "waiting"
    """It has room for reservations."""
    READY = "ready"
    """All its entries are occupied: it can be consumed in its turn."""
    STUCK = "stuck"
    """It has no room, and some of its entries are reserved."""


@dataclass(slots=True, kw_only=True)
class StalenessBuffer:
    """The entries of one buffer: versions by group."""

    reserved: dict[SampleGroupId, int] = field(default_factory=dict)
    occupied: dict[SampleGroupId, int] = field(default_factory=dict)


class Buffers:
    """All buffers that are not consumed. Operations take O(staleness² + entries of a buffer)."""

    def __init__(
        self, *, staleness: int, size: int, extra: int = 0, first_version: int = 0
    ) -> None:
        self.staleness = staleness
        self.size = size
        self.extra = extra
        self.next_version = first_version
        self._buffers: dict[int, StalenessBuffer] = {}
        self._place: dict[SampleGroupId, int] = {}
        """The buffer of each entry."""

    def copy(self) -> "Buffers":
        """Equal buffers that change on their own: what would happen is tried on them."""
        other = Buffers(staleness=self.staleness, size=self.size, extra=self.extra)
        other.next_version = self.next_version
        other._place = self._place.copy()
        other._buffers = {
            version: StalenessBuffer(reserved=each.reserved.copy(), occupied=each.occupied.copy())
            for version, each in self._buffers.items()
        }
        return other

    def buffer(self, version: int) -> StalenessBuffer:
        """Entries of the buffer; empty for one that was never used."""
        return self._buffers.get(version) or StalenessBuffer()

    def entries(self) -> Iterator[tuple[int, StalenessBuffer]]:
        """Buffers that hold entries, by version ascending."""
        return ((v, self._buffers[v]) for v in sorted(self._buffers))

    def place(self, group: SampleGroupId) -> int | None:
        """The buffer that holds the group's entry; None if it has no entry."""
        return self._place.get(group)

    def version(self, group: SampleGroupId) -> int:
        """The version of the group's entry. Raises ConflictError: it has none."""
        buffer = self._buffers[self._placed(group)]
        found = buffer.reserved.get(group)
        return buffer.occupied[group] if found is None else found

    def is_occupied(self, group: SampleGroupId) -> bool:
        """True for a group with an occupied entry."""
        place = self._place.get(group)
        return place is not None and group in self._buffers[place].occupied

    def __len__(self) -> int:
        """Number of entries."""
        return len(self._place)

    def state(self, version: int) -> BufferState:
        """State of the buffer."""
        if len(self.buffer(version).occupied) == self.size:
            return BufferState.READY
        return BufferState.WAITING if self.room(version) else BufferState.STUCK

    def room(self, version: int) -> int:
        """Number of reservations that fit into the buffer."""
        buffer = self._buffers.get(version)
        if buffer is None:
            return self.size + self.extra
        if len(buffer.occupied) == self.size:
            return 0
        return self.size + self.extra - len(buffer.occupied) - len(buffer.reserved)

    def reservable(self, version: int) -> int | None:
        """The buffer that a reservation of this version would get: the latest one with room."""
        for place in range(version + self.staleness, self.next_version - 1, -1):
            if self.room(place):
                return place
        return None

    def admits(self, group: SampleGroupId, version: int) -> bool:
        """True if `assign` would succeed: the discriminator. Nothing changes."""
        if not 0 <= version <= self.next_version:
            return False
        place = self._place.get(group)
        if place is None:
            return self.reservable(version) is not None
        own = self._buffers[place].reserved.get(group)
        if own is None:
            return False
        latest = version + self.staleness
        return (
            own <= version
            or place <= latest
            or self._hole_after_release(group) <= latest
            or self.reservable(version) is not None
        )

    def assign(self, group: SampleGroupId, version: int) -> None:
        """Gives a member of the group this version. The group reserves an entry if it has none; a
        version older than that of its entry moves the entry to a buffer that allows it.

        Raises ConflictError: the version does not exist or breaks the staleness bound, or the
        group is complete. Nothing changes.
        """
        if not self.admits(group, version):
            raise ConflictError(
                f"group {group} cannot have version {version}: versions exist up to "
                f"{self.next_version}, and its entry must fit into a staleness buffer up to "
                f"{version + self.staleness}; assign a newer version",
                group=group,
                version=version,
            )
        place = self._place.get(group)
        if place is not None:
            if self._buffers[place].reserved[group] <= version:
                return
            self._take_reserved(group)
        latest = self.reservable(version)
        assert latest is not None, "the version is admitted"
        self.put(group, version, latest, is_occupied=False)

    def occupy(self, group: SampleGroupId) -> int:
        """Turns the reservation into an occupied entry and returns its buffer.

        Raises ConflictError: the group has no reservation.
        """
        version = self._take_reserved(group)
        place = self.next_version
        while not self._has_place_to_occupy(place):
            place += 1
        self.put(group, version, place, is_occupied=True)
        return place

    def release(self, group: SampleGroupId) -> None:
        """Deletes the entry, and moves entries forward and reservations back.

        Raises ConflictError: the group has no entry.
        """
        place = self._placed(group)
        if group in self._buffers[place].reserved:
            self._take_reserved(group)
        else:
            del self._buffers[place].occupied[group]
            self._forget(group, place)
            self._fill(place)
        self._advance_occupied()

    def consume(self) -> dict[SampleGroupId, int]:
        """Retires the first buffer and returns the versions of its groups.

        Raises ConflictError: the buffer is not ready.
        """
        version = self.next_version
        if (state := self.state(version)) is not BufferState.READY:
            raise ConflictError(
                f"staleness buffer {version} is {state}: consume it when it is ready",
                buffer=version,
            )
        buffer = self._buffers.pop(version)
        if buffer.reserved:
            raise ConflictError(
                f"staleness buffer {version} is ready and holds the reservations of surplus "
                f"groups {sorted(buffer.reserved)}: release them first"
            )
        for group in buffer.occupied:
            del self._place[group]
        self.next_version = version + 1
        return buffer.occupied

    def put(self, group: SampleGroupId, version: int, place: int, *, is_occupied: bool) -> None:
        """Adds an entry to this buffer, unchecked: to restore what was there before."""
        buffer = self._buffers.setdefault(place, StalenessBuffer())
        (buffer.occupied if is_occupied else buffer.reserved)[group] = version
        self._place[group] = place

    def _hole_after_release(self, group: SampleGroupId) -> int:
        """The buffer that would gain room if the group's reservation were released."""
        hole = self._place[group]
        while (source := self._movable(hole, leaving_out=group)) is not None:
            hole = source[1]
        return hole

    def _placed(self, group: SampleGroupId) -> int:
        place = self._place.get(group)
        if place is None:
            raise ConflictError(f"group {group} has no entry in the staleness buffers")
        return place

    def _forget(self, group: SampleGroupId, place: int) -> None:
        del self._place[group]
        buffer = self._buffers[place]
        if not buffer.reserved and not buffer.occupied:
            del self._buffers[place]

    def _take_reserved(self, group: SampleGroupId) -> int:
        """Deletes the reservation, moves others into its place, and returns its version."""
        place = self._placed(group)
        version = self._buffers[place].reserved.pop(group, None)
        if version is None:
            raise ConflictError(f"group {group} occupies its entry already")
        self._forget(group, place)
        self._fill(place)
        return version

    def _movable(
        self, hole: int, *, leaving_out: SampleGroupId | None = None
    ) -> tuple[SampleGroupId, int] | None:
        """The earliest reservation before buffer `hole` that may move there, and its buffer."""
        for place in range(self.next_version, hole):
            buffer = self._buffers.get(place)
            if buffer is None:
                continue
            found = [
                (version, group)
                for group, version in buffer.reserved.items()
                if version + self.staleness >= hole and group != leaving_out
            ]
            if found:
                return min(found)[1], place
        return None

    def _fill(self, hole: int) -> None:
        """Moves reservations to later buffers until none can use the free place."""
        while self.room(hole) and (found := self._movable(hole)) is not None:
            group, place = found
            version = self._buffers[place].reserved.pop(group)
            self._forget(group, place)
            self.put(group, version, hole, is_occupied=False)
            hole = place

    def _has_place_to_occupy(self, version: int) -> bool:
        return len(self.buffer(version).occupied) < self.size and self.room(version) > 0

    def _advance_occupied(self) -> None:
        """Moves occupied entries to earlier buffers with room, from the last buffer first."""
        while True:
            last = max((v for v, each in self._buffers.items() if each.occupied), default=-1)
            free = range(self.next_version, last)
            place = next((v for v in free if self._has_place_to_occupy(v)), None)
            if place is None:
                return
            group, version = max(self._buffers[last].occupied.items(), key=lambda e: (e[1], e[0]))
            del self._buffers[last].occupied[group]
            self._forget(group, last)
            # No reservation moves into the place that this leaves: by the last invariant none may.
            self.put(group, version, place, is_occupied=True)

    def check_invariants(self) -> None:
        """Raises InvariantError: an invariant of this module does not hold."""
        held: dict[SampleGroupId, int] = {}
        for place, buffer in self._buffers.items():
            held |= dict.fromkeys([*buffer.reserved, *buffer.occupied], place)
            used = len(buffer.reserved) + len(buffer.occupied)
            if len(buffer.occupied) > self.size or used > self.size + self.extra:
                raise InvariantError(f"buffer {place} holds {used} entries", law="buffer size")
            for group, version in (buffer.reserved | buffer.occupied).items():
                if not self.next_version <= place <= version + self.staleness:
                    raise InvariantError(
                        f"group {group} of version {version} is in buffer {place}",
                        law="staleness bound",
                    )
            for group, version in buffer.reserved.items():
                for later in range(place + 1, version + self.staleness + 1):
                    if self.room(later):
                        raise InvariantError(
                            f"group {group} could move from buffer {place} to {later}",
                            law="reservations are late",
                        )
        if held != self._place:
            raise InvariantError("an entry is in two buffers or in none", law="one entry a group")
        last = max((v for v, each in self._buffers.items() if each.occupied), default=-1)
        for place in range(self.next_version, last):
            if self._has_place_to_occupy(place):
                raise InvariantError(
                    f"buffer {place} has room before buffer {last}", law="occupied are early"
                )
