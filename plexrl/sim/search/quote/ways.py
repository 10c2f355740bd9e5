"""Other ways to submit a job: another size, later, another class, or without sharing. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from plexrl.scheduler.queries.overview.planned_jobs import ClusterPlan, ProjectedJob
from plexrl.scheduler.rules.limits import PRIORITY_MAX
from plexrl.sim.search.quote.simulated_future import FutureEnds

if TYPE_CHECKING:
    from plexrl.scheduler.state.demand.trace import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to submit a job."""

    way: str
    """What differs, for people."""
    job: ProjectedJob
    later_s: float = 0.0


def other_ways(plan: ClusterPlan, base: Sequence[FutureEnds]) -> list[Way]:
    """The ways that are open to the asked job. `base`: futures without it."""
    job = plan.asked
    ways = []
    if job.gpus > 1 and job.gpus % 2 == 0:
        ways.append(Way(way=f"with {job.gpus // 2} training GPUs", job=resized(job, 0.5)))
    if 2 * job.gpus <= max((node.gpus * node.nodes for node in plan.nodes), default=0):
        ways.append(Way(way=f"with {2 * job.gpus} training GPUs", job=resized(job, 2.0)))
    ends_s = _ends(base)
    if ends_s:
        ways.append(Way(way="later, when the next job has ended", job=job, later_s=ends_s[0]))
    if job.priority < _highest_class(plan):
        higher = replace(job, priority=job.priority + 1)
        ways.append(Way(way=f"in class {job.priority + 1}", job=higher))
    if job.priority > -PRIORITY_MAX:
        ways.append(
            Way(way=f"in class {job.priority - 1}", job=replace(job, priority=job.priority - 1))
        )
    if job.slo != 0.0:
        ways.append(Way(way="without sharing (slo=0)", job=replace(job, slo=0.0)))
    return ways


def resized(job: ProjectedJob, factor: float) -> ProjectedJob:
    """The job on `factor` times the training GPUs, whose work then takes 1 / `factor` of the time:
    the best case. Rollouts take as long as before."""
    gpus = round(job.gpus * factor)
    if job.period_s is None:
        return replace(job, gpus=gpus, left_s=job.left_s / factor)
    segments: list[Segment] = []
    saved_s = 0.0
    for segment in job.segments:
        duration_s = segment.duration_s / factor
        at_s = segment.offset_s - saved_s
        segments.append(replace(segment, offset_s=at_s, duration_s=duration_s))
        saved_s += segment.duration_s - duration_s
    period_s = job.period_s - saved_s
    return replace(
        job,
        gpus=gpus,
        period_s=period_s,
        segments=tuple(segments),
        left_s=job.left_s / job.period_s * period_s,
    )


def _ends(base: Sequence[FutureEnds]) -> list[float]:
    """Median ends of live jobs, the first one first."""
    by_job: dict[str, list[float]] = {}
    for future in base:
        for name, end_s in future.ends_s.items():
            by_job.setdefault(name, []).append(end_s)
    return sorted(max(0.0, median(ends)) for ends in by_job.values())


def _highest_class(plan: ClusterPlan) -> int:
    for tenant in plan.tenants:
        if tenant.tenant == plan.asked.tenant:
            return PRIORITY_MAX if tenant.is_operator else tenant.priority_max
    return 0
