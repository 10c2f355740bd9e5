"""A controller's state about its job, in addition to its futures.

A failed mutation halts its deployment until the controller acknowledges the failure. Every response
about the job contains such a failure, so the next call raises it even if no future is read.
"""

import threading
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote

from plexrl.client.calls.transport import Call, Steps
from plexrl.errors import JobEndedError, from_wire
from plexrl.wire.messages.cluster_views import ErrorView
from plexrl.wire.messages.views import FailureView, JobView, PolledOperationView
from plexrl.wire.operations import HALTED, OperationKind

if TYPE_CHECKING:
    from plexrl.client.calls.requests import Submission

COMPLETED = "COMPLETED"
"""State of a job that ended well."""
SENT_BYTES_MAX = 64 << 20
"""Bound on the batches that a controller keeps after they were accepted."""
LASTING = HALTED - {OperationKind.SYNC_WEIGHTS}
"""Kinds that must finish before a job is completed; synced weights are useless after its end."""


class Controller:
    """One controller of one job. Thread-safe."""

    def __init__(self, sent_bytes_max: int = SENT_BYTES_MAX) -> None:
        """`sent_bytes_max`: bound on the batches that are kept, in case the cluster loses them."""
        self.token = uuid.uuid4().hex
        """Identifies this controller: the cluster accepts requests of the job's latest one only."""
        self._failure: ErrorView | None = None
        self._acknowledged_count = 0
        self._awaited: Counter[str] = Counter()
        self._last: dict[str, str] = {}
        self._sent: OrderedDict[str, Call] = OrderedDict()
        self._sent_bytes = 0
        self._sent_bytes_max = sent_bytes_max
        self._lock = threading.Lock()

    @property
    def acknowledged_count(self) -> int:
        """Number of acknowledged failures; read it before a request."""
        return self._acknowledged_count

    @property
    def failure(self) -> ErrorView | None:
        """The job's first unacknowledged failure, as last received."""
        return self._failure

    def receive_failure(self, failure: ErrorView | None, acknowledged_count: int) -> None:
        """Store the job's first unacknowledged failure, or None. A response to a request that was
        sent at another `acknowledged_count` may be outdated and is ignored."""
        with self._lock:
            if acknowledged_count == self._acknowledged_count:
                self._failure = failure

    def check(self) -> None:
        """Raises `EarlierFailureError` for a received failure whose future nobody waits for."""
        failure = self._failure
        if failure is None:
            return
        with self._lock:
            is_awaited = bool(self._awaited[_failed(failure)])
        if not is_awaited:
            raise from_wire(failure)

    @contextmanager
    def waiting(self, operation: str) -> Iterator[None]:
        """While the block runs, somebody waits for `operation` and sees its failure."""
        with self._lock:
            self._awaited[operation] += 1
        try:
            yield
        finally:
            with self._lock:
                self._awaited[operation] -= 1
                if not self._awaited[operation]:
                    del self._awaited[operation]

    def acknowledged(self, answer: FailureView) -> None:
        """Record that the cluster accepted an acknowledgement; `answer` has the next failure."""
        with self._lock:
            self._acknowledged_count += 1
            self._failure = answer.get("failure")

    def record_last(self, deployment: str, operation: str) -> None:
        """Record a deployment's last operation whose effect must outlive the job."""
        with self._lock:
            self._last[deployment] = operation

    def record_sent(self, operation: str, call: Call) -> None:
        """Keep a submission with a batch, in case the cluster loses the batch; the oldest ones go
        beyond the bound."""
        with self._lock:
            self._forget_sent(operation)
            self._sent[operation] = call
            self._sent_bytes += len(call.content or b"")
            while self._sent_bytes > self._sent_bytes_max:
                self._forget_sent(next(iter(self._sent)))

    def sent(self, operation: str) -> Call | None:
        """The submission of an operation, if it is still kept."""
        with self._lock:
            return self._sent.get(operation)

    def _forget_sent(self, operation: str) -> None:
        call = self._sent.pop(operation, None)
        if call is not None:
            self._sent_bytes -= len(call.content or b"")

    def last_operations(self) -> list[str]:
        """The last operation of each deployment whose effect must outlive the job."""
        with self._lock:
            return list(self._last.values())


def submit(
    submission: "Submission", deadline_s: float | None, controller: Controller | None
) -> Steps[PolledOperationView]:
    """Submit an operation and return the cluster's view of it.

    Raises:
        EarlierFailureError: an earlier operation failed, and nobody read its future.
    """
    count = 0
    if controller is not None:
        controller.check()
        count = controller.acknowledged_count
    view: PolledOperationView = (yield submission.call.within(deadline_s)).json()
    if controller is not None:
        if submission.has_batch:
            controller.record_sent(str(view["operation"]), submission.call)
        controller.receive_failure(view.get("job_failure"), count)
        if submission.kind in LASTING:
            controller.record_last(submission.deployment, str(view["operation"]))
    return view


def check_completed(view: JobView) -> None:
    """Check the view of a job that was to be completed.

    Raises:
        EarlierFailureError: a failure was not acknowledged.
        JobEndedError: the job has ended with another outcome.
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
    """The request that acknowledges an operation's failure."""
    path = f"/v1/operations/{quote(operation, safe='')}/acknowledge"
    return Call(method="POST", path=path)


def _failed(failure: ErrorView) -> str:
    """The operation that an `EarlierFailureError` refers to."""
    return str(failure["details"]["operation"])
