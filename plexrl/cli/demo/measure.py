"""Computes the cost of a demo phase from the cluster's operation log. Pure.

A training group is *reserved* from the submission of its first job to the end of its last one,
whether or not anything runs: that is what a tenant without PlexRL pays for.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
"""One finished operation of the cluster's operation log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """One job of one phase."""

    name: str
    tenant: str
    job: str
    submitted_at: float
    ended_at: float
    train_deployment: str
    workers: int
    steps: int
    reward_before: float
    reward_after: float
    rewards: tuple[tuple[int, float, float], ...]
    """(step, seconds since submission, mean reward of the step's rollouts)."""
    gpus: frozenset[tuple[str, int]] = frozenset()
    """Node and index of the GPUs that its deployments, rollouts too, were on at any time."""
    weights: str = ""
    """SHA-256 of the final weights, in hexadecimal; empty if nothing was computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSpan:
    """An interval in which one job held a training group."""

    group: str
    job: str
    kind: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """The results of both jobs in one mode: `shared` (one group) or `isolated` (a group each)."""

    name: str
    jobs: tuple[JobResult, ...]
    groups: int
    wall_seconds: float
    worker_seconds: float
    """Reserved training worker-seconds: Σ over groups of workers times reserved time."""
    worker_seconds_per_step: float
    gpus: int
    """GPUs of training and rollouts."""
    gpu_seconds_per_step: float
    """Reserved seconds of these: each from the submission of the first job that used it to the end
    of the last. Isolated jobs have GPUs of their own, though they ran one after the other."""
    busy_share: float
    """Part of the reserved worker-seconds in which training operations ran."""
    context_switches: int
    switch_seconds: float
    spans: tuple[DemoSpan, ...]


SWITCH_KINDS = frozenset({"offload", "load"})


def measure_phase(name: str, jobs: Sequence[JobResult], rows: Iterable[Row]) -> PhaseResult:
    """The figures of one phase; operations of other jobs in `rows` are ignored."""
    by_train = {job.train_deployment: job for job in jobs}
    own = [row for row in rows if row["deployment"] in by_train and row["started_at"] is not None]
    group_of = {row["deployment"]: str(row["group"]) for row in own}
    worker_seconds = 0.0
    for group in sorted(set(group_of.values())):
        members = [job for job in jobs if group_of.get(job.train_deployment) == group]
        worker_seconds += members[0].workers * union_seconds(
            [(job.submitted_at, job.ended_at) for job in members]
        )
    spans = tuple(
        DemoSpan(
            group=group_of[row["deployment"]],
            job=by_train[row["deployment"]].name,
            kind=str(row["kind"]),
            start=float(row["started_at"]),
            end=float(row["finished_at"]),
        )
        for row in own
    )
    busy = sum(
        by_train[row["deployment"]].workers * float(row["compute_s"] or 0.0)
        for row in own
        if row["kind"] not in SWITCH_KINDS
    )
    switches, switch_seconds = count_switches(own)
    steps = sum(job.steps for job in jobs)
    users: dict[object, list[JobResult]] = {}
    for job in jobs:
        for gpu in job.gpus:
            # An isolated job's GPU is not another one's, though it is the same in this run.
            users.setdefault(gpu if name == "shared" else (job.job, gpu), []).append(job)
    gpu_seconds = sum(
        union_seconds([(job.submitted_at, job.ended_at) for job in user]) for user in users.values()
    )
    return PhaseResult(
        name=name,
        jobs=tuple(jobs),
        groups=len(set(group_of.values())),
        wall_seconds=union_seconds([(job.submitted_at, job.ended_at) for job in jobs]),
        worker_seconds=worker_seconds,
        worker_seconds_per_step=worker_seconds / max(1, steps),
        gpus=len(users),
        gpu_seconds_per_step=gpu_seconds / max(1, steps),
        busy_share=busy / worker_seconds if worker_seconds else 0.0,
        context_switches=switches,
        switch_seconds=switch_seconds,
        spans=spans,
    )


def union_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds covered by at least one of the intervals."""
    total = 0.0
    reach = float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def count_switches(rows: Sequence[Row]) -> tuple[int, float]:
    """Number and seconds of context switches: each offload and the load that follows it.

    The first load of a deployment builds its model on an empty group and does not count.
    """
    offloads = [row for row in rows if row["kind"] == "offload" and row["state"] == "finished"]
    grants = {(row["group"], row["token"]) for row in offloads}
    seconds = sum(
        float(row["finished_at"]) - float(row["started_at"])
        for row in rows
        if row["kind"] in SWITCH_KINDS and (row["group"], row["token"]) in grants
    )
    return len(offloads), seconds
