"""What leaves the host tier when room is needed. Pure: no files, no clock."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A version in the host tier, as the choice sees it."""

    name: str
    nbytes: int
    last_use: int
    """Larger is more recent."""
    pinned: bool = False
    """Being read or written: cannot leave now."""


def choose_spills(
    residents: Iterable[Resident], used_bytes: int, needed_bytes: int, bytes_max: int
) -> list[str] | None:
    """Names to move out, in order, so that `needed_bytes` more fit; None where nothing helps.

    Least recently used first, no more than needed. `used_bytes` may exceed what `residents` add up
    to: room that is reserved for versions still being written cannot be freed.
    """
    excess = used_bytes + needed_bytes - bytes_max
    chosen: list[str] = []
    for resident in sorted(residents, key=lambda r: (r.last_use, r.name)):
        if excess <= 0:
            break
        if resident.pinned or resident.nbytes == 0:
            continue
        chosen.append(resident.name)
        excess -= resident.nbytes
    return chosen if excess <= 0 else None
