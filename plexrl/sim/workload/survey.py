"""One look through a trace before it is run: that it can be run at all, and on which clusters.

A run is long; what would spoil it is said before it starts, all in one go. What is kept is bounded
by the number of different sizes, node types and tenants, not by that of jobs.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from plexrl.errors import CapacityError, InvalidRequestError
from plexrl.sim.workload.scenario import Pool
from plexrl.traces import TraceJob

NAMED = 3
"""Jobs named of a kind that is at fault; the rest are counted."""


@dataclass(slots=True, kw_only=True)
class Kind:
    """Jobs that ask for the same GPUs."""

    jobs: int = 0
    first: list[str] = field(default_factory=list)
    """Ids of the first few."""

    def add(self, job_id: str) -> None:
        """One more."""
        self.jobs += 1
        if len(self.first) < NAMED:
            self.first.append(job_id)


@dataclass(slots=True, kw_only=True)
class Survey:
    """What a trace asks for."""

    jobs: int = 0
    arrivals_s: float = 0.0
    """Submission of the last job."""
    busy_gpu_s: float = 0.0
    """Training GPUs, while cycles need them."""
    held_gpu_s: float = 0.0
    """Training GPUs as long as jobs run: what isolation takes."""
    without_rollout_gpus: int = 0
    """Jobs that have rollouts, and no GPUs for them."""
    kinds: dict[tuple[str, int], Kind] = field(default_factory=dict)
    """By node type and GPUs."""

    @property
    def gpus_max(self) -> int:
        """Of the largest job."""
        return max((gpus for _, gpus in self.kinds), default=0)

    def nodes_for(self, gpus_per_node: int) -> tuple[int, int]:
        """(nodes of the largest job, nodes of all jobs side by side): fewer cannot run the trace,
        and more make no difference."""
        largest = math.ceil(self.gpus_max / gpus_per_node)
        every = sum(
            kind.jobs * math.ceil(gpus / gpus_per_node) for (_, gpus), kind in self.kinds.items()
        )
        return max(1, largest), max(1, largest, every)


def surveyed(jobs: Iterable[TraceJob]) -> Survey:
    """Look through all jobs of a trace.

    Raises:
        InvalidRequestError: there are none, or jobs that cannot be simulated: without training
            GPUs, without a cycle, or without a segment.
        TraceError: as the jobs' source raises it.
    """
    survey = Survey()
    lacking: dict[str, Kind] = {}
    for job in jobs:
        survey.jobs += 1
        survey.arrivals_s = max(survey.arrivals_s, job.submit_s)
        survey.kinds.setdefault((job.node_type, job.gpus), Kind()).add(job.job_id)
        survey.held_gpu_s += job.gpus * job.service_s
        if job.period_s and job.segments:
            busy_s = sum(segment.duration_s for segment in job.segments)
            survey.without_rollout_gpus += not job.rollout_gpus and busy_s < job.period_s
            survey.busy_gpu_s += job.gpus * job.service_s * min(1.0, busy_s / job.period_s)
        lack = _lack(job)
        if lack:
            lacking.setdefault(lack, Kind()).add(job.job_id)
    if survey.jobs == 0:
        raise InvalidRequestError(
            "the trace has no jobs, or all were left out: see `plexrl traces describe`, and what "
            "--min-gpus, --max-gpus and --days leave"
        )
    if lacking:
        raise InvalidRequestError(
            "cannot simulate "
            + "; nor ".join(f"{_named(kind)} {lack}" for lack, kind in lacking.items()),
            jobs={lack: kind.jobs for lack, kind in lacking.items()},
        )
    return survey


def check_fits(survey: Survey, pools: Sequence[Pool]) -> None:
    """That every job has its place on a cluster that is empty otherwise.

    Raises:
        CapacityError: some are larger than every pool that they may run on.
        InvalidRequestError: some ask for a node type that no pool has.
    """
    names = sorted({pool.node_type.name for pool in pools})
    strange = [
        (node_type, kind)
        for (node_type, _), kind in sorted(survey.kinds.items())
        if node_type and node_type not in names
    ]
    if strange:
        missing = sorted({node_type for node_type, _ in strange})
        raise InvalidRequestError(
            f"node type {', '.join(map(repr, missing))} is asked for by "
            f"{_named(*(kind for _, kind in strange))}; the cluster has {', '.join(names)} only: "
            "add it by --pool NAME:NODES, or let jobs run anywhere by --any-node-type",
            node_types=missing,
        )
    larger = []
    gpus_wanted = 0
    for (node_type, gpus), kind in sorted(survey.kinds.items()):
        room = max(
            pool.nodes * pool.node_type.gpus
            for pool in pools
            if node_type in ("", pool.node_type.name)
        )
        if gpus > room:
            larger.append(kind)
            gpus_wanted = max(gpus_wanted, gpus)
    if larger:
        room = max(pool.nodes * pool.node_type.gpus for pool in pools)
        nodes = math.ceil(gpus_wanted / max(pool.node_type.gpus for pool in pools))
        raise CapacityError(
            f"the cluster is too small for {_named(*larger)} of up to {gpus_wanted} GPUs: its "
            f"largest pool has {room}; take --nodes {nodes} or more, or leave larger jobs out by "
            f"--max-gpus {room}",
            jobs=sum(kind.jobs for kind in larger),
            gpus=gpus_wanted,
        )


def _lack(job: TraceJob) -> str | None:
    if job.gpus < 1:
        return "without training GPUs: leave them out by --min-gpus 1"
    if not job.segments:
        return (
            "without segments, as nothing says when their cycles need the training GPUs: let them "
            "have the published RL profiles (leave --no-profiles away)"
        )
    if not any(segment.duration_s > 0 for segment in job.segments):
        return "whose segments all take no time: mend the trace"
    return None


def _named(*kinds: Kind) -> str:
    """`12 jobs (a, b, c, …)`."""
    count = sum(kind.jobs for kind in kinds)
    named = list(islice((job for kind in kinds for job in kind.first), NAMED))
    more = ", …" if count > len(named) else ""
    return f"{count} job{'s' if count != 1 else ''} ({', '.join(named)}{more})"
