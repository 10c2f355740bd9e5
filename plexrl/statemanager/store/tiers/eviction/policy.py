"""Eviction policy: the tier of a new version, and the versions to evict for it. Pure.

The host tier is preferred, because loads from it run at memory speed. To make space there, versions
that the new one supersedes are dropped first. Then versions are spilled to NVMe in this order:

1. the latest expected use (`expected_use`);
2. the least recent use;
3. the first by name.

A version with a copy on NVMe is spilled at no cost. A version in use is never chosen, because it
would occupy its space until its readers are done.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

SUMS_MAX = 4096
"""Sums that `_any_that_suffice` visits at most."""


class TierName(StrEnum):
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionCandidate:
    """A stored version, or a group of versions that is evicted together."""

    name: str
    tier: TierName
    nbytes: int
    last_use: int
    """Larger is more recent."""
    next_use: float = 0.0
    """Time of the expected use, on any clock; see `expected_use`."""
    spill_bytes: int | None = None
    """Bytes to write to NVMe on eviction from host; absent: `nbytes`."""
    in_use: bool = False
    superseded: bool = False
    """The version is not needed any more: another complete one is kept."""

    @property
    def cost_bytes(self) -> int:
        return self.nbytes if self.spill_bytes is None else self.spill_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUsage:
    """Usage and capacity of a tier."""

    used_bytes: int
    """Includes versions in use and reservations of versions being written."""
    bytes_max: int

    @property
    def free_bytes(self) -> int:
        return self.bytes_max - self.used_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionPlan:
    """Steps in this order: drop, spill, write the new version to `tier`."""

    tier: TierName
    drop: tuple[str, ...] = ()
    spill: tuple[str, ...] = ()
    """Versions to move from host to NVMe, which has space for them after `drop`."""


def expected_use(predicted: float | None, last_use: float, now: float) -> float:
    """Expected time of a version's next use. All times are in seconds on one clock.

    A prediction in the past means now. Without a prediction a version is expected to stay idle for
    as long as it has been idle, so these versions are evicted in least-recently-used order.
    """
    return max(predicted, now) if predicted is not None else now + max(0.0, now - last_use)


def plan_eviction(
    needed_bytes: int,
    candidates: Iterable[EvictionCandidate],
    host: TierUsage,
    nvme: TierUsage,
    needed_nvme_bytes: int | None = None,
) -> EvictionPlan | None:
    """Plan space for `needed_bytes` more; None if no tier can take them.

    Evicts no version that need not go. `needed_nvme_bytes` is the size on NVMe; absent: the same.
    """
    if needed_nvme_bytes is None:
        needed_nvme_bytes = needed_bytes
    if needed_bytes <= host.free_bytes:
        return EvictionPlan(tier=TierName.HOST)
    evictable = sorted((r for r in candidates if not r.in_use and r.nbytes > 0), key=_order)
    stale = [r for r in evictable if r.superseded]
    stale_in_host = [r for r in stale if r.tier == TierName.HOST]
    dropped = _first_that_suffice(stale_in_host, needed_bytes - host.free_bytes)
    if dropped is not None:
        return EvictionPlan(tier=TierName.HOST, drop=_names(dropped))

    # Space is short on the node, so superseded versions are dropped from both tiers.
    excess = needed_bytes - host.free_bytes - _total(stale_in_host)
    nvme_free = nvme.free_bytes + _total(stale) - _total(stale_in_host)
    kept = [r for r in evictable if r.tier == TierName.HOST and not r.superseded]
    spilled = _first_that_suffice(kept, excess, nvme_free) or _any_that_suffice(
        kept, excess, nvme_free
    )
    if spilled is not None:
        return EvictionPlan(tier=TierName.HOST, drop=_names(stale), spill=_names(spilled))
    if needed_nvme_bytes <= nvme_free:
        return EvictionPlan(tier=TierName.NVME, drop=_names(stale))
    return None


def _first_that_suffice(
    candidates: Sequence[EvictionCandidate], excess: int, nvme_free: int | None = None
) -> list[EvictionCandidate] | None:
    """The first candidates that free `excess` bytes, without those that need not go.

    `nvme_free` bounds the sum of their costs (absent: no bound); a candidate beyond it is skipped.
    None if the candidates do not free enough.
    """
    chosen: list[EvictionCandidate] = []
    for candidate in candidates:
        if excess <= 0:
            break
        if nvme_free is not None and candidate.cost_bytes > nvme_free - _cost(chosen):
            continue
        chosen.append(candidate)
        excess -= candidate.nbytes
    if excess > 0:
        return None
    for candidate in reversed(list(chosen)):
        if candidate.nbytes <= -excess:
            chosen.remove(candidate)
            excess += candidate.nbytes
    return chosen


def _any_that_suffice(
    candidates: Sequence[EvictionCandidate], excess: int, nvme_free: int
) -> list[EvictionCandidate] | None:
    """Candidates that free `excess` bytes and cost at most `nvme_free`; None if none are found.

    Used if the first candidates are too large together. Visits the distinct sums of candidates, at
    most `SUMS_MAX`; there are few, because the shards of a deployment have equal sizes.
    """
    reached: dict[tuple[int, int], list[EvictionCandidate]] = {(0, 0): []}
    for candidate in candidates:
        for (nbytes, cost), chosen in list(reached.items()):
            larger = (nbytes + candidate.nbytes, cost + candidate.cost_bytes)
            if larger[1] > nvme_free or larger in reached:
                continue
            if larger[0] >= excess:
                return _first_that_suffice([*chosen, candidate], excess)
            if len(reached) < SUMS_MAX:
                reached[larger] = [*chosen, candidate]
    return None


def _order(candidate: EvictionCandidate) -> tuple[float, int, str]:
    return (-candidate.next_use, candidate.last_use, candidate.name)


def _total(candidates: Iterable[EvictionCandidate]) -> int:
    return sum(candidate.nbytes for candidate in candidates)


def _cost(candidates: Iterable[EvictionCandidate]) -> int:
    return sum(candidate.cost_bytes for candidate in candidates)


def _names(candidates: Iterable[EvictionCandidate]) -> tuple[str, ...]:
    return tuple(candidate.name for candidate in candidates)
