"""(b) A burst of 2 000 jobs with profiles, from submission to the launch of their workers.

They go through the scheduler's shell: each event is committed to SQLite before it is handled.
"""

import asyncio
import itertools
import random
import tempfile
import time
from pathlib import Path

from benchmarks.report import percentile
from benchmarks.scheduling.cluster import config, demand, node
from benchmarks.sizes import sized
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.service.journal.sql_journal import SqlJournal
from plexrl.scheduler.service.shell import Clock, Shell
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire import messages as cmd

JOBS = sized(2_000, quick=50)
NODES = sized(800, quick=20)
WORKERS = (4, 8, 8, 16)
AT_ONCE = sized(64, quick=4)
"""Jobs that are being submitted at a time, so that they share commits."""


def measure() -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """(table rows, figures). 800 nodes do not hold all of them alone: the last ones share or
    wait."""
    core = SchedulerCore(config(policy="spread+backfill"))
    with tempfile.TemporaryDirectory(prefix="plexrl-bench-") as folder:
        took_s, samples, launches = asyncio.run(_burst(core, str(Path(folder) / "journal.sqlite")))
    rate = JOBS / took_s
    waiting = int(core.status(1.0)["deployments_waiting"])
    assert launches + waiting == JOBS, "a job was lost"
    p99 = percentile(samples, 99) * 1e3
    figures = {
        "admit_jobs_per_s": rate,
        "admit_p50_ms": percentile(samples, 50) * 1e3,
        "admit_p99_ms": p99,
        "admit_launched": launches,
    }
    label = (
        f"burst of {JOBS} jobs on {NODES} nodes ({launches} launched, {waiting} wait), journalled"
    )
    row = (label, f"{rate:,.0f} jobs/s", f"p99 {p99:.2f} ms", "")
    return [row], figures


async def _burst(core: SchedulerCore, path: str) -> tuple[float, list[float], int]:
    """(seconds, seconds of each job, jobs launched)."""
    journal = SqlJournal(path)
    journal.acquire("benchmark", 3600.0)
    shell = Shell(core, journal, Clock(0.0))
    launches = 0

    def count(commands: list[cmd.Command]) -> None:
        nonlocal launches
        launches += sum(isinstance(each, cmd.LaunchWorkers) for each in commands)

    shell.on_change = count
    running = asyncio.create_task(shell.run())
    async with asyncio.TaskGroup() as tasks:
        for index in range(NODES):
            tasks.create_task(shell.request(node(index)))
    await shell.request(ev.RouterJoined(router="r"))  # type: ignore[arg-type]
    samples: list[float] = []
    numbers, rng = itertools.count(), random.Random(1)

    async def submit() -> None:
        while (index := next(numbers)) < JOBS:
            submitted = time.perf_counter()
            for event in _job(index, rng):
                await shell.request(event)
            samples.append(time.perf_counter() - submitted)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(submit())
    took_s = time.perf_counter() - began
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    journal.release()
    journal.close()
    return took_s, samples, launches


def _job(index: int, rng: random.Random) -> tuple[ev.Event, ev.Event]:
    job, workers = f"j{index}", WORKERS[index % len(WORKERS)]
    return (
        ev.JobSubmitted(
            job=job,  # type: ignore[arg-type]
            tenant="t",  # type: ignore[arg-type]
            name="job",
            controller_timeout_s=1e9,
            reattach_timeout_s=1e9,
        ),
        ev.DeploymentCreated(
            deployment=f"{job}/actor",  # type: ignore[arg-type]
            job=job,  # type: ignore[arg-type]
            kind="train",
            workers=workers,
            state_bytes=8 << 30,
            exclusive=False,
            spec_json="{}",
            trace=demand(rng),
        ),
    )
