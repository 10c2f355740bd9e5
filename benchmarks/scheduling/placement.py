"""(a) Placing one warm job among residents, and its search beside one of every group and shift."""

import math
import time
from dataclasses import dataclass, field, replace

from benchmarks.report import percentile
from benchmarks.scheduling.cluster import Population, populate
from benchmarks.scheduling.exhaustive import Rings
from benchmarks.sizes import sized
from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.placement.capacity.index import CANDIDATES_PER_PASS
from plexrl.scheduler.placement.choice.candidates import can_take
from plexrl.scheduler.placement.choice.search import fitting
from plexrl.scheduler.placement.placement import leave, place
from plexrl.scheduler.rules.settings import Situation
from plexrl.scheduler.state.demand.trace import DemandTrace
from plexrl.scheduler.state.records import Deployment

ROUNDS = sized(400, quick=4)
SEARCHES = sized(100, quick=2)
SIZES = sized(((256, 500), (12_800, 20_000)), quick=((8, 10), (16, 20)))
"""(nodes, residents)."""


@dataclass(slots=True)
class Searches:
    """What searches took, and how far the costs lay apart."""

    index_ms: list[float] = field(default_factory=list)
    exhaustive_ms: list[float] = field(default_factory=list)
    above_least: list[float] = field(default_factory=list)
    """Cost of the index's choice above the least one, in seconds."""
    groups: int = 0
    """Groups of the wanted size or larger, in all searches; of these:"""
    with_capacity: int = 0
    """With members, duty and memory to spare: the first level of the index."""
    fits: int = 0
    """Searched in time, and free at some shift: the second level."""

    def pruned(self) -> tuple[float, float]:
        """The parts of the groups that the first level drops, and that both drop."""
        groups = max(1, self.groups)
        return 1.0 - self.with_capacity / groups, 1.0 - self.fits / groups


def measure() -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """(table rows, figures)."""
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for nodes, residents in SIZES:
        population = populate(nodes, residents, seed=nodes)
        placed = sum(len(g.members) for g in population.context.state.groups.values())
        samples, fits = _place(population)
        searches = _search(population)
        index_ms, exhaustive_ms = (
            percentile(each, 50) for each in (searches.index_ms, searches.exhaustive_ms)
        )
        above = max(searches.above_least)
        p50, p99 = percentile(samples, 50), percentile(samples, 99)
        figures |= {
            f"place_{nodes}_p50_ms": p50,
            f"place_{nodes}_p99_ms": p99,
            f"search_{nodes}_p50_ms": index_ms,
            f"search_{nodes}_exhaustive_p50_ms": exhaustive_ms,
            f"search_{nodes}_above_least_s": above,
            f"search_{nodes}_pruned_first": searches.pruned()[0],
            f"search_{nodes}_pruned": searches.pruned()[1],
            f"place_{nodes}_residents": placed,
        }
        label = f"warm placement, {nodes} nodes, {placed} residents ({fits:.0%} strict)"
        rows.append((label, f"{p50:.2f} ms", f"{p99:.2f} ms", ""))
        label = f"its search alone, beside all groups and shifts; cost at most {above:.3g} s above"
        rows.append((label, f"{index_ms:.2f} ms", "", f"{exhaustive_ms / index_ms:,.1f}x"))
        first, both = searches.pruned()
        label = f"groups dropped by capacity, {first:.1%}, and by the search in time"
        rows.append((label, f"{both:.1%}", "", ""))
    few, many = (nodes for nodes, _ in SIZES)
    growth = figures[f"place_{many}_p50_ms"] / figures[f"place_{few}_p50_ms"]
    figures["place_growth"] = growth
    rows.append((f"growth of p50 for {many // few}x the nodes", f"{growth:.1f}x", "", ""))
    return rows, figures


def _place(population: Population) -> tuple[list[float], float]:
    """Milliseconds of each placement, and how many of them found a strict fit."""
    samples, strict = [], 0
    for _ in range(ROUNDS):
        deployment = population.deployment()
        now = population.rng.uniform(0, 28_800)
        began = time.perf_counter()
        group = place(population.context.cluster, deployment, now)
        samples.append((time.perf_counter() - began) * 1e3)
        if group is not None:
            assert deployment.placement.record is not None
            strict += deployment.placement.record.way == "strict"
            leave(population.context.cluster.capacity, deployment, now)
        del population.context.state.deployments[deployment.deployment]
    return samples, strict / ROUNDS


def _search(population: Population) -> Searches:
    """Searches among the same groups by the index and by trying everything.

    The periods divide the horizon: with others the index rounds to whole slots with a margin, and
    its cost is above the least. So it is in a large cluster, of which it searches the groups with
    the least load.
    """
    cluster = population.context.cluster
    rings = Rings(cluster.capacity)
    found = Searches()
    for number in range(SEARCHES + 1):
        deployment = population.deployment()
        deployment.demand.trace = _with_whole_cycles(deployment.demand.trace, cluster)
        now = population.rng.uniform(0, 28_800)
        began = time.perf_counter()
        fits = fitting(cluster, deployment, now, strict=True, count=1)
        middle = time.perf_counter()
        least = rings.best_cost(deployment, now)
        ended = time.perf_counter()
        cost = fits[0].cost if fits else math.inf
        assert cost >= least - 1e-9, f"cost {cost} is below the least of all groups, {least}"
        if len(cluster.state.groups) <= CANDIDATES_PER_PASS:
            assert cost <= least + 1e-9, f"cost {cost} is above the least of all groups, {least}"
        if number:
            # The first one compiles.
            found.index_ms.append((middle - began) * 1e3)
            found.exhaustive_ms.append((ended - middle) * 1e3)
            found.above_least.append(cost - least if cost < math.inf else 0.0)
            _count(found, cluster.capacity, deployment)
            found.fits += len(fitting(cluster, deployment, now, strict=True))
            assert math.isfinite(cost) == math.isfinite(least), "only one search found a group"
        del population.context.state.deployments[deployment.deployment]
    return found


def _count(found: Searches, capacity: Capacity, deployment: Deployment) -> None:
    """Count the groups that the deployment could be on, and those with capacity for it."""
    assert deployment.demand.trace is not None
    index, larger = capacity.inventory.index, capacity.settings.divides_groups
    for shape in index.shapes(deployment.spec.workers, deployment.spec.node_type, or_larger=larger):
        table = index.table(shape)
        found.groups += sum(name is not None for name in table.groups)
        takes = can_take(capacity.settings, table, deployment, deployment.demand.trace.duty)
        found.with_capacity += int(takes.sum())


def _with_whole_cycles(trace: DemandTrace | None, situation: Situation) -> DemandTrace:
    """The same busy time in the nearest period that divides the horizon."""
    assert trace is not None
    horizon = situation.settings.config.horizon_slots
    divisors = [each for each in range(1, horizon + 1) if horizon % each == 0]
    period = min(divisors, key=lambda each: abs(each - trace.period_s))
    return replace(trace, period_s=float(period))
