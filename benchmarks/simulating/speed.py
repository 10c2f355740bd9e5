"""Measures events per second of the real core, of a whole run of the published jobs."""

import heapq
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from statistics import fmean

import simpy

from benchmarks.report import Part
from benchmarks.simulating.cluster import whole
from benchmarks.simulating.workloads import residents
from benchmarks.sizes import sized
from plexrl.sim.engine.simulate import is_compiled, simulate
from plexrl.sim.workload.scenario import Scenario

POLICIES = ("isolated", "pack", "spread", "spread+backfill")
MAIN = "spread+backfill"

MONTHS_DAYS = 92.0
THREE_MONTHS = f"three months, {MAIN}"

LOOP_EVENTS = sized(300_000, quick=3000)
"""Events of a loop without decisions."""
DEPTH = 1000
"""Events pending in the bare loop, and processes of the second SimPy run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Of one policy."""

    events: float
    took_s: float
    """Of the processor."""

    @property
    def events_per_s(self) -> float:
        """Of the whole run, its start and end included."""
        return self.events / self.took_s


def measure(*, full: bool) -> Part:
    """`full`: also three months of a cluster whose groups are always full."""
    before = heap_rate(), simpy_rate(1), simpy_rate(DEPTH)
    paces = {policy: _pace(whole(policy, 1, 0)) for policy in POLICIES}
    months = {THREE_MONTHS: _pace(residents(MONTHS_DAYS, MAIN))} if full else {}
    after = heap_rate(), simpy_rate(1), simpy_rate(DEPTH)
    heap, one, many = (fmean(pair) for pair in zip(before, after, strict=True))
    rows: list[tuple[str, ...]] = [
        (
            name,
            f"{pace.events:,.0f}",
            f"{pace.took_s:,.1f}",
            f"{pace.events_per_s:,.0f}",
            f"{pace.events_per_s / many:.3f}",
        )
        for name, pace in {**paces, **months}.items()
    ]
    rows += [
        (name, f"{LOOP_EVENTS:,}", "", f"{rate:,.0f}", f"{rate / many:.3f}")
        for name, rate in (
            ("SimPy, one process", one),
            (f"SimPy, {DEPTH} processes", many),
            (f"bare heap, {DEPTH} deep, a callback each", heap),
        )
    ]
    return Part(
        title=f"Speed, {'compiled' if is_compiled() else 'pure Python'}: the jobs and cluster of "
        "the policies' comparison, one seed; seconds of the processor, on one core",
        columns=("policy", "events", "seconds", "events/s", "times SimPy"),
        rows=rows,
        figures={
            "events_per_s": paces[MAIN].events_per_s,
            "simpy_1_events_per_s": one,
            "simpy_1000_events_per_s": many,
            "heapq_events_per_s": heap,
            **{f"events_per_s_{policy}": pace.events_per_s for policy, pace in paces.items()},
            **({"three_months_s": months[THREE_MONTHS].took_s} if full else {}),
        },
    )


def _pace(scenario: Scenario) -> Pace:
    began = time.process_time()
    result = simulate(scenario)
    took_s = time.process_time() - began
    assert result.failed_jobs == 0, f"{scenario.policy} gave {result.failed_jobs} jobs up"
    return Pace(events=result.events, took_s=took_s)


def simpy_rate(processes: int) -> float:
    """Timeouts per CPU second, by SimPy processes that only wait."""
    environment = simpy.Environment()

    def process(period_s: float) -> Generator[simpy.Timeout, None, None]:
        while True:
            yield environment.timeout(period_s)

    # Periods near 1: so many events take that many seconds of the virtual clock.
    for number in range(processes):
        environment.process(process(1.0 + number / processes / 10))
    return _rate(lambda: environment.run(until=LOOP_EVENTS / processes * 1.05))


def heap_rate() -> float:
    """Callbacks per CPU second, each of which schedules its next call."""
    heap = [(number / DEPTH, number) for number in range(DEPTH)]
    happened = 0

    def happen(at: float, number: int) -> None:
        nonlocal happened
        happened += 1
        heapq.heapreplace(heap, (at + 1.0, number))

    def run() -> None:
        for _ in range(LOOP_EVENTS):
            happen(*heap[0])

    rate = _rate(run)
    assert happened == LOOP_EVENTS, "the loop lost events"
    return rate


def _rate(run: Callable[[], None]) -> float:
    began = time.process_time()
    run()
    return LOOP_EVENTS / (time.process_time() - began)
