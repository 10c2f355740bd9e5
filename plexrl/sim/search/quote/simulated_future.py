"""Simulates one future of a live cluster, and bounds the work of it.

The bound counts events, so that a quote is the same however fast the machine is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from plexrl.errors import CapacityError, OverloadedError
from plexrl.process.garbage_collection import rare_collections
from plexrl.scheduler.queries.overview.planned_jobs import ClusterPlan
from plexrl.sim.engine.simulate import CALLS_PER_CHECK
from plexrl.sim.engine.trace_run import TraceRun
from plexrl.sim.metrics.job_rows import JobRow
from plexrl.sim.search.quote.planned_scenario import ASKED, PlannedFuture, cycles_from_now

EVENTS_MAX = 100_000
"""Events of one future: a few seconds of computing."""
TOO_LONG_S = 60.0


@dataclass(slots=True, kw_only=True)
class FutureEnds:
    """When the jobs of one future end, in seconds from the present."""

    ends_s: dict[str, float] = field(default_factory=dict)
    """By name in the simulation; without those that had not ended at the bound."""
    start_s: float = 0.0
    """First GPUs of the asked job, and its other figures; 0 without one."""
    end_s: float = 0.0
    alone_s: float = 0.0
    gpu_hours: float = 0.0
    is_cut: bool = False
    """The bound came first: `end_s` follows from the cycles until then."""


def simulate_future(
    future: PlannedFuture, plan: ClusterPlan, *, has_asked: bool, only_asked: bool = False
) -> FutureEnds:
    """Run a future of `plan` to the end of its last job (of the asked job, with `only_asked`), or
    to the bound.

    Raises:
        CapacityError: the cluster cannot hold the asked job.
        OverloadedError: the asked job had completed no cycle at the bound.
    """
    rows: dict[str, JobRow] = {}
    cycles: dict[str, list[float]] = {}
    run = _run(future, plan, rows, cycles)
    with rare_collections():
        run.start()
        while run.shell.run(CALLS_PER_CHECK) == CALLS_PER_CHECK and run.shell.events < EVENTS_MAX:
            if only_asked and ASKED in rows:
                break
    now_s = future.before_s
    found = FutureEnds(ends_s={name: row.end_s - now_s for name, row in rows.items()})
    if has_asked:
        _add_asked(found, future, rows.get(ASKED), cycles.get(ASKED, []), run.shell.now)
    return found


def _run(
    future: PlannedFuture,
    plan: ClusterPlan,
    rows: dict[str, JobRow],
    cycles: dict[str, list[float]],
) -> TraceRun:
    """The run, which fills in `rows` of ended jobs and seconds of `cycles` by job."""
    clock: list[TraceRun] = []

    def on_cycle(job: str, seconds: float, alone_s: float) -> None:
        del alone_s
        cycles.setdefault(job, []).append(seconds)

    def on_job(row: JobRow) -> None:
        rows[row.job_id] = row

    run = TraceRun(
        future.scenario,
        settings=plan.settings,
        cycle_factory=cycles_from_now(future, lambda: clock[0].shell.now),
        on_cycle=on_cycle,
        on_job=on_job,
    )
    clock.append(run)
    for settings in future.tenants:
        run.add_tenant(settings.tenant, settings)
    return run


def _add_asked(
    found: FutureEnds, future: PlannedFuture, row: JobRow | None, cycles: list[float], at_s: float
) -> None:
    """Add the figures of the asked job, whose row is None if it had not ended at `at_s`."""
    if row is None:
        _add_cut(found, future, cycles, at_s)
        return
    if row.outcome != "completed" or row.start_s is None:
        raise CapacityError(
            "the cluster cannot hold this job: ask for fewer GPUs, or for another type of node"
        )
    # A job that got GPUs before the present, when nothing worked, gets them now.
    found.start_s = max(0.0, row.start_s - future.before_s)
    found.end_s = row.end_s - future.before_s
    found.alone_s = row.alone_s
    found.gpu_hours = row.busy_gpu_hours + row.switch_gpu_hours


def _add_cut(found: FutureEnds, future: PlannedFuture, cycles: list[float], at_s: float) -> None:
    """As `_add_asked`, by the cycles until `at_s`."""
    if not cycles:
        raise OverloadedError(
            f"so much work is before this job that it has no cycle within the {EVENTS_MAX} events "
            "that a quote simulates: ask again when the queue is shorter",
            retry_after_s=TOO_LONG_S,
        )
    asked = next(job for job in future.scenario.source.jobs() if job.job_id == ASKED)
    count = asked.cycles or 1
    cycle_s = sum(cycles) / len(cycles)
    done_at_s = at_s - future.before_s
    found.is_cut = True
    found.start_s = max(0.0, done_at_s - sum(cycles))
    found.end_s = done_at_s + (count - len(cycles)) * cycle_s
    period_s = asked.period_s or cycle_s
    found.alone_s = count * period_s
    busy_s = sum(segment.duration_s for segment in asked.segments) or period_s
    found.gpu_hours = (
        count * (asked.gpus * busy_s + asked.rollout_gpus * max(0.0, period_s - busy_s)) / 3600.0
    )


def delays(base: Mapping[str, float], shifted: Mapping[str, float]) -> dict[str, float]:
    """By job: how much later it ends than in `base`, for those that end in both."""
    return {name: shifted[name] - end_s for name, end_s in base.items() if name in shifted}
