"""All errors that a caller can get, in one tree.

    PlexRLError
    ├── InvalidRequestError            400  invalid_request
    │   ├── BatchShapeError            400  batch_shape
    │   ├── NoTokenCountsError         400  no_token_counts
    │   ├── TokenRangeError            400  token_out_of_vocabulary
    │   ├── NonFiniteInputError        400  non_finite_input
    │   ├── LayoutError                400  layout            (`details["field"]`: the axis)
    │   ├── TraceError                 400  trace             (`problems`: line, field, text)
    │   ├── ConfigError                400  invalid_config    (`problems`: path in the file, text)
    │   ├── ClockDifferenceError       400  clock_difference  (`difference_s`: of two machines)
    │   ├── UnsupportedModelError      400  unsupported_model (`details["supported"]`)
    │   └── UnsupportedDtypeError      400  unsupported_dtype
    ├── AuthenticationError            401  unauthenticated
    │   └── JoinTokenError             401  join_token        (`reason`: used, expired, …)
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
    │   ├── WrongWorkerError           409  wrong_worker      (the address is another worker's now)
    │   ├── EarlierFailureError        409  earlier_failure   (`__cause__`: that failure)
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
    │   ├── RolloutFailedError         500  rollout_failed    (no instance left, or only failures)
    │   └── StaleWeightsError          500  stale_weights     (an engine missed an update)
    ├── ConnectionLostError            503  connection_lost   (no connection, or it broke)
    ├── UnavailableError               503  unavailable       (a part of the cluster is restarting)
    │   ├── LeaseHeldError             503  lease_held        (another scheduler leads)
    │   ├── StoreUnavailableError      503  store_unavailable (the object store does not answer)
    │   └── NoAnswerError              504  no_answer         (a part did not answer in time)
    ├── DeadlineExceededError          504  deadline_exceeded
    ├── SchedulerFaultError            500  scheduler_fault   (a bug; nothing was changed)
    ├── InvariantError                 500  invariant         (a bug in a simulated run)
    ├── SandboxError                   500  sandbox           (nothing is known about the program)
    ├── DeviceError                    500  device            (a device driver's call failed)
    │   ├── DeviceUnavailableError     503  device_unavailable (no such device)
    │   └── DeviceMemoryFullError      507  device_memory_full
    └── StorageError                   507  storage
        ├── StorageUnavailableError    503  storage_unavailable (retry when it is mended)
        │   └── JournalUnavailableError 503 journal_unavailable (of the journal's disk or database)
        ├── StorageFullError           507  storage_full      (retry when there is space)
        │   ├── JournalFullError       507  journal_full
        │   └── StateTierFullError     507  state_tier_full
        ├── JournalMissingError        500  journal_missing   (state without its journal)
        ├── LeaseLostError             503  lease_lost        (another scheduler took over)
        ├── StateLostError             500  state_lost
        └── CorruptStateError          500  corrupt_state
            └── PayloadLostError       500  payload_lost      (`details["payload"]`)
Over HTTP, `Retry-After` means: send the valid request again later. A final error has none."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from plexrl.wire.messages.cluster_views import ErrorView


class PlexRLError(Exception):
    """Base of all errors. `code` and `status` are stable; `details` holds JSON values."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.message, self.details = message, details

    def to_wire(self) -> "ErrorView":
        """The error as plain values."""
        return {"code": self.code, "message": self.message, "details": self.details}


class InvalidRequestError(PlexRLError):
    """The request is invalid; the same request fails again."""

    code = "invalid_request"
    status = 400


class BatchShapeError(InvalidRequestError):
    """The shape of a batch, a prompt or a checkpoint's parameter is invalid."""

    code = "batch_shape"


class NoTokenCountsError(InvalidRequestError):
    """The mask is zero at every predicted token of the batch, so the loss has no terms."""

    code = "no_token_counts"


class TokenRangeError(InvalidRequestError):
    """A token is outside of the vocabulary."""

    code = "token_out_of_vocabulary"


class NonFiniteInputError(InvalidRequestError):
    """An input of the batch is infinite or not a number."""

    code = "non_finite_input"


class LayoutError(InvalidRequestError):
    """A parallel layout is invalid or unsupported: `details["field"]` names the axis."""

    code = "layout"


class TraceError(InvalidRequestError):
    """A trace cannot be read: `details["problems"]` has line, field and text of each."""

    code = "trace"


class ConfigError(InvalidRequestError):
    """A configuration file is invalid: `details["problems"]` has the path and text of each."""

    code = "invalid_config"


class ClockDifferenceError(InvalidRequestError):
    """This machine's clock is `details["difference_s"]` ahead, too much for certificates."""

    code = "clock_difference"


class UnsupportedModelError(InvalidRequestError):
    """The backend runs `details["supported"]`, not models of `details["architecture"]`."""

    code = "unsupported_model"


class UnsupportedDtypeError(InvalidRequestError):
    """The backend does not support weights or computation in this dtype."""

    code = "unsupported_dtype"


class AuthenticationError(PlexRLError):
    """The API key is missing or unknown."""

    code = "unauthenticated"
    status = 401


class JoinTokenError(AuthenticationError):
    """A join token does not admit the node; `details["reason"]` has the reason in one word."""

    code = "join_token"


class PermissionDeniedError(PlexRLError):
    """The caller may not do this, or a file or folder belongs or is open to another user."""

    code = "permission_denied"
    status = 403


class QuotaExceededError(PlexRLError):
    """The request exceeds a quota of the tenant."""

    code = "quota_exceeded"
    status = 403


class NotFoundError(PlexRLError):
    """The named object does not exist."""

    code = "not_found"
    status = 404


class UnknownJobError(NotFoundError):
    """There is no such job."""

    code = "unknown_job"


class UnknownDeploymentError(NotFoundError):
    """The job has no such deployment."""

    code = "unknown_deployment"


class UnknownOperationError(NotFoundError):
    """There is no such operation."""

    code = "unknown_operation"


class CheckpointNotFoundError(NotFoundError):
    """There is no such checkpoint."""

    code = "unknown_checkpoint"


class ConflictError(PlexRLError):
    """The request conflicts with the current state."""

    code = "conflict"
    status = 409


class JobEndedError(ConflictError):
    """The job has ended."""

    code = "job_ended"


class NoGradientsError(ConflictError):
    """An optimizer step without gradients. Nothing was changed."""

    code = "no_gradients"


class StaleTokenError(ConflictError):
    """Another deployment holds the group's lock; the fencing token is outdated."""

    code = "stale_token"


class WrongWorkerError(ConflictError):
    """The request is for another worker than the one that received it."""

    code = "wrong_worker"


class EarlierFailureError(ConflictError):
    """An earlier failure, which `details` and `__cause__` hold, has not been acknowledged."""

    code = "earlier_failure"


class ControllerReplacedError(ConflictError):
    """Another controller has attached the job, so this one may not use it any more."""

    code = "controller_replaced"


class CheckpointExistsError(ConflictError):
    """A checkpoint with this name exists."""

    code = "checkpoint_exists"


class ModelDoesNotFitError(PlexRLError):
    """The deployment needs more memory than the cluster's GPUs or nodes have."""

    code = "model_does_not_fit"
    status = 413


class PayloadTooLargeError(PlexRLError):
    """The payload of a request or of a result is too large."""

    code = "payload_too_large"
    status = 413


class CapacityError(PlexRLError):
    """The cluster lacks the capacity for the request: nodes, GPUs or free slots."""

    code = "capacity"
    status = 422


class NonFiniteGradientError(PlexRLError):
    """The gradient norm is infinite or not a number. The gradients were dropped."""

    code = "non_finite_gradient"
    status = 422


class NonFiniteWeightsError(PlexRLError):
    """A parameter is infinite or not a number; `details["parameter"]` names the first one."""

    code = "non_finite_weights"
    status = 422


class OverloadedError(PlexRLError):
    """A queue is full. Retry after `details["retry_after_s"]` seconds."""

    code = "overloaded"
    status = 429


class OperationCancelledError(PlexRLError):
    """The operation was cancelled."""

    code = "operation_cancelled"
    status = 499


class ExecutionError(PlexRLError):
    """The operation failed on the workers."""

    code = "execution_failed"


class RolloutFailedError(ExecutionError):
    """An asynchronous rollout has no instance left, or all that it tries fails."""

    code = "rollout_failed"


class StaleWeightsError(ExecutionError):
    """An engine does not compute with the weights of the last update, and refuses to generate."""

    code = "stale_weights"


class ConnectionLostError(PlexRLError):
    """The connection ended, or no server was reached."""

    code = "connection_lost"
    status = 503


class UnavailableError(PlexRLError):
    """A part of the cluster does not serve now. The same request may succeed later."""

    code = "unavailable"
    status = 503


class LeaseHeldError(UnavailableError):
    """Another scheduler is the leader: `details["holder"]` names it."""

    code = "lease_held"


class StoreUnavailableError(UnavailableError):
    """The object store does not answer. Retry after `details["retry_after_s"]` seconds."""

    code = "store_unavailable"


class NoAnswerError(UnavailableError):
    """A part did not answer in time, and may have carried out the request: repeat the same ids."""

    code = "no_answer"
    status = 504


class DeadlineExceededError(PlexRLError):
    """An operation or a wait exceeded its deadline."""

    code = "deadline_exceeded"
    status = 504


class SchedulerFaultError(PlexRLError):
    """A bug: nothing was changed. The scheduler's log and `plexrl status` show the fault."""

    code = "scheduler_fault"


class InvariantError(PlexRLError):
    """A bug: `details["law"]` names the violated invariant, `details["at_s"]` its time."""

    code = "invariant"


class SandboxError(PlexRLError):
    """The sandbox is missing or has failed. This says nothing about the program that it ran."""

    code = "sandbox"


class DeviceError(PlexRLError):
    """The device driver's `details["call"]` failed with `details["result"]`."""

    code = "device"


class DeviceUnavailableError(DeviceError):
    """There is no such device, or its driver is missing."""

    code = "device_unavailable"
    status = 503


class DeviceMemoryFullError(DeviceError):
    """Others use too much device memory: `details` names `rank`, `holders` and foreign bytes."""

    code = "device_memory_full"
    status = 507


class StorageError(PlexRLError):
    """Storage failed."""

    code = "storage"
    status = 507


class StorageFullError(StorageError):
    """A disk or capacity is full. Nothing was changed: retry after `details["retry_after_s"]`."""

    code = "storage_full"


class StorageUnavailableError(StorageError):
    """A disk, mount or database fails or is away. The same request succeeds once it is mended."""

    code = "storage_unavailable"
    status = 503


class JournalUnavailableError(StorageUnavailableError):
    """The journal's database does not answer."""

    code = "journal_unavailable"


class JournalFullError(StorageFullError):
    """The journal's storage is full."""

    code = "journal_full"


class JournalMissingError(StorageError):
    """The journal is new, but state of an earlier one exists, such as `details["found"]`."""

    code = "journal_missing"
    status = 500


class LeaseLostError(StorageError):
    """This scheduler is not the leader any more and must stop. Nothing was written."""

    code = "lease_lost"
    status = 503


class StateTierFullError(StorageFullError):
    """A tier of the StateManager is full."""

    code = "state_tier_full"


class StateLostError(StorageError):
    """A stored version of a deployment's state is lost."""

    code = "state_lost"
    status = 500


class CorruptStateError(StorageError):
    """Stored data is damaged: a checksum or format check failed."""

    code = "corrupt_state"
    status = 500


class PayloadLostError(CorruptStateError):
    """The blob `details["payload"]` is damaged or missing, and could not be sent again."""

    code = "payload_lost"


_CLASSES = [each for each in globals().values() if isinstance(each, type)]
_KINDS = {each.code: each for each in _CLASSES if issubclass(each, PlexRLError)}


def is_storage_held(code: str) -> bool:
    """Whether errors with this code mean a storage that is full, or fails until it is mended."""
    return issubclass(_KINDS.get(code, PlexRLError), StorageFullError | StorageUnavailableError)


def from_wire(body: object) -> PlexRLError:
    """The error that `to_wire` encoded; an unknown code becomes a plain `PlexRLError`."""
    if not isinstance(body, Mapping):
        return PlexRLError("the other side failed without a reason: see its log")
    error = _KINDS.get(str(body.get("code")), PlexRLError)(str(body.get("message", "no message")))
    if isinstance(details := body.get("details"), Mapping):
        error.details = {str(k): v for k, v in details.items()}
    if isinstance(error, EarlierFailureError):
        error.__cause__ = from_wire(error.details.get("cause"))
    return error
