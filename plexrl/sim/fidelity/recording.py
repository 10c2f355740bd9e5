"""Extracts the cycles of a live run from its operation log: measured and own durations. Pure.

A cycle ends with the job's last operation on its training group (the publish of its weights), and
the next cycle begins there. The rollout of a cycle lasts until the next operation is submitted, and
includes the controller's own time. The duration of an operation is its workers' compute time plus
the control-plane overhead of its kind, measured in a run without sharing. None of these includes
waiting.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from plexrl.errors import InvalidRequestError
from plexrl.traces.convert.cycles import split_cycles
from plexrl.traces.convert.history import (
    PastDeployment,
    PastJob,
    PastOperation,
    PastRun,
    by_deployment,
    runs_of,
)
from plexrl.wire.operations import MOVES

NOT_IN_CYCLES = MOVES | {"barrier"}
"""Kinds of operation that are not part of any cycle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCycle:
    """The measured duration of one cycle and the durations of its parts, in seconds."""

    took_s: float
    """From the end of the cycle before to its own end, with all waiting."""
    rollout_s: float
    """From the end of the cycle before to the submission of the first operation."""
    segments_s: tuple[float, ...]
    """Duration of each operation without waiting."""
    held_s: tuple[float, ...]
    """From each operation's start to its completion."""
    gaps_s: tuple[float, ...]
    """From an operation's completion to the submission of the next; 0 if it was queued already."""
    tokens: int
    """Tokens of the first operation."""

    @property
    def alone_s(self) -> float:
        """Duration on a group of the job's own."""
        return self.rollout_s + sum(self.segments_s) + sum(self.gaps_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedJob:
    """One job of a recorded run."""

    name: str
    gpus: int
    """GPUs of its training deployment."""
    state_bytes: int
    began_at: float
    """Submission time on the cluster's clock. The first cycle begins there, and the time before the
    first operation counts as its rollout."""
    kinds: tuple[str, ...]
    """Kinds of the operations of a cycle."""
    cycles: tuple[RecordedCycle, ...]
    load_s: float
    """Mean duration of a load of its state in a context switch."""
    offload_s: float
    control_s: float
    """Median control-plane overhead of an operation, over all kinds including moves."""


Overheads = Mapping[str, float]
"""Control-plane overhead in seconds, by kind of operation."""


def overheads(operations: Iterable[PastOperation]) -> dict[str, float]:
    """Median overhead of each kind of operation: run time minus compute time."""
    beyond: dict[str, list[float]] = {}
    for run in _finished(operations):
        beyond.setdefault(run.kind, []).append(max(0.0, run.took_s - run.compute_s))
    return {kind: median(values) for kind, values in beyond.items()}


def recorded_run(
    jobs: Iterable[PastJob],
    operations: Iterable[PastOperation],
    beyond: Mapping[str, Overheads],
) -> tuple[RecordedJob, ...]:
    """The jobs of a run, by name, from its operation log.

    `beyond`: overheads of each job, by job name.

    Raises:
        InvalidRequestError: a job does not have exactly one training deployment, has no whole cycle
            in the log, has cycles of different operations, or lacks the overhead of a kind.
    """
    own = by_deployment(operations)
    return tuple(
        _record_job(job, own, beyond.get(job.name, {}))
        for job in sorted(jobs, key=lambda job: job.name)
    )


def training_of(job: PastJob) -> list[PastDeployment]:
    """The training deployments of a job."""
    return [deployment for deployment in job.deployments if deployment.kind == "train"]


def _record_job(
    job: PastJob, operations: Mapping[str, Sequence[PastOperation]], beyond: Overheads
) -> RecordedJob:
    training = training_of(job)
    if len(training) != 1:
        raise InvalidRequestError(
            f"{job.name} has {len(training)} training deployments: only jobs with one can be "
            "predicted"
        )
    runs = _finished(operations.get(training[0].deployment, ()))
    groups = _equal_cycles(job.name, runs)
    kinds = tuple(run.kind for run in groups[0])
    if unknown := sorted(set(kinds) - set(beyond)):
        raise InvalidRequestError(
            f"{job.name}: the control-plane overhead of {', '.join(unknown)} is unknown: run such "
            "operations on a group without other jobs"
        )
    ends = [group[-1].finished_at for group in groups]
    begins = [job.submitted_at, *ends[:-1]]
    return RecordedJob(
        name=job.name,
        gpus=training[0].workers,
        state_bytes=training[0].state_bytes,
        began_at=job.submitted_at,
        kinds=kinds,
        cycles=tuple(
            _cycle(group, began_at, beyond) for group, began_at in zip(groups, begins, strict=True)
        ),
        load_s=_move_s(runs, "load"),
        offload_s=_move_s(runs, "offload"),
        control_s=median(beyond[kind] for kind in {run.kind for run in runs} & set(beyond)),
    )


def _equal_cycles(name: str, runs: Sequence[PastRun]) -> list[list[PastRun]]:
    """The whole cycles, all of the same kinds of operation; at least one."""
    groups, _ = split_cycles([run for run in runs if run.kind not in NOT_IN_CYCLES])
    if not groups:
        raise InvalidRequestError(f"{name}: its operation log has no whole cycle: run it longer")
    orders = [", ".join(run.kind for run in group) for group in groups]
    for number, order in enumerate(orders):
        if order != orders[0]:
            raise InvalidRequestError(
                f"{name}: cycle {number} is {order}, the first is {orders[0]}: only runs of equal "
                "cycles can be predicted"
            )
    return groups


def _finished(operations: Iterable[PastOperation]) -> list[PastRun]:
    return [run for run in runs_of(operations) if run.state == "finished"]


def _cycle(group: Sequence[PastRun], began_at: float, beyond: Overheads) -> RecordedCycle:
    return RecordedCycle(
        took_s=group[-1].finished_at - began_at,
        rollout_s=max(0.0, group[0].submitted_at - began_at),
        segments_s=tuple(run.compute_s + beyond[run.kind] for run in group),
        held_s=tuple(run.took_s for run in group),
        gaps_s=tuple(
            max(0.0, run.submitted_at - former.finished_at) for former, run in pairwise(group)
        ),
        tokens=group[0].tokens,
    )


def _move_s(runs: Iterable[PastRun], kind: str) -> float:
    """Mean duration of a move, without the first load, which builds the model, if others exist."""
    moves = sorted((run for run in runs if run.kind == kind), key=lambda run: run.index)
    took = [run.took_s for run in moves]
    return fmean(took[kind == "load" and len(took) > 1 :]) if took else 0.0
