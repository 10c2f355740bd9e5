"""(a) Placing one warm job among residents, beside a scan of every group, shift and slot."""

import math
import time

from benchmarks.report import percentile
from benchmarks.scheduling.cluster import Population, populate
from benchmarks.sizes import sized
from plexrl.ids import GroupId
from plexrl.scheduler.placement.placement import leave, place
from plexrl.scheduler.state.demand.trace import project
from plexrl.scheduler.state.records import Deployment

ROUNDS = sized(400, quick=4)
NAIVE_ROUNDS = sized(3, quick=1)
SIZES = sized(((256, 500), (12_800, 20_000)), quick=((8, 10), (16, 20)))
"""(nodes, residents)."""


def measure() -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """(table rows, figures)."""
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for nodes, residents in SIZES:
        population = populate(nodes, residents, seed=nodes)
        placed = sum(len(g.members) for g in population.context.state.groups.values())
        samples, fits = _place(population)
        naive_s = _naive(population)
        p50, p99 = percentile(samples, 50), percentile(samples, 99)
        figures |= {
            f"place_{nodes}_p50_ms": p50,
            f"place_{nodes}_p99_ms": p99,
            f"place_{nodes}_naive_ratio": naive_s * 1e3 / p50,
            f"place_{nodes}_residents": placed,
        }
        label = f"warm placement, {nodes} nodes, {placed} residents ({fits:.0%} strict)"
        rows.append((label, f"{p50:.2f} ms", f"{p99:.2f} ms", f"{naive_s * 1e3 / p50:,.0f}x"))
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
            assert deployment.placement is not None
            strict += deployment.placement.way == "strict"
            leave(population.context.cluster, deployment, now)
        del population.context.state.deployments[deployment.deployment]
    return samples, strict / ROUNDS


def _naive(population: Population) -> float:
    """Seconds to look at every group of the size, every shift, every cycle, slot by slot."""
    context = population.context
    rings = {}
    for group in context.state.groups.values():
        ring = bytearray(context.settings.config.horizon_slots)
        for member in group.members:
            footprint = context.cluster.inventory.footprint(context.state.deployment(member))
            for start, stop, _ in footprint.intervals().tolist():
                for slot in range(start, stop):
                    ring[slot % len(ring)] = 1
        rings[group.group] = (len(group.gpus), bytes(ring))
    took = []
    for _ in range(NAIVE_ROUNDS):
        deployment = population.deployment()
        began = time.perf_counter()
        _scan(deployment, rings, context.settings.config.horizon_slots)
        took.append(time.perf_counter() - began)
        del context.state.deployments[deployment.deployment]
    return sorted(took)[len(took) // 2]


def _scan(
    deployment: Deployment, rings: dict[GroupId, tuple[int, bytes]], horizon: int
) -> tuple[int, GroupId] | None:
    assert deployment.trace is not None
    footprint = project(deployment.trace, horizon, 0.02)
    best: tuple[int, GroupId] | None = None
    for name, (gpus, ring) in rings.items():
        if gpus != deployment.workers:
            continue
        for shift in range(math.floor(footprint.period)):
            if _is_free(ring, footprint.at(shift).intervals().tolist(), horizon):
                if best is None or shift < best[0]:
                    best = (shift, name)
                break
    return best


def _is_free(ring: bytes, intervals: list[list[int]], horizon: int) -> bool:
    return not any(
        ring[slot % horizon] for start, stop, _ in intervals for slot in range(start, stop)
    )
