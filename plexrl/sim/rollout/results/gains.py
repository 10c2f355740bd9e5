"""Throughput of StaleFlow relative to the other systems. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from plexrl.sim.rollout.results.outcome import Outcome
from plexrl.sim.rollout.setting import BOUNDED, Strategies, SystemName

PUBLISHED = {
    SystemName.SYNC: (2.01, 2.68),
    SystemName.ONE_STEP: (1.52, 1.95),
    SystemName.INFLIGHT: (1.17, 1.42),
}
"""Mean and largest gain of StaleFlow over each system (StaleFlow §6.2)."""
COMPARED = (*PUBLISHED, SystemName.INFLIGHT_REBALANCED, SystemName.INFLIGHT_LOOSE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gains:
    """Gains over one system, by limit of the response length and η."""

    over: SystemName
    ratios: dict[tuple[int, int], float]

    @property
    def mean(self) -> float:
        """Mean over the settings."""
        return fmean(self.ratios.values())

    @property
    def largest(self) -> float:
        """The largest of the settings."""
        return max(self.ratios.values())


def gains(outcomes: Iterable[Outcome]) -> list[Gains]:
    """The gains of StaleFlow with all strategies over each system that was run in the same
    setting; of systems with a choice of η, over that of the same η."""
    found = list(outcomes)
    ours = [
        each
        for each in found
        if each.system.name == SystemName.STALEFLOW and each.system.strategies == Strategies()
    ]
    listed = []
    for name in COMPARED:
        ratios = {}
        for each in ours:
            other = _beside(each, name, found)
            if other is not None:
                ratios[each.limit, each.system.staleness] = each.throughput / other.throughput
        if ratios:
            listed.append(Gains(over=name, ratios=ratios))
    return listed


def gain_over_sync(each: Outcome, outcomes: Sequence[Outcome]) -> float | None:
    """Throughput relative to the synchronous run of the same limit; None without one."""
    sync = _beside(each, SystemName.SYNC, outcomes)
    return None if sync is None else each.throughput / sync.throughput


def _beside(each: Outcome, name: SystemName, outcomes: Iterable[Outcome]) -> Outcome | None:
    for other in outcomes:
        is_same = name not in BOUNDED or other.system.staleness == each.system.staleness
        if other.system.name == name and other.limit == each.limit and is_same:
            return other
    return None
