"""(b) A burst of 10 000 jobs, from submission to the launch of their workers."""

import time

from benchmarks.report import percentile
from benchmarks.scheduling.cluster import config, node
from benchmarks.sizes import sized
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.state.messages import commands as cmd
from plexrl.scheduler.state.messages import events as ev

JOBS = sized(10_000, quick=50)
NODES = sized(4_000, quick=20)
WORKERS = (4, 8, 8, 16)
NAIVE_JOBS = sized(40, quick=2)


def measure() -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """(table rows, figures). 4 000 nodes do not hold all of them alone: the last ones wait."""
    core = SchedulerCore(config(policy="spread+backfill"))
    for index in range(NODES):
        core.handle(node(index), 0.0)
    core.handle(ev.RouterJoined(router="r"), 0.0)  # type: ignore[arg-type]
    samples, launches = [], 0
    began = time.perf_counter()
    for index in range(JOBS):
        submitted = time.perf_counter()
        for event in _job(index):
            launches += sum(
                isinstance(command, cmd.LaunchWorkers) for command in core.handle(event, 1.0)
            )
        samples.append(time.perf_counter() - submitted)
    rate = JOBS / (time.perf_counter() - began)
    waiting = int(core.status(1.0)["deployments_waiting"])
    assert launches + waiting == JOBS, "a job was lost"
    naive = _naive_rate(core)
    p99 = percentile(samples, 99) * 1e3
    figures = {
        "admit_jobs_per_s": rate,
        "admit_p50_ms": percentile(samples, 50) * 1e3,
        "admit_p99_ms": p99,
        "admit_launched": launches,
        "admit_naive_ratio": rate / naive,
    }
    label = f"burst of {JOBS} jobs on {NODES} nodes ({launches} launched, {waiting} wait)"
    row = (label, f"{rate:,.0f} jobs/s", f"p99 {p99:.2f} ms", f"{rate / naive:,.0f}x")
    return [row], figures


def _job(index: int) -> tuple[ev.Event, ev.Event]:
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
        ),
    )


def _naive_rate(core: SchedulerCore) -> float:
    """Jobs per second when each looks for free GPUs through all groups and nodes."""
    groups = [{(gpu["node"], gpu["gpu"]) for gpu in view["gpus"]} for view in core.list_groups(1.0)]
    nodes = [(view["node"], int(view["gpus"])) for view in core.list_nodes()]
    began = time.perf_counter()
    for index in range(NAIVE_JOBS):
        taken = {gpu for group in groups for gpu in group}
        free = {
            name: [gpu for gpu in range(count) if (name, gpu) not in taken] for name, count in nodes
        }
        wanted = WORKERS[index % len(WORKERS)]
        min((len(gpus), name) for name, gpus in free.items() if len(gpus) >= min(wanted, 0))
    return NAIVE_JOBS / (time.perf_counter() - began)
