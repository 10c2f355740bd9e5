"""Checks a trace before a run: whether it can be simulated, and on which clusters.

A run is long, so all errors are reported together before it starts. Memory is bounded by the number
of different sizes and node types, not by the number of jobs.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from plexrl.errors import CapacityError, InvalidRequestError
from plexrl.scheduler.rules.limits import PRIORITY_MAX
from plexrl.sim.workload.scenario import NODES_MAX, Pool
from plexrl.traces import TraceJob

NAMED = 3
"""Most jobs that an error message names; it counts the rest."""
WRONG_PRIORITY = (
    f"with a priority outside {-PRIORITY_MAX} to {PRIORITY_MAX}, the scheduler's range: correct "
    "the trace"
)


@dataclass(slots=True, kw_only=True)
class RequestKind:
    """Jobs with equal GPU requests."""

    jobs: int = 0
    first: list[str] = field(default_factory=list)
    """Names of the first few."""

    def add(self, name: str) -> None:
        """Count a job."""
        self.jobs += 1
        if len(self.first) < NAMED:
            self.first.append(name)


@dataclass(slots=True, kw_only=True)
class Survey:
    """The total demand of a trace."""

    jobs: int = 0
    arrivals_s: float = 0.0
    """Submission of the last job."""
    busy_gpu_s: float = 0.0
    """GPU-seconds in which cycles need their GPUs."""
    held_gpu_s: float = 0.0
    """GPU-seconds of GPUs while jobs run: the use without sharing."""
    without_rollout_gpus: int = 0
    """Jobs with rollouts but without rollout GPUs."""
    kinds: dict[tuple[str, int], RequestKind] = field(default_factory=dict)
    """Jobs by node type and GPUs."""

    @property
    def gpus_max(self) -> int:
        """GPUs of the largest job."""
        return max((gpus for _, gpus in self.kinds), default=0)

    def nodes_for(self, gpus_per_node: int) -> tuple[int, int]:
        """(nodes of the largest job, nodes of all jobs together): fewer cannot run the trace, and
        more make no difference."""
        largest = math.ceil(self.gpus_max / gpus_per_node)
        every = sum(
            kind.jobs * math.ceil(gpus / gpus_per_node) for (_, gpus), kind in self.kinds.items()
        )
        return max(1, largest), max(1, largest, every)


def survey_jobs(jobs: Iterable[TraceJob], *, places_rollouts: bool = False) -> Survey:
    """Check and sum all jobs of a trace; `places_rollouts`: with their rollout GPUs.

    Raises:
        InvalidRequestError: there are no jobs, or jobs without training GPUs, cycles or segments,
            or with a priority that the scheduler refuses.
        TraceError: the jobs' source raises it.
    """
    survey = Survey()
    lacking: dict[str, RequestKind] = {}
    for job in jobs:
        survey.jobs += 1
        survey.arrivals_s = max(survey.arrivals_s, job.submit_s)
        gpus = job.gpus + job.rollout_gpus if places_rollouts else job.gpus
        survey.kinds.setdefault((job.node_type, gpus), RequestKind()).add(job.job_id)
        survey.held_gpu_s += gpus * job.service_s
        if job.period_s and job.segments:
            busy_s = sum(segment.duration_s for segment in job.segments)
            survey.without_rollout_gpus += not job.rollout_gpus and busy_s < job.period_s
            busy = min(1.0, busy_s / job.period_s)
            survey.busy_gpu_s += (job.gpus * busy + (gpus - job.gpus) * (1 - busy)) * job.service_s
        lack = _lack(job)
        if lack:
            lacking.setdefault(lack, RequestKind()).add(job.job_id)
        if not is_priority(job):
            lacking.setdefault(WRONG_PRIORITY, RequestKind()).add(f"{job.job_id} at {job.priority}")
    if survey.jobs == 0:
        raise InvalidRequestError(
            "the trace has no jobs, or the options exclude all: see `plexrl traces describe`, and "
            "check --min-gpus, --max-gpus, --start-day and --days"
        )
    if lacking:
        raise InvalidRequestError(
            "cannot simulate "
            + "; nor ".join(f"{_named(kind)} {lack}" for lack, kind in lacking.items()),
            jobs={lack: kind.jobs for lack, kind in lacking.items()},
        )
    return survey


def check_fits(survey: Survey, pools: Sequence[Pool]) -> None:
    """Check that every job fits on the empty cluster.

    Raises:
        CapacityError: jobs are larger than every pool that they may run on.
        InvalidRequestError: jobs request a node type that no pool has.
    """
    names = sorted({pool.node_type.name for pool in pools})
    unknown = [
        (node_type, kind)
        for (node_type, _), kind in sorted(survey.kinds.items())
        if node_type and node_type not in names
    ]
    if unknown:
        missing = sorted({node_type for node_type, _ in unknown})
        raise InvalidRequestError(
            f"node type {', '.join(map(repr, missing))} is requested by "
            f"{_named(*(kind for _, kind in unknown))}; the cluster has {', '.join(names)} only: "
            "add it by --pool NAME:NODES, or allow any node type by --any-node-type",
            node_types=missing,
        )
    larger = []
    gpus_wanted = 0
    for (node_type, gpus), kind in sorted(survey.kinds.items()):
        pool_gpus = max(
            pool.nodes * pool.node_type.gpus
            for pool in pools
            if node_type in ("", pool.node_type.name)
        )
        if gpus > pool_gpus:
            larger.append(kind)
            gpus_wanted = max(gpus_wanted, gpus)
    if larger:
        largest_gpus = max(pool.nodes * pool.node_type.gpus for pool in pools)
        nodes = math.ceil(gpus_wanted / max(pool.node_type.gpus for pool in pools))
        raise CapacityError(
            f"the cluster is too small for {_named(*larger)} of up to {gpus_wanted} GPUs: its "
            f"largest pool has {largest_gpus}; {_larger_cluster(nodes)}exclude larger jobs by "
            f"--max-gpus {largest_gpus}",
            jobs=sum(kind.jobs for kind in larger),
            gpus=gpus_wanted,
        )


def _larger_cluster(nodes: int) -> str:
    if nodes <= NODES_MAX:
        return f"use --nodes {nodes} or more, or "
    return (
        f"they need {nodes} nodes and a pool has at most {NODES_MAX}, so use nodes of more GPUs "
        "(--gpus-per-node), or "
    )


def is_priority(job: TraceJob) -> bool:
    """Whether the scheduler accepts the job's priority."""
    return abs(job.priority) <= PRIORITY_MAX


def _lack(job: TraceJob) -> str | None:
    if job.gpus < 1:
        return "without training GPUs: exclude them by --min-gpus 1"
    if not job.segments:
        return (
            "without segments, so the times at which cycles need training GPUs are unknown: use "
            "the published RL profiles (omit --no-profiles)"
        )
    if not any(segment.duration_s > 0 for segment in job.segments):
        return "whose segments all take no time: correct the trace"
    return None


def _named(*kinds: RequestKind) -> str:
    """`12 jobs (a, b, c, …)`."""
    count = sum(kind.jobs for kind in kinds)
    named = list(islice((job for kind in kinds for job in kind.first), NAMED))
    more = ", …" if count > len(named) else ""
    return f"{count} job{'s' if count != 1 else ''} ({', '.join(named)}{more})"
