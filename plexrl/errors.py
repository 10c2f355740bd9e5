"""Every error a caller can meet, in one tree.

    PlexRLError
    ├── InvalidRequestError            400  invalid_request
    │   ├── BatchShapeError            400  batch_shape
    │   ├── NoTokenCountsError         400  no_token_counts
    │   ├── TokenRangeError            400  token_out_of_vocabulary
    │   ├── NonFiniteInputError        400  non_finite_input
    │   ├── LayoutError                400  layout            (`details["field"]`: the axis)
    │   ├── TraceError                 400  trace             (`problems`: by line and field)
    │   ├── UnsupportedModelError      400  unsupported_model (`details["supported"]`)
    │   └── UnsupportedDtypeError      400  unsupported_dtype
    ├── AuthenticationError            401  unauthenticated
    ├── PermissionDeniedError          403  permission_denied
    ├── QuotaExceededError             403  quota_exceeded
    ├── NotFoundError                  404  not_found
    │   ├── UnknownJobError            404  unknown_job
    │   ├── UnknownDeploymentError     404  unknown_deployment
    │   ├── UnknownOperationError      404  unknown_operation
    │   └── CheckpointNotFoundError    404  unknown_checkpoint
    ├── ConflictError                  409  conflict
    │   ├── JobEndedError              409  job_ended
    │   ├── NoGradientsError           409  no_gradients
    │   ├── StaleTokenError            409  stale_token
    │   ├── EarlierFailureError        409  earlier_failure   (`__cause__`: the error behind it)
    │   ├── ControllerReplacedError    409  controller_replaced
    │   └── CheckpointExistsError      409  checkpoint_exists
    ├── ModelDoesNotFitError           413  model_does_not_fit
    ├── PayloadTooLargeError           413  payload_too_large
    ├── CapacityError                  422  capacity
    ├── NonFiniteGradientError         422  non_finite_gradient
    ├── NonFiniteWeightsError          422  non_finite_weights
    ├── OverloadedError                429  overloaded        (retry after `retry_after_s`)
    ├── OperationCancelledError        499  operation_cancelled
    ├── ExecutionError                 500  execution_failed
    │   ├── WorkerLostError            500  worker_lost
    │   └── StaleWeightsError          500  stale_weights     (an engine missed an update)
    ├── ConnectionLostError            503  connection_lost   (the client met no server)
    ├── UnavailableError               503  unavailable       (a part of the cluster is restarting)
    │   ├── LeaseHeldError             503  lease_held        (another scheduler leads)
    │   └── NoAnswerError              504  no_answer         (a part was silent for too long)
    ├── DeadlineExceededError          504  deadline_exceeded
    ├── SchedulerFaultError            500  scheduler_fault   (a fault of ours; nothing was changed)
    ├── InvariantError                 500  invariant         (a simulated run broke a law)
    ├── DeviceError                    500  device            (a device's driver refused a call)
    │   ├── DeviceUnavailableError     503  device_unavailable (there is no such device)
    │   └── DeviceMemoryFullError      507  device_memory_full
    └── StorageError                   507  storage
        ├── JournalUnavailableError    503  journal_unavailable (the database does not answer)
        ├── StorageFullError           507  storage_full      (work goes on when there is room)
        │   ├── JournalFullError       507  journal_full
        │   └── StateTierFullError     507  state_tier_full
        ├── JournalMissingError        500  journal_missing   (state without the journal it is of)
        ├── LeaseLostError             503  lease_lost        (another scheduler took over)
        ├── StateLostError             500  state_lost
        └── CorruptStateError          500  corrupt_state

Over HTTP, an answer with a `Retry-After` header asks for the same request again: nothing is wrong
with it, and it succeeds later. The final error of an operation never carries that header.

A message says what is wrong, where, and how to mend it. `code` and `status` are stable; `details`
holds plain values for programs. Errors cross process boundaries as `to_wire()` / `from_wire()`.
"""

import errno
from collections.abc import Mapping
from typing import ClassVar, Final


class PlexRLError(Exception):
    """Root of the tree. `details` holds plain JSON values naming what the message speaks of."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, object] = details

    def to_wire(self) -> dict[str, object]:
        """The error as plain values: `{"code", "message", "details"}`."""
        return {"code": self.code, "message": self.message, "details": self.details}


class InvalidRequestError(PlexRLError):
    code = "invalid_request"
    status = 400


class BatchShapeError(InvalidRequestError):
    code = "batch_shape"


class NoTokenCountsError(InvalidRequestError):
    """A batch whose mask is zero wherever a token is predicted: there is nothing to learn."""

    code = "no_token_counts"


class TokenRangeError(InvalidRequestError):
    code = "token_out_of_vocabulary"


class NonFiniteInputError(InvalidRequestError):
    code = "non_finite_input"


class LayoutError(InvalidRequestError):
    """A parallel layout that cannot be, or that a backend cannot run: `details["field"]`."""

    code = "layout"


class TraceError(InvalidRequestError):
    """A trace that cannot be read; `details["problems"]`: each fault's line, field and message."""

    code = "trace"


class UnsupportedModelError(InvalidRequestError):
    """No backend, or not this one, runs models of `details["architecture"]`; those in
    `details["supported"]` it does."""

    code = "unsupported_model"


class UnsupportedDtypeError(InvalidRequestError):
    """A backend cannot compute from weights of this dtype."""

    code = "unsupported_dtype"


class AuthenticationError(PlexRLError):
    code = "unauthenticated"
    status = 401


class PermissionDeniedError(PlexRLError):
    code = "permission_denied"
    status = 403


class QuotaExceededError(PlexRLError):
    code = "quota_exceeded"
    status = 403


class NotFoundError(PlexRLError):
    code = "not_found"
    status = 404


class UnknownJobError(NotFoundError):
    code = "unknown_job"


class UnknownDeploymentError(NotFoundError):
    code = "unknown_deployment"


class UnknownOperationError(NotFoundError):
    code = "unknown_operation"


class CheckpointNotFoundError(NotFoundError):
    code = "unknown_checkpoint"


class ConflictError(PlexRLError):
    code = "conflict"
    status = 409


class JobEndedError(ConflictError):
    code = "job_ended"


class NoGradientsError(ConflictError):
    """An optimizer step came where no gradients wait; nothing was changed."""

    code = "no_gradients"


class StaleTokenError(ConflictError):
    code = "stale_token"


class EarlierFailureError(ConflictError):
    """An operation that this one builds on failed, and the controller has not acknowledged that.

    `details["operation"]`, `details["deployment"]` and `details["kind"]` name the operation that
    failed; `details["cause"]` is its error as `to_wire` has it, and `__cause__` after `from_wire`.
    """

    code = "earlier_failure"


class ControllerReplacedError(ConflictError):
    """Another controller has attached the job, so this one may not act for it any more."""

    code = "controller_replaced"


class CheckpointExistsError(ConflictError):
    code = "checkpoint_exists"


class ModelDoesNotFitError(PlexRLError):
    code = "model_does_not_fit"
    status = 413


class PayloadTooLargeError(PlexRLError):
    code = "payload_too_large"
    status = 413


class CapacityError(PlexRLError):
    code = "capacity"
    status = 422


class NonFiniteGradientError(PlexRLError):
    code = "non_finite_gradient"
    status = 422


class NonFiniteWeightsError(PlexRLError):
    """A parameter is infinite or not a number; `details["parameter"]` names the first such one."""

    code = "non_finite_weights"
    status = 422


class OverloadedError(PlexRLError):
    """The queue is at its bound. `details["retry_after_s"]` says when to come back."""

    code = "overloaded"
    status = 429


class OperationCancelledError(PlexRLError):
    code = "operation_cancelled"
    status = 499


class ExecutionError(PlexRLError):
    code = "execution_failed"
    status = 500


class WorkerLostError(ExecutionError):
    code = "worker_lost"


class StaleWeightsError(ExecutionError):
    """An engine computes with other weights than it was given last, and refuses to generate."""

    code = "stale_weights"


class ConnectionLostError(PlexRLError):
    code = "connection_lost"
    status = 503


class UnavailableError(PlexRLError):
    code = "unavailable"
    status = 503


class LeaseHeldError(UnavailableError):
    """Another scheduler leads: `details["holder"]` says which."""

    code = "lease_held"


class NoAnswerError(UnavailableError):
    """A part of the cluster gave no answer in time. It may have carried the request out: the same
    request may be sent again under the same ids."""

    code = "no_answer"
    status = 504


class DeadlineExceededError(PlexRLError):
    code = "deadline_exceeded"
    status = 504


class SchedulerFaultError(PlexRLError):
    """The scheduler cannot take this request in, because of a fault of its own. Nothing was
    changed; operators are told by the log and by `plexrl status`."""

    code = "scheduler_fault"


class InvariantError(PlexRLError):
    """A bug of ours: `details["law"]` and `details["at_s"]` say which law was broken, and when."""

    code = "invariant"


class DeviceError(PlexRLError):
    """`details["call"]` and `details["result"]` name the driver's call and what it answered."""

    code = "device"


class DeviceUnavailableError(DeviceError):
    code = "device_unavailable"
    status = 503


class DeviceMemoryFullError(DeviceError):
    """What others borrow leaves too little: come back once they have offloaded."""

    code = "device_memory_full"
    status = 507


class StorageError(PlexRLError):
    code = "storage"
    status = 507


NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Numbers of system errors that mean `StorageFullError`."""


class StorageFullError(StorageError):
    """A disk, a memory file system or a bound of ours has no room left. Nothing was changed: the
    same request succeeds once there is room. `details["retry_after_s"]` says when to ask again."""

    code = "storage_full"


class JournalUnavailableError(StorageError):
    """The journal's database does not answer. The same request succeeds once it does."""

    code = "journal_unavailable"
    status = 503


class JournalFullError(StorageFullError):
    code = "journal_full"


class JournalMissingError(StorageError):
    """The journal is new, and beside it lies state that only a former one explains. Nothing was
    changed: `details["found"]` names some of that state."""

    code = "journal_missing"
    status = 500


class LeaseLostError(StorageError):
    """This scheduler leads no more and must do nothing further; nothing was written."""

    code = "lease_lost"
    status = 503


class StateTierFullError(StorageFullError):
    code = "state_tier_full"


class StateLostError(StorageError):
    code = "state_lost"
    status = 500


class CorruptStateError(StorageError):
    code = "corrupt_state"
    status = 500


def _collect(root: type[PlexRLError]) -> dict[str, type[PlexRLError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_collect(child))
    return found


_KINDS: dict[str, type[PlexRLError]] = _collect(PlexRLError)


def is_storage_full(code: str) -> bool:
    """Whether errors of this code say that there is no room now."""
    return issubclass(_KINDS.get(code, PlexRLError), StorageFullError)


def from_wire(body: object) -> PlexRLError:
    """The error that `to_wire` described; an unknown code becomes a plain `PlexRLError`."""
    if not isinstance(body, Mapping):
        return PlexRLError("the other side failed and gave no reason")
    details = body.get("details")
    plain = {str(k): v for k, v in details.items()} if isinstance(details, Mapping) else {}
    kind = _KINDS.get(str(body.get("code")), PlexRLError)
    error = kind(str(body.get("message", "no message")))
    error.details = plain
    if isinstance(error, EarlierFailureError):
        error.__cause__ = from_wire(plain.get("cause"))
    return error
