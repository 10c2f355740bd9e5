"""What a controller knows of its job besides its futures.

A failed mutation halts its deployment until the controller takes note of it. Every answer about the
job tells of such a failure, so the next call raises it even where nobody reads futures.
"""

import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from plexrl.client.calls.transport import Call
from plexrl.errors import JobEndedError, from_wire
from plexrl.wire.operations import HALTED, OperationKind

if TYPE_CHECKING:
    from plexrl.client.calls.requests import Submission

COMPLETED = "COMPLETED"
"""The state of a job that ended well."""
LASTING = HALTED - {OperationKind.SYNC_WEIGHTS}
"""Kinds that a job is completed after; weights that are synced are of no use once it has ended."""


class Controller:
    """One controller of one job. Safe for use by several threads."""

    def __init__(self) -> None:
        self.token = uuid.uuid4().hex
        """Names this controller: the cluster takes requests of the job's last one only."""
        self._failure: Mapping[str, Any] | None = None
        self._mark = 0
        self._awaited: Counter[str] = Counter()
        self._last: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def mark(self) -> int:
        """How often this controller has taken note of a failure; to be taken before a request."""
        return self._mark

    @property
    def failure(self) -> Mapping[str, Any] | None:
        """The job's first failure that was told of and not acknowledged."""
        return self._failure

    def heard(self, failure: Mapping[str, Any] | None, mark: int) -> None:
        """An answer told of the job's first failure that was not acknowledged, or of none. One that
        was asked for at another `mark` may be of before the last acknowledgement."""
        with self._lock:
            if mark == self._mark:
                self._failure = failure

    def check(self) -> None:
        """Raises `EarlierFailureError` for a failure that was told of and that nobody waits for."""
        failure = self._failure
        if failure is None:
            return
        with self._lock:
            is_awaited = bool(self._awaited[_failed(failure)])
        if not is_awaited:
            raise from_wire(failure)

    @contextmanager
    def waiting(self, operation: str) -> Iterator[None]:
        """Somebody waits for the result of `operation`, and will be told if it fails."""
        with self._lock:
            self._awaited[operation] += 1
        try:
            yield
        finally:
            with self._lock:
                self._awaited[operation] -= 1
                if not self._awaited[operation]:
                    del self._awaited[operation]

    def acknowledged(self, answer: Mapping[str, Any]) -> None:
        """The cluster took note that this controller knows of a failure; `answer` has the next."""
        with self._lock:
            self._mark += 1
            self._failure = answer.get("failure")

    def submitted(self, submission: "Submission", view: Mapping[str, Any], mark: int) -> None:
        """An operation was accepted; `view` is the answer."""
        self.heard(view.get("job_failure"), mark)
        if submission.kind in LASTING:
            with self._lock:
                self._last[submission.deployment] = str(view["operation"])

    def last_operations(self) -> list[str]:
        """Of each deployment the last operation whose effect is to last."""
        with self._lock:
            return list(self._last.values())


def check_completed(view: Mapping[str, Any]) -> None:
    """Look at a job that was to be completed.

    Raises:
        EarlierFailureError: nobody took note of a failure.
        JobEndedError: it has ended otherwise.
    """
    if view.get("failure") is not None:
        raise from_wire(view["failure"])
    state = view.get("state", COMPLETED)
    if state != COMPLETED:
        raise JobEndedError(
            f"job {view['job']!r} has ended ({state.lower()}): {view['reason']}",
            reason=view["reason"],
        )


def acknowledge_call(operation: str) -> Call:
    """The request that takes note of an operation's failure."""
    path = f"/v1/operations/{quote(operation, safe='')}/acknowledge"
    return Call(method="POST", path=path)


def recover_call(deployment: str) -> Call:
    """The request that takes note of whatever halts a deployment."""
    job, _, name = deployment.rpartition("/")
    path = f"/v1/jobs/{quote(job)}/deployments/{quote(name)}/recover"
    return Call(method="POST", path=path)


def _failed(failure: Mapping[str, Any]) -> str:
    """The operation whose failure an `EarlierFailureError` tells of."""
    return str(failure["details"]["operation"])
