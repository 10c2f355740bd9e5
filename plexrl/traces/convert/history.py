"""The recorded history of a live cluster as a JSON file, the input of `plexrl fidelity`.

It contains the fields of jobs and operations that the recorder and the simulator use, without
payloads and results. Unknown fields are ignored.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from plexrl.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class PastDeployment:
    """A deployment of a job."""

    deployment: str
    kind: str
    workers: int
    state_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PastJob:
    """A job of `/v1/jobs`."""

    job: str
    name: str
    tenant: str
    priority: int
    state: str
    submitted_at: float
    ended_at: float | None
    deployments: tuple[PastDeployment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PastOperation:
    """An operation of `/v1/operations`."""

    deployment: str
    kind: str
    state: str
    group: str | None
    submitted_at: float
    started_at: float | None
    finished_at: float | None
    compute_s: float | None
    index: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """An operation that ran, in seconds of the cluster's clock."""

    kind: str
    state: str
    group: str | None
    submitted_at: float
    started_at: float
    finished_at: float
    compute_s: float
    """Time of the workers; 0 if it was not measured."""
    index: int
    tokens: int

    @property
    def took_s(self) -> float:
        """From its start to its completion."""
        return self.finished_at - self.started_at


def runs_of(operations: Iterable[PastOperation]) -> list[PastRun]:
    """The operations that ran, in the order of their starts."""
    runs = [
        PastRun(
            kind=operation.kind,
            state=operation.state,
            group=operation.group,
            submitted_at=operation.submitted_at,
            started_at=operation.started_at,
            finished_at=operation.finished_at,
            compute_s=operation.compute_s or 0.0,
            index=operation.index,
            tokens=operation.tokens,
        )
        for operation in operations
        if operation.started_at is not None and operation.finished_at is not None
    ]
    return sorted(runs, key=lambda run: (run.started_at, run.index))


def by_deployment(operations: Iterable[PastOperation]) -> dict[str, list[PastOperation]]:
    """The operations of each deployment, in their order."""
    own: dict[str, list[PastOperation]] = {}
    for operation in operations:
        own.setdefault(operation.deployment, []).append(operation)
    return own


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A cluster's jobs and operations. Times are on its clock."""

    now: float
    jobs: tuple[PastJob, ...]
    operations: tuple[PastOperation, ...]
    planning: dict[str, str | int | float | bool | None] | None = None
    """Policy, ordering and other settings of its scheduler that a prediction needs; absent in
    recordings of earlier versions."""
    format: Literal["plexrl-history/1"] = "plexrl-history/1"


def history_of(
    jobs: Iterable[Mapping[str, object]],
    operations: Iterable[Mapping[str, object]],
    status: Mapping[str, object],
) -> History:
    """The history from a cluster's API views; `status` is that of `/v1/status`."""
    rows = {"jobs": list(jobs), "operations": list(operations)}
    header = {"now": status["now"], "planning": status.get("planning")}
    return msgspec.convert({**header, **rows}, History, strict=False)


def write_history(path: Path, history: History) -> int:
    """Write a history; returns the number of jobs.

    Raises:
        InvalidRequestError: the file cannot be written.
    """
    try:
        path.write_bytes(msgspec.json.encode(history) + b"\n")
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}") from error
    return len(history.jobs)


def read_history(path: Path) -> History:
    """Read a file of `write_history`.

    Raises:
        InvalidRequestError: the file cannot be read or is not a history.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=History)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"{path} is not a recording of a cluster's history ({error}): record one with "
            "`plexrl traces record NAME.json`"
        ) from error
