"""Memory of one GPU that was returned and is kept for the next allocation of the same user. Pure.

Creating physical memory takes longer than mapping it. Between an offload and the next load nothing
computes on a GPU, so its memory may wait there. Invariants:

- At most `bytes_max` are kept, so that processes which start meanwhile find room.
- The next allocation takes what fits it, if it is of the same user, and all else is released before
  anything is created: frameworks and other users never find memory missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class IdleSegment(NamedTuple):
    """Physical memory that is mapped nowhere."""

    handle: int
    nbytes: int
    uid: int
    """User whose workers have held it; only they may read what it contains."""


@dataclass(slots=True)
class IdleSegments:
    """Not thread-safe."""

    bytes_max: int
    _kept: list[IdleSegment] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Memory that is kept."""
        return sum(segment.nbytes for segment in self._kept)

    def put(self, returned: Sequence[IdleSegment]) -> list[IdleSegment]:
        """Keep returned segments; returns those to release, the oldest first."""
        self._kept += returned
        surplus: list[IdleSegment] = []
        while self.nbytes > self.bytes_max:
            surplus.append(self._kept.pop(0))
        return surplus

    def take(
        self, sizes: Sequence[int], uid: int
    ) -> tuple[list[IdleSegment | None], list[IdleSegment]]:
        """For an allocation of `sizes`: the segment for each, None if there is none; and all other
        segments, to release. Nothing is kept afterwards."""
        left, self._kept = self._kept, []
        found: list[IdleSegment | None] = []
        for size in sizes:
            fit = next((each for each in left if (each.nbytes, each.uid) == (size, uid)), None)
            if fit is not None:
                left.remove(fit)
            found.append(fit)
        return found, left
