"""Where a new version goes, and what gives way to it. Pure: no files, no clock.

The host tier comes first, because everything is loaded from it at memory speed. Room in it is made
by dropping what the new version supersedes, then by moving to NVMe what is expected to be used last
(`expected_use`); of those expected at the same moment what was used longest ago goes first, and of
these the first by name. What has a copy on NVMe already costs nothing to move there. A version that
is in use keeps its room until its users are done, so counting on it could only wait; it is never
chosen.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

SUMS_MAX = 4096


class TierName(StrEnum):
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A stored version, as the choice sees it."""

    name: str
    tier: TierName
    nbytes: int
    last_use: int
    """Larger is more recent."""
    next_use: float = 0.0
    """When it is expected to be used, on any clock; see `expected_use`."""
    spill_bytes: int | None = None
    """What NVMe must take to let it leave the host tier; absent: all of it."""
    in_use: bool = False
    superseded: bool = False
    """Of no use once the new version is whole, nor before: another complete one is kept."""

    @property
    def cost_bytes(self) -> int:
        return self.nbytes if self.spill_bytes is None else self.spill_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A tier's bytes."""

    used_bytes: int
    """Including versions in use, and room promised to versions that are still being written."""
    bytes_max: int

    @property
    def free_bytes(self) -> int:
        return self.bytes_max - self.used_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What to do, in this order: drop, spill, write the new version to `tier`."""

    tier: TierName
    drop: tuple[str, ...] = ()
    spill: tuple[str, ...] = ()
    """From host to NVMe, where there is room for them once `drop` is done."""


def expected_use(predicted: float | None, last_use: float, now: float) -> float:
    """When a version will be used, all three in seconds on one clock.

    A prediction that has passed means at any moment. Without one, what has been idle for a time is
    expected to be idle for as long again; so the least recently used goes first among those of
    which nothing was said.
    """
    return max(predicted, now) if predicted is not None else now + max(0.0, now - last_use)


def place(
    needed_bytes: int,
    residents: Iterable[Resident],
    host: Room,
    nvme: Room,
    needed_nvme_bytes: int | None = None,
) -> Placement | None:
    """Where `needed_bytes` more can go; None where no tier can take them.

    Gives up no more than the host tier needs: nothing if there is room, superseded versions before
    spilled ones, the farthest expected use first, and nothing whose going makes no difference.
    `needed_nvme_bytes` absent: NVMe would need as much.
    """
    if needed_nvme_bytes is None:
        needed_nvme_bytes = needed_bytes
    if needed_bytes <= host.free_bytes:
        return Placement(tier=TierName.HOST)
    free_to_go = sorted((r for r in residents if not r.in_use and r.nbytes > 0), key=_order)
    stale = [r for r in free_to_go if r.superseded]
    stale_in_host = [r for r in stale if r.tier == TierName.HOST]
    dropped = _first_that_free(stale_in_host, needed_bytes - host.free_bytes)
    if dropped is not None:
        return Placement(tier=TierName.HOST, drop=_names(dropped))

    # Past this point room is short on the node, so nothing superseded stays in either tier.
    excess = needed_bytes - host.free_bytes - _total(stale_in_host)
    nvme_free = nvme.free_bytes + _total(stale) - _total(stale_in_host)
    kept = [r for r in free_to_go if r.tier == TierName.HOST and not r.superseded]
    spilled = _first_that_free(kept, excess, nvme_free) or _any_that_free(kept, excess, nvme_free)
    if spilled is not None:
        return Placement(tier=TierName.HOST, drop=_names(stale), spill=_names(spilled))
    if needed_nvme_bytes <= nvme_free:
        return Placement(tier=TierName.NVME, drop=_names(stale))
    return None


def _first_that_free(
    candidates: Sequence[Resident], excess: int, room: int | None = None
) -> list[Resident] | None:
    """The first candidates that free `excess` bytes, without those that need not go.

    `room` is what they may come to together (absent: anything); one too large for it is passed
    over. None where they do not free enough.
    """
    chosen: list[Resident] = []
    for resident in candidates:
        if excess <= 0:
            break
        if room is not None and resident.cost_bytes > room - _cost(chosen):
            continue
        chosen.append(resident)
        excess -= resident.nbytes
    if excess > 0:
        return None
    for resident in reversed(list(chosen)):
        if resident.nbytes <= -excess:
            chosen.remove(resident)
            excess += resident.nbytes
    return chosen


def _any_that_free(candidates: Sequence[Resident], excess: int, room: int) -> list[Resident] | None:
    """Some candidates that free `excess` bytes and need no more than `room`, where any do.

    For when the first are too large together: walks all sums that a choice can come to, which are
    few, because the shards of a deployment are of one size. Looks at `SUMS_MAX` of them at most.
    """
    reached: dict[tuple[int, int], list[Resident]] = {(0, 0): []}
    for resident in candidates:
        for (nbytes, cost), chosen in list(reached.items()):
            larger = (nbytes + resident.nbytes, cost + resident.cost_bytes)
            if larger[1] > room or larger in reached:
                continue
            if larger[0] >= excess:
                return _first_that_free([*chosen, resident], excess)
            if len(reached) < SUMS_MAX:
                reached[larger] = [*chosen, resident]
    return None


def _order(resident: Resident) -> tuple[float, int, str]:
    return (-resident.next_use, resident.last_use, resident.name)


def _total(residents: Iterable[Resident]) -> int:
    return sum(resident.nbytes for resident in residents)


def _cost(residents: Iterable[Resident]) -> int:
    return sum(resident.cost_bytes for resident in residents)


def _names(residents: Iterable[Resident]) -> tuple[str, ...]:
    return tuple(resident.name for resident in residents)
