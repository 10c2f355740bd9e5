"""Runs many scenarios in parallel, with the same results as one after another.

Each run has a process of its own instead of a process pool: if one dies (out of memory, for
example), no other result is lost, and its memory is freed. Processes are spawned, so a calling
script needs the guard `if __name__ == "__main__"`; they die with their parent. With the address of
a Ray cluster, runs are Ray tasks instead.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from plexrl.errors import PlexRLError
from plexrl.process.children.lifeline import die_with_parent
from plexrl.sim.engine.simulate import RunProgress
from plexrl.sim.search.one_run import FailedRun, OnEnd, OnProgress, Outcome, failed, run_one
from plexrl.sim.search.ray_sweep import run_on_ray
from plexrl.sim.workload.scenario import JobSource, Scenario

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess


_Task = tuple[Scenario, Path | None]
"""A run and the file for its job rows."""


def run_all(
    scenarios: Sequence[Scenario],
    *,
    workers: int | None = None,
    ray_address: str | None = None,
    copies: Mapping[JobSource, JobSource] | None = None,
    job_rows: Mapping[Scenario, Path] | None = None,
    on_progress: OnProgress | None = None,
    on_end: OnEnd | None = None,
) -> tuple[Outcome, ...]:
    """The outcome of each scenario, in order; a failing run does not affect the others.

    `workers`: parallel runs, by default one per core; 1 runs in this process. `copies`: faster
    copies of job sources for runs on this machine (`job_copy`). `job_rows`: files for the job rows
    of runs on this machine (`job_rows_file`). An interrupt (Ctrl-C) ends every run and propagates.

    Raises:
        UnavailableError: Ray is not installed, or there is no Ray cluster at `ray_address`.
    """
    report, ended = on_progress or _ignore, on_end or _ignore
    if ray_address is not None:
        return run_on_ray(scenarios, ray_address, report, ended)
    slots = min(workers or len(os.sched_getaffinity(0)), len(scenarios))
    run = _run_here if slots <= 1 else partial(_run_in_processes, slots=slots)
    rows = [job_rows.get(scenario) if job_rows else None for scenario in scenarios]
    if not copies:
        return run([*zip(scenarios, rows, strict=True)], report, ended)
    reading = [
        replace(scenario, source=copies.get(scenario.source, scenario.source))
        for scenario in scenarios
    ]

    def with_own_source(index: int, outcome: Outcome) -> Outcome:
        if isinstance(outcome, FailedRun):
            return replace(outcome, scenario=scenarios[index])
        return outcome

    tasks = [*zip(reading, rows, strict=True)]
    found = run(tasks, report, lambda index, outcome: ended(index, with_own_source(index, outcome)))
    return tuple(with_own_source(index, outcome) for index, outcome in enumerate(found))


def _run_here(tasks: Sequence[_Task], report: OnProgress, ended: OnEnd) -> tuple[Outcome, ...]:
    outcomes = []
    for index, (scenario, rows) in enumerate(tasks):
        outcomes.append(run_one(scenario, partial(report, index), rows))
        ended(index, outcomes[-1])
    return tuple(outcomes)


def _run_in_processes(
    tasks: Sequence[_Task], report: OnProgress, ended: OnEnd, *, slots: int
) -> tuple[Outcome, ...]:
    waiting = deque(enumerate(tasks))
    outcomes: dict[int, Outcome] = {}
    with _children() as running:
        while waiting or running:
            while waiting and len(running) < slots:
                index, task = waiting.popleft()
                connection, process = _start(task)
                running[connection] = (index, process)
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                index, process = running[ready]
                try:
                    message = ready.recv()
                except EOFError:
                    process.join()
                    died = PlexRLError(
                        f"its process died with exit code {process.exitcode}: -9 may mean that the "
                        "machine is out of memory; use fewer --workers"
                    )
                    message = failed(tasks[index][0], died)
                if isinstance(message, RunProgress):
                    report(index, message)
                    continue
                outcomes[index] = message
                process.join()
                ready.close()
                del running[ready]
                ended(index, message)
    return tuple(outcomes[index] for index in range(len(tasks)))


@contextmanager
def _children() -> "Iterator[dict[Connection, tuple[int, SpawnProcess]]]":
    """The running processes; all are killed when the context ends."""
    running: dict[Connection, tuple[int, SpawnProcess]] = {}
    try:
        yield running
    finally:
        for connection, (_, process) in running.items():
            process.kill()
            process.join()
            connection.close()


def _start(task: _Task) -> "tuple[Connection, SpawnProcess]":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, task), daemon=True)
    process.start()
    # The parent keeps no copy of the child's end, so it sees EOF when the child dies.
    theirs.close()
    return ours, process


def _child(connection: Connection, task: _Task) -> None:
    # Ctrl-C reaches every process of a terminal; the parent ends its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs in a child only"
    die_with_parent(parent=parent.pid)
    scenario, rows = task
    connection.send(run_one(scenario, connection.send, rows))
    connection.close()


def _ignore(index: int, message: object) -> None:
    del index, message
