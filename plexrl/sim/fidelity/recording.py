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
from plexrl.traces.convert.cycles import Row, split_cycles
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


def overheads(rows: Iterable[Row]) -> dict[str, float]:
    """Median overhead of each kind of operation in `rows`: run time minus compute time."""
    found: dict[str, list[float]] = {}
    for row in _runs(rows):
        beyond_s = row["finished_at"] - row["started_at"] - (row["compute_s"] or 0.0)
        found.setdefault(row["kind"], []).append(max(0.0, beyond_s))
    return {kind: median(each) for kind, each in found.items()}


def recorded_run(
    jobs: Iterable[Row], operations: Iterable[Row], beyond: Mapping[str, Overheads]
) -> tuple[RecordedJob, ...]:
    """The jobs of a run, by name, from rows of `/v1/jobs` and its operation log.

    `beyond`: overheads of each job, by job name.

    Raises:
        InvalidRequestError: a job does not have exactly one training deployment, has no whole cycle
            in the log, has cycles of different operations, or lacks the overhead of a kind.
    """
    by_deployment: dict[str, list[Row]] = {}
    for row in operations:
        by_deployment.setdefault(row["deployment"], []).append(row)
    found: list[RecordedJob] = []
    for job in sorted(jobs, key=lambda job: str(job["name"])):
        training = [each for each in job["deployments"] if each["kind"] == "train"]
        if len(training) != 1:
            raise InvalidRequestError(
                f"{job['name']} has {len(training)} training deployments: only jobs with one can "
                "be predicted"
            )
        rows = by_deployment.get(training[0]["deployment"], [])
        found.append(_record_jobs(job, training[0], rows, beyond.get(job["name"], {})))
    return tuple(found)


def _record_jobs(job: Row, deployment: Row, rows: Sequence[Row], beyond: Overheads) -> RecordedJob:
    name = job["name"]
    runs = sorted(_runs(rows), key=lambda row: (row["started_at"], row["index"]))
    groups, _ = split_cycles([row for row in runs if row["kind"] not in NOT_IN_CYCLES])

    if not groups:
        raise InvalidRequestError(f"{name}: its operation log has no whole cycle: run it longer")
    kinds = tuple(row["kind"] for row in groups[0])
    if unknown := sorted(set(kinds) - set(beyond)):
        raise InvalidRequestError(
            f"{name}: the control-plane overhead of {', '.join(unknown)} is unknown: run such "
            "operations on a group without other jobs"
        )
    began_at = ended_at = float(job["submitted_at"])
    cycles: list[RecordedCycle] = []
    for number, group in enumerate(groups):
        if tuple(row["kind"] for row in group) != kinds:
            raise InvalidRequestError(
                f"{name}: cycle {number} is {', '.join(row['kind'] for row in group)}, the first "
                f"is {', '.join(kinds)}: only runs of equal cycles can be predicted"
            )
        cycles.append(_cycle(group, ended_at, beyond))
        ended_at = group[-1]["finished_at"]
    return RecordedJob(
        name=name,
        gpus=deployment["workers"],
        state_bytes=deployment["state_bytes"],
        began_at=began_at,
        kinds=kinds,
        cycles=tuple(cycles),
        load_s=_move_s(rows, "load"),
        offload_s=_move_s(rows, "offload"),
        control_s=median(beyond[kind] for kind in {row["kind"] for row in runs} & set(beyond)),
    )


def _runs(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["started_at"] is not None and row["state"] == "finished"]


def _cycle(group: Sequence[Row], began_at: float, beyond: Overheads) -> RecordedCycle:
    return RecordedCycle(
        took_s=group[-1]["finished_at"] - began_at,
        rollout_s=max(0.0, group[0]["submitted_at"] - began_at),
        segments_s=tuple(float(row["compute_s"]) + beyond[row["kind"]] for row in group),
        held_s=tuple(row["finished_at"] - row["started_at"] for row in group),
        gaps_s=tuple(
            max(0.0, row["submitted_at"] - former["finished_at"]) for former, row in pairwise(group)
        ),
        tokens=int(group[0]["tokens"]),
    )


def _move_s(rows: Iterable[Row], kind: str) -> float:
    """Mean duration of a move, without the first load, which builds the model, if others exist."""
    moves = sorted(
        (row for row in _runs(rows) if row["kind"] == kind), key=lambda row: float(row["index"])
    )
    took = [float(row["finished_at"] - row["started_at"]) for row in moves]
    return fmean(took[kind == "load" and len(took) > 1 :]) if took else 0.0
