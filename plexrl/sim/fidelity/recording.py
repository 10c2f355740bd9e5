"""A live run's cycles, out of the operation log of its cluster: what each cycle took, and what of
that was the job's own. Pure.

A cycle ends with the last work that the job has for its training group in it (the publish of its
weights), and there the next one begins. Its rollout is the time until its next operation is
submitted: all that happens elsewhere, the controller's own time included. An operation's seconds
are those that its workers computed, and what the control plane adds to such an operation, which is
measured in a run that shares with nobody. Waiting is in none of these.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.wire.operation_phases import MOVES

Row = Mapping[str, Any]
"""Of `/v1/operations`."""

CYCLE_ENDS = ("publish", "optim_step", "forward")
"""What a cycle ends with: the first of these kinds that the job has."""
BETWEEN_CYCLES = MOVES | {"barrier"}
"""Kinds of rows that are no part of a cycle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCycle:
    """One cycle as it went, and what the job needed for it. Seconds."""

    took_s: float
    """From end to end, with all waiting."""
    rollout_s: float
    """From the former cycle's end to the submission of the first operation."""
    segments_s: tuple[float, ...]
    """Of each operation, if it had the group to itself."""
    gaps_s: tuple[float, ...]
    """Between an operation's answer and the submission of the next; 0 where it was there before."""
    tokens: int
    """Of the first operation."""

    @property
    def alone_s(self) -> float:
        """On a group that the job has to itself."""
        return self.rollout_s + sum(self.segments_s) + sum(self.gaps_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedJob:
    """One job of a recorded run."""

    name: str
    gpus: int
    """Of its training deployment."""
    state_bytes: int
    began_at: float
    """When it was submitted, on the cluster's clock. Its first cycle begins there, and all that
    comes before its first operation counts as its rollout."""
    kinds: tuple[str, ...]
    """Of the operations of a cycle."""
    cycles: tuple[RecordedCycle, ...]
    load_s: float
    """Of its state, as a context switch loads it: mean, for it is a sum that they make up."""
    offload_s: float
    control_s: float
    """Of a run, what is the control plane's: median over all kinds, moves too."""


Overheads = Mapping[str, float]
"""Seconds of the control plane in the run of an operation, by kind."""


def overheads(rows: Iterable[Row]) -> dict[str, float]:
    """The median seconds of a run beyond its computation, of each kind of operation in `rows`."""
    found: dict[str, list[float]] = {}
    for row in _runs(rows):
        beyond_s = row["finished_at"] - row["started_at"] - (row["compute_s"] or 0.0)
        found.setdefault(row["kind"], []).append(max(0.0, beyond_s))
    return {kind: median(each) for kind, each in found.items()}


def recorded_run(
    jobs: Iterable[Row], operations: Iterable[Row], beyond: Mapping[str, Overheads]
) -> tuple[RecordedJob, ...]:
    """The jobs of a run, from its views of `/v1/jobs` and its operation log, by their names; with
    the overheads of each.

    Raises:
        InvalidRequestError: a job has not one training deployment; there is no whole cycle in its
            log, the cycles differ in their operations, or nothing is known of what the control
            plane adds to one.
    """
    by_deployment: dict[str, list[Row]] = {}
    for row in operations:
        by_deployment.setdefault(row["deployment"], []).append(row)
    found: list[RecordedJob] = []
    for job in sorted(jobs, key=lambda job: str(job["name"])):
        training = [each for each in job["deployments"] if each["kind"] == "train"]
        if len(training) != 1:
            raise InvalidRequestError(
                f"{job['name']} has {len(training)} training deployments: only jobs of one can be "
                "replayed"
            )
        rows = by_deployment.get(training[0]["deployment"], [])
        found.append(_recorded(job, training[0], rows, beyond.get(job["name"], {})))
    return tuple(found)


def _recorded(job: Row, deployment: Row, rows: Sequence[Row], beyond: Overheads) -> RecordedJob:
    name = job["name"]
    runs = sorted(_runs(rows), key=lambda row: (row["started_at"], row["index"]))
    work = [row for row in runs if row["kind"] not in BETWEEN_CYCLES]
    present = {row["kind"] for row in work}
    last = next((kind for kind in CYCLE_ENDS if kind in present), None)
    groups: list[list[Row]] = [[]]
    for row in work:
        groups[-1].append(row)
        if row["kind"] == last:
            groups.append([])
    # What comes after the last end is no whole cycle.
    groups.pop()
    if not groups:
        raise InvalidRequestError(f"{name}: its operation log has no whole cycle: run it longer")
    kinds = tuple(row["kind"] for row in groups[0])
    if unknown := sorted(set(kinds) - set(beyond)):
        raise InvalidRequestError(
            f"{name}: nothing is known of what the control plane adds to {', '.join(unknown)}: "
            "run such operations on a group that nobody shares"
        )
    began_at = ended_at = float(job["submitted_at"])
    cycles: list[RecordedCycle] = []
    for number, group in enumerate(groups):
        if tuple(row["kind"] for row in group) != kinds:
            raise InvalidRequestError(
                f"{name}: cycle {number} is {', '.join(row['kind'] for row in group)}, the first "
                f"is {', '.join(kinds)}: only runs of equal cycles can be replayed"
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
        gaps_s=tuple(
            max(0.0, row["submitted_at"] - former["finished_at"]) for former, row in pairwise(group)
        ),
        tokens=int(group[0]["tokens"]),
    )


def _move_s(rows: Iterable[Row], kind: str) -> float:
    """Mean run of a move; the first load, which builds the model, is left out where it can be."""
    moves = sorted(
        (row for row in _runs(rows) if row["kind"] == kind), key=lambda row: float(row["index"])
    )
    took = [float(row["finished_at"] - row["started_at"]) for row in moves]
    return fmean(took[kind == "load" and len(took) > 1 :]) if took else 0.0
