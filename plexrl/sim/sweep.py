"""Many scenarios side by side: results in their order, the same bytes as one after another.

Each run has a process of its own, not a place in a pool of processes: one that dies (for want of
memory, say) takes no other's result along, and its memory is given back. Processes are spawned, so
a script that calls this keeps its own work behind `if __name__ == "__main__"`; they die with their
parent, whatever ends it. With the address of a Ray cluster runs are Ray tasks instead.
"""

import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from plexrl.cluster.lifeline import die_with_parent
from plexrl.errors import PlexRLError, from_wire
from plexrl.sim.job_rows_file import row_writer
from plexrl.sim.replay import Progress, simulate
from plexrl.sim.result import SimResult
from plexrl.sim.scenario import JobSource, Scenario

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """A run that came to no result."""

    scenario: Scenario
    error: PlexRLError = field(compare=False)
    """What went wrong; the message begins with which run it was."""


Outcome = SimResult | FailedRun
_Task = tuple[Scenario, Path | None]
"""A run, and where its rows of jobs go."""
OnProgress = Callable[[int, Progress], None]
"""Told the number of a run and how far it is."""
OnEnd = Callable[[int, Outcome], None]
"""Told the number of a run and what came of it, in the order in which runs end."""


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
        from plexrl.sim.ray_sweep import run_on_ray

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


def run_one(
    scenario: Scenario, on_progress: Callable[[Progress], None], job_rows: Path | None = None
) -> Outcome:
    """One run here, its failure as a value."""
    try:
        if job_rows is None:
            return simulate(scenario, on_progress)
        with row_writer(job_rows) as take:
            return simulate(scenario, on_progress, on_job=take)
    except PlexRLError as error:
        return _failed(scenario, error)
    except Exception as error:
        # A fault of ours in one run must not cost the others' hours.
        told = PlexRLError(f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
        return _failed(scenario, told)


def label(scenario: Scenario) -> str:
    """Which run of a sweep a scenario is, for people."""
    pools = " + ".join(f"{pool.nodes} x {pool.node_type.name}" for pool in scenario.pools)
    return f"{scenario.policy} on {pools}, seed {scenario.seed}"


def _failed(scenario: Scenario, error: PlexRLError) -> FailedRun:
    said = from_wire(error.to_wire())
    said.message = f"{label(scenario)}: {error.message}"
    said.args = (said.message,)
    return FailedRun(scenario=scenario, error=said)


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
                    told = _failed(tasks[index][0], died)
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
