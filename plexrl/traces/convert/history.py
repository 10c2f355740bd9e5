"""The whole history of a live cluster as a file: what `plexrl fidelity` predicts anew. JSON.

Of the job views and the operation log as much as recorder and simulator look at; no payloads, no
results. Whatever else a cluster says is left out, and may be there in a file that others wrote.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
    """A job, as `/v1/jobs` has it."""

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
    """An operation, as `/v1/operations` has it."""

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
    """What a cluster remembers. Times are of its clock."""

    now: float
    jobs: tuple[PastJob, ...]
    operations: tuple[PastOperation, ...]
    format: Literal["plexrl-history/1"] = "plexrl-history/1"


Row = Mapping[str, Any]


def history_of(jobs: Iterable[Row], operations: Iterable[Row], now: float) -> History:
    """Of a cluster's views."""
    return msgspec.convert(
        {"now": now, "jobs": list(jobs), "operations": list(operations)}, History, strict=False
    )


def write_history(path: Path, history: History) -> int:
    """Write it; returns the number of jobs.

    Raises:
        InvalidRequestError: the file cannot be written.
    """
    try:
        path.write_bytes(msgspec.json.encode(history) + b"\n")
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}") from error
    return len(history.jobs)


def read_history(path: Path) -> History:
    """What `write_history` wrote.

    Raises:
        InvalidRequestError: it cannot be read, or is something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=History)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"{path} is no recording of a cluster's history ({error}): make one by "
            "`plexrl traces record NAME.json`"
        ) from error
