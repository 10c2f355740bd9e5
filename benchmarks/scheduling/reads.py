"""Measures read calls while 10 000 deployments wait for GPUs.

Four backlogs: jobs alike, jobs of as many lengths as there are jobs, gangs, and jobs that declare
a demand, no two the same. Every read call of a router is made a few times; the worst is shown.
"""

import time
from collections.abc import Callable, Iterator

from benchmarks.report import percentile
from benchmarks.scheduling.cluster import GPUS, config, node
from benchmarks.sizes import sized
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.queries.views import operation_log, usage_view
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.messages.calls import ListOperations
from plexrl.wire.operations import OperationKind

WAITING = sized(10_000, quick=200)
NODES = sized(200, quick=20)
TENANTS = 20
SAMPLES = sized(20, quick=2)


def measure() -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """(table rows, figures)."""
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for backlog in ("alike", "lengths", "gangs", "demands"):
        core = _core(backlog)
        for name, call in _reads(core):
            samples = []
            for _ in range(SAMPLES):
                began = time.perf_counter()
                call()
                samples.append(time.perf_counter() - began)
            p50, p99 = (percentile(samples, part) * 1e3 for part in (50, 99))
            figures[f"read_{backlog}_{name}_p50_ms"] = p50
            figures[f"read_{backlog}_{name}_max_ms"] = p99
            rows.append((f"{name}, {WAITING} {backlog}", f"{p50:.3f} ms", f"{p99:.3f} ms", ""))
    return rows, figures


def _core(backlog: str) -> SchedulerCore:
    """A cluster full of jobs, and the backlog behind them."""
    core = SchedulerCore(config(policy="spread+backfill", waiting_part_max=0.001))
    for index in range(NODES):
        core.handle(node(index), 0.0)
    core.handle(ev.RouterJoined(router="r"), 0.0)  # type: ignore[arg-type]
    for index in range(NODES):
        for event in _job(index, "alike", "full"):
            core.handle(event, 1.0)
    size = 2 if backlog == "gangs" else 1
    for index in range(WAITING // size):
        for event in _job(index, backlog, "wait"):
            core.handle(event, 2.0 + index * 1e-3)
    return core


def _job(index: int, backlog: str, prefix: str) -> Iterator[ev.Event]:
    job = f"{prefix}{index}"
    gang = 2 if backlog == "gangs" else 0
    yield ev.JobSubmitted(
        job=job,  # type: ignore[arg-type]
        tenant=f"t{index % TENANTS}",  # type: ignore[arg-type]
        name="job",
        controller_timeout_s=1e9,
        reattach_timeout_s=1e9,
        gang=gang,
        expected_s=100.0 + index if backlog == "lengths" else 0.0,
    )
    trace = None
    if prefix == "full":
        parts = tuple(Segment(offset_s=each, duration_s=30.0) for each in (0.0, 100.0, 200.0))
        trace = DemandTrace(period_s=300.0, segments=parts, cycles=3)
    elif backlog == "demands":
        segment = Segment(offset_s=0.0, duration_s=100.0 + index * 1e-3)
        trace = DemandTrace(period_s=300.0, segments=(segment,), cycles=3)
    for each in range(max(gang, 1)):
        yield ev.DeploymentCreated(
            deployment=f"{job}/d{each}",  # type: ignore[arg-type]
            job=job,  # type: ignore[arg-type]
            kind="train",
            workers=GPUS,
            state_bytes=8 << 30,
            exclusive=False,
            spec_json="{}",
            trace=trace,
        )
    if prefix == "wait":
        yield ev.OperationSubmitted(
            operation=f"{job}:1",  # type: ignore[arg-type]
            deployment=f"{job}/d0",  # type: ignore[arg-type]
            kind=OperationKind.BARRIER,
            params=None,
        )


def _reads(core: SchedulerCore) -> Iterator[tuple[str, Callable[[], object]]]:
    now = 50.0
    size = len(core.list_jobs("t3", now))  # type: ignore[arg-type]
    job = f"wait{(size // 2) * TENANTS + 3 - TENANTS}"
    page = ListOperations(limit=100)
    yield "operation_view", lambda: core.operation_view(f"{job}:1", now)  # type: ignore[arg-type]
    yield "deployment_view", lambda: core.deployment_view(f"{job}/d0", now)  # type: ignore[arg-type]
    yield "job_view", lambda: core.job_view(job, now)  # type: ignore[arg-type]
    yield "explain_job", lambda: core.explain_job(job, now)  # type: ignore[arg-type]
    yield "status", lambda: core.status(now)
    yield "status_of_a_tenant", lambda: core.status(now, "t3")  # type: ignore[arg-type]
    yield "list_jobs_of_a_tenant", lambda: core.list_jobs("t3", now)  # type: ignore[arg-type]
    yield "list_jobs", lambda: core.list_jobs(None, now)
    yield "usage", lambda: usage_view(core.cluster.state, None)
    yield "list_nodes", core.list_nodes
    yield "list_groups", lambda: core.list_groups(now)
    yield "list_tenants", lambda: core.list_tenants(now)
    yield "list_operations", lambda: operation_log(core.cluster, None, page, now)
