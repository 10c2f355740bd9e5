"""Finds the split of GPUs between rollout and training with the highest throughput.

Each system gets its own split, as in the paper (§6.1). The search runs a coarse grid of whole
nodes, then the neighbours of the best until none is better. Runs go to processes; the answer does
not depend on their number.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from math import ceil, floor
from typing import TypeVar

from plexrl.process.children.lifeline import die_with_parent
from plexrl.sim.rollout.results.outcome import RolloutOutcome, outcome
from plexrl.sim.rollout.results.recorder import Recorder
from plexrl.sim.rollout.runs.run import simulate_rollout
from plexrl.sim.rollout.setting import SPLIT, Setting, System

Result = TypeVar("Result")

COARSE = (0.5, 0.625)
"""Parts of the GPUs that roll out, in the coarse grid."""
NODE_GPUS = 8
"""Splits are whole nodes, if the cluster has several."""


class Runner:
    """Starts runs in the processes of a pool, or in this one."""

    def __init__(self, pool: ProcessPoolExecutor | None) -> None:
        self._pool = pool

    def outcome(self, setting: Setting, system: System) -> "Future[RolloutOutcome]":
        """The figures of one run."""
        return self.start(_outcome, setting, system)

    def history(self, setting: Setting, system: System) -> "Future[Recorder]":
        """The history of one run, with loads and trajectories."""
        return self.start(_history, setting, system)

    def start(
        self, run: Callable[[Setting, System], Result], setting: Setting, system: System
    ) -> "Future[Result]":
        """The result of `run` for one question; a process has to be able to import `run`."""
        if self._pool is not None:
            return self._pool.submit(run, setting, system)
        done: Future[Result] = Future()
        done.set_result(run(setting, system))
        return done


@contextmanager
def runner(workers: int | None = None) -> Iterator[Runner]:
    """Runs in `workers` processes, by default one per core; 1: in this one."""
    count = workers or len(os.sched_getaffinity(0))
    if count == 1:
        yield Runner(None)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        count, mp_context=context, initializer=_prepare, initargs=(os.getpid(),)
    ) as pool:
        try:
            yield Runner(pool)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def best_splits(
    run: Callable[[Setting, System], "Future[RolloutOutcome]"],
    questions: Sequence[tuple[Setting, System]],
    on_run: Callable[[RolloutOutcome], None] | None = None,
) -> list[RolloutOutcome]:
    """The best outcome of each system; a system whose split is given, or that has none, runs once.

    Raises:
        InvariantError: a run breaks one of its own invariants.
    """
    searches = [_Search(setting, system) for setting, system in questions]
    while True:
        asked = [
            (search, gpus, run(search.setting, replace(search.system, rollout_gpus=gpus)))
            for search in searches
            for gpus in search.wanted()
        ]
        if not asked:
            return [search.best() for search in searches]
        for search, gpus, future in asked:
            search.found[gpus] = future.result()
            if on_run is not None:
                on_run(search.found[gpus])


class _Search:
    """The search for one system."""

    def __init__(self, setting: Setting, system: System) -> None:
        self.setting = setting
        self.system = system
        self.found: dict[int, RolloutOutcome] = {}
        unit = setting.costs.gpus
        if setting.gpus > NODE_GPUS:
            unit = max(NODE_GPUS, ceil(NODE_GPUS / unit) * unit)
        self._unit = min(unit, max(1, setting.gpus - 1))
        self._is_searched = system.name in SPLIT and not system.rollout_gpus
        self._first = [system.rollout_gpus]
        if self._is_searched:
            self._first = sorted({self._rounded(part * setting.gpus) for part in COARSE})

    def wanted(self) -> list[int]:
        """Splits to run next; empty if the best is found."""
        if not self.found:
            return self._first
        if not self._is_searched:
            return []
        best = self.best().system.rollout_gpus
        near = (best - self._unit, best + self._unit)
        return [gpus for gpus in near if gpus not in self.found and gpus == self._rounded(gpus)]

    def best(self) -> RolloutOutcome:
        """The outcome with the highest throughput so far; of equals that with fewer rollout
        GPUs."""
        return max(
            self.found.values(), key=lambda each: (each.throughput, -each.system.rollout_gpus)
        )

    def _rounded(self, gpus: float) -> int:
        """The nearest possible split."""
        last = floor((self.setting.gpus - 1) / self._unit)
        return self._unit * min(max(1, round(gpus / self._unit)), last)


def _outcome(setting: Setting, system: System) -> RolloutOutcome:
    return outcome(setting, system, simulate_rollout(setting, system))


def _history(setting: Setting, system: System) -> Recorder:
    return simulate_rollout(setting, system, with_history=True)


def _prepare(parent: int) -> None:
    # Ctrl-C reaches every process of a terminal; the parent ends its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent=parent)
