"""Baselines of event loops without decisions: SimPy, and a bare heap of callbacks."""

import heapq
import time
from collections.abc import Callable, Generator

import simpy

from benchmarks.sizes import sized

EVENTS = sized(300_000, quick=3000)
DEPTH = 1000
"""Events pending in the bare loop, and processes of the second SimPy run."""


def simpy_rate(processes: int) -> float:
    """Timeouts per CPU second, by SimPy processes that only wait."""
    environment = simpy.Environment()

    def process(period_s: float) -> Generator[simpy.Timeout, None, None]:
        while True:
            yield environment.timeout(period_s)

    # Periods near 1: so many events take that many seconds of the virtual clock.
    for number in range(processes):
        environment.process(process(1.0 + number / processes / 10))
    return _rate(lambda: environment.run(until=EVENTS / processes * 1.05))


def heap_rate() -> float:
    """Callbacks per CPU second, each of which schedules its next call."""
    heap = [(number / DEPTH, number) for number in range(DEPTH)]
    happened = 0

    def happen(at: float, number: int) -> None:
        nonlocal happened
        happened += 1
        heapq.heapreplace(heap, (at + 1.0, number))

    def run() -> None:
        for _ in range(EVENTS):
            happen(*heap[0])

    rate = _rate(run)
    assert happened == EVENTS, "the loop lost events"
    return rate


def _rate(run: Callable[[], None]) -> float:
    began = time.process_time()
    run()
    return EVENTS / (time.process_time() - began)
