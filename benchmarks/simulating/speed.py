"""Measures events per second of the real core, and extrapolates to three months."""

import heapq
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from statistics import fmean

import simpy

from benchmarks.report import Part
from benchmarks.simulating.workloads import DAY_S, residents
from benchmarks.sizes import sized
from plexrl.process.garbage_collection import rare_collections
from plexrl.sim.engine.simulate import is_compiled, simulate
from plexrl.sim.engine.trace_run import TraceRun

POLICIES = ("isolated", "pack", "spread", "spread+backfill")
MAIN = "spread+backfill"

MONTHS_DAYS = 92.0
WARM_DAYS = sized(0.06, quick=0.005)
"""Warm-up until all jobs are placed and have run some twenty cycles each."""
EVENTS = sized(40_000, quick=1000)
"""Events after the warm-up, from which three months are extrapolated."""

LOOP_EVENTS = sized(300_000, quick=3000)
"""Events of a loop without decisions."""
DEPTH = 1000
"""Events pending in the bare loop, and processes of the second SimPy run."""

STEP = 512

BAR, AIM = 100_000, 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Of one policy."""

    events_per_s: float
    months_events: float
    months_s: float


def measure(*, full: bool) -> Part:
    """`full`: three months as they are, not from what a day takes."""
    before = heap_rate(), simpy_rate(1), simpy_rate(DEPTH)
    paces = {policy: _months(policy) if full else _stretch(policy) for policy in POLICIES}
    after = heap_rate(), simpy_rate(1), simpy_rate(DEPTH)
    heap, one, many = (fmean(pair) for pair in zip(before, after, strict=True))
    rows: list[tuple[str, ...]] = [
        (
            policy,
            f"{pace.events_per_s:,.0f}/s",
            f"{pace.months_events / 1e6:.1f} M",
            f"{pace.months_s:,.0f} s",
            f"{pace.events_per_s / many:.3f}",
        )
        for policy, pace in paces.items()
    ]
    rows += [
        ("bar, aim", f"{BAR:,} / {AIM:,}", "", "200 / 100 s", ""),
        ("SimPy, one process", f"{one:,.0f}/s", "", "", f"{one / many:.3f}"),
        (f"SimPy, {DEPTH} processes", f"{many:,.0f}/s", "", "", "1"),
        (
            f"bare heap, {DEPTH} deep, a callback each",
            f"{heap:,.0f}/s",
            "",
            "",
            f"{heap / many:.3f}",
        ),
    ]
    return Part(
        title=f"Speed, {'compiled' if is_compiled() else 'pure Python'}: 64 groups x 4 jobs on "
        "2 048 GPUs; seconds of the processor, on one core"
        + ("" if full else f"; three months extrapolated from {EVENTS:,} events"),
        columns=("policy", "events", "three months", "take", "times SimPy"),
        rows=rows,
        figures={
            "events_per_s": paces[MAIN].events_per_s,
            "simpy_1_events_per_s": one,
            "simpy_1000_events_per_s": many,
            "heapq_events_per_s": heap,
            **{f"events_per_s_{policy}": pace.events_per_s for policy, pace in paces.items()},
            **{f"three_months_s_{policy}": pace.months_s for policy, pace in paces.items()},
        },
    )


def _months(policy: str) -> Pace:
    began = time.process_time()
    result = simulate(residents(MONTHS_DAYS, policy))
    took_s = time.process_time() - began
    assert result.failed_jobs == 0, f"{policy} gave {result.failed_jobs} jobs up"
    events = result.events
    return Pace(events_per_s=events / took_s, months_events=events, months_s=took_s)


def _stretch(policy: str) -> Pace:
    run = TraceRun(residents(MONTHS_DAYS, policy))
    shell = run.shell
    with rare_collections():
        run.start()
        began = time.process_time()
        while shell.now < WARM_DAYS * DAY_S:
            shell.run(STEP)
        warm_s = time.process_time() - began
        events, now = shell.events, shell.now
        began = time.process_time()
        while shell.events < events + EVENTS:
            shell.run(STEP)
        took_s = time.process_time() - began
    counted = shell.events - events
    months_events = counted * MONTHS_DAYS * DAY_S / (shell.now - now)
    return Pace(
        events_per_s=counted / took_s,
        months_events=months_events,
        months_s=warm_s + months_events * took_s / counted,
    )


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
