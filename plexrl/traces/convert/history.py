"""The recorded history of a live cluster as a JSON file, the input of `plexrl fidelity`.

It contains the fields of jobs and operations that the recorder and the simulator use, without
payloads and results. Unknown fields are ignored.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from plexrl.errors import InvalidRequestError
from plexrl.traces.convert.cycles import Row


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
class History:
    """A cluster's jobs and operations. Times are on its clock."""

    now: float
    jobs: tuple[PastJob, ...]
    operations: tuple[PastOperation, ...]
    planning: dict[str, str | int | float | bool | None] | None = None
    """Policy, ordering and other settings of its scheduler that a prediction needs; absent in
    recordings of earlier versions."""
    format: Literal["plexrl-history/1"] = "plexrl-history/1"


def history_of(jobs: Iterable[Row], operations: Iterable[Row], status: Row) -> History:
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
