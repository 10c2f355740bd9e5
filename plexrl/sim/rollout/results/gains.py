"""Throughput of StaleFlow relative to the other systems. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from plexrl.sim.rollout.results.outcome import Outcome
from plexrl.sim.rollout.setting import BOUNDED, COORDINATED, ON_POLICY, Strategies, SystemName

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

    @property
    def text(self) -> str:
        """The gain in words, with what the other system does not keep."""
        loose = self.over == SystemName.INFLIGHT_LOOSE
        over = f"{self.over.value}{' (bound not kept)' if loose else ''}"
        most = "" if len(self.ratios) == 1 else f", at most {self.largest:.2f}"
        return f"{self.mean:.2f} times the tokens/s of {over}{most}"


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
    """Throughput relative to the synchronous run of the same limit; None without one. On-policy
    runs train the same prompts as it, and tail batching short and long ones in turn: theirs is the
    ratio of the whole runs' times."""
    sync = _beside(each, SystemName.SYNC, outcomes)
    if sync is None:
        return None
    if each.system.name in ON_POLICY:
        return sync.run_s / each.run_s
    return each.throughput / sync.throughput


def gain_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """The gains of the coordinator's systems, one sentence each."""
    lines = [f"staleflow trains {each.text}" for each in gains(outcomes)]
    for each in outcomes:
        gain = gain_over_sync(each, outcomes)
        if each.system.name in COORDINATED and gain is not None:
            lines.append(
                f"{each.system.label} trains the prompts of sync {gain:.2f} times as fast, "
                f"{each.limit:,} tokens"
            )
    return lines


def _beside(each: Outcome, name: SystemName, outcomes: Iterable[Outcome]) -> Outcome | None:
    for other in outcomes:
        is_same = name not in BOUNDED or other.system.staleness == each.system.staleness
        if other.system.name == name and other.limit == each.limit and is_same:
            return other
    return None
