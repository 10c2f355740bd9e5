"""Many scenarios side by side: results in their order, the same bytes as one after another.

Each run has a process of its own, not a place in a pool of processes: one that dies (for want of
memory, say) takes no other's result along, and its memory is given back. Processes are spawned, so
a script that calls this keeps its own work behind `if __name__ == "__main__"`; they die with their
parent, whatever ends it. With the address of a Ray cluster runs are Ray tasks instead.
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
from plexrl.process.lifeline import die_with_parent
from plexrl.sim.engine.simulate import Progress
from plexrl.sim.search.one_run import FailedRun, OnEnd, OnProgress, Outcome, failed, run_one
from plexrl.sim.search.ray_sweep import run_on_ray
from plexrl.sim.workload.scenario import JobSource, Scenario

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess


_Task = tuple[Scenario, Path | None]
"""A run, and where its rows of jobs go."""


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
    """The outcome of each scenario, in their order; one that fails leaves the others alone.

    `workers`: runs at a time, by default as many as there are cores; 1 stays in this process.
    `copies`: where runs on this machine find the jobs of a source more quickly (`job_copy`).
    `job_rows`: where runs on this machine write a row of each of their jobs (`job_rows_file`).
    An interrupt (Ctrl-C) ends every run and is raised again.

    Raises:
        UnavailableError: there is no Ray, or none at `ray_address`.
    """
    tell, ended = on_progress or _ignore, on_end or _ignore
    if ray_address is not None:
        return run_on_ray(scenarios, ray_address, tell, ended)
    places = min(workers or len(os.sched_getaffinity(0)), len(scenarios))
    run = _run_here if places <= 1 else partial(_run_in_processes, places=places)
    rows = [job_rows.get(each) if job_rows else None for each in scenarios]
    if not copies:
        return run([*zip(scenarios, rows, strict=True)], tell, ended)
    reading = [replace(each, source=copies.get(each.source, each.source)) for each in scenarios]

    def as_asked(index: int, outcome: Outcome) -> Outcome:
        if isinstance(outcome, FailedRun):
            return replace(outcome, scenario=scenarios[index])
        return outcome

    tasks = [*zip(reading, rows, strict=True)]
    found = run(tasks, tell, lambda index, outcome: ended(index, as_asked(index, outcome)))
    return tuple(as_asked(index, outcome) for index, outcome in enumerate(found))


def _run_here(tasks: Sequence[_Task], tell: OnProgress, ended: OnEnd) -> tuple[Outcome, ...]:
    outcomes = []
    for index, (scenario, rows) in enumerate(tasks):
        outcomes.append(run_one(scenario, partial(tell, index), rows))
        ended(index, outcomes[-1])
    return tuple(outcomes)


def _run_in_processes(
    tasks: Sequence[_Task], tell: OnProgress, ended: OnEnd, *, places: int
) -> tuple[Outcome, ...]:
    waiting = deque(enumerate(tasks))
    outcomes: dict[int, Outcome] = {}
    with _children() as running:
        while waiting or running:
            while waiting and len(running) < places:
                index, task = waiting.popleft()
                connection, process = _start(task)
                running[connection] = (index, process)
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                index, process = running[ready]
                try:
                    told = ready.recv()
                except EOFError:
                    process.join()
                    died = PlexRLError(
                        f"its process died with exit code {process.exitcode}: where that is -9 the "
                        "machine may be short of memory; take fewer --workers"
                    )
                    told = failed(tasks[index][0], died)
                if isinstance(told, Progress):
                    tell(index, told)
                    continue
                outcomes[index] = told
                process.join()
                ready.close()
                del running[ready]
                ended(index, told)
    return tuple(outcomes[index] for index in range(len(tasks)))


@contextmanager
def _children() -> "Iterator[dict[Connection, tuple[int, SpawnProcess]]]":
    """Those that run; whatever happens, none is left."""
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
    # Ours alone, so that its end is seen when the process dies.
    theirs.close()
    return ours, process


def _child(connection: Connection, task: _Task) -> None:
    # Ctrl-C reaches every process of a terminal; the parent ends its children itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs in a child only"
    die_with_parent(parent=parent.pid)
    scenario, rows = task
    connection.send(run_one(scenario, connection.send, rows))
    connection.close()


def _ignore(index: int, told: object) -> None:
    del index, told
